"""The configuration: one typed schema per entry point, composition of files, the command line.

Everyone reads configurations through this package: `parse_argv` and `parse` for what users wrote, `load_resolved` for
what a launcher wrote, `dump` to write it. Nothing here imports torch, looks at the network or probes the machine.
Names are loaded when they are first used, so that each entry point pays for its own schema only.
"""

import importlib

_HOME = {
    "layers": ("Composed", "compose", "load_layer", "set_key"),
    "data": ("DataConfig",),
    "env_server": ("EnvServerConfig",),
    "eval": ("EvalConfig",),
    "experiment": ("BestTable", "ExperimentTable", "GridTable", "load_experiment"),
    "fields": ("Config", "classify", "dump", "semantic_part"),
    "import_": ("ImportConfig",),
    "inference": ("InferenceConfig",),
    "init": ("InitConfig",),
    "names": ("fault_of_path", "fault_of_segment"),
    "orchestrator": ("OrchestratorConfig",),
    "reading": ("load_resolved", "parse", "parse_argv"),
    "rl": ("RLConfig",),
    "sft": ("SFTConfig",),
    "trainer": ("TrainerConfig",),
}
_WHERE = {name: module for module, names in _HOME.items() for name in names}
__all__ = sorted(_WHERE)


def __getattr__(name: str):
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value
