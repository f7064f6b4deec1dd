// One episode: transcript, timeline, replay, graph; tokens with overlays.

import { ofRun } from "../api.js";
import { clock, fill, h, number, pill, seconds, select } from "../dom.js";
import { change, go, href, where } from "../router.js";
import { extend, fetchMore, messageCard } from "./transcript.js";
import { OVERLAYS, tokenCards } from "./tokens.js";

const MODES = [["transcript", "Transcript"], ["timeline", "Timeline"], ["replay", "Replay"], ["graph", "Graph"]];

export async function show(main, place, scope) {
  const run = place.run;
  let line = place.line;
  if (line === undefined) line = (await ofRun(run, "episodes/find", { episode: place.episode, step: place.step, kind: place.kind, subset: place.subset }, scope)).line;
  const one = await ofRun(run, `episodes/${line}`, {}, scope);
  let trace = Number(place.trace || 0), branch = place.branch === undefined ? -1 : Number(place.branch), mode = MODES.some(([key]) => key === place.mode) ? place.mode : "transcript", overlay = OVERLAYS[place.overlay] ? place.overlay : "";
  let highlight = [];
  try { highlight = place.highlight ? JSON.parse(place.highlight).filter((one) => typeof one?.quote === "string") : []; } catch { /* a broken link shows no marks */ }
  const keep = Object.fromEntries(Object.entries(where()).filter(([key]) => !["line", "episode", "trace", "branch", "highlight", "mode", "overlay"].includes(key)));
  let lines = [];
  try { lines = JSON.parse(sessionStorage.getItem(`lines ${run}`) || "[]"); } catch { /* none */ }
  const at = lines.indexOf(Number(line));
  const turn = (by) => { const next = at >= 0 ? lines[at + by] : Number(line) + by; if (next !== undefined && next >= 0) go({ ...keep, line: next, mode, overlay }); };
  const body = h("div", {}), tools = h("div", { class: "bar sticky" }), note = h("p", { class: "hint", hidden: true });
  const say = (text) => { note.textContent = text; note.hidden = !text; };

  fill(main,
    h("div", { class: "bar" }, h("a", { href: href(keep), data: { key: "Escape" } }, "← Episodes"), h("b", { class: "mono", style: { overflowWrap: "anywhere", minWidth: "0" } }, one.name || one.id), h("span", { style: { flex: "1" } }),
      h("button", { data: { key: "[" }, title: "Key [", disabled: at === 0, onclick: () => turn(-1) }, "Previous"), h("button", { data: { key: "]" }, title: "Key ]", disabled: at >= 0 && at === lines.length - 1, onclick: () => turn(1) }, "Next")),
    facts(one), errors(one), tools, note, body);

  const draw = async () => {
    const own = one.traces[trace];
    say("");
    fill(tools,
      h("div", { class: "group", role: "group" }, MODES.map(([key, text]) => h("button", { "aria-pressed": String(mode === key), onclick: () => { mode = key; change({ mode: key === "transcript" ? "" : key }); draw(); } }, text))),
      one.traces.length > 1 && select(one.traces.map((t, n) => [n, `${t.agent || "agent"} (${n})`]), trace, (value) => { trace = Number(value); branch = -1; change({ trace, branch: "" }); draw(); }, "Trace"),
      own && own.branches.length > 1 && select([[-1, `all ${own.branches.length} branches`], ...own.branches.map((path, n) => [n, `branch ${n}: ${path.length} messages`])], branch, (value) => { branch = Number(value); change({ branch: branch < 0 ? "" : branch }); draw(); }, "Branch"),
      mode === "transcript" && select([["", "text"], ...Object.entries(OVERLAYS).map(([key, [text]]) => [key, `tokens: ${text}`])], overlay, (value) => { overlay = value; change({ overlay }); draw(); }, "Overlay"),
      mode === "transcript" && overlay && h("span", { class: "muted small" }, OVERLAYS[overlay][3]));
    if (!own) return void fill(body, h("p", { class: "empty" }, "This episode ended without a trace."));
    const nodes = branch >= 0 && own.branches[branch] ? own.branches[branch].map((n) => own.nodes[n]) : own.nodes;
    if (mode === "transcript") {
      const more = fetchMore(run, line, trace, scope);
      for (const { node, field } of overlay ? [] : highlight) await whole(own.nodes[node], field === "reasoning" ? field : "content", more);
      if (overlay) fill(body, tokenCards(run, line, trace, nodes, overlay, scope, say));
      else fill(body, nodes.map((node) => messageCard(node, { highlight, origin: own.nodes[0]?.timestamp, more })));
      const first = body.querySelector("mark");
      if (first) { first.classList.add("active"); first.scrollIntoView({ block: "center" }); } else if (highlight.length && !overlay) say("The quoted text is not in what is shown here.");
    } else {
      const asked = mode, [times, view] = await Promise.all([ofRun(run, `episodes/${line}/timeline`, { trace: String(trace) }, scope), import(`./${mode}.js`)]);
      if (asked !== mode) return;  // another was chosen meanwhile
      const jump = (node) => { mode = "transcript"; overlay = ""; branch = -1; change({ mode: "", overlay: "", branch: "" }); draw(); const card = document.getElementById(`m${node}`); card?.scrollIntoView({ block: "center" }); card?.classList.add("current"); };
      view.draw(body, own, times, { jump, scope });
    }
  };
  await draw();
}

