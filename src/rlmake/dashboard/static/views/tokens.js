// Tokens of messages with a colour for each: fetched and drawn a message at a time, as it comes into sight.

import { ofRun } from "../api.js";
import { h, number, when } from "../dom.js";

const signed = (value, most) => (value === null || value === undefined ? null : value >= 0 ? tint("35 132 90", value / most) : tint("200 50 40", -value / most));
const tint = (rgb, share) => `rgb(${rgb} / ${Math.max(0, Math.min(1, share)) * 0.7})`;
const flag = (rgb) => (value) => (value ? tint(rgb, 0.6) : null);

// name: [title, stream, colour(value, largest), explanation]
export const OVERLAYS = { __proto__: null,
  advantage: ["Advantage", "advantages", signed, "Credit of each sampled token: green above, red below the baseline."],
  entropy: ["Entropy", "entropies", (v, most) => (v === null || v === undefined ? null : tint("43 89 195", v / most)), "The trainer's entropy where the token was drawn."],
  mismatch: ["Mismatch", "mismatch", signed, "Trainer's minus sampler's log-probability."],
  ipo: ["IPO mask", "is_masked", flag("200 50 40"), "Tokens that the trust region took out of the loss."],
  loss: ["Loss mask", "trained", flag("35 132 90"), "Tokens that count in the loss. Of an episode that was not trained on: those that were sampled."],
  content: ["Content mask", "content", flag("139 79 184"), "Body of the message; what is not coloured is template."],
  logprob: ["Log-probability", "logprobs", (v, most) => (v === null || v === undefined ? null : tint("208 99 43", -v / most)), "The sampler's: the darker, the less likely."],
};

const WHY = { missing_token_ids: "This episode holds no token ids (it was sampled through chat completions).", missing_model: "The run's configuration names no model, so token ids stay numbers.", tokenizer_unavailable: "The model's tokenizer.json is not on this machine, so token ids stay numbers.", decode_error: "The tokenizer could not read these ids, so they stay numbers." };

export function tokenCards(run, line, trace, nodes, overlay, scope, say) {
  const [title, stream, paint] = OVERLAYS[overlay];
  let waiting = [], timer = 0, most = 1e-6;
  const flush = async () => {
    const part = waiting;
    waiting = []; timer = 0;
    const answer = await ofRun(run, `episodes/${line}/tokens`, { trace: String(trace), node: part.map((one) => String(one.node.index)) }, scope);
    if (answer.status !== "ok") say(WHY[answer.status] || answer.status);
    for (const found of answer.nodes) for (const value of pick(found) || []) if (typeof value === "number") most = Math.max(most, Math.abs(value));
    answer.nodes.forEach((found, at) => fillTokens(part[at].body, found));
  };
  const pick = (found) => found[stream] || (overlay === "loss" ? found.mask : null);
  const fillTokens = (body, found) => {
    const values = pick(found);
    body.replaceChildren();
    if (!found.ids.length) { body.append(h("span", { class: "faint" }, "no tokens")); return; }
    const box = document.createDocumentFragment();
    found.ids.forEach((id, at) => {
      const value = values ? values[at] : null, text = found.texts ? found.texts[at] : `${id} `;
      if (found.texts && text === "") return;
      const colour = paint(value, most), span = h("span", { class: found.mask[at] ? "" : "out", data: { at: String(at) } }, text);
      if (colour) span.style.background = colour;
      box.append(span);
    });
    body.append(box);
    body.addEventListener("mouseover", (event) => tip(event, found));
    body.addEventListener("mouseleave", () => tip(null));
  };
  return nodes.map((node) => {
    const body = h("div", { class: "tokens", style: { minHeight: `${Math.min(600, 22 + (node.tokens / 14) * 18)}px` } }, h("span", { class: "faint" }, "…"));
    const card = h("article", { class: `message ${node.role || ""}`, id: `m${node.index}`, data: { node: String(node.index) } },
      h("header", {}, h("b", {}, node.role || "?"), h("span", {}, `#${node.index}`), h("span", {}, `${number(node.tokens)} tokens`)), body);
    const stop = when(card, () => { waiting.push({ node, body }); if (!timer) timer = setTimeout(() => flush().catch((error) => { if (error.name !== "AbortError") say(error.message); }), 10); });
    scope.addEventListener("abort", stop);
    return card;
  });
}

let box = null;
function tip(event, found) {
  const at = event?.target.dataset?.at;
  if (at === undefined) { box?.remove(); box = null; return; }
  const rows = [["id", found.ids[at]], ["log-probability", found.logprobs[at]], ["trainer's", found.trainer_logprobs?.[at]], ["mismatch", found.mismatch?.[at]], ["advantage", found.advantages?.[at]], ["entropy", found.entropies?.[at]], ["trust region", found.is_masked?.[at] === 1 ? "masked" : null], ["in the loss", found.trained?.[at] ? "yes" : null]];
  const text = rows.filter(([, value]) => value !== null && value !== undefined).map(([key, value]) => `${key}: ${number(value)}`).join("\n");
  box = box || document.body.appendChild(h("div", { class: "tip" }));
  box.textContent = text;
  const spot = event.target.getBoundingClientRect();
  box.style.left = `${Math.min(spot.left, innerWidth - box.offsetWidth - 8)}px`;
  box.style.top = `${spot.bottom + 6 + box.offsetHeight > innerHeight ? spot.top - box.offsetHeight - 6 : spot.bottom + 6}px`;
}
