"""RL algorithms, one file each: how finished episodes get their per-token training signal.

The orchestrator builds one instance per training source (`build`) and calls `score_episode`, then `finish` on a whole
group; both write advantages, reference logprobs and loss weights onto the nodes of verifiers' traces. A new algorithm
is a file here with a subclass of `Algorithm`, and a line in `rlmake.config.algo.ALGORITHMS`: see docs/algorithms.md.
"""

from rlmake.algorithms.base import Algorithm, AlgorithmContext, Endpoint
from rlmake.algorithms.registry import ALGORITHMS, build

__all__ = ["ALGORITHMS", "Algorithm", "AlgorithmContext", "Endpoint", "build"]
