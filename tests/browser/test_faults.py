"""What is damaged or single is said on the page: torn lines, one value, a rank's prefix, a broken expression."""

import shutil

import pytest
from dashboard_runs import Made, cite, configs, record, report, work, write

LINES = {
    "trainer.log": "[rank0] 00:00:02 WARNING trainer waited\n[rank1] 00:00:04 INFO    trainer of rank one\n",
    "orchestrator.log": "00:00:01 INFO    orchestrator first\n00:00:03 SUCCESS orchestrator third\n",
}


def test_lines_of_ranks_are_merged_by_time_and_filtered_by_level(tab, outputs):
    made = Made(outputs / "ranks")
    made.close()
    for name, text in LINES.items():
        write(made.run / "logs/attempt_1" / name, text)
    page = tab("?run=ranks&tab=logs").see("of rank one").page
    rows = page.locator(".log > div").all_text_contents()
    of_both = [row for row in rows if row.startswith("00:00:0")]
    assert [row[:8] for row in of_both] == ["00:00:01", "00:00:02", "00:00:03", "00:00:04"], rows
    assert "trainer rank0" in of_both[1] and "trainer rank1" in of_both[3] and "[rank" not in "".join(of_both)
    warned = tab("?run=ranks&tab=logs&level=WARNING&q=waited").see("trainer waited").page
    assert warned.locator(".log > .WARNING").count() == 1


def test_lines_that_cannot_be_read_are_counted(tab, outputs):
    made = Made(outputs / "torn")
    made.close()
    metrics = made.run / "monitors/file/metrics.jsonl"
    write(metrics, '{"step": 1, "torn\n' * 752)
    index = next((made.run / "monitors/file/traces").rglob("*.jsonl"), None)
    for query in ("?run=torn", "?run=torn&tab=metrics"):
        tab(query).see("752 lines of metrics.jsonl could not be read").fits()
    tab("?run=torn&tab=metrics").see("No line of the file could be read")
    if index is not None:
        write(index, "{\n" * 3)
        tab("?run=torn&tab=traces").see("3 lines of the traces could not be read")


def test_a_resume_is_followed_by_the_open_logs_and_configurations(tab, outputs):
    made = Made(outputs / "resumed").step(1)
    made.close()
    logs, files = (
        tab("?run=resumed&tab=logs").see("orchestrator starts"),
        tab("?run=resumed&tab=config").see("max_steps"),
    )
    Made(outputs / "resumed", 2, 1).close()
    for what in ("orchestrator", "trainer"):
        write(
            made.run / f"logs/attempt_2/{what}.log",
            f"11:00:00 INFO    {what} goes on, with more to say than before\n" * 9,
        )
    logs.see("goes on").page.wait_for_function("() => !document.querySelector('.log').innerText.includes('starts')")
    assert logs.page.locator("select[aria-label=Attempt] option").all_text_contents()[1:] == ["attempt 1", "attempt 2"]
    assert logs.page.locator(".log > div", has_text="goes on").count() == 18, "from their start"
    files.page.locator("select[aria-label=Attempt] option", has_text="attempt 2").wait_for(state="attached")
    assert files.page.locator("select[aria-label=Attempt]").input_value() == "2"
    logs.clean(), files.clean()


def test_links_within_a_report_lead_to_their_places(tab, outputs):
    made = Made(outputs / "linked").step(1)
    made.close()
    text = "[below](#main-part) and broken[^b]\n\n" + "words\n\n" * 60 + "## Main *part*\n\n" + "words\n\n" * 60
    write(made.run / "reports/a.md", f"{text}\n[^b]: {cite(quote='nowhere')}")
    page = tab("?run=linked&tab=report", height=500).see("the quote is not in this episode").page
    for link, place in (("a:has-text('below')", "#to-main-part"), ("a.cite.broken", "#note-1")):
        box = f"document.querySelector('{place}').getBoundingClientRect()"
        seen = f"() => {box}.top >= 0 && {box}.bottom <= innerHeight"
        assert not page.evaluate(seen)
        page.locator(link).first.click()
        page.wait_for_function(seen)
        page.evaluate("document.querySelector('main').scrollTop = 0")


