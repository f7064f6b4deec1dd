"""Configuration of a data set made by the build (kind `data`)."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from rlmake.config.fields import Config, group, semantic
from rlmake.config.names import fault_of_segment
from rlmake.config.refused import Refused


class PydocPhrases(Config):
    """Phrases cut from the English prose that ships with Python (`pydoc_data.topics`), split by hash."""

    type: Literal["pydoc-phrases"] = semantic("pydoc-phrases", "Source.")
    task: Literal["reverse"] = semantic("reverse", "Task made of each phrase.")
    min_chars: int = semantic(8, "Shortest phrase.", ge=1)
    max_chars: int = semantic(24, "Longest phrase.", ge=1)
    num_train: int = semantic(4096, "Rows of the train split.", ge=1)
    num_heldout: int = semantic(256, "Rows of the held-out split, whose phrases are in no other.", ge=0)
    copy_share: float = semantic(0.0, "Share of train rows whose answer is the phrase itself, unreversed.", ge=0, lt=1)
    seed: int = semantic(0, "Seed of the choice.", ge=0)
    hint: str | None = semantic(
        None, "System message of hinted rows; `{demonstration}` stands for the answer. Rows then have `demonstration`."
    )
    hint_share: float = semantic(0.0, "Share of train rows that see the hint, and answer right.", ge=0, le=1)

    @model_validator(mode="after")
    def _checked(self):
        faults = []
        if self.min_chars > self.max_chars:
            faults.append(("min_chars", f"must be ≤ max_chars = {self.max_chars}, not {self.min_chars}"))
        if self.hint is not None and "{demonstration}" not in self.hint:
            faults.append(("hint", "must contain {demonstration}, the place of the answer"))
        if self.hint_share and self.hint is None:
            faults.append(("hint", f"is needed with hint_share = {self.hint_share}"))
        if faults:
            raise Refused(faults)
        return self


class MadeTasks(Config):
    """Tasks of the environments that ship, with demonstrations, split by content (see `rlmake.envs.made`)."""

    type: Literal["made"] = semantic("made", "Source.")
    task: Literal["alphabet-sort", "phone-book", "kuhn-poker", "proposer-solver"] = semantic(..., "Environment.")
    num_train: int = semantic(4096, "Rows of the train split.", ge=1)
    num_heldout: int = semantic(256, "Rows of the held-out split, whose tasks are in no other.", ge=0)
    fault_share: float = semantic(0.0, "Share of train rows that demonstrate a fault.", ge=0, lt=1)
    seed: int = semantic(0, "Seed of the choice.", ge=0)

    @model_validator(mode="after")
    def _checked(self):
        if self.task == "kuhn-poker" and self.num_heldout:
            raise Refused(("num_heldout", "must be 0 for kuhn-poker, which has twelve situations in all"))
        return self


class ReasoningGym(Config):
    """Tasks of the package reasoning-gym with their answers, split by the question's hash."""

    type: Literal["reasoning-gym"] = semantic("reasoning-gym", "Source.")
    dataset: str = semantic(..., "Its data set, e.g. chain_sum.")
    options: dict[str, Any] = semantic(dict, "Options of the data set.")
    num_train: int = semantic(4096, "Rows of the train split.", ge=1)
    num_heldout: int = semantic(256, "Rows of the held-out split, whose tasks are in no other.", ge=0)
    fault_share: float = semantic(0.0, "Share of train rows with the answer of another task.", ge=0, lt=1)
    seed: int = semantic(0, "Seed of the data set.", ge=0)


class FileSource(Config):
    """Files of the user's (JSONL or Parquet), one list per split."""

    type: Literal["file"] = semantic("file", "Source.")
    paths: dict[str, str | list[str]] = semantic(..., 'Files by split, e.g. train = "data/train.jsonl".', min_length=1)

    @model_validator(mode="after")
    def _names(self):
        if faults := [(f"paths.{name}", fault) for name in self.paths if (fault := fault_of_segment(name))]:
            raise Refused(faults)
        return self


class DataConfig(Config):
    """A data set (kind `data`)."""

    entry: ClassVar[str | None] = "data"

    source: Annotated[PydocPhrases | FileSource | MadeTasks | ReasoningGym, Field(discriminator="type")] = group(
        PydocPhrases(), "Where rows come from."
    )
    columns: dict[str, str] = semantic(dict, "Columns to rename: name in the source → name in the data set.")
    format: Literal["jsonl", "parquet"] = semantic("jsonl", "Format of the files.")
