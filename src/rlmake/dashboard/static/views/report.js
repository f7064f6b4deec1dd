// Reports with citations that are checked against the traces when they are shown.

import { ofRun, poll } from "../api.js";
import { ago, empty, fault, fill, h } from "../dom.js";
import { href, tell, where } from "../router.js";

const TAGS = new Set(["p", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "em", "strong", "s", "table", "thead", "tbody", "tr", "th", "td", "hr", "br", "code", "pre", "a"]);

export async function show(main, place, scope) {
  const run = place.run, { reports } = await ofRun(run, "reports", {}, scope);
  poll(scope, 5000, async () => { if (JSON.stringify((await ofRun(run, "reports", {}, scope)).reports) !== JSON.stringify(reports)) tell(); });
  if (!reports.length) return void fill(main, empty("No reports", h("span", {}, "Markdown files in ", h("code", {}, `${run}/reports/`), " appear here. A citation ", h("code", {}, "[^id]"), " is checked against the traces.")));
  const file = place.report || reports[0].file, body = h("article", { class: "panel prose", style: { padding: "20px 24px" } });
  fill(main, h("div", { class: "split" }, h("aside", { class: "list" }, reports.map((one) => h("a", { href: href({ ...where(), report: one.file }), class: one.file === file ? "on" : "" }, one.title, h("div", { class: "faint small" }, `${one.file} · ${ago(one.mtime)}`)))), body));
  let found;
  try { found = await ofRun(run, "report", { file }, scope); } catch (error) { return void fill(body, fault(error.message)); }
  const ids = Object.keys(found.citations), number = new Map(ids.map((id, at) => [id, at + 1])), marks = new Map(), notes = h("div", { class: "notes" });
  const build = (part) => {
    if (typeof part === "string") return part;
    if (part.cite !== undefined) {
      const link = h("a", { class: "cite", href: `#note-${number.get(part.cite)}`, title: "being checked" }, `[${number.get(part.cite) ?? "?"}]`);
      if (!marks.has(part.cite)) marks.set(part.cite, []);
      marks.get(part.cite).push(link);
      return link;
    }
    if (!TAGS.has(part.tag)) return (part.children || []).map(build);
    return h(part.tag, part.tag === "a" ? leads(part.href) : /^h\d$/.test(part.tag) ? { id: anchor(plain(part)) } : {}, (part.children || []).map(build));
  };
  const taken = new Map(), anchor = (text) => {  // the second heading of a name has -1 behind it
    const name = slug(text), before = taken.get(name) || 0;
    taken.set(name, before + 1);
    return before ? `${name}-${before}` : name;
  };
  fill(body, h("h1", {}, found.title), found.body.map(build), ids.length ? [h("h2", {}, "Citations"), notes] : null);
  for (const id of ids) {
    const cite = found.citations[id], state = h("span", { class: "pill" }, "checking"), row = h("div", { id: `note-${number.get(id)}` }, h("div", {}, h("b", {}, `[${number.get(id)}] `), state, " ", cite.note || ""), cite.quote ? h("div", { class: "muted" }, `“${cite.quote}”`) : null);
    notes.append(row);
    ofRun(run, "check", { file, id }, scope).then((answer) => {
      state.className = `pill ${answer.ok ? "good" : "bad"}`;
      state.textContent = answer.ok ? "verified" : "broken";
      if (!answer.ok) row.append(h("div", { class: "small", style: { color: "var(--bad)" } }, answer.fault || "not found"));
      const mark = [{ node: answer.node, quote: cite.quote, prefix: cite.prefix, suffix: cite.suffix, reason: cite.note, field: answer.field }];
      const target = answer.ok ? href({ run: answer.run, tab: "traces", line: answer.line, trace: answer.trace, step: cite.step, kind: cite.kind, subset: cite.subset, highlight: JSON.stringify(mark) }) : null;
      if (target) row.firstChild.append(" ", h("a", { href: target }, "open in the trace"));
      for (const link of marks.get(id) || []) { link.classList.add(answer.ok ? "ok" : "broken"); link.title = answer.ok ? `verified: ${cite.note}` : `broken: ${answer.fault}`; if (target) link.href = target; }
    }).catch((error) => { if (error.name !== "AbortError") { state.textContent = "not checked"; state.title = error.message; } });
  }
}

// Headings are named as they are on GitHub, behind a prefix: no other element of the page can be meant.
const slug = (text) => `to-${text.trim().toLowerCase().replace(/[^\p{L}\p{N}\s_-]/gu, "").replace(/\s/g, "-")}`;
const plain = (part) => (typeof part === "string" ? part : (part.children || []).map(plain).join(""));

function leads(href) {
  if (/^https?:\/\//.test(href)) return { href, rel: "noopener noreferrer", target: "_blank" };
  let name = href.slice(1);
  try { name = decodeURIComponent(name); } catch { /* as it stands */ }
  return href.startsWith("#") ? { href: `#to-${name}` } : {};
}
