import { poll } from "../api.js";
import { card, pages } from "../chart.js";
import { empty, fault, fill, h, left, number, search, select } from "../dom.js";
import { change } from "../router.js";
import { fetcher, watch } from "../series.js";

export async function show(main, place, scope) {
  const run = place.run, ask = fetcher(run, scope), grid = h("div", { class: "charts" }), count = h("span", { class: "muted" }), note = h("div", {}), lost = h("div", {}), wrong = h("div", { class: "full" });
  let torn = 0;
  const options = { x: place.x || "step", log: place.log === "1", smooth: Number(place.smooth || 0) };
  let keys = [], cards = [], pattern = place.q || "";
  const redraw = () => cards.forEach((one) => one.reload());
  const input = search(pattern, (text) => { pattern = text; change({ q: text }); list(); }, "Filter by regular expression, e.g. ^reward|kl");
  fill(main, h("div", { class: "bar sticky" }, h("div", { class: "grow" }, input), count,
    select([["step", "by step"], ["time", "by time"]], options.x, (value) => { options.x = value; change({ x: value }); redraw(); }, "x axis"),
    select([[0, "no smoothing"], [0.6, "smooth 0.6"], [0.9, "smooth 0.9"], [0.98, "smooth 0.98"]], options.smooth, (value) => { options.smooth = Number(value); change({ smooth: value }); redraw(); }, "Smoothing"),
    h("label", {}, h("input", { type: "checkbox", checked: options.log, onchange: (event) => { options.log = event.target.checked; change({ log: options.log }); redraw(); } }), "log y"), wrong), lost, note, grid);
  const draw = (key) => {
    const one = card(key, "", async (self) => { const line = await ask(key); if (!scope.aborted) self.show([{ name: key, ...line }], options); }, scope);
    one.node.querySelector("header").addEventListener("dblclick", () => { one.node.classList.toggle("big"); one.reload(); });
    cards.push(one);
    return one.node;
  };
  const list = () => {
    let test;
    try { test = new RegExp(pattern, "i"); input.classList.remove("bad"); fill(wrong); fill(note); } catch (error) { input.classList.add("bad"); count.textContent = "not filtered"; fill(wrong, fault(`Not a regular expression: ${error.message}`)); return; }
    const chosen = keys.filter((key) => test.test(key));
    count.textContent = `${number(chosen.length)} of ${number(keys.length)}`;
    cards = [];
    pages(grid, chosen, draw, scope);
    if (!chosen.length) fill(note, keys.length ? empty("No metric matches", `Nothing among ${number(keys.length)} names matches ${pattern}.`) : torn ? empty("No metrics", "No line of the file could be read.") : empty("No metrics yet", "They appear with the first step."));
  };
  const look = watch(run, scope, poll, redraw);
  const take = async () => {
    const answer = await look();
    fill(lost, left(answer, "metrics.jsonl"));
    if (answer.keys) { keys = answer.keys; list(); }
    if (answer.torn !== torn && !keys.length) { torn = answer.torn; list(); }
  };
  await take();
  if (!keys.length) list();
  poll(scope, 3000, take);
}
