"""Every view on a run that the monitors wrote: what is on it, in both themes and widths, by mouse and by keys."""

import json
import re
import time
import urllib.error
import urllib.request

import pytest
from dashboard_runs import HOSTILE, Made, cite, configs, record, report, work, write


@pytest.fixture(scope="module", autouse=True)
def run(outputs):
    made = Made(outputs / "demo")
    for step in (1, 2, 3):
        made.step(step, groups=2)
    made.episode(work(400, 0, 4), record(turns=3))
    made.episode(work(401, 0, 4), record(ok=False, error="ProviderError"), trained=False)
    made.episode(work(7, 0, 3, kind="eval"), record())
    made.close()
    configs(made.run, 2)
    report(made.run, "first.md", a=cite(), b=cite(quote="never said"), c=cite(episode="rev/400/0", step=4, node=2))
    other = Made(outputs / "other")
    other.step(1).step(2).close()
    return made.run


VIEWS = {
    "overview": ("?run=demo", "reward"),
    "metrics": ("?run=demo&tab=metrics", "loss/mean"),
    "config": ("?run=demo&tab=config", "tiny/model"),
    "traces": ("?run=demo&tab=traces", "ProviderError"),
    "episode": ("?run=demo&tab=traces&line=0", "olleh"),
    "tokens": ("?run=demo&tab=traces&line=0&overlay=entropy", "not on this machine"),
    "timeline": ("?run=demo&tab=traces&line=24&mode=timeline", "branch 0"),
    "replay": ("?run=demo&tab=traces&line=24&mode=replay", "inferred cadence"),
    "graph": ("?run=demo&tab=traces&line=24&mode=graph", "context 0"),
    "logs": ("?run=demo&tab=logs", "it broke"),
    "report": ("?run=demo&tab=report", "Citations"),
    "compare": ("?view=compare&runs=demo,other", "Configurations"),
    "project": ("?view=project", "no project"),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "dark")])
def test_each_view(tab, name, width, theme):
    query, words = VIEWS[name]
    tab(query, width=width, theme=theme).see(words).fits().clean()


def test_charts_are_drawn_and_filtered_by_expression(tab):
    page = tab("?run=demo&tab=metrics").see("loss/mean").page
    page.wait_for_function("() => document.querySelectorAll('.chart .plot path.line').length >= 4")
    page.fill("main [data-filter]", "^loss|lr$")
    page.wait_for_function("() => document.querySelectorAll('.chart').length === 2")
    assert page.locator(".chart h3").all_text_contents() == ["loss/mean", "optim/lr"] and "q=%5Eloss" in page.url
    page.fill("main [data-filter]", "(")
    page.get_by_text("Not a regular expression").wait_for()
    assert page.locator(".chart").count() == 2, "what was there stays"


def test_the_table_is_filtered_sorted_and_walked_by_keys(tab):
    one = tab("?run=demo&tab=traces").see("ProviderError")
    page = one.page
    page.select_option("select[aria-label=Step]", "2")
    page.wait_for_function("() => document.querySelectorAll('tr[data-pick]').length === 8")
    page.locator("th button", has_text="Reward").click()
    page.wait_for_function("() => document.querySelector('tr[data-pick] .reward').textContent === '0.75'")
    page.locator("main").focus()
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.get_by_text("olleh").first.wait_for()
    first = re.search(r"line=(\d+)", page.url)[1]
    page.keyboard.press("]")
    page.wait_for_function(f"() => new URLSearchParams(location.search).get('line') !== '{first}'")
    page.get_by_text("olleh").first.wait_for()
    page.keyboard.press("Escape")
    page.wait_for_function("() => document.querySelectorAll('tr[data-pick]').length === 8")
    page.keyboard.press("5")
    page.get_by_text("it broke").first.wait_for()
    page.keyboard.press("?")
    page.get_by_text("next, previous row").wait_for()
    page.keyboard.press("Escape")
    page.go_back()
    page.wait_for_function("() => document.querySelectorAll('tr[data-pick]').length === 8")
    one.clean()


@pytest.mark.parametrize("overlay", ["advantage", "entropy", "mismatch", "ipo", "loss", "content", "logprob"])
def test_overlays_colour_tokens(tab, overlay):
    page = tab(f"?run=demo&tab=traces&line=1&overlay={overlay}").page
    page.wait_for_function("() => document.querySelectorAll('#m2 .tokens span').length === 6")
    coloured = page.evaluate(
        "[...document.querySelectorAll('#m2 .tokens span')].map((s) => Boolean(s.style.background))"
    )
    expected = {"ipo": [4], "content": [1, 2, 3, 4]}.get(overlay, [4, 5])
    assert [n for n, is_coloured in enumerate(coloured) if is_coloured] == expected
    page.hover("#m2 .tokens span:nth-child(5)")
    tip = page.locator(".tip").text_content()
    assert "log-probability: -0.5" in tip and "entropy: 0.7" in tip and "trust region: masked" in tip


def test_replay_reveals_text_over_the_call(tab):
    page = tab("?run=demo&tab=traces&line=24&mode=replay").see("inferred cadence").page
    screen = page.locator(".terminal")
    move = """(at) => {
        const slider = document.querySelector('input[type=range]');
        slider.value = at;
        slider.dispatchEvent(new Event('input'));
    }"""
    page.evaluate(move, 111)
    partial = screen.text_content()
    page.evaluate(move, 1000)
    assert "Let me" in partial and "clock(" not in partial, "half of a turn: its call to a tool is not there yet"
    assert screen.text_content().count("olleh") == 3 and screen.text_content().count("clock(") == 2
    page.get_by_role("button", name="Play", exact=True).click()
    page.get_by_role("button", name="Pause", exact=True).wait_for()


