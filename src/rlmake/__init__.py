"""rlmake: a declarative build system for LLM post-training experiments, and the post-training system under it."""

__version__ = "0.1.0"
