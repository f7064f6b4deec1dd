"""Run by an interpreter with vLLM: prints `{argument: what is wrong}` of its server's command line, as JSON.

Every argument that `[inference.vllm]` takes is given once by itself, with values of its kind, and has to arrive.
"""

import json

from rlmake.config.inference import OURS, VllmConfig, vllm_arguments
from rlmake.core.errors import UserError
from rlmake.inference.engines import vllm_versions

VALUES = [7, 0.5, "x", "{{ x }}", {"a": 1}, ["a", "b"], [7, 8], [{"name": "a", "path": "b"}], {}]


def wrong(name: str, value: object) -> str | None:
    try:
        found = getattr(vllm_versions.parse({name: value}), known[name].dest)
    except UserError as error:
        return f"{value!r}: {error}"
    as_object = value == {} or (isinstance(value, list) and isinstance(value[0], dict))  # vLLM makes one of its own
    return (
        None if found == value or (as_object and not isinstance(found, str | type(None))) else f"{value!r}: {found!r}"
    )


_, known, _ = vllm_versions.command_line()
dests = {action.dest for action in known.values()} - {"config", "help", "grpc", "grpc_port"}
faults = {name: "vLLM has it, and no key here" for name in dests - vllm_arguments() - VllmConfig.model_fields.keys()}
for name in sorted(dests - OURS.keys() - faults.keys()):
    action = known[name]
    if action.nargs == 0:
        said = [why for value in (True, False) if (why := wrong(name, value))]
    else:
        values = [[choice] if action.nargs else choice for choice in action.choices or ()] or VALUES
        said = [wrong(name, value) for value in values]
        said = [] if None in said else said
    if said:
        faults[name] = "; ".join(said)
print(json.dumps({"tried": len(dests), "faults": faults}))
