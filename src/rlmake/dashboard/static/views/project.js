// The experiments: every target with its state and why it would be made, where things come from, grids as tables.

import { get, poll } from "../api.js";
import { empty, fault, fill, h, number, pill, s, search } from "../dom.js";
import { change, href } from "../router.js";
import { state as shell } from "../main.js";

const STATES = ["running", "failed", "stale", "missing", "ready"];
const WORDS = { ready: "ready", stale: "to be made anew", missing: "not built", failed: "failed for good", running: "running" };

export async function show(main, place, scope) {
  let only = place.state || "", text = place.q || "", mark = "", last = null;
  const choose = (key) => { only = key; change({ state: key }); if (last) draw(); };
  const buttons = new Map(["", ...STATES].map((key) => [key, h("button", { hidden: true, onclick: () => choose(key) })]));
  const tools = h("div", { class: "bar sticky" }, h("div", { class: "grow" }, search(text, (value) => { text = value; change({ q: value }); if (last) tables(); }, "Filter targets, runs, reasons", 100)), h("div", { class: "group" }, [...buttons.values()])), note = h("div", {}), body = h("div", {});
  fill(main, h("div", { class: "bar" }, h("h1", {}, "Experiments"), h("span", { style: { flex: "1" } }), h("button", { onclick: () => round(true) }, "Plan again")), tools, note, fill(body, empty("Reading the experiments…")));
  const round = async (force = false) => {
    const { projects } = await get("project", { force }, scope);
    const project = projects.find((one) => one.document || one.fault || one.planning);
    if (!project) return void fill(body, empty("No project", "The directories of this dashboard are not the outputs/ of a project with a Snakefile."));
    fill(note, project.planning ? h("p", { class: "hint" }, "The plan is being worked out…") : null, project.fault ? fault(project.fault) : null);
    const now = JSON.stringify([project.document?.at, project.planning]);
    if (now === mark) return;
    mark = now;
    last = project.document;
    if (last) draw(); else if (!project.fault) fill(body, empty("Planning", "Experiments are read and compared with what is built."));
  };
  const draw = () => {
    // The buttons stay the same ones, so that a new plan takes the focus from none of them.
    for (const [key, button] of buttons) {
      const count = last.targets.filter((target) => !key || target.state === key).length;
      button.textContent = `${key ? WORDS[key] : "all"} ${count}`;
      button.hidden = Boolean(key) && !count && only !== key && button !== document.activeElement;
      button.setAttribute("aria-pressed", String(only === key));
    }
    tables();
  };
  const link = (run) => (shell.runs.some((one) => one.id === run) ? h("a", { href: href({ run }) }, run) : run);
  const tables = () => {
    const low = text.toLowerCase(), rows = last.targets.filter((target) => (!only || target.state === only) && (!low || `${target.path} ${target.reason || ""} ${target.changes.map((one) => one.key).join(" ")}`.toLowerCase().includes(low)));
    fill(body,
      h("div", { class: "panel scroll" }, h("table", { class: "stack" }, h("thead", {}, h("tr", {}, ["Target", "Run", "State", "Why"].map((one) => h("th", {}, one)))), h("tbody", {}, rows.map((target) => h("tr", {}, h("td", { class: "mono wrap" }, target.path), h("td", { data: { label: "run" } }, link(target.run)), h("td", {}, pill(WORDS[target.state] || target.state, target.state)), h("td", { class: "wrap" }, why(target)))))), !rows.length && empty("No target matches")),
      grids(last, link), h("div", { class: "section" }, h("h2", {}, "Where things come from")), lineage(last));
  };
  await round();
  poll(scope, 4000, () => round());
}

function why(target) {
  const parts = [];
  if (target.reason) parts.push(h("div", {}, target.reason));
  for (const one of target.changes) parts.push(h("div", { class: "small" }, h("code", {}, one.key), ` ${say(one.before)} → ${say(one.after)}`, one.default ? h("span", { class: "muted" }, " (the default in the code has changed)") : null));
  if (target.reuses.length) parts.push(h("div", { class: "small muted" }, `reuses ${target.reuses.join(", ")}`));
  return parts;
}

const say = (value) => (value === null ? "none" : typeof value === "string" ? value : JSON.stringify(value));

