// A trace in flight, growing as it is watched.

import { ofRun, poll } from "../api.js";
import { empty, fill, h } from "../dom.js";
import { href } from "../router.js";
import { messageCard } from "./transcript.js";

export async function show(main, place, scope) {
  const body = h("div", {}), back = h("a", { href: href({ run: place.run, tab: "traces" }), data: { key: "Escape" } }, "← Episodes");
  fill(main, h("div", { class: "bar" }, back, h("b", { class: "mono" }, place.live), h("span", { class: "dot running" })), body);
  let etag = "";
  const round = async () => {
    let found;
    try { found = await ofRun(place.run, `live/${place.live}`, {}, scope); } catch (error) {
      if (error.status !== 404) throw error;
      fill(body, empty("It has ended", h("a", { href: href({ run: place.run, tab: "traces", q: "" }) }, "It is among the finished episodes now.")));
      return;
    }
    if (found.etag === etag) return;
    etag = found.etag;
    const rows = found.nodes.map((node, at) => card(node, at));
    fill(body, rows, found.pending.length ? [h("p", { class: "muted" }, "On its way to the model:"), found.pending.map((message, at) => card({ message }, found.nodes.length + at))] : null, !rows.length && empty("Waiting for the first turn"));
  };
  await round();
  poll(scope, 1000, round);
}

const text = (content) => (typeof content === "string" ? content : Array.isArray(content) ? content.map((part) => part.text || `[${part.type}]`).join("\n") : "");
const card = (node, index) => messageCard({ index, role: node.message?.role, content: text(node.message?.content), reasoning: text(node.message?.reasoning_content), tool_calls: node.message?.tool_calls || [], sampled: node.sampled, timestamp: node.timestamp, tokens: 0 });