def test_live_following(tab, outputs):
    made = Made(outputs / "demo", 3, 4)
    chart = tab("?run=demo")
    table = tab("?run=demo&tab=traces").see("ProviderError")
    logs = tab("?run=demo&tab=logs").see("it broke")
    chart.page.wait_for_function("() => document.querySelector('.chart .plot path.line')")
    made.step(5).close()
    with open(made.run / "logs/attempt_3/trainer.log", "a") as file:
        file.write("11:00:00 SUCCESS trainer a line that came later\n")
    table.see("500/3")
    logs.see("a line that came later")
    chart.page.wait_for_function("() => document.querySelector('.chart .plot').plotted.lines[0].x.includes(5)")
    chart.clean(), table.clean(), logs.clean()


def post(url, body):
    request = urllib.request.Request(f"{url}/api/view", json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_program_drives_two_open_tabs(tab, url):
    tabs = [tab("?run=demo&tab=logs").see("it broke"), tab("?run=other").see("reward")]
    body = {"run": "demo", "tab": "traces", "step": 1, "kind": "train", "subset": "effective", "episode": "rev/100/2"}
    body["highlight"] = [
        {"node": 2, "quote": "Let me\nthink", "field": "reasoning", "reason": "why"},
        {"node": 1, "quote": "hello"},
    ]
    for one in tabs:
        one.page.wait_for_function("() => document.querySelector('.tabs')")
    status, answer = post(url, body)
    assert (status, answer["clients"], answer["line"]) == (200, 2, 2)
    for one in tabs:
        one.page.wait_for_selector("mark.active")
        assert one.page.locator("mark").all_text_contents() == ["hello", "Let me think"], "in the order of the messages"
        assert "line=2" in one.page.url
        one.clean()
        one.page.close()
    for _ in range(40):  # the server notices that a tab is gone when it next writes to it
        status, answer = post(url, {"run": "demo", "report": "first.md"})
        if status == 409:
            break
        time.sleep(0.25)
    assert status == 409
    tab("?run=other").see("What it learns")


def test_citations_are_checked_and_lead_to_the_quote(tab):
    page = tab("?run=demo&tab=report").see("verified").see("broken").page
    for kind in ("ok", "broken"):
        page.wait_for_function(f"() => document.querySelectorAll('.cite.{kind}').length === 1")
    assert page.locator(".prose b").count() == page.locator(".notes b").count(), "raw HTML is text"
    page.locator(".cite.ok").click()
    page.wait_for_selector("mark.active")
    assert page.locator("mark").text_content() == "olleh"


def test_hostile_content_is_text(tab, outputs):
    """Script, an image with a handler, text that turns direction, half a character, ten megabytes, broken JSON."""
    made = Made(outputs / "hostile<img src=x onerror=window.pwned=1>")
    made.orch.log(1, {f"<script>window.pwned=1</script>/{n}": 1.0 for n in range(3)})
    made.episode(work(1, 0, 1), record(prompt=HOSTILE, reply=HOSTILE + "x" * 10_000_000, error="<b>E</b>", ok=False))
    made.close()
    write(made.run / "logs/attempt_1/trainer.log", "y" * 3_000_000 + f"\n10:00:00 INFO {HOSTILE}\n")
    write(made.run / "configs/attempt_1/resolved/trainer.json", HOSTILE)
    report(made.run, "x.md", a=cite(note=HOSTILE.replace("\ud83d", ""), quote="<script>", episode="rev/1/0", step=1))
    name = "hostile%3Cimg%20src%3Dx%20onerror%3Dwindow.pwned%3D1%3E"
    places = {
        "metrics": "window.pwned", "traces": "<b>E</b>", "traces&line=0": "<script>", "logs": "<script>",
        "config&file=resolved/trainer.json": "<script>", "report": "window.pwned",
    }  # fmt: skip
    for view, words in places.items():
        query = f"?run={name}&tab={view}"
        one = tab(query).see(words).fits().clean()
        assert one.page.evaluate("window.pwned") is None and one.page.locator("main img").count() == 0
    one = tab(f"?run={name}&tab=traces&line=0").see("Show more of")
    one.page.get_by_role("button", name="Show more of").last.click()
    one.page.wait_for_function("() => document.querySelector('#m2').textContent.length > 1_000_000")
    one.clean()


def test_empty_and_error_states(tab, outputs, url):
    bare = Made(outputs / "bare")
    bare.close()
    tab("?run=bare").see("No metrics yet").fits()
    tab("?run=bare&tab=metrics").see("No metrics yet")
    tab("?run=bare&tab=traces").see("No episodes yet").fits()
    tab("?run=bare&tab=report").see("No reports")
    tab("?run=gone").see("There is no such run")
    one = tab("?run=demo&tab=traces&line=99999")
    one.see("not there")
    tab("?view=compare").see("Choose runs")
    tab("?run=demo&tab=traces&q=nothing-like-this").see("No episode matches")


def test_light_dark_and_the_menu_of_a_narrow_page(tab):
    page = tab("?run=demo", width=390).see("reward").page
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_label("Light or dark").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    assert page.locator("#side").is_hidden()
    page.get_by_label("Runs", exact=True).first.click()
    page.locator("#side a.run", has_text="other").click()
    page.wait_for_function("() => location.search.includes('run=other')")
    assert page.locator("#side").is_hidden()