def test_a_new_report_appears_on_the_open_page(tab, outputs):
    made = Made(outputs / "told").step(1)
    made.close()
    report(made.run)
    page = tab("?run=told&tab=report").see("first")
    report(made.run, "second.md")
    page.see("second").clean()


def test_the_page_of_a_run_made_this_moment_opens_without_a_fault(tab, outputs):
    Made(outputs / "before").close()
    other = tab("?run=before").see("before")
    for at in range(3):
        other.page.evaluate("fetch('/api/runs').then(answer => answer.json())")  # the list is as new as can be
        made = Made(outputs / f"made{at}").step(1)
        made.close()
        report(made.run)
        tab(f"?run=made{at}&tab=report").see("Findings").clean()


def test_a_bar_of_the_histogram_takes_what_it_counts_and_nothing_of_the_next(tab, outputs):
    """61 rewards a quarter apart, bars half wide: every other one lies on an edge."""
    Made(outputs / "bars").step(1, samples=61).close()
    page = tab("?run=bars&tab=traces&bins=reward").page
    page.locator(".histogram button[aria-label='10: 2']").click()
    page.wait_for_url("**&low=*")
    page.wait_for_function("() => document.querySelectorAll('tr[data-pick]').length < 50")
    assert sorted(page.locator("tr[data-pick] .reward").all_text_contents()) == ["10", "10.3"]


def test_times_are_rounded_before_they_are_taken_apart(tab, outputs):
    Made(outputs / "times").step(1).close()
    page = tab("?run=times").see("times").page
    said = "values => import('/static/dom.js').then(dom => values.map(dom.seconds))"
    assert page.evaluate(said, [0.9996, 99.97, 119.7, 5999.7, 7199]) == [
        "1.0 s",
        "1 min 40 s",
        "2 min 0 s",
        "1 h 40 min",
        "2 h 0 min",
    ]


def test_a_single_value_is_a_number_under_its_real_name(tab, outputs):
    made = Made(outputs / "evaluated")
    made.orch.log(0, {"eval/rev/avg@4": 0.625, "eval/rev/no_response/mean": 0.0})
    made.close()
    page = tab("?run=evaluated").see("at step 0").page
    assert "eval/rev/avg@4" in page.locator(".chart h3").all_text_contents()
    assert not [title for title in page.locator(".chart h3").all_text_contents() if "{" in title]
    assert page.locator(".chart .single b", has_text="0.625").count() == 1
    made = Made(outputs / "evaluated", 1)
    made.orch.log(1, {"eval/rev/avg@4": 0.75})
    made.close()
    page.wait_for_function("() => document.querySelector('.chart .plot path.line')")
    assert page.locator("section[aria-label='eval/rev/avg@4'] .single").count() == 0, "two values are a curve"


def test_a_broken_expression_is_said_where_it_is_seen(tab, outputs):
    made = Made(outputs / "wide")
    for step in (1, 2):
        made.orch.log(step, {f"reward/{n}/mean": float(step) for n in range(40)})
    made.close()
    page = tab("?run=wide&tab=metrics").see("reward/39/mean").page
    page.locator(".chart").last.scroll_into_view_if_needed()
    page.fill("main [data-filter]", "^reward/(")
    said = page.get_by_text("Not a regular expression")
    said.wait_for()
    assert 0 <= said.bounding_box()["y"] < 300, "beside the filter, also far down the page"
    assert page.get_by_text("not filtered").is_visible()
    page.fill("main [data-filter]", "^reward/(1|2)/")
    page.wait_for_function("() => document.querySelectorAll('.chart').length === 2")
    assert said.count() == 0


def test_a_run_that_is_removed_and_a_server_that_is_silent_are_said(tab, outputs):
    """The page keeps what it shows; the header says that it is no longer so."""
    Made(outputs / "passing").step(1).step(2).close()
    one = tab("?run=passing").see("reward").see("running")
    shutil.rmtree(outputs / "passing")
    one.see("not there")
    one.page.route("**/api/**", lambda route: route.abort())
    one.see("no answer")
    one.page.unroute("**/api/**")
    Made(outputs / "passing").step(1).close()
    one.page.wait_for_function("() => document.querySelector('#top .pill')?.textContent === 'running'")
    assert one.page.get_by_text("no answer").count() == 0