// A text that something is marked in, as far as a page can hold it.
async function whole(node, field, more) {
  const key = field === "reasoning" ? "cut_reasoning" : "cut";
  for (let parts = 0; node?.[key] && parts < 5; parts += 1) await extend(node, field, key, more);
}

function facts(one) {
  const parts = one.traces.flatMap((trace) => Object.entries(trace.rewards)).filter(([, part]) => part);
  const rows = [
    ["Reward", h("span", {}, one.reward === null ? "–" : number(one.reward), parts.length > 1 || (parts[0] && parts[0][1].weight !== 1) ? h("span", { class: "muted small" }, ` = ${parts.map(([name, part]) => `${name} ${number(part.score, 3)}${part.weight !== 1 ? ` × ${number(part.weight, 3)}` : ""}`).join(" + ")}`) : null)],
    ["Advantage", one.advantage === null ? "–" : number(one.advantage)], [one.kind === "eval" ? "Evaluated version" : "Step", one.step ?? "–"], ["Policy", one.version === null ? "frozen model" : `v${one.version}${one.arrived && one.arrived.version !== one.version ? ` to v${one.arrived.version}` : ""}`],
    ["Environment", one.env || "–"], ["Task", one.task || "–"], ["Group", one.group], ["Tokens", `${number(one.input_tokens)} in, ${number(one.output_tokens)} out`], ["Turns, branches", `${number(one.turns)}, ${number(one.branches)}`],
    ["Took", seconds(one.duration)], ["Arrived", clock(one.arrival)], ["Ended", one.ok ? h("span", {}, one.stop_condition || "–", " ", one.truncated ? pill("truncated", "warn") : null, one.superseded ? pill("made again by a later attempt") : one.effective ? pill("trained", "good") : null) : pill(one.error || "failed", "bad")],
  ];
  for (const [name, value] of Object.entries(one.traces[0]?.metrics || {})) rows.push([name, number(value)]);
  return h("section", { class: "panel", style: { padding: "12px", marginBottom: "12px" } }, h("dl", { class: "facts" }, rows.map(([key, value]) => h("div", {}, h("dt", {}, key), h("dd", {}, value)))));
}

function errors(one) {
  const all = [...one.errors, ...one.traces.flatMap((trace) => trace.errors)];
  return all.map((error) => h("details", { class: "fault" }, h("summary", {}, `${error.type}: ${String(error.message || "").slice(0, 400)}`), h("pre", {}, error.traceback || error.message || "")));
}
