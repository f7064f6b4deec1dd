"""The trainer's ranks: supervised fine-tuning (`sft`) and reinforcement learning (`rl`), started under torchrun.

The loops are `sft.py` and `rl.py`; what they share is `training.py`. The rest has one subject each: the ranks
(`world`), the sharded model (`policy`, `parallel`, `families/`, `lm_head`), the update (`optim`, `muon`, `schedule`,
`gradients`), `losses/`, SFT `data/`, `checkpoint`, `weights` for the engines, `ledger`, `metrics`. The launcher starts
these modules as processes; nobody imports them but tests.
"""