@pytest.mark.parametrize(
    "rest",
    ["&tab=constructor", "&tab=traces&line=0&overlay=constructor", "&tab=traces&line=0&highlight=5",
     "&tab=traces&line=0&highlight=[null,{}]", "&tab=traces&line=0&trace=x&branch=y&mode=toString",
     "&tab=traces&sort=constructor&bins=x&offset=-5", "&tab=metrics&smooth=x&x=y", "&tab=logs&level=x&file=none"],
)  # fmt: skip
def test_an_address_with_nonsense_in_it_shows_the_run(tab, outputs, rest):
    if not (outputs / "plain").exists():
        Made(outputs / "plain").step(1).step(2).close()
    one = tab(f"?run=plain{rest}").see("running")
    one.page.wait_for_function("() => document.querySelector('main .view')?.textContent.length > 40")
    assert one.page.locator("main .fault").count() == 0
    one.clean()


@pytest.mark.parametrize("width", [1280, 390])
def test_words_without_an_end_stay_in_their_place(tab, outputs, width):
    name, long = "n" * 180, "word" * 60
    if not (outputs / name).exists():
        made = Made(outputs / name)
        made.orch.log(1, {f"metric_{long}": 1.0, f"reward/{long}/mean": 1.0})
        made.orch.log(2, {f"metric_{long}": 2.0, f"reward/{long}/mean": 2.0})
        made.episode(work(1, 0, 1, env=long), record(prompt=long, reply=long, turns=3, error=long, ok=False))
        made.close()
        configs(made.run, 2, **{long: long}, model={"name": long})
        write(made.run / "logs/attempt_2" / f"{long[:150]}.log", f"10:00:00 INFO {long * 9}\n")
        report(made.run, "long.md", a=cite(episode=long, quote=long, note=long))
        text = f"# {long}\n\n{long} `{long}`\n\n```\n{long}\n```\n\n|{long}|b|\n|-|-|\n|{long}|c|\n\n> - {long}\n"
        write(made.run / "reports/wide.md", text)
    places = [
        "overview",
        "metrics",
        "config",
        "config&attempt=2&against=1",
        "traces",
        "traces&line=0",
        "logs",
        "report",
    ]
    places += [f"traces&line=0&mode={mode}" for mode in ("timeline", "replay", "graph")] + ["report&report=wide.md"]
    for place in places:
        one = tab(f"?run={name}&tab={place}", width=width)
        one.page.wait_for_function("() => document.querySelector('main .view')?.textContent.length > 200")
        one.page.wait_for_timeout(200)
        one.fits().clean()
        shown = "document.querySelector('#top .pill')?.getBoundingClientRect().right < innerWidth"
        one.page.wait_for_function(f"() => {shown}")  # its state, behind a long name
    table = tab(f"?run={name}&tab=traces", width=width).see("Took").page.locator("main table")
    assert table.bounding_box()["width"] < 2700


@pytest.mark.parametrize("query", ["?run=many&tab=metrics&q=.", "?view=compare&q=.&runs=many"])
def test_a_hundred_thousand_names_are_shown_a_page_at_a_time(tab, outputs, query):
    if not (outputs / "many").exists():
        made = Made(outputs / "many")
        for step in (1, 2, 1, 7, -3):
            made.orch.log(step, {f"metric/{n:06d}/mean": float(step) for n in range(100_000)})
        made.close()
    one = tab(query).see("metric/000000/mean").clean()
    one.page.wait_for_function("() => document.querySelector('.chart .plot').plotted?.lines[0].x.join() === '-3,1,2,7'")
    before = one.page.locator(".chart").count()
    assert before <= 96
    one.page.locator(".chart").nth(before - 1).scroll_into_view_if_needed()
    one.page.wait_for_function(f"() => document.querySelectorAll('.chart').length > {before}")
    assert one.page.locator(".chart").count() < 500
