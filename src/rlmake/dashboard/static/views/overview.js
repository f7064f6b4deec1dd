import { ofRun, poll } from "../api.js";
import { card } from "../chart.js";
import { clock, empty, fill, h, left, number, pill, seconds } from "../dom.js";
import { fetcher } from "../series.js";
import { state } from "../main.js";
import { href } from "../router.js";

const NAMES = { train: "Training", eval: "Evaluation", stability: "Stability", inference: "Inference", performance: "Performance" };

export async function show(main, place, scope) {
  const run = place.run, ask = fetcher(run, scope), facts = h("div", {}), lost = h("div", {}), body = h("div", {});
  fill(main, facts, lost, body);
  let cards = [], names = "", size = -1;
  const round = async () => {
    const meta = state.runs.find((one) => one.id === run);
    if (meta) fill(facts, head(meta));
    const answer = await ofRun(run, "panels", {}, scope);
    fill(lost, left(answer, "metrics.jsonl"));
    const found = JSON.stringify(answer.sections.map((part) => part.panels.map((panel) => panel.keys)));
    if (found !== names) {
      names = found;
      cards = [];
      fill(body, answer.sections.length ? answer.sections.map((part) => section(part)) : empty("No metrics yet", "They appear with the first step. A run without the file monitor (--no-monitors.file) has none."));
    } else if (answer.size !== size || !answer.whole) cards.forEach((one) => one.reload());
    size = answer.whole ? answer.size : -1;
  };
  const section = (part) => [h("div", { class: "section" }, h("h2", {}, NAMES[part.section] || part.section)),
    h("div", { class: "charts" }, part.panels.map((panel) => {
      const one = card(title(panel), panel.text, async (self) => {
        const lines = await Promise.all(panel.keys.map(async (key) => ({ name: key, ...(await ask(key)) })));
        if (!scope.aborted) self.show(lines, {});
      }, scope);
      cards.push(one);
      return one.node;
    }))];
  await round();
  poll(scope, 3000, round);
}

// The name of a panel: its pattern with what all its keys have in common in the places of the placeholders.
function title({ title: pattern, keys }) {
  const parts = keys.map((key) => key.split("/"));
  return pattern.split("/").map((part, at) => {
    if (/^\{(scope|agg)\}$/.test(part)) return null;
    if (!part.includes("{")) return part;
    const found = new Set(parts.map((one) => one[at]));
    return found.size === 1 ? parts[0][at] : "…";
  }).filter((part) => part !== null).join("/");
}

function head(meta) {
  const end = (path) => h("span", { title: path }, path ? path.split("/").slice(-3).join("/") : "–");
  const envs = [...new Set([...meta.train_envs, ...meta.eval_envs])].join(", ");
  const rows = [
    ["State", pill(meta.state, meta.state)],
    ["Step", meta.last_step === null ? "–" : `${number(meta.last_step)}${meta.max_steps ? ` of ${number(meta.max_steps)}` : ""}`],
    ["Model", end(meta.model)], envs || !meta.dataset ? ["Environments", envs || "–"] : ["Data", end(meta.dataset)],
    ["Started", clock(meta.created)], ["Last sign", clock(meta.updated)], ["From first to last", seconds(meta.updated - meta.created)], ["Attempt", meta.attempt ?? "–"],
  ];
  if (meta.left !== null && meta.state === "running") rows.push(["Left, about", seconds(meta.left)]);
  if (meta.has_traces) rows.push(["Episodes", h("a", { href: href({ run: meta.id, tab: "traces" }) }, "open the traces")]);
  return h("section", { class: "panel", style: { padding: "12px", marginBottom: "16px" } }, h("dl", { class: "facts" }, rows.map(([key, value]) => h("div", {}, h("dt", {}, key), h("dd", {}, value)))));
}
