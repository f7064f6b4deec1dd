// Configurations of every attempt, as they were given and as they were resolved; and what differs between two.

import { ofRun, poll } from "../api.js";
import { empty, fill, h, select } from "../dom.js";
import { change, href, tell, where } from "../router.js";

export async function show(main, place, scope) {
  const run = place.run;
  let found;
  try { found = await ofRun(run, "configs", { attempt: place.attempt || "latest" }, scope); } catch (error) { if (error.status === 404) return void fill(main, empty("No configurations", "This run has recorded none.")); throw error; }
  const file = place.file && found.files.some((one) => one.file === place.file) ? place.file : (found.files.find((one) => /resolved\/(orchestrator|sft|eval|trainer)\.json$/.test(one.file)) || found.files[0])?.file;
  const body = h("div", { class: "panel" }), against = place.against || "";
  fill(main, h("div", { class: "bar" },
    select(found.attempts.map((one) => [one, `attempt ${one}`]), found.attempt, (value) => { change({ attempt: value }, { replace: false }); }, "Attempt"),
    found.attempts.length > 1 && select([["", "no comparison"], ...found.attempts.filter((one) => one !== found.attempt).map((one) => [one, `compared to attempt ${one}`])], against, (value) => change({ against: value }, { replace: false }), "Compare to")),
  h("div", { class: "split" }, h("aside", { class: "list" }, found.files.map((one) => h("a", { href: href({ ...where(), file: one.file }), class: one.file === file ? "on" : "" }, one.file))), body));
  const mark = JSON.stringify([found.attempt, found.attempts, found.files]);
  poll(scope, 5000, async () => {  // the run was resumed, or a process has written what it resolved
    const now = await ofRun(run, "configs", { attempt: place.attempt || "latest" }, scope);
    if (JSON.stringify([now.attempt, now.attempts, now.files]) !== mark) tell();
  });
  if (!file) return void fill(body, empty("No files in this attempt"));
  const one = await ofRun(run, "config", { attempt: found.attempt, file }, scope);
  if (!against) return void fill(body, h("pre", { class: "file" }, one.text), one.cut && h("p", { class: "hint" }, "The file is longer than is shown."));
  let other;
  try { other = await ofRun(run, "config", { attempt: against, file }, scope); } catch { return void fill(body, empty("Nothing to compare", `Attempt ${against} has no ${file}.`)); }
  fill(body, difference(other.text, one.text, `attempt ${against}`, `attempt ${found.attempt}`));
}

export function flat(value, key = "", found = {}) {
  if (value !== null && typeof value === "object" && Object.keys(value).length) for (const [name, item] of Object.entries(value)) flat(item, key ? `${key}.${name}` : name, found);
  else found[key] = JSON.stringify(value);
  return found;
}

export function difference(a, b, nameA, nameB) {
  let left, right;
  try { left = flat(JSON.parse(a)); right = flat(JSON.parse(b)); } catch {
    const rows = (text) => new Set(text.split("\n"));
    const old = rows(a), now = rows(b);
    return h("pre", { class: "file diff" }, [...a.split("\n").filter((row) => !now.has(row)).map((row) => h("div", { class: "del" }, `− ${row}`)), ...b.split("\n").map((row) => h("div", { class: old.has(row) ? "" : "add" }, `${old.has(row) ? "  " : "+ "}${row}`))]);
  }
  const keys = [...new Set([...Object.keys(left), ...Object.keys(right)])].filter((key) => left[key] !== right[key]).sort();
  if (!keys.length) return empty("The same", `${nameA} and ${nameB} do not differ in this file.`);
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "Key"), h("th", {}, nameA), h("th", {}, nameB))), h("tbody", { class: "diff" }, keys.map((key) => h("tr", {}, h("td", { class: "mono wrap" }, key), h("td", { class: "mono wrap del" }, left[key] ?? "–"), h("td", { class: "mono wrap add" }, right[key] ?? "–"))))));
}
