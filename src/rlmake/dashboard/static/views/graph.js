// Model calls from top to bottom, with the relationships that the harness declared.

import { empty, fill, h, number, s } from "../dom.js";

const W = 168, H = 46, GX = 40, GY = 34;

export function draw(body, trace, times, { jump }) {
  const { turns, edges, contexts } = times.semantic;
  if (!turns.length) return void fill(body, empty("No model call", "The graph shows what called what; here nothing did."));
  const rank = new Map(turns.map((turn, at) => [turn.node, at])), shown = turns.slice(0, 400);
  const x = (turn) => 12 + turn.context * (W + GX), y = (turn) => 58 + rank.get(turn.node) * (H + GY);
  const byNode = new Map(shown.map((turn) => [turn.node, turn]));
  const width = 24 + (Math.max(...shown.map((turn) => turn.context)) + 1) * (W + GX), height = 70 + shown.length * (H + GY);
  const lines = edges.filter((edge) => byNode.has(edge.from) && byNode.has(edge.to)).map((edge) => {
    const a = byNode.get(edge.from), b = byNode.get(edge.to), up = rank.get(b.node) <= rank.get(a.node);
    const [x1, y1, x2, y2] = [x(a) + W / 2, y(a) + H, x(b) + W / 2, y(b)], odd = edge.type !== "continuation";
    const path = up ? `M${x(a) + W} ${y(a) + H / 2} C${x(a) + W + 60} ${y(a)} ${x(b) + W + 60} ${y(b) + H} ${x(b) + W} ${y(b) + H / 2}` : odd ? `M${x1 + 30} ${y1} C${x1 + 60} ${y1 + GY} ${x2 + 60} ${y2 - GY} ${x2 + 30} ${y2}` : `M${x1} ${y1} C${x1} ${y1 + GY} ${x2} ${y2 - GY} ${x2} ${y2}`;
    return [s("path", { d: path, class: odd ? "odd" : "", "marker-end": "url(#arrow)" }), odd ? s("text", { class: "sub", x: (x1 + x2) / 2 + 40, y: (y1 + y2) / 2 }, edge.type) : null];
  });
  const boxes = shown.map((turn) => s("g", { class: "pick", tabindex: "0", role: "button", onclick: () => jump(turn.node), onkeydown: (event) => event.key === "Enter" && jump(turn.node) },
    s("title", {}, `message #${turn.node}`), s("rect", { x: x(turn), y: y(turn), width: W, height: H, rx: 6 }), s("text", { x: x(turn) + 10, y: y(turn) + 18 }, `#${turn.node}${turn.tools.length ? `  → ${turn.tools.join(", ").slice(0, 18)}` : ""}`),
    s("text", { class: "sub", x: x(turn) + 10, y: y(turn) + 35 }, `${number(turn.prompt)} → ${number(turn.completion)} tokens`)));
  const heads = contexts.map((one) => s("g", {}, s("title", {}, `${number(one.cumulative)} tokens processed in all, ${one.turns} turns`), s("text", { x: 12 + one.context * (W + GX), y: 22 }, `context ${one.context}`), s("text", { class: "sub", x: 12 + one.context * (W + GX), y: 40 }, `prompt ${number(one.latest)}, peak ${number(one.peak)}`)));
  fill(body, h("section", { class: "panel graph", tabindex: "0" }, s("svg", { width, height, role: "img", "aria-label": "Graph of model calls" }, s("defs", {}, s("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse" }, s("path", { d: "M0 0 8 4 0 8z", style: "fill: var(--line2); stroke: none" }))), lines, boxes, heads)),
    turns.length > shown.length && h("p", { class: "hint" }, `The first ${shown.length} of ${turns.length} calls.`), h("p", { class: "muted small", style: { marginTop: "8px" } }, "Top to bottom in time. A column is a context: a chain of calls, each going on from the one before. Dashed: relationships that the harness declared."));
}
