"""Launching: run directory and attempt, placement on this machine, supervision of a run's processes.

`train.run` and `evaluate.run` are the two workers: the console scripts call them and so does the build. A run's
processes are children of the calling process and end with it, however it ends.
"""
