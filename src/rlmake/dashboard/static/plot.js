// Lines over a common x axis, as SVG: axes, a pointer that reads values off, dragging zooms, a double click shows all.
// A chart costs a millisecond and needs no library to be read in before the first one is there.

import { number, s } from "./dom.js";

const LEFT = 52, RIGHT = 12, TOP = 8, BOTTOM = 22, FEW = 40;

// lines: [{name, x, y, colour, thin}], `y` null where there is nothing; options: {log, unit}
export function plot(node, lines, { log = false, unit = "" } = {}) {
  const usable = (value) => value !== null && Number.isFinite(value) && (!log || value > 0);
  node.plotted = { lines, log, unit, usable };
  if (!node.zoomable) { node.zoomable = true; resized.observe(node); follow(node); }
  paint(node);
}

export function unplot(node) {
  resized.unobserve(node);
  node.plotted = null;
  read(node, null);
  node.replaceChildren();
}

const resized = new ResizeObserver((entries) => {
  for (const { target } of entries) if (target.plotted && target.plotted.width !== target.clientWidth) paint(target);
});

function paint(node) {
  const { lines, log, unit, usable } = node.plotted, width = node.clientWidth || 320, height = node.clientHeight || 180;
  const [x0, x1] = node.zoomed || range(lines.flatMap((line) => [line.x[0], line.x[line.x.length - 1]]).filter(Number.isFinite));
  let low = Infinity, high = -Infinity;
  for (const line of lines) {
    line.y.forEach((value, at) => {
      if (!usable(value) || line.x[at] < x0 || line.x[at] > x1) return;
      low = Math.min(low, value); high = Math.max(high, value);
    });
  }
  const up = log ? Math.log10 : (value) => value, back = log ? (value) => 10 ** value : (value) => value;
  const flat = !(high > low), pad = flat ? (log ? 0.5 : Math.abs(up(high)) * 0.05 || 0.5) : (up(high) - up(low)) * 0.05;
  let [y0, y1] = Number.isFinite(low) ? [up(low) - pad, up(high) + pad] : [0, 1];
  if (!log && low >= 0 && y0 < 0) y0 = 0;  // what is never negative has no room below zero
  const x = (value) => LEFT + ((value - x0) / (x1 - x0 || 1)) * (width - LEFT - RIGHT), y = (value) => height - BOTTOM - ((up(value) - y0) / (y1 - y0)) * (height - TOP - BOTTOM);
  const whole = lines.every((line) => line.x.every(Number.isInteger));
  const across = ticks(x0, x1, Math.max(2, Math.floor(width / 90)), whole).map((at) => [x(at), at]);
  const upwards = (log && y1 - y0 >= 1.5 ? ticks(y0, y1, 4, true) : ticks(log ? back(y0) : y0, log ? back(y1) : y1, 4).map(up)).filter((at) => Number.isFinite(at)).map((at) => [height - BOTTOM - ((at - y0) / (y1 - y0)) * (height - TOP - BOTTOM), back(at)]);
  node.plotted = { ...node.plotted, width, height, x, y, x0, x1 };
  const clip = `clip${(serial += 1)}`;
  node.replaceChildren(s("svg", { width, height, role: "img", "aria-label": said(lines) },
    s("clipPath", { id: clip }, s("rect", { x: LEFT - 4, y: 0, width: Math.max(0, width - LEFT - RIGHT + 8), height: height - BOTTOM + 3 })),
    s("path", { class: "grid", d: [...across.map(([at]) => `M${at.toFixed(1)} ${TOP}V${height - BOTTOM}`), ...upwards.map(([at]) => `M${LEFT} ${at.toFixed(1)}H${width - RIGHT}`)].join("") }),
    across.map(([at, value]) => s("text", { x: at > width - 30 ? width - 4 : at, y: height - 7, "text-anchor": at > width - 30 ? "end" : "middle" }, number(value) + (unit && value === across[across.length - 1][1] ? ` ${unit}` : ""))),
    upwards.map(([at, value]) => s("text", { x: LEFT - 6, y: at + 4, "text-anchor": "end" }, short(value))),
    s("g", { "clip-path": `url(#${clip})` }, lines.map((line) => trace(line, x, y, usable))), s("g", { class: "cursor" })));
}
let serial = 0;

