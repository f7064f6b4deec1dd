"""The beginnings of sequences, from a run's own data: what its tasks ask, or what stands before the first trained token
of an SFT row. The first ones that fit, so that they are the same whenever it is asked."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlmake.config import RLConfig
from rlmake.config.parity import Run
from rlmake.core.errors import UserError

LOOKED_AT = 4096  # prompts, before it is said that none fits


def of_run(run: Run, model: Path, vocab: int, count: int, longest: int) -> list[list[int]]:
    """`count` prompts of at most `longest` tokens, fewer where the data have no more. Raises `UserError` for none."""
    found = _of_tasks(run, model) if isinstance(run, RLConfig) else _of_rows(run, model, vocab)
    fitting = (prompt for prompt in itertools.islice(found, LOOKED_AT) if 0 < len(prompt) <= longest)
    if prompts := list(itertools.islice(fitting, count)):
        return prompts
    raise UserError(f"no prompt of the run's data has at most {longest} tokens: raise seq_len or vllm.max_model_len")


def _of_tasks(run: RLConfig, model: Path) -> Iterator[list[int]]:
    """Of every source's tasks, in turn."""
    from rlmake.envs.client import load_tasks
    from rlmake.models.renderer import make_renderer

    renderer = make_renderer(model, run.orchestrator.renderer)
    sources = [load_tasks(source)[0] for source in run.orchestrator.train.source]
    while sources:
        for tasks in list(sources):
            if (task := next(tasks, None)) is None:
                sources.remove(tasks)
            else:
                yield list(renderer.render_ids(messages_of(task.data), add_generation_prompt=True))


def messages_of(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The conversation that a task begins. Where it is made while the episode runs (games), what the task has of
    its own stands for it: which text it is matters little here."""
    prompt = data.get("prompt")
    if isinstance(prompt, list):
        messages = prompt
    else:
        messages = [{"role": "user", "content": prompt or _own_fields(data)}]
    system = data.get("system_prompt")
    return [{"role": "system", "content": system}, *messages] if system else messages


def _own_fields(data: dict[str, Any]) -> str:
    """Names, and the fields that not every task has (those are about its runtime), as JSON."""
    import verifiers.v1 as vf

    named = ("id", "name", "description")
    kept = {key: value for key, value in data.items() if key in named or key not in vf.TaskData.model_fields}
    return json.dumps({key: value for key, value in kept.items() if value is not None}, sort_keys=True)


def _of_rows(run: Any, model: Path, vocab: int) -> Iterator[list[int]]:
    from rlmake.trainer.data.loader import SFTLoader

    tokenizer = run.tokenizer.model_copy(update={"name": str(model)})
    loader = SFTLoader(run.data, run.renderer, tokenizer, vocab, 0, 1, epochs=1)
    try:
        for document in loader.documents:
            yield document.ids[: int(document.mask.argmax()) + 1].tolist()
    finally:
        loader.close()
