// Several runs side by side: the same metrics in one chart, and where their configurations differ.

import { ofRun, poll } from "../api.js";
import { card, colour, pages } from "../chart.js";
import { empty, fault, fill, h, number, search, select } from "../dom.js";
import { change, href } from "../router.js";
import { fetcher } from "../series.js";
import { state } from "../main.js";
import { flat } from "./config.js";

const MOST = 8;

export async function show(main, place, scope) {
  let chosen = (place.runs || "").split(",").map(decodeURIComponent).filter(Boolean).slice(0, MOST), pattern = place.q ?? "", cards = [], panels = [];
  const options = { x: place.x || "step", smooth: Number(place.smooth || 0) };
  const pick = h("div", {}), tools = h("div", { class: "bar sticky" }), note = h("div", {}), charts = h("div", { class: "charts" }), configs = h("div", {});
  fill(main, h("div", { class: "bar" }, h("h1", {}, "Compare runs")), pick, tools, note, charts, configs);
  const put = () => { change({ runs: chosen.map(encodeURIComponent).join(",") }); picker(); load(); };
  const picker = () => fill(pick, h("div", { class: "bar" }, chosen.map((run, at) => h("span", { class: "pill" }, h("i", { style: { width: "9px", height: "9px", borderRadius: "2px", background: colour(at) } }), h("a", { href: href({ run }) }, run), h("button", { class: "plain", style: { height: "18px" }, "aria-label": `Remove ${run}`, onclick: () => { chosen = chosen.filter((one) => one !== run); put(); } }, "×"))),
    chosen.length < MOST && select([["", "add a run…"], ...state.runs.filter((run) => run.has_metrics && !chosen.includes(run.id)).map((run) => [run.id, run.id])], "", (value) => { if (value) { chosen.push(value); put(); } }, "Add a run")));
  fill(tools, h("div", { class: "grow" }, search(pattern, (value) => { pattern = value; change({ q: value }); draw(); }, "Metrics by regular expression (empty: those of the overview)")),
    select([["step", "by step"], ["time", "by time"]], options.x, (value) => { options.x = value; change({ x: value }); cards.forEach((one) => one.reload()); }, "x axis"),
    select([[0, "no smoothing"], [0.6, "smooth 0.6"], [0.9, "smooth 0.9"]], options.smooth, (value) => { options.smooth = Number(value); change({ smooth: value }); cards.forEach((one) => one.reload()); }, "Smoothing"));
  const asks = new Map(), ask = (run) => { if (!asks.has(run)) asks.set(run, fetcher(run, scope)); return asks.get(run); };
  let keys = [];
  const load = async () => {
    if (chosen.length < 1) { fill(charts); fill(configs); return void fill(note, empty("Choose runs", "Up to eight, above. Their curves are drawn over one another, and their configurations compared.")); }
    fill(note);
    try {
      const found = await Promise.all(chosen.map((run) => Promise.all([ofRun(run, "keys", {}, scope), ofRun(run, "panels", {}, scope)])));
      keys = [...new Set(found.flatMap(([one]) => one.keys))].sort();
      panels = [...new Set(found.flatMap(([, one]) => one.sections.flatMap((part) => part.panels.map((panel) => panel.keys[0]))))];
      draw();
      await compare();
    } catch (error) { if (error.name !== "AbortError") fill(note, fault(error.message)); }
  };
  const draw = () => {
    let names = panels;
    if (pattern) { try { const test = new RegExp(pattern, "i"); names = keys.filter((key) => test.test(key)); fill(note); } catch (error) { return void fill(note, fault(`Not a regular expression: ${error.message}`)); } }
    cards = [];
    pages(charts, names, (key) => { const one = card(key, "", async (self) => { const lines = await Promise.all(chosen.map(async (run, at) => ({ name: run, colour: at, ...(await ask(run)(key)) }))); if (!scope.aborted) self.show(lines.filter((line) => line.value.length), options); }, scope); cards.push(one); return one.node; }, scope);
  };
  const compare = async () => {
    const sides = await Promise.all(chosen.map(async (run) => {
      const all = {};
      try {
        const { files } = await ofRun(run, "configs", {}, scope);
        for (const { file } of files.filter((one) => /^resolved\/(sft|trainer|orchestrator|inference|eval)\.json$/.test(one.file))) { try { flat(JSON.parse((await ofRun(run, "config", { file }, scope)).text), file.slice(9, -5), all); } catch { /* broken: left out */ } }
      } catch { /* none */ }
      return all;
    }));
    if (chosen.length < 2) return void fill(configs);
    const differ = [...new Set(sides.flatMap(Object.keys))].filter((key) => new Set(sides.map((side) => side[key])).size > 1 && !/output_dir|run\.name|run\.dir/.test(key)).sort();
    fill(configs, h("div", { class: "section" }, h("h2", {}, "Configurations"), h("span", { class: "muted small" }, `${number(differ.length)} keys differ`)), h("div", { class: "panel scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "Key"), chosen.map((run) => h("th", {}, run)))), h("tbody", {}, differ.slice(0, 400).map((key) => h("tr", {}, h("td", { class: "mono wrap" }, key), sides.map((side) => h("td", { class: "mono wrap" }, side[key] ?? "–"))))))));
  };
  picker();
  await load();
  poll(scope, 5000, async () => { if (chosen.some((id) => state.runs.find((run) => run.id === id)?.state === "running")) cards.forEach((one) => one.reload()); });
}
