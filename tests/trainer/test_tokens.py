"""Loss masks: exactly what the model would itself have said trains, closing token included, and nothing it is given."""

import numpy as np
import pytest
from renderers import Qwen3RendererConfig, create_renderer

from rlmake.config.renderer import RendererConfig
from rlmake.config.sft import Columns, LossMask
from rlmake.core.errors import UserError
from rlmake.models.chatml import ChatMLRenderer
from rlmake.models.renderer import load_tokenizer, make_renderer
from rlmake.trainer.data.rows import resolve
from rlmake.trainer.data.tokens import NOTHING, NOTHING_LEFT, Tokeniser, without_given


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return load_tokenizer(model_dir)


@pytest.fixture(scope="module")
def chatml(tokenizer):
    return lambda options: ChatMLRenderer(tokenizer)


def qwen(tokenizer, thinking: bool):
    return lambda options: create_renderer(tokenizer, Qwen3RendererConfig(enable_thinking=thinking))


def tokens(make, seq_len=512, mask=None, **row):
    return Tokeniser(make, mask or LossMask(), seq_len)(resolve(row, Columns()))


def trained(found, tokenizer) -> str:
    return tokenizer.decode(found.targets[found.mask].tolist(), skip_special_tokens=False)


def test_the_header_and_the_newline_after_the_end_do_not_train(tokenizer, chatml):
    found = tokens(chatml, prompt="hi", completion="yo")
    assert trained(found, tokenizer) == "yo<|im_end|>"
    assert len(found.ids) == len(found.targets) == len(found.mask)
    np.testing.assert_array_equal(found.ids[1:], found.targets[:-1])


@pytest.mark.parametrize("turns", [1, 2])
def test_a_think_block_that_the_generation_prompt_gives_does_not_train(tokenizer, turns):
    """Qwen3 without thinking prefills `<think>\\n\\n</think>\\n\\n`; `renderers` counts it as sampled."""
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}] * turns
    found = tokens(qwen(tokenizer, False), messages=talk)
    assert trained(found, tokenizer) == "yo<|im_end|>" * turns
    whole = tokenizer.decode(found.ids.tolist(), skip_special_tokens=False)
    assert whole.count("<think>") == turns, "the block is still there, as context"


def test_a_think_block_that_the_model_must_write_itself_trains(tokenizer):
    """With thinking the generation prompt stops behind the header, so the model has to produce the block."""
    found = tokens(qwen(tokenizer, True), prompt="hi", completion="yo")
    assert trained(found, tokenizer) == "<think>\n\n</think>\n\nyo<|im_end|>"


def test_only_the_given_prefix_of_a_run_is_taken_out():
    ids, given = np.array([1, 2, 9, 8, 5, 6, 1, 2, 9, 7, 6]), [1, 2, 9, 8]
    mask = np.array([0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1], dtype=bool)
    assert without_given(ids, mask, given).tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1]
    assert without_given(ids, np.zeros(11, dtype=bool), given).sum() == 0
    everything = np.ones(3, dtype=bool)
    assert without_given(np.array([8, 5, 6]), everything, given).tolist() == [1, 1, 1], "no header before it"


def test_first_answer_token_and_end_token_train_and_padding_never_does(tokenizer, chatml):
    """Shifted once: the target after the last prompt token is the first answer token, the last one is the end."""
    found = tokens(chatml, prompt="alpha beta", completion="beta alpha")
    targets = found.targets[found.mask].tolist()
    assert targets == [
        *tokenizer.encode("beta alpha", add_special_tokens=False),
        tokenizer.convert_tokens_to_ids("<|im_end|>"),
    ]
    before = found.ids[np.flatnonzero(found.mask)[0]]
    assert tokenizer.decode([int(before)]).endswith("\n")


def test_several_turns_and_message_masks(tokenizer, chatml):
    talk = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u1"},
        {"role": "assistant", "content": "a1"},
        {"role": "user", "content": "u2"},
        {"role": "assistant", "content": "a2"},
    ]
    assert trained(tokens(chatml, messages=talk), tokenizer) == "a1<|im_end|>a2<|im_end|>"
    last = tokens(chatml, messages=talk, message_loss_mask=[0, 0, 0, 0, 1])
    assert trained(last, tokenizer) == "a2<|im_end|>"
    np.testing.assert_array_equal(last.ids, tokens(chatml, messages=talk).ids)
    every = LossMask(system=True, user=True)
    assert trained(tokens(chatml, messages=talk, mask=every), tokenizer) == "su1a1<|im_end|>u2a2<|im_end|>"
    user = LossMask(user=True, assistant=False)
    assert trained(tokens(chatml, messages=talk, mask=user), tokenizer) == "u1u2"


