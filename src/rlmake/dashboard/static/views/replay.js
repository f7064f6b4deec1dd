// The episode played again by its recorded times. Providers keep no time per token: text is spread evenly over the
// measured span of its call, and that is said.

import { empty, fill, h, seconds } from "../dom.js";

export function draw(body, trace, times, { scope }) {
  const spans = new Map(trace.calls.filter((call) => call.node !== null && call.time && call.time.end >= call.time.start && call.time.start > 0).map((call) => [call.node, call.time]));
  if (times.start === null || !trace.nodes.length) return void fill(body, empty("No times were recorded", "Nothing can be played again by the clock."));
  const start = Math.min(times.start, ...trace.nodes.map((node) => node.timestamp || Infinity)), end = Math.max(times.end, ...trace.nodes.map((node) => node.timestamp || 0)), length = Math.max(end - start, 0.001);
  let now = 0, playing = false, speed = length > 60 ? 10 : 1, before = 0;
  const screen = h("div", { class: "terminal", tabindex: "0", "aria-label": "Replay" }), clock = h("span", { class: "muted num", style: { minWidth: "110px" } });
  const slider = h("input", { type: "range", min: "0", max: "1000", value: "0", "aria-label": "Time", style: { flex: "1 1 160px" }, oninput: () => { now = (length * slider.value) / 1000; paint(); } });
  const button = h("button", { onclick: () => { playing = !playing; if (playing && now >= length) now = 0; before = performance.now(); button.textContent = playing ? "Pause" : "Play"; if (playing) requestAnimationFrame(frame); } }, "Play");
  const paint = () => {
    const t = start + now, parts = [];
    let active = false;
    for (const node of trace.nodes) {
      const call = node.sampled ? spans.get(node.index) : null, text = [node.reasoning, node.content, ...node.tool_calls.map((one) => `→ ${one.name || "call"}(${typeof one.arguments === "string" ? one.arguments : ""})`)].filter(Boolean).join("\n");
      if (call ? t < call.start : t < (node.timestamp || 0) && !firstCall(node, t)) continue;
      const share = call && t < call.end ? (t - call.start) / Math.max(call.end - call.start, 1e-6) : 1;
      if (share < 1) active = true;
      parts.push(h("div", {}, h("span", { class: "role" }, `${node.role} #${node.index} `), h("span", { class: share < 1 ? "now" : "" }, text.slice(0, Math.ceil(text.length * share)).slice(-20000))));
    }
    fill(screen, parts.length ? parts : h("span", { class: "faint" }, "Before the first message."));
    clock.textContent = `${seconds(now)} of ${seconds(length)}${active ? " · generating" : ""}`;
    slider.value = String(Math.round((1000 * now) / length));
  };
  const firstCall = (node, t) => {
    // Messages become nodes when the turn they belong to is committed; they were there when its call began.
    for (const later of trace.nodes.slice(node.index + 1)) if (later.sampled) { const call = spans.get(later.index); return call ? t >= call.start : false; }
    return false;
  };
  const frame = (moment) => {
    if (!playing || scope.aborted || !screen.isConnected) return;
    now = Math.min(length, now + ((moment - before) / 1000) * speed);
    before = moment;
    paint();
    if (playing) screen.scrollTop = screen.scrollHeight;
    if (now >= length) { playing = false; button.textContent = "Play"; } else requestAnimationFrame(frame);
  };
  fill(body, h("div", { class: "bar" }, button, h("select", { "aria-label": "Speed", onchange: (event) => { speed = Number(event.target.value); } }, [0.25, 0.5, 1, 2, 5, 10, 50].map((one) => h("option", { value: one, selected: one === speed }, `${one}×`))), slider, clock), screen,
    h("p", { class: "muted small", style: { marginTop: "8px" } }, h("span", { class: "pill warn" }, "inferred cadence"), " Calls and messages appear at their recorded times. No times per token exist: a reply's text is spread evenly over its call."));
  paint();
}