function grids(found, link) {
  const names = [...new Set(found.runs.map((run) => run.grid).filter(Boolean))];
  return names.map((name) => {
    const runs = found.runs.filter((run) => run.grid === name), axes = [...new Set(runs.flatMap((run) => Object.keys(run.cell?.texts || {})))], scores = [...new Set(runs.flatMap((run) => Object.keys(run.scores)))];
    return [h("div", { class: "section" }, h("h2", {}, name), h("span", { class: "muted small" }, `grid of ${runs.length} runs`)), h("div", { class: "panel scroll" }, h("table", { class: "stack" },
      h("thead", {}, h("tr", {}, h("th", {}, "Run"), axes.map((axis) => h("th", {}, axis)), h("th", {}, "State"), h("th", { class: "num" }, "Step"), scores.map((score) => h("th", { class: "num" }, score)))),
      h("tbody", {}, runs.map((run) => { const state = stateOf(found, run); return h("tr", {}, h("td", {}, link(run.name), run.cell?.baseline ? h("span", { class: "pill accent", style: { marginLeft: "6px" } }, "baseline") : null), axes.map((axis) => h("td", { class: "mono", data: { label: axis } }, run.cell?.texts?.[axis] ?? "–")), h("td", {}, pill(WORDS[state] || state, state), run.failed ? h("div", { class: "small" }, run.failed) : null), h("td", { class: "num", data: { label: "step" } }, run.last_step ? `${number(run.reached ?? 0)} / ${number(run.last_step)}` : "–"), scores.map((score) => { const one = run.scores[score]; return h("td", { class: "num", data: { label: score }, title: one?.ci95 ? `95 %: ${number(one.ci95[0])} to ${number(one.ci95[1])}` : null }, one ? number(one.mean) : "–"); })); }))))];
  });
}

function stateOf(found, run) {
  const own = found.targets.filter((target) => target.run === run.name).map((target) => target.state);
  return STATES.find((one) => own.includes(one)) || "missing";
}

function lineage(found) {
  const seen = new Map();
  for (const run of found.runs) if (!seen.has(run.fingerprint)) seen.set(run.fingerprint, run);
  const runs = [...seen.values()].slice(0, 300), level = new Map();
  const parents = (run) => run.parents.map((parent) => seen.get(`${parent.stage}-${parent.fingerprint}`)).filter(Boolean);
  const depth = (run, path = new Set()) => {
    if (level.has(run.name)) return level.get(run.name);
    if (path.has(run.name)) return 0;
    path.add(run.name);
    const own = parents(run).map((one) => depth(one, path)), at = own.length ? Math.max(...own) + 1 : 0;
    level.set(run.name, at);
    return at;
  };
  runs.forEach((run) => depth(run));
  const columns = [];
  for (const run of runs) (columns[level.get(run.name)] ||= []).push(run);
  const W = 240, H = runs.some((run) => run.grid) ? 54 : 40, place = new Map();
  columns.forEach((column, x) => column.forEach((run, y) => place.set(run.name, [12 + x * (W + 56), 12 + y * (H + 14)])));
  const lines = runs.flatMap((run) => parents(run).filter((one) => place.has(one.name)).map((one) => { const [x1, y1] = place.get(one.name), [x2, y2] = place.get(run.name); return s("path", { d: `M${x1 + W} ${y1 + H / 2} C${x1 + W + 28} ${y1 + H / 2} ${x2 - 28} ${y2 + H / 2} ${x2} ${y2 + H / 2}` }); }));
  const boxes = runs.map((run) => { const [x, y] = place.get(run.name), there = shell.runs.some((one) => one.id === run.name), state = stateOf(found, run); const box = [s("title", {}, `${run.name}: ${WORDS[state] || state}\n${run.file}\n${run.fingerprint}`), s("rect", { x, y, width: W, height: H, rx: 6, class: state }), words(run, state).map(([text, kind], at) => s("text", { class: kind, x: x + 10, y: y + 17 + 15 * at }, fit(text, W - 20)))]; return there ? s("a", { href: href({ run: run.name }), class: "pick" }, box) : s("g", {}, box); });
  const width = 24 + columns.length * (W + 56), height = 24 + Math.max(1, ...columns.map((column) => column?.length || 0)) * (H + 14);
  return h("section", { class: "panel graph", tabindex: "0" }, s("svg", { width, height, role: "img", "aria-label": "Lineage of runs" }, lines, boxes));
}

// A cell of a grid has its grid's name above its own.
function words(run, state) {
  const cell = run.grid && run.name.startsWith(`${run.grid}/`) ? [[run.grid, null], [run.name.slice(run.grid.length + 1), null]] : [[run.name, null]];
  return [...cell, [`${run.kind} · ${WORDS[state] || state}`, "sub"]];
}

// The text, or its end behind an ellipsis, no wider than `width` pixels.
function fit(text, width) {
  const pen = document.createElement("canvas").getContext("2d"), style = getComputedStyle(document.documentElement);
  pen.font = `${style.getPropertyValue("--t1").trim()} ${style.getPropertyValue("--sans").trim()}`;
  if (pen.measureText(text).width <= width) return text;
  let from = 1;
  while (from < text.length && pen.measureText(`…${text.slice(from)}`).width > width) from += 1;
  return `…${text.slice(from)}`;
}