def test_the_prompt_of_a_prompt_completion_row_never_trains(tokenizer, chatml):
    prompt = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": "v"},
    ]
    assert trained(tokens(chatml, prompt=prompt, completion="yes"), tokenizer) == "yes<|im_end|>"


TOOL = {"type": "function", "function": {"name": "add_numbers", "parameters": {"type": "object"}}}
TOOL_TEXT = '[{"type":"function","function":{"name":"add_numbers","parameters":{"type":"object"}}}]'


@pytest.mark.parametrize("renderer", ["chatml", "qwen3"])
def test_tool_rows_in_every_spelling_are_the_same_tokens(tokenizer, chatml, renderer):
    make = chatml if renderer == "chatml" else qwen(tokenizer, False)
    found = []
    for tools in ([TOOL], TOOL_TEXT):
        for arguments in ({"a": 1}, '{"a":1}'):
            call = {"type": "function", "function": {"name": "add_numbers", "arguments": arguments}}
            talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
            found.append(tokens(make, messages=talk, tools=tools))
    for one in found[1:]:
        np.testing.assert_array_equal(one.ids, found[0].ids)
        np.testing.assert_array_equal(one.mask, found[0].mask)
    text = tokenizer.decode([*found[0].ids.tolist(), int(found[0].targets[-1])], skip_special_tokens=False)
    assert "add_numbers" in text.split("<|im_end|>")[0], "the tool is named in the system part"
    assert "None" not in text and "null" not in text and '\\"' not in text and '{"a": 1}' in text
    none, absent = tokens(make, prompt="q", completion="a", tools=None), tokens(make, prompt="q", completion="a")
    np.testing.assert_array_equal(none.ids, absent.ids)
    np.testing.assert_array_equal(tokens(make, prompt="q", completion="a", tools="[]").ids, absent.ids)


@pytest.mark.parametrize("answer", ["→ 👩‍🚀 ok é e\u0301", "🙂", "naïve 🧪", "  spaces \n\n"])
def test_every_byte_of_an_answer_trains(tokenizer, chatml, answer):
    found = tokens(chatml, prompt="naïve 🧪", completion=answer)
    assert trained(found, tokenizer) == f"{answer}<|im_end|>"


def test_truncation(tokenizer, chatml):
    whole = tokens(chatml, prompt="alpha beta", completion="gamma delta")
    first = int(np.flatnonzero(whole.mask)[0])
    assert tokens(chatml, seq_len=first, prompt="alpha beta", completion="gamma delta") == NOTHING_LEFT
    cut = tokens(chatml, seq_len=first + 2, prompt="alpha beta", completion="gamma delta")
    np.testing.assert_array_equal(cut.ids, whole.ids[: first + 2])
    np.testing.assert_array_equal(cut.mask, whole.mask[: first + 2])
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in cut.targets[cut.mask], "no invented end"


def test_a_row_that_trains_nothing_says_so(chatml):
    assert tokens(chatml, messages=[{"role": "user", "content": "hi"}]) == NOTHING
    assert tokens(chatml, prompt="a", completion="b", message_loss_mask=[0, 0]) == NOTHING


def test_renderer_options_of_a_row(tokenizer):
    """A field that the renderer has is set for that row; one that it lacks is an error that names it."""
    config = RendererConfig(name="qwen3", enable_thinking=False)
    make = lambda options: make_renderer(tokenizer, config.model_copy(update=options))  # noqa: E731
    columns = Columns(renderer={"enable_thinking": "think"})
    tokenise = Tokeniser(make, LossMask(), 512)
    off, on = (tokenise(resolve({"prompt": "a", "completion": "b", "think": v}, columns)) for v in (None, True))
    assert trained(off, tokenizer) == "b<|im_end|>" and trained(on, tokenizer).startswith("<think>")
    with pytest.raises(UserError, match="reasoning_effort"):
        tokenise(resolve({"prompt": "a", "completion": "b", "reasoning_effort": "low"}, Columns()))
