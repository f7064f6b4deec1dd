// Line charts, drawn with plotly when they come into sight.

import { h, number, when } from "./dom.js";

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const colour = (at) => css(`--c${at % 8}`);

// lines: [{name, step, time, value}]; options: {x: "step" | "time", log, smooth}
export function draw(node, lines, options = {}) {
  if (typeof Plotly === "undefined") { addEventListener("load", () => draw(node, lines, options), { once: true }); return; }
  const grid = css("--line"), ink = css("--ink2");
  const traces = [];
  lines.forEach((line, at) => {
    const start = line.time[0] || 0, x = options.x === "time" ? line.time.map((t) => (t - start) / 60) : line.step;
    const few = x.length < 40, smooth = options.smooth || 0;
    const base = { x, type: "scatter", mode: few && !smooth ? "lines+markers" : "lines", marker: { size: 3 }, name: line.name, hovertemplate: "%{y:.5g}<extra>%{fullData.name}</extra>" };
    if (smooth) {
      traces.push({ ...base, y: line.value, opacity: .25, line: { color: colour(line.colour ?? at), width: 1 }, hoverinfo: "skip", hovertemplate: null });
      traces.push({ ...base, y: ema(line.value, smooth), line: { color: colour(line.colour ?? at), width: 1.8 } });
    } else traces.push({ ...base, y: line.value, line: { color: colour(line.colour ?? at), width: 1.6 } });
  });
  const axis = { gridcolor: grid, zerolinecolor: grid, linecolor: grid, tickfont: { size: 11, color: ink }, automargin: true, nticks: 6 };
  const layout = {
    margin: { l: 44, r: 12, t: 8, b: 26 }, showlegend: false, paper_bgcolor: "transparent", plot_bgcolor: "transparent", hovermode: "x unified",
    font: { family: css("--sans"), size: 11, color: css("--ink") }, xaxis: { ...axis, title: options.x === "time" ? { text: "minutes", font: { size: 11 } } : undefined },
    yaxis: { ...axis, type: options.log ? "log" : "linear" }, hoverlabel: { bgcolor: css("--panel"), bordercolor: css("--line2"), font: { size: 11 } }, dragmode: "zoom",
  };
  Plotly.react(node, traces, layout, { displayModeBar: false, responsive: true, doubleClick: "reset" });
}

export function purge(node) {
  if (typeof Plotly !== "undefined" && node.data) Plotly.purge(node);
}

// One value is a number, not a curve.
function single(node, lines) {
  purge(node);
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
  const plot = h("div", { class: "plot" }), last = h("span", { class: "last" }), legend = h("div", { class: "legend" });
  const node = h("section", { class: "panel chart", "aria-label": title },
    h("header", {}, h("h3", { title: text || title }, title), last), plot, legend);
  let seen = false;
  const self = {
    node, plot,
    show(lines, options) {
      node.dataset.drawn = "1";
      if (!lines.some((line) => line.value.length)) { last.textContent = "no values yet"; return; }
      if (lines.every((line) => line.value.length <= 1)) { single(plot, lines); last.textContent = ""; legend.replaceChildren(); return; }
      if (!plot.data) plot.replaceChildren();
      draw(plot, lines, options);
      const ends = lines.filter((line) => line.value.length).map((line) => line.value[line.value.length - 1]);
      last.textContent = ends.length === 1 ? number(ends[0]) : "";
      legend.replaceChildren(...(lines.length > 1 ? lines.map((line, at) => h("span", {}, h("i", { style: { background: colour(line.colour ?? at) } }), line.name, " ", number(line.value[line.value.length - 1]))) : []));
    },
    reload() { if (seen) load(self); },
  };
  const stop = when(node, () => { seen = true; load(self); });
  scope.addEventListener("abort", () => { stop(); purge(plot); });
  return self;
}
