"""The orchestrator of an RL run: tasks → rollouts → credit → batches for the trainer, and new weights to the engines.

One asyncio process. Components know nothing of one another: `orchestrator.Orchestrator` wires them by callbacks, and
its `run` is the main loop. Launchers start `python -m rlmake.orchestrator.main @ <resolved>/orchestrator.json`.
"""
