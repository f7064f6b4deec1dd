"""Tasksets that ship; `taskset.id = "reverse-text"` means `reverse_text.py` here (see `rlmake.envs.plugins`)."""
