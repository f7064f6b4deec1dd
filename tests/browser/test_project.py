"""The page of experiments on a plan that changes; the plan itself is tests/build's."""

import json

import pytest

CELL = "sweeps/reverse-text/lr=1e-4,group_size=4,seed=0"
LONG = "a-project-with-a-long-name/and-a-run-with-a-longer-name-than-any-box"


def run(name, fingerprint, parents=(), **given):
    base = {"grid": None, "cell": None, "scores": {}, "failed": None, "last_step": 10, "reached": 3}
    parents = [{"stage": "train", "fingerprint": one} for one in parents]
    file = f"experiments/{name}.toml"
    made = {"name": name, "kind": "rl", "file": file, "fingerprint": f"train-{fingerprint}", "parents": parents}
    return made | base | given


def target(name, state, leaf="weights", reason="the file experiments/x.toml changed since it was built"):
    path = f"outputs/{name}/{leaf}"
    return {"path": path, "run": name, "state": state, "reason": reason, "changes": [], "reuses": []}


def document(at, states):
    targets = [target(LONG if n == 0 else f"run-{n}", state) for n, state in enumerate(states)]
    targets += [target(CELL, "missing")]
    runs = [run(LONG, "0"), run("run-1", "1", ["0"])]
    runs += [run(CELL, "2", ["0"], grid="sweeps/reverse-text", cell={"texts": {"lr": "1e-4"}, "baseline": True})]
    return {"at": at, "targets": targets, "runs": runs}


@pytest.fixture
def project(tab):
    """`(page, say)`: the page of experiments, and what changes the plan below it."""

    def make(states, **given):
        plan = {"now": document(1, states)}
        one = tab("?view=compare", **given)
        answer = lambda: json.dumps({"projects": [{"document": plan["now"], "planning": False, "fault": None}]})  # noqa: E731
        one.page.route("**/api/project*", lambda r: r.fulfill(body=answer(), content_type="application/json"))
        one.open("?view=project").see("Where things come from")
        return one, lambda states: plan.update(now=document(plan["now"]["at"] + 1, states))

    return make


def test_counts_follow_the_plan_and_keep_the_focus(project):
    one, say = project(["missing", "missing", "ready"])
    ready = one.page.get_by_role("button", name="ready 1")
    ready.click()
    one.page.wait_for_function("() => document.querySelectorAll('main tbody')[0].rows.length === 1")
    say(["ready", "ready", "ready"])
    one.page.get_by_role("button", name="ready 3").wait_for()
    assert one.page.locator("main tbody").first.locator("tr").count() == 3
    assert one.page.evaluate("document.activeElement.textContent") == "ready 3"
    assert one.page.get_by_role("button", name="all 4").is_visible()
    one.clean()


def test_a_narrow_page_stacks_what_a_wide_one_puts_side_by_side(project):
    one, _ = project(["missing", "failed"], width=390)
    one.fits()
    for row in one.page.locator("main tbody").first.locator("tr").all():
        widths = [cell.bounding_box()["width"] for cell in row.locator("td").all()]
        assert min(widths) > 250, widths


def test_labels_stay_in_their_boxes_and_cells_keep_their_names(project):
    one, _ = project(["missing", "failed"] * 20)
    measure = """() => [...document.querySelectorAll('.graph svg text')].map((text) => {
        const box = text.parentNode.querySelector('rect').getBBox(), own = text.getBBox();
        return [own.x - box.x, box.x + box.width - own.x - own.width, box.y + box.height - own.y - own.height];
    })"""
    assert min(min(gaps) for gaps in one.page.evaluate(measure)) > 0
    texts = one.page.locator(".graph text").all_text_contents()
    assert "sweeps/reverse-text" in texts and "lr=1e-4,group_size=4,seed=0" in texts
    one.page.evaluate("document.querySelector('main').scrollTo(0, 400)")
    top = "(css) => document.querySelector(css).getBoundingClientRect().top"
    assert abs(one.page.evaluate(top, ".bar.sticky") - one.page.evaluate(top, "main")) < 1, "no row shows above the bar"
