"""Harnesses that ship; `agent.harness.id = "inproc-chat"` means `inproc_chat.py` here (see `rlmake.envs.plugins`)."""
