"""What is compared: written by the launcher, read by the processes `ask` and `score`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlmake.config import RLConfig, SFTConfig, dump, parse
from rlmake.config.parity import Run
from rlmake.core import jsonio
from rlmake.core.errors import UserError

CONFIGS = {"rl": RLConfig, "sft": SFTConfig}


@dataclass(frozen=True)
class Order:
    """`model`: folder of the weights. `folder`: where report.json is to lie. `identity` goes into the report."""

    run: Run
    model: Path
    folder: Path
    identity: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        kind = next(kind for kind, cls in CONFIGS.items() if isinstance(self.run, cls))
        places = {"model": str(self.model), "folder": str(self.folder)}
        return {"schema": 1, "kind": kind, "config": dump(self.run), **places, "identity": self.identity}

    @classmethod
    def read(cls, path: Path) -> "Order":
        data = jsonio.read_json(path)
        if data.get("schema") != 1:
            raise UserError(f"{path}: schema {data.get('schema')} is unknown, expected 1")
        run = parse(CONFIGS[data["kind"]], data["config"])
        return cls(run, Path(data["model"]), Path(data["folder"]), data["identity"])

    def answers(self, dtype: str) -> Path:
        """Where the engine's answers in a type lie while the report is made."""
        return self.folder / "answers" / f"{dtype}.safetensors"


@dataclass(frozen=True)
class Answer:
    """A completion of n tokens: int64 [n], the logprobs of its tokens, fp32 [n], and of all tokens, fp32 [n, V]."""

    prompt: np.ndarray
    completion: np.ndarray
    sampled: np.ndarray
    logprobs: np.ndarray


def save(path: Path, answers: list[Answer], version: str) -> None:
    """`version`: of the engine."""
    from safetensors.numpy import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {f"{index}.{name}": value for index, one in enumerate(answers) for name, value in vars(one).items()}
    save_file(tensors, path, {"version": version})


def load(path: Path) -> tuple[list[Answer], str]:
    """The answers of an engine, and its version."""
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        names = ("prompt", "completion", "sampled", "logprobs")
        count = len(file.keys()) // len(names)
        answers = [Answer(**{name: file.get_tensor(f"{index}.{name}") for name in names}) for index in range(count)]
        return answers, file.metadata()["version"]
