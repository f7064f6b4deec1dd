"""Masks of every renderer that ships and that a local tokenizer can drive, against the golden file and by rule."""

import json
import re

import pytest
from mask_samples import GOLDEN, TALKS, LossMask, driven, names, shown

from rlmake.config.sft import Columns
from rlmake.trainer.data.rows import resolve
from rlmake.trainer.data.tokens import Tokeniser, generation_prompt

golden = json.loads(GOLDEN.read_text(encoding="utf-8"))


def test_every_renderer_has_its_golden_masks():
    assert sorted(golden) == sorted(names()) and len(golden) >= 27


@pytest.mark.parametrize("name", names())
def test_masks(name):
    found = shown(name)
    assert found == golden[name]
    tokenizer, renderer = driven(name)
    given = tokenizer.decode(generation_prompt(renderer), skip_special_tokens=False)
    stops = [tokenizer.decode([token], skip_special_tokens=False) for token in renderer.get_stop_token_ids()]
    for key, text in found.items():
        runs = re.findall("⟦(.*?)⟧", text, flags=re.S)
        assert runs and not any(run.startswith(given) for run in runs), f"{key}: a header trains"
        assert any(runs[-1].endswith(stop) for stop in stops), f"{key}: the closing token does not train"
        for message in TALKS[key]["messages"]:
            if message["role"] != "assistant" and len(message["content"]) > 4:
                assert not any(message["content"] in run for run in runs), f"{key}: {message['role']} trains"
    said = "".join(re.findall("⟦(.*?)⟧", found["unicode"], flags=re.S))
    assert "→ 👩‍🚀 ok é e\u0301" in said and "🙂" in said and "\ufffd" not in said
    assert found["reasoning"].count("first thought") <= 1, "reasoning that the template strips is nowhere"


@pytest.mark.parametrize("name", names())
def test_a_row_cut_in_mid_answer_gets_no_invented_end(name):
    _, renderer = driven(name)
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a long answer"}]}
    whole = Tokeniser(lambda options: renderer, LossMask(), 4096)(resolve(row, Columns()))
    last = int(whole.mask.nonzero()[0][-1])
    cut = Tokeniser(lambda options: renderer, LossMask(), last)(resolve(row, Columns()))
    assert cut.cut and not whole.cut
    assert cut.targets.tolist() == whole.targets[:last].tolist() and cut.mask.tolist() == whole.mask[:last].tolist()
    assert cut.targets[-1] not in renderer.get_stop_token_ids()
