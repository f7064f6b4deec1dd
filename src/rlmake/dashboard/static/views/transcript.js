// Messages of a trace as text, with quotes marked.

import { ofRun } from "../api.js";
import { h, number } from "../dom.js";

// Where `quote` stands in `text`, with any white space equal to any other: [[start, stop]].
export function places(text, quote, prefix = "", suffix = "") {
  const map = [];
  let flat = "";
  for (let at = 0; at < text.length; at += 1) {
    const space = /\s/.test(text[at]);
    if (space && flat.endsWith(" ")) continue;
    flat += space ? " " : text[at];
    map.push(at);
  }
  const squeeze = (part) => String(part).replace(/\s+/g, " ");
  const before = squeeze(prefix), core = squeeze(quote).trim(), whole = before + core + squeeze(suffix), found = [];
  if (!core) return found;
  for (let at = flat.indexOf(whole); at >= 0; at = flat.indexOf(whole, at + 1)) {
    const start = at + before.length, stop = start + core.length;
    found.push([map[start], stop < map.length ? map[stop] : text.length]);
  }
  return found;
}

export function marked(text, quotes) {
  const spots = quotes.flatMap((one) => places(text, one.quote, one.prefix, one.suffix).map(([start, stop]) => ({ start, stop, reason: one.reason }))).sort((a, b) => a.start - b.start);
  const parts = [];
  let at = 0;
  for (const { start, stop, reason } of spots) {
    if (start < at) continue;
    parts.push(text.slice(at, start), h("mark", { title: reason || null }, text.slice(start, stop)));
    at = stop;
  }
  parts.push(text.slice(at));
  return parts;
}

export function messageCard(node, { highlight = [], origin = 0, more = null } = {}) {
  const of = (field) => highlight.filter((one) => one.node === node.index && (one.field || "content") === field);
  const when = node.timestamp && origin ? `+${(node.timestamp - origin).toFixed(2)} s` : null;
  const body = h("pre", { class: "text", style: { fontFamily: "inherit" } }, marked(node.content || "", of("content")));
  const thought = h("pre", { class: "text reasoning", style: { fontFamily: "inherit" } }, marked(node.reasoning || "", of("reasoning")));
  const card = h("article", { class: `message ${node.role || ""}`, id: `m${node.index}`, data: { node: String(node.index) } },
    h("header", {}, h("b", {}, node.role || "?"), node.name ? h("span", {}, node.name) : null, h("span", {}, `#${node.index}`), node.sampled ? h("span", { class: "pill accent" }, "sampled") : null,
      node.tokens ? h("span", {}, `${number(node.tokens)} tokens${node.sampled_tokens ? `, ${number(node.sampled_tokens)} sampled` : ""}`) : null, when ? h("span", {}, when) : null),
    node.reasoning ? thought : null,
    node.content || !node.tool_calls.length ? body : null,
    node.tool_calls.map((call) => h("pre", { class: "text call" }, `${call.name || call.function?.name || "call"}(${typeof call.arguments === "string" ? call.arguments : JSON.stringify(call.arguments ?? call.function?.arguments ?? {})})`)));
  if (more) for (const [field, key, place] of [["reasoning", "cut_reasoning", thought], ["content", "cut", body]]) if (node[key]) place.after(rest(node, field, key, place, more));
  return card;
}

// The next part of a text that was cut; whether there is more. The server counts characters, not halves of them.
export async function extend(node, field, key, more) {
  const part = await more(node.index, [...node[field]].length, field);
  node[field] += part.text;
  if (!part.text || part.start + [...part.text].length >= part.total) node[key] = null;
  return part.text;
}

function rest(node, field, key, place, more) {
  const whole = node[key], button = h("button", { onclick: async () => {
    button.disabled = true;
    try {
      place.append(await extend(node, field, key, more));
      if (!node[key]) button.parentNode.remove();
    } finally { button.disabled = false; }
  } }, `Show more of ${number(whole)} characters`);
  return h("div", { style: { padding: "0 12px 8px" } }, button);
}

export const fetchMore = (run, line, trace, scope) => (node, start, field) => ofRun(run, `episodes/${line}/message`, { trace: String(trace), node: String(node), start: String(start), field }, scope);
