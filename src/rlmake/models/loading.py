"""Models in Hugging Face layout: where they lie, building them empty or with weights, reading and writing weights."""

import contextlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from rlmake.core.errors import UserError
from rlmake.core.jsonio import read_json

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HEAD = "lm_head.weight"
DRAWS = {"normal_", "uniform_", "kaiming_uniform_"}  # of torch.nn.init and of tensors


def locate(name: str | Path, *, weights: bool = True, revision: str | None = None) -> Path:
    """The folder of a model: a local directory, or a hub id's snapshot (downloaded; `weights=False`: small files only).

    Raises `UserError` when it is neither, or the hub can't be reached and the cache does not have it.
    """
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"{folder}: no config.json there, so this is no model directory")
        return folder
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(name)) or str(name).startswith("."):
        raise UserError(f"model '{name}': no such directory")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py"]
    if weights:
        patterns.append("*.safetensors")
    try:
        return Path(snapshot_download(str(name), revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"model '{name}': neither a directory nor to be had from the hub: {reason}") from None


def load_config(name: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The transformers configuration of a model; `UserError` where it can't be read."""
    folder = locate(name, weights=False)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # of transformers' making, and of any kind
        raise UserError(f"{folder}: config.json: {first_line(error)}") from None


def build(
    config: Any, *, attn: str, dtype: str = "float32", device: str = "meta", trust_remote_code: bool = False
) -> nn.Module:
    """The model of a configuration, without its weights: on the meta device by default. `attn`: registered name."""
    config._attn_implementation = attn
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            config, dtype=DTYPES[dtype], attn_implementation=attn, trust_remote_code=trust_remote_code
        )


def load(name: str | Path, *, attn: str, dtype: str = "float32", trust_remote_code: bool = False) -> nn.Module:
    """The model with its weights, on the CPU, in evaluation mode. Raises `UserError` for missing or odd tensors."""
    config = load_config(name, trust_remote_code=trust_remote_code)
    folder = locate(name)
    try:
        with _NoDraws():
            model = build(config, attn=attn, dtype=dtype, device="cpu", trust_remote_code=trust_remote_code)
    except Exception as error:
        raise UserError(f"{folder}: config.json: {type(error).__name__}: {first_line(error)}") from None
    assign(model, read_weights(folder), str(folder))
    return model.eval()


class _NoDraws(TorchFunctionMode):
    """A model is built without its random initial weights, which `assign` overwrites, every one: drawing 600 M of them,
    twice, took ten seconds. Constants and buffers are as ever."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in DRAWS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def expected(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """`{name: shape}` of what a weights file must hold; a tied head is not listed."""
    return {
        name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items() if _owned(model, name)
    }


def _owned(model: nn.Module, name: str) -> bool:
    return not (name == HEAD and model.config.tie_word_embeddings)


def assign(model: nn.Module, tensors: dict[str, torch.Tensor], where: str) -> None:
    """Copy weights into a model, all or nothing: names, shapes and kinds are checked before the first is touched.

    A tied head may be among them if it equals the embedding. Raises `UserError` naming `where` and the tensor.
    """
    wanted = expected(model)
    tensors = _stacked(tensors, wanted)
    extra = set(tensors) - set(wanted) - ({HEAD} if model.config.tie_word_embeddings else set())
    if missing := sorted(set(wanted) - set(tensors)):
        raise UserError(f"{where}: tensor {missing[0]} is missing ({len(missing)} in all)")
    if extra:
        raise UserError(f"{where}: tensor {min(extra)} does not belong to this model ({len(extra)} in all)")
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape:
            raise UserError(f"{where}: tensor {name} has shape {tuple(tensors[name].shape)}, the model wants {shape}")
        if not tensors[name].is_floating_point():
            raise UserError(f"{where}: tensor {name} is {tensors[name].dtype}, expected floating point")
    state = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name in wanted:
            state[name].copy_(tensors[name])


EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


def _stacked(tensors: dict[str, torch.Tensor], wanted: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Experts that lie apart, as hubs keep them, in the form transformers computes with: all of a layer in one tensor,
    [experts, 2 · width, hidden] of gate and up projections and [experts, hidden, width] of down projections."""
    apart = [match for name in tensors if name not in wanted and (match := EXPERT.fullmatch(name))]
    if not apart:
        return tensors
    found = {name: tensor for name, tensor in tensors.items() if not EXPERT.fullmatch(name)}
    for stem in sorted({match[1] for match in apart}):
        count = 1 + max(int(match[2]) for match in apart if match[1] == stem)

        def one(kind: str, stem: str = stem, count: int = count) -> torch.Tensor:
            return torch.stack([tensors[f"{stem}.{index}.{kind}.weight"] for index in range(count)])

        try:
            found[f"{stem}.gate_up_proj"] = torch.cat([one("gate_proj"), one("up_proj")], 1)
            found[f"{stem}.down_proj"] = one("down_proj")
        except (KeyError, RuntimeError):
            continue  # told apart below: what was wanted is missing
    return found


def _weight_map(path: Path) -> dict[str, str]:
    index = read_json(path)
    found = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise UserError(f"{path}: expected 'weight_map', from tensors to files")
    return found


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model directory, by its index or as one file. Raises `UserError` where none are."""
    if (folder / INDEX).is_file():
        names = sorted(set(_weight_map(folder / INDEX).values()))
    elif (folder / SINGLE).is_file():
        names = [SINGLE]
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise UserError(f"{folder}: no safetensors files there")
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise UserError(f"{folder}: {name} is named in the index and not there")
    return [folder / name for name in names]


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """`{name: tensor}` of all safetensors files of a directory, in memory. Raises `UserError` for a damaged file."""
    found: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: not readable as safetensors: {error}") from None
    return found


def save_hf(
    tensors: dict[str, torch.Tensor],
    out: Path,
    config: Any,
    *,
    dtype: str,
    max_shard: int | str = "5GB",
    stop_ids: Iterable[int] = (),
) -> None:
    """Write safetensors (sharded with an index where large), config.json and generation_config.json into `out`.

    `tensors` by Hugging Face names, a tied head left out; they are cast to `dtype`. `stop_ids` end a generation.
    """
    from huggingface_hub import save_torch_state_dict

    out.mkdir(parents=True, exist_ok=True)
    cast = {name: tensor.detach().to(DTYPES[dtype]).contiguous() for name, tensor in tensors.items()}
    if config.tie_word_embeddings:
        cast.pop(HEAD, None)
    save_torch_state_dict(cast, out, max_shard_size=max_shard, safe_serialization=True)
    for path in out.glob("*.safetensors"):
        path.chmod(0o644)  # the library leaves them to the owner alone
    config.dtype = DTYPES[dtype]
    config.save_pretrained(out)
    stops = list(stop_ids)
    GenerationConfig(eos_token_id=stops or None, pad_token_id=config.pad_token_id, do_sample=True).save_pretrained(out)


def check(folder: Path, where: str) -> None:
    """Let transformers match a directory's tensors with its architecture, reading none of them.

    Raises `UserError` naming `where` when a tensor is missing, left over, or of another shape.
    """
    with quiet():
        try:
            _, info = AutoModelForCausalLM.from_pretrained(folder, device_map="meta", output_loading_info=True)
        except Exception as error:  # whatever transformers meets in a foreign directory
            raise UserError(f"{where}: transformers can't load it: {first_line(error)}") from None
    require_all(info, where)


def require_all(info: dict[str, Any], where: str) -> None:
    """Raise `UserError` for the first tensor that `from_pretrained`'s loading info reports."""
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(str(name) for name in info[what]):
            raise UserError(f"{where}: {what.replace('_', ' ')}: {names[0]} ({len(names)} in all)")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars and reports; what matters of them is raised."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        transformers_logging.enable_progress_bar()


def stop_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Token ids that end a generation: those of generation_config.json and the tokenizer's end of sequence."""
    path = folder / "generation_config.json"
    stated = read_json(path) if path.is_file() else {}
    ids = stated.get("eos_token_id") if isinstance(stated, dict) else stated
    ids = [] if ids is None else [ids] if isinstance(ids, int) else ids
    if (
        not isinstance(stated, dict)
        or not isinstance(ids, list)
        or not all(type(one) is int and one >= 0 for one in ids)
    ):
        raise UserError(f"{path}: eos_token_id: expected a token's id or a list of them")
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(ids))


def first_line(error: Exception) -> str:
    """What an error says, shortened to one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