function trace(line, x, y, usable) {
  let path = "", dots = "", open = false;
  line.y.forEach((value, at) => {
    if (!usable(value)) { open = false; return; }
    const spot = `${x(line.x[at]).toFixed(1)} ${y(value).toFixed(1)}`;
    path += `${open ? "L" : "M"}${spot}`;
    if (!line.thin && line.x.length < FEW) dots += `M${spot}h0`;
    open = true;
  });
  return [s("path", { class: `line c${line.colour % 8}${line.thin ? " thin" : ""}`, d: path }), dots && s("path", { class: `dots c${line.colour % 8}`, d: dots })];
}

const range = (values) => (values.length ? [Math.min(...values), Math.max(...values)] : [0, 1]);
const said = (lines) => lines.filter((line) => !line.thin).map((line) => `${line.name}: ${number(line.y[line.y.length - 1])} at the end`).join("; ");
const short = (value) => (Math.abs(value) >= 1e5 ? value.toExponential(0).replace("e+", "e") : value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(1) : number(value, 4));

// At most about `count` round values from `low` to `high`.
function ticks(low, high, count, whole = false) {
  const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = Math.max(whole ? 1 : 0, [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999) * power), found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9 && found.length < 50; at += 1) found.push(Number((at * step).toPrecision(12)));
  return found;
}

// ---- the pointer
function follow(node) {
  let from = null;
  const place = (event) => event.clientX - node.getBoundingClientRect().left, value = (at) => { const p = node.plotted; return p.x0 + ((at - LEFT) / (p.width - LEFT - RIGHT || 1)) * (p.x1 - p.x0); };
  node.addEventListener("pointermove", (event) => node.plotted && read(node, value(place(event)), from === null ? null : [from, place(event)]));
  node.addEventListener("pointerleave", () => { from = null; read(node, null); });
  node.addEventListener("pointerdown", (event) => { if (event.button === 0 && event.pointerType === "mouse") { from = place(event); event.preventDefault(); } });
  node.addEventListener("pointerup", (event) => {
    if (!node.plotted || from === null) return;
    const to = place(event), [a, b] = [value(Math.min(from, to)), value(Math.max(from, to))];
    if (Math.abs(to - from) > 8) { node.zoomed = [Math.max(a, node.plotted.x0), Math.min(b, node.plotted.x1)]; paint(node); }
    from = null;
  });
  node.addEventListener("dblclick", () => { if (node.plotted) { node.zoomed = null; paint(node); } });
}

let box = null;
function read(node, at, drag = null) {
  const group = node.querySelector(".cursor"), p = node.plotted;
  group?.replaceChildren();
  if (at === null || !p || !group) { if (box?.of === node || !p) { box?.remove(); box = null; } return; }
  const rows = [];
  let spot = null;
  for (const line of p.lines) {
    if (line.thin || !line.x.length) continue;
    const n = nearest(line.x, at);
    if (!p.usable(line.y[n])) continue;
    if (spot === null || Math.abs(line.x[n] - at) < Math.abs(spot - at)) spot = line.x[n];
    rows.push([line, n]);
  }
  if (spot === null) return;
  group.append(s("path", { class: "grid", d: `M${p.x(spot).toFixed(1)} ${TOP}V${p.height - BOTTOM}` }));
  const shown = rows.filter(([line, n]) => line.x[n] === spot);
  for (const [line, n] of shown) group.append(s("circle", { class: `c${line.colour % 8}`, cx: p.x(line.x[n]), cy: p.y(line.y[n]), r: 3 }));
  if (drag && Math.abs(drag[1] - drag[0]) > 8) group.append(s("rect", { class: "drag", x: Math.min(...drag), y: TOP, width: Math.abs(drag[1] - drag[0]), height: p.height - TOP - BOTTOM }));
  if (!box) { box = document.body.appendChild(document.createElement("div")); box.className = "tip"; }
  box.of = node;
  box.textContent = [`${p.unit || "step"} ${number(spot)}`, ...shown.map(([line, n]) => (shown.length > 1 ? `${line.name}: ` : "") + number(line.y[n], 5))].join("\n");
  const frame = node.getBoundingClientRect(), left = frame.left + p.x(spot) + 12;
  box.style.left = `${Math.max(4, left + box.offsetWidth > innerWidth - 8 ? left - box.offsetWidth - 24 : left)}px`;
  box.style.top = `${Math.max(4, frame.top + 4)}px`;
}

function nearest(values, at) {
  let low = 0, high = values.length - 1;
  while (low < high) { const mid = (low + high) >> 1; if (values[mid] < at) low = mid + 1; else high = mid; }
  return low > 0 && at - values[low - 1] < values[low] - at ? low - 1 : low;
}
