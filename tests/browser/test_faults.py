"""What is damaged or single is said on the page: torn lines, one value, a rank's prefix, a broken expression."""

from dashboard_runs import Made, write

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
