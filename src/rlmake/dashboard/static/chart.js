// Cards of line charts, drawn when they come into sight.

import { h, number, when } from "./dom.js";
import { plot, unplot } from "./plot.js";

export const colour = (at) => `var(--c${at % 8})`;

// lines: [{name, step, time, value, colour}]; options: {x: "step" | "time", log, smooth}
function draw(node, lines, { x = "step", log = false, smooth = 0 }) {
  const drawn = lines.flatMap((line, at) => {
    const start = line.time[0] || 0, own = { name: line.name, colour: line.colour ?? at, x: x === "time" ? line.time.map((t) => (t - start) / 60) : line.step };
    return smooth ? [{ ...own, y: line.value, thin: true }, { ...own, y: ema(line.value, smooth) }] : [{ ...own, y: line.value }];
  });
  plot(node, drawn, { log, unit: x === "time" ? "min" : "" });
}

// One value is a number, not a curve.
function single(node, lines) {
  unplot(node);
  node.replaceChildren(h("div", { class: "single" }, lines.map((line, at) => line.value.length > 0 && h("div", {},
    h("i", { style: { background: colour(line.colour ?? at) } }), h("b", {}, number(line.value[0])), ` at step ${number(line.step[0])}`, lines.length > 1 && ` · ${line.name}`))));
}

function ema(values, weight) {
  let last = null, debt = 0;
  return values.map((value) => {
    if (value === null) return null;
    last = (last ?? 0) * weight + value * (1 - weight);
    debt = debt * weight + (1 - weight);
    return last / debt;
  });
}

// A card with a chart. `load(card)` is called when it comes into sight and again by `card.reload()`.
export function card(title, text, load, scope) {
  const place = h("div", { class: "plot" }), last = h("span", { class: "last" }), legend = h("div", { class: "legend" });
  const node = h("section", { class: "panel chart", "aria-label": title },
    h("header", {}, h("h3", { title: text || title }, title), last), place, legend);
  let seen = false;
  const self = {
    node,
    show(lines, options) {
      node.dataset.drawn = "1";
      if (!lines.some((line) => line.value.length)) { last.textContent = "no values yet"; return; }
      if (lines.every((line) => line.value.length <= 1)) { single(place, lines); last.textContent = ""; legend.replaceChildren(); return; }
      draw(place, lines, options || {});
      const ends = lines.filter((line) => line.value.length).map((line) => line.value[line.value.length - 1]);
      last.textContent = ends.length === 1 ? number(ends[0]) : "";
      legend.replaceChildren(...(lines.length > 1 ? lines.map((line, at) => h("span", {}, h("i", { style: { background: colour(line.colour ?? at) } }), line.name, " ", number(line.value[line.value.length - 1]))) : []));
    },
    reload() { if (seen) load(self); },
  };
  const stop = when(node, () => { seen = true; load(self); });
  scope.addEventListener("abort", () => { stop(); unplot(place); });
  return self;
}

const PAGE = 48;

// Cards of many names, `make(name)` each: the next ones are made when the last of these comes near.
export function pages(grid, names, make, scope) {
  grid.replaceChildren();
  const more = (start) => {
    const made = names.slice(start, start + PAGE).map(make), last = made[made.length - 1];
    grid.append(...made);
    if (start + PAGE < names.length) scope.addEventListener("abort", when(last, () => last.isConnected && more(start + PAGE)));
  };
  more(0);
}
