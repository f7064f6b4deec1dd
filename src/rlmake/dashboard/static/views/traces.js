// The table of episodes with its filters and histogram; one episode is views/episode.js.

import { ofRun, poll } from "../api.js";
import { ago, clock, empty, fault, fill, h, left, number, search, seconds, select } from "../dom.js";
import { change, go, where } from "../router.js";

const PAGE = 100;
const COLUMNS = [
  ["step", "Step", "num"], ["env", "Environment"], ["group", "Group"], ["sample", "Episode"], ["reward", "Reward", "num"], ["advantage", "Advantage", "num"],
  ["output_tokens", "Out", "num"], ["input_tokens", "In", "num"], ["turns", "Turns", "num"], ["duration", "Took", "num"], ["stop", "Ended"], ["arrival", "Arrived", "num"],
];
const SORTABLE = new Set(["step", "group", "reward", "advantage", "output_tokens", "input_tokens", "turns", "duration", "arrival"]);
const BINS = [["arrival", "arrival"], ["reward", "reward"], ["duration", "duration"], ["output_tokens", "tokens out"], ["turns", "turns"], ["advantage", "advantage"]];

export async function show(main, place, scope) {
  if (place.live) return (await import("./live.js")).show(main, place, scope);
  if (place.line !== undefined || place.episode !== undefined) return (await import("./episode.js")).show(main, place, scope);
  const run = place.run, f = { ...where() };
  let etag = "", last = null;
  const bar = h("div", { class: "bar sticky" }), bins = h("div", { class: "panel", style: { marginBottom: "12px" } }), table = h("div", { class: "panel scroll" }), foot = h("div", { class: "bar", style: { marginTop: "8px" } }), flying = h("div", {}), note = h("div", {}), lost = h("div", {});
  fill(main, bar, note, lost, flying, bins, table, foot);
  const filters = () => ({ step: f.step, kind: f.kind, subset: f.subset, env: f.env, group: f.group, q: f.q, errors_only: f.errors_only, low: f.low, high: f.high, start: f.start, end: f.end });
  const put = (pairs) => { Object.assign(f, pairs); if (!("offset" in pairs)) f.offset = ""; change({ ...pairs, offset: f.offset }); etag = ""; load(); };

  const tools = (facets) => {
    const steps = facets.cohorts.filter((one) => (!f.kind || one.kind === f.kind) && one.step >= 0).map((one) => one.step);
    const distinct = [...new Set(steps)].sort((a, b) => a - b);
    fill(bar,
      h("div", { class: "grow" }, search(f.q, (text) => put({ q: text }), "Filter by episode, task, error or ending")),
      select([["", "train and eval"], ...facets.kinds.map((kind) => [kind, kind])], f.kind, (value) => put({ kind: value }), "Kind"),
      distinct.length > 400 ? h("input", { type: "number", min: distinct[0], max: distinct[distinct.length - 1], value: f.step ?? "", placeholder: "step", "aria-label": "Step", style: { width: "90px" }, onchange: (event) => put({ step: event.target.value }) })
        : select([["", "all steps"], ...distinct.map((step) => [step, `step ${step}`])], f.step, (value) => put({ step: value }), "Step"),
      select([["", "all episodes"], ["effective", "trained on"]], f.subset === "effective" ? "effective" : "", (value) => put({ subset: value }), "Subset"),
      facets.envs.length > 1 && select([["", "all environments"], ...facets.envs.map((env) => [env, env])], f.env, (value) => put({ env: value }), "Environment"),
      h("label", {}, h("input", { type: "checkbox", checked: Boolean(f.errors_only), onchange: (event) => put({ errors_only: event.target.checked ? "1" : "" }) }), "errors only"),
      (f.group || f.low || f.high || f.start) && h("button", { onclick: () => { put({ group: "", low: "", high: "", start: "", end: "" }); tools(facets); } }, `clear ${f.group ? "group" : "range"}`));
  };

  const draw = (answer) => {
    last = answer;
    fill(lost, left(answer, "the traces"));
    const sort = f.sort || "arrival", order = f.order || "desc";
    if (!answer.lines) {
      fill(table, empty(answer.whole ? "No episodes yet" : "Reading the episodes…", answer.whole ? "Each finished rollout of training and evaluation appears here. SFT has none." : `${Math.round(answer.progress * 100)} % read`));
      fill(foot); bins.hidden = true;
      return;
    }
    bins.hidden = false;
    const low = Math.min(0, ...answer.episodes.map((row) => row.reward ?? 0)), high = Math.max(1, ...answer.episodes.map((row) => row.reward ?? 0));
    const head = h("tr", {}, COLUMNS.map(([key, text, kind]) => h("th", { class: kind || "", "aria-sort": sort === key ? (order === "desc" ? "descending" : "ascending") : null }, SORTABLE.has(key)
      ? h("button", { onclick: () => put({ sort: key, order: sort === key && order === "desc" ? "asc" : "desc" }) }, text, sort === key ? (order === "desc" ? " ↓" : " ↑") : "") : text)));
    const rows = answer.episodes.map((row) => h("tr", { class: "pick", data: { pick: "1" }, onclick: (event) => { if (!event.target.closest("button")) open(row.line); } },
      h("td", { class: "num" }, row.step ?? "–"), h("td", { class: "name" }, row.env || "–", row.kind === "eval" ? h("span", { class: "pill accent", style: { marginLeft: "6px" } }, "eval") : null),
      h("td", {}, h("button", { class: "plain", style: { height: "18px" }, title: "Only this group", onclick: () => put({ group: row.group }) }, row.group.split("/").slice(-1)[0] || row.group)),
      h("td", { class: "mono name" }, h("a", { href: link(row.line) }, row.name.split("/").slice(-2).join("/"))),
      h("td", { class: "num" }, h("span", { class: "reward" }, row.reward === null ? "–" : number(row.reward, 3), h("i", {}, h("b", { style: { width: `${row.reward === null ? 0 : (100 * (row.reward - low)) / (high - low || 1)}%` } })))),
      h("td", { class: "num" }, row.advantage === null ? "–" : number(row.advantage, 3)), h("td", { class: "num" }, number(row.output_tokens)), h("td", { class: "num" }, number(row.input_tokens)),
      h("td", { class: "num" }, number(row.turns)), h("td", { class: "num" }, seconds(row.duration)),
      h("td", {}, row.ok ? (row.truncated ? h("span", { class: "pill warn" }, "truncated") : row.stop_condition || "–") : h("span", { class: "pill bad" }, row.error || (row.timeout ? "timeout" : "failed")), row.superseded ? h("span", { class: "pill", style: { marginLeft: "4px" }, title: `Attempt ${row.attempt} was cut off: a later one made this episode again` }, "made again") : row.effective ? h("span", { class: "pill good", style: { marginLeft: "4px" }, title: "Went into a batch" }, "trained") : null),
      h("td", { class: "num", title: clock(row.arrival) }, ago(row.arrival))));
    fill(table, h("table", {}, h("thead", {}, head), h("tbody", {}, rows)), !rows.length && empty("No episode matches", "Loosen a filter above."));
    const offset = answer.offset, end = offset + rows.length;
    fill(foot, h("span", { class: "muted" }, answer.total ? `${number(offset + 1)}–${number(end)} of ${number(answer.total)}` : "", answer.total !== answer.lines ? ` (${number(answer.lines)} in all)` : "", answer.whole ? "" : ` · reading, ${Math.round(answer.progress * 100)} %`),
      h("button", { disabled: offset === 0, onclick: () => put({ offset: Math.max(0, offset - PAGE) }) }, "Newer"), h("button", { disabled: end >= answer.total, onclick: () => put({ offset: offset + PAGE }) }, "Older"));
    try { sessionStorage.setItem(`lines ${run}`, JSON.stringify(answer.episodes.map((row) => row.line))); } catch { /* no neighbours then */ }
  };

  const link = (line) => `/?${new URLSearchParams({ ...Object.fromEntries(Object.entries(filters()).filter(([, v]) => v)), run, tab: "traces", line })}`;
  const open = (line) => go({ ...where(), line, sort: f.sort, order: f.order, offset: f.offset });

  const histogram = async () => {
    const key = f.bins || "arrival", found = await ofRun(run, "episodes/histogram", { ...filters(), key, bars: 60 }, scope);
    const most = Math.max(1, ...found.bins.map((bin) => bin[1]));
    const text = key === "arrival" ? clock : (value) => number(value, 3);
    const pick = (value) => {
      const hair = found.bin * 1e-6, from = value - hair, to = value + found.bin - hair;  // what the next bar counts is not taken
      if (key === "reward") put({ low: from, high: to });
      else if (key === "arrival") put({ start: from, end: to });
    };
    fill(bins, h("div", { class: "histogram" }, found.bins.map(([value, count]) => h("button", { title: `${text(value)}: ${number(count)}`, "aria-label": `${text(value)}: ${count}`, tabindex: "-1", onclick: () => pick(value) }, h("i", { style: { height: `${(100 * count) / most}%` } })))),
      h("div", { class: "axis" }, h("span", {}, found.total ? text(found.start) : ""), select(BINS, key, (value) => { f.bins = value; change({ bins: value }); histogram(); }, "Histogram of"), h("span", {}, found.total ? text(found.end) : "")));
  };

  let seen = "", counted = 0, asked = "";
  const load = async () => {
    try {
      const answer = await ofRun(run, "episodes", { ...filters(), sort: f.sort || "arrival", order: f.order || "desc", offset: f.offset, limit: PAGE, etag }, scope);
      fill(note);
      if (answer.unchanged) return;
      etag = answer.etag;
      const cursor = [...table.querySelectorAll("tr.pick")].findIndex((row) => row.classList.contains("cursor"));
      draw(answer);
      table.querySelectorAll("tr.pick")[cursor]?.classList.add("cursor");
      // Counting takes the server a while when there are many: it is not done at every arrival then.
      const now = JSON.stringify(filters());
      if (answer.lines > 20000 && now === asked && Date.now() - counted < 20000) return;
      counted = Date.now();
      asked = now;
      const facets = await ofRun(run, "rollouts", {}, scope), mark = JSON.stringify([facets.envs, facets.kinds, facets.cohorts.length]);
      if (mark !== seen && !bar.contains(document.activeElement)) { seen = mark; tools(facets); }
      if (answer.lines) await histogram();
    } catch (error) { if (error.name !== "AbortError") { fill(note, fault(error.message)); throw error; } }
  };
  let flight = "";
  const live = async () => {
    const found = await ofRun(run, "live", { etag: flight }, scope);
    if (found.unchanged) return;
    flight = found.etag;
    fill(flying, found.traces.length ? h("details", { class: "panel", style: { padding: "8px 12px", marginBottom: "12px" } }, h("summary", {}, h("span", { class: "dot running" }), ` ${number(found.traces.length)} in flight`),
      h("div", { class: "scroll" }, h("table", {}, h("tbody", {}, found.traces.slice(0, 200).map((one) => h("tr", {}, h("td", { class: "mono" }, one.trace ? h("a", { href: `/?${new URLSearchParams({ run, tab: "traces", live: one.trace })}` }, one.name) : one.name), h("td", {}, one.env), h("td", {}, one.state === "pending" ? "waiting for its first answer" : "running"), h("td", { class: "num" }, one.dispatch ? ago(one.dispatch.time) : ""))))))) : null);
  };
  await load();
  poll(scope, 2500, load);
  poll(scope, 2500, live);
}
