// Wall-clock lanes: one for the stages, one for each branch of messages.

import { empty, fill, h, seconds } from "../dom.js";

export function draw(body, trace, times, { jump }) {
  if (times.start === null) return void fill(body, empty("No times were recorded", "The harness of this episode kept no spans of its model calls."));
  const span = Math.max(times.end - times.start, 1e-6), share = (t) => `${(100 * (t - times.start)) / span}%`;
  const track = (bars, kind) => h("div", { class: "track" }, bars.map((bar) => h("button", { class: kind || bar.kind, title: `${bar.label}: ${seconds(bar.end - bar.start)}, from +${(bar.start - times.start).toFixed(2)} s`, style: { left: share(bar.start), width: `${Math.max(0.15, (100 * (bar.end - bar.start)) / span)}%` }, onclick: () => bar.node !== undefined && jump(bar.node) }, bar.label)));
  fill(body, h("section", { class: "panel" }, h("div", { class: "body" },
    times.stages.length ? h("div", { class: "lane" }, h("span", { class: "muted small" }, "stages"), track(times.stages, "stage")) : null,
    times.lanes.map((lane) => h("div", { class: "lane" }, h("span", { class: "muted small" }, lane.branch === null ? "failed calls" : `branch ${lane.branch}`), track(lane.bars))),
    h("div", { class: "lane" }, h("span", {}), h("div", { class: "axis", style: { padding: "0" } }, h("span", {}, "0 s"), h("span", {}, seconds(span / 2)), h("span", {}, seconds(span)))),
    h("p", { class: "muted small", style: { margin: "8px 0 0" } }, "A lane is a physical branch of messages; what branches share stands in the first. Blue: model calls. Ochre: tools and harness between them. A click opens the message."))));
}
