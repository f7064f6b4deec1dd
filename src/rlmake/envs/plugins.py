"""Which tasksets, harnesses and environments an id means.

verifiers looks an id up in its own package first (`verifiers.v1.tasksets.<id>`), then as an importable module. Our
folders are added to those packages' search paths, so the ids that ship with rlmake mean the same module in every
process, whatever else is installed. A user's own taskset is any importable module, as verifiers documents.
"""

import copy
import importlib
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlmake.envs.seeds import own_seeds
from rlmake.envs.startup import light_tokenizers

HARNESS = "inproc-chat"  # verifiers' own default is a program that has to be fetched at first use
TOOL_HARNESS = "inproc-tools"  # the same, for tasksets with tool servers
RUNTIME = "subprocess"  # verifiers' own default is a hosted sandbox

_EACH_ROLLOUT = ("rollout start", "rollout done")
_GROUPS = {"verifiers.v1.tasksets": "tasksets", "verifiers.v1.harnesses": "harnesses"}


def register() -> None:
    """Make the ids that ship known to verifiers in this process. Cheap to repeat."""
    for package, folder in _GROUPS.items():
        path = importlib.import_module(package).__path__
        own = str(Path(__file__).parent / folder)
        if own not in path:
            path.append(own)


def start_worker(level: str | None = None) -> None:
    """Prepare a process that serves episodes: its log on stdout, our ids, seeds. Run by every worker of a pool too.

    `level` of verifiers' log falls back to `$PRIME_VF_LOG_LEVEL`, then info without the two lines of every rollout.
    """
    asked = level or os.environ.get("PRIME_VF_LOG_LEVEL")
    level = (asked or "info").upper()
    level = {"TRACE": "DEBUG", "SUCCESS": "INFO"}.get(level, level)  # loguru's levels that `logging` has not
    form = "%(asctime)s %(levelname)-7s %(name)s %(message)s"
    logging.basicConfig(stream=sys.stdout, level=level, format=form, datefmt="%H:%M:%S")
    for noisy in ("httpx", "httpx2", "mcp", "aiohttp.access", "openai"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if not asked:
        logging.getLogger("verifiers.v1.rollout").addFilter(lambda line: not str(line.msg).startswith(_EACH_ROLLOUT))
    register()
    light_tokenizers()
    own_seeds()


def resolve(env: dict[str, Any]) -> Any:
    """The typed verifiers `EnvConfig` of a source's `env` table.

    An agent that names no harness or runtime gets ours, which need neither a network nor a container, unless taskset or
    environment bring theirs. Raises what verifiers and the user's own code raise; see `reason`.
    """
    register()
    from verifiers.v1.utils import loaders

    env = copy.deepcopy(env)
    harness = _harness(env["taskset"]["id"])
    for name, role in roles(env).items():
        agent = env.setdefault(name, {})
        if role.harness is None and harness is not None and isinstance(agent, dict):
            agent.setdefault("harness", {"id": harness})
        if "runtime" not in role.model_fields_set and isinstance(agent, dict):
            agent.setdefault("runtime", {"type": RUNTIME})
    return loaders.resolve_env_config(env)


def reason(error: Exception) -> str:
    """Why an environment cannot be loaded, in one line; where its own code failed, with the place."""
    if isinstance(error, ValidationError):
        return "; ".join(map(_refused, error.errors(include_url=False, include_context=False)))
    missing = error.__cause__  # of verifiers' "not found", also where the package is there and imports what is not
    if isinstance(missing, ModuleNotFoundError) and f"'{missing.name}'" not in str(error):
        frames = traceback.extract_tb(missing.__traceback__)
        where = next((f for f in reversed(frames) if not f.filename.startswith("<frozen")), frames[-1])
        return f"{missing} ({where.filename}:{where.lineno})"
    text = (str(error).splitlines() or [""])[0]
    if isinstance(error, ValueError | TypeError | AttributeError | ImportError | OSError) and text:
        return text
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text} ({frame.filename}:{frame.lineno})"


def _refused(fault: dict[str, Any]) -> str:
    """A key of the `env` table and what is wrong with it."""
    words = {"extra_forbidden": "unknown key", "missing": "is needed"}
    shown = "" if fault["type"] in words or isinstance(fault["input"], dict) else f", not {fault['input']!r}"
    what = words.get(fault["type"], fault["msg"].removeprefix("Value error, "))
    return f"env.{'.'.join(map(str, fault['loc']))}: {what}{shown}"


def _harness(taskset: str) -> str | None:
    """Ours for a taskset: with tools where it has some; None where it brings a harness."""
    from verifiers.v1.task import Task
    from verifiers.v1.taskset import Taskset
    from verifiers.v1.utils import loaders

    if loaders.default_harness_id(taskset) == taskset:
        return None
    found = loaders.taskset_class(taskset)
    own = ((found, Taskset), (found.task_type(), Task))
    tools = any(cls.toolsets.__func__ is not base.toolsets.__func__ for cls, base in own)
    return TOOL_HARNESS if tools else HARNESS


def roles(env: dict[str, Any]) -> dict[str, Any]:
    """`{name: default AgentConfig}` of the agents that an environment has."""
    register()
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import env_config_type

    fields = env_config_type(env["taskset"]["id"], env.get("id") or "").model_fields
    return {name: field.default for name, field in fields.items() if isinstance(field.default, AgentConfig)}
