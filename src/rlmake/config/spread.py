"""Shared keys: a value given once at a root fills the tables of the components, before anything is validated.

A key of the root fills a component's key where that is absent. Both given and different is a fault, both given and
equal is fine. All of this works on the raw dictionaries, so that every component is validated once and whole.
"""

from typing import Any

from pydantic import ValidationInfo, model_validator

from rlmake.config.fields import Config
from rlmake.config.refused import Refused
from rlmake.config.trainer import LoRAConfig
from rlmake.core.errors import Fault
from rlmake.core.jsonio import plain_copy

ABSENT = object()
SPREAD = "spread"  # validation context of a raw configuration whose shared keys were spread already


def get(data: Any, path: str, default: Any = ABSENT) -> Any:
    """The value at a dotted path of nested dictionaries, `default` where there is none."""
    for part in path.split("."):
        if not isinstance(data, dict) or part not in data:
            return default
        data = data[part]
    return data


def is_null(value: Any) -> bool:
    return value is None or value == "None"


def same(left: Any, right: Any) -> bool:
    """Equal as a user would see it: text from a command line equals the number it spells."""
    if left == right or (is_null(left) and is_null(right)):
        return True
    if isinstance(left, dict) or isinstance(right, dict):
        return False
    try:
        return float(left) == float(right)
    except (TypeError, ValueError):
        return str(left).lower() == str(right).lower()


def as_int(value: Any, default: int) -> int:
    """An integer of a raw configuration; what is none is left to the validation of its field."""
    try:
        return int(value)
    except (TypeError, ValueError):
        return default


class Spreader:
    """Writes shared values into the raw dictionaries of components and collects what contradicts."""

    def __init__(self, data: dict[str, Any]):
        self.data = data
        self.faults: list[Fault] = []
        self.filled: dict[str, str] = {}
        """`{key of a component: key of the root that filled it}`; a fault of the one is a fault of the other."""

    def put(self, target: str, value: Any, origin: str) -> None:
        """Set `target` to `value`, which comes from the key `origin`. Tables are put field by field."""
        if isinstance(value, dict):
            if is_null(get(self.data, target)):
                self._conflict(target, None, value, origin)
            elif get(self.data, target) is ABSENT:
                self.filled[target] = origin
                self._set(target, {})
            for key, item in value.items():
                self.put(f"{target}.{key}", item, f"{origin}.{key}")
            return
        given = get(self.data, target)
        if given is ABSENT:
            self.filled[target] = origin
            self._set(target, value)
        elif not same(given, value):
            self._conflict(target, given, value, origin)

    def share(self, origin: str, *targets: str) -> None:
        """Spread the root's key `origin`, if it was given, to every target."""
        value = get(self.data, origin)
        if value is not ABSENT:
            for target in targets:
                self.put(target, value, origin)

    def _conflict(self, target: str, given: Any, value: Any, origin: str) -> None:
        shown = "a table" if isinstance(value, dict) else repr(value)
        text = f"{given!r} contradicts {origin} = {shown}; give it once, at the root"
        if not isinstance(value, dict):
            self._set(target, value)
        self.faults.append(Fault(text, target, via=""))

    def _set(self, path: str, value: Any) -> None:
        node = self.data
        *parents, last = path.split(".")
        for part in parents:
            child = node.get(part)
            if not isinstance(child, dict):
                if child is not None and child != "None" and part in node:
                    return  # not a table: the field's own validation says so
                if part in node and is_null(child):
                    return  # switched off: nothing to fill
                child = node[part] = {}
            node = child
        node[last] = value


class SharingConfig(Config):
    """A root with shared keys: they fill the tables of its components before anything is validated."""

    @model_validator(mode="before")
    @classmethod
    def _spread(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict) or info.context == SPREAD:
            return data
        data = plain_copy(data)
        if faults := cls.spread(data).faults:
            raise Refused([(fault.key or "", fault.message) for fault in faults])
        return data

    @classmethod
    def spread(cls, data: dict[str, Any]) -> Spreader:
        """Fill the raw tables of the components, in place."""
        raise NotImplementedError


def put_server(spreader: Spreader, client: str) -> None:
    """Port and URL of a managed server: one that was given no port takes one from the system (port 0) and publishes
    its address in the run directory, so that `<client>.base_url` is None until the launcher knows it."""
    data = spreader.data
    port = get(data, "inference.server.port")
    if get(data, f"{client}.base_url") is ABSENT:
        number = 0 if port is ABSENT else as_int(port, 8000)
        if port is ABSENT:
            spreader.put("inference.server.port", number, "inference.server.port")
        url = f"http://localhost:{number}/v1" if number else None
        spreader.put(f"{client}.base_url", url, "inference.server.port")


ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what the vLLM engine can be told


def adapter_name(rank: int, alpha: float) -> str:
    """What an adapter is called at the inference server."""
    return f"r{rank}-a{alpha:g}" if isinstance(alpha, int | float) else f"r{rank}-a{alpha}"


def put_adapter(spreader: Spreader, managed: bool, model: str = "trainer.model") -> None:
    """A trainer with `model.lora` sends adapters: their name for the orchestrator, and an engine that takes them."""
    table = get(spreader.data, f"{model}.lora", None)
    if not isinstance(table, dict):
        return
    origin, fields = f"{model}.lora", LoRAConfig.model_fields
    rank, alpha = table.get("rank", fields["rank"].default), table.get("alpha", fields["alpha"].default)
    if model == "trainer.model":
        spreader.put("orchestrator.model.lora.name", adapter_name(rank, alpha), origin)
    if managed:
        spreader.put("inference.vllm.enable_lora", True, origin)
        if get(spreader.data, "inference.vllm.max_lora_rank") is ABSENT:
            least = next((size for size in ADAPTER_RANKS if size >= as_int(rank, 1)), rank)
            spreader.put("inference.vllm.max_lora_rank", least, origin)


def put_engine(spreader: Spreader) -> None:
    """SFT's inference server: the same model, on the deployment's inference GPUs or the CPU, at a port of its own."""
    put_device(spreader, "inference", "num_infer_gpus")
    put_adapter(spreader, managed=True, model="model")
    spreader.share("model.name", "inference.vllm.model")
    for key in ("seed", "log.level", "weight_broadcast", "tokenizer.chat_template"):
        spreader.share(key, "inference.vllm.chat_template" if key.startswith("tokenizer") else f"inference.{key}")
    if get(spreader.data, "inference.server.port") is ABSENT:
        spreader.put("inference.server.port", 0, "inference.server.port")


def put_device(spreader: Spreader, part: str, gpus_key: str, default: int = 1) -> None:
    """Device and threads of the process `part` ("" for the root itself) from the deployment."""
    place = get(spreader.data, "deployment", {})
    if not isinstance(place, dict):
        return
    prefix = f"{part}." if part else ""
    if place.get("type", "single_node") != "single_node":
        gpus_key, default = "gpus_per_node", 8
    on_cpu = as_int(place.get(gpus_key, default), default) == 0
    spreader.put(f"{prefix}device", "cpu" if on_cpu else "cuda", f"(deployment.{gpus_key}) device")
    if "cpu_threads" in place:
        spreader.put(f"{prefix}cpu_threads", place["cpu_threads"], "deployment.cpu_threads")
