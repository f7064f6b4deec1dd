// The shell: header, list of runs, tabs, keys; each view is a module with `show(main, place, scope)`.

import { get, poll } from "./api.js";
import { ago, empty, fault, fill, h, number, pill, search } from "./dom.js";
import { go, href, onChange, RUN_TABS, where } from "./router.js";
import { listen } from "./events.js";
import { keys } from "./keys.js";

const VIEWS = { __proto__: null,
  overview: () => import("./views/overview.js"), metrics: () => import("./views/metrics.js"), config: () => import("./views/config.js"),
  traces: () => { if (where().line !== undefined) import("./views/episode.js"); return import("./views/traces.js"); }, logs: () => import("./views/logs.js"), report: () => import("./views/report.js"),
  project: () => import("./views/project.js"), compare: () => import("./views/compare.js"),
};
const NAMES = { overview: "Overview", metrics: "Metrics", config: "Configs", traces: "Traces", logs: "Logs", report: "Reports" };
const top = document.getElementById("top"), side = document.getElementById("side"), main = document.getElementById("main");
export const state = { runs: [], loaded: false, lost: "", filter: "" };
let scope = new AbortController(), drawn = "";
const MISSING = "a run that is not there";

const brand = h("a", { class: "brand", href: "/" }, h("img", { src: "/static/icon.svg", alt: "" }), h("span", {}, "rlmake"));  // one, or its picture is fetched each time
function header(place) {
  const run = state.runs.find((one) => one.id === place.run);
  fill(top,
    h("button", { class: "menu plain", "aria-label": "Runs", onclick: () => document.body.classList.toggle("side") }, "☰"),
    brand,
    h("div", { class: "where" }, place.run
      ? [h("b", { title: place.run }, place.run), " ", run ? pill(run.state, run.state) : state.loaded && pill("not there", "bad"), " ", state.lost && h("span", { class: "pill bad", title: state.lost }, "no answer"), " ",
        run && h("span", { class: "muted small wide" }, [run.type.toUpperCase(), steps(run, " of "), leaf(run.model), ago(run.updated)].filter(Boolean).join(" · "))]
      : place.view === "project" ? h("b", {}, "Experiments") : place.view === "compare" ? h("b", {}, "Compare runs") : null),
    h("button", { class: "plain", title: "Light or dark (t)", "aria-label": "Light or dark", onclick: theme }, "◐"),
    h("button", { class: "plain", title: "Keys (?)", "aria-label": "Keyboard", onclick: () => help() }, "?"));
}

// An evaluation has one step, which says nothing.
const steps = (run, of) => (run.type === "eval" || run.last_step === null ? null
  : `step ${number(run.last_step)}${run.max_steps ? of + number(run.max_steps) : ""}`);
const leaf = (model) => (model ? model.split("/").slice(-2).join("/") : null);

export function theme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try { localStorage.setItem("theme", root.dataset.theme); } catch { /* not kept then */ }
  dispatchEvent(new Event("theme"));
}

const list = h("div", {});
function sideOnce() {
  fill(side, h("div", { class: "side-head" },
    search("", (text) => { state.filter = text.toLowerCase(); listRuns(where()); }, "Filter runs", 50),
    h("div", { class: "side-links" }, h("a", { href: "/?view=project", data: { view: "project" } }, "Experiments"), h("a", { href: "/?view=compare", data: { view: "compare" } }, "Compare"))), list);
}

function listRuns(place) {
  for (const link of side.querySelectorAll(".side-links a")) link.classList.toggle("on", link.dataset.view === place.view);
  const rows = state.runs.filter((run) => `${run.id} ${run.type} ${run.state} ${run.model || ""}`.toLowerCase().includes(state.filter));
  fill(list, rows.map((run) => h("a", { class: `run ${run.id === place.run ? "on" : ""}`, href: href({ run: run.id, tab: place.run ? place.tab : null }) },
    h("span", { class: `dot ${run.state}`, title: run.state }), h("span", { class: "name" }, run.id), h("span", { class: "faint small" }, run.type),
    h("span", { class: "sub" }, h("span", {}, steps(run, " / ") || run.state), h("span", {}, ago(run.updated))))),
  !rows.length && state.loaded && h("p", { class: "empty" }, state.runs.length ? "No run matches." : "No runs here yet."));
}

async function show(place) {
  header(place);
  listRuns(place);
  document.body.classList.remove("side");
  const view = place.run ? (RUN_TABS.includes(place.tab) ? place.tab : "overview") : place.view;
  const mark = `${place.run}|${view}`;
  scope.abort();
  scope = new AbortController();
  const mine = scope;
  document.title = [place.run || place.view, "rlmake"].filter(Boolean).join(" – ");
  if (!VIEWS[view]) return home();
  if (mark !== drawn) main.scrollTop = 0;
  drawn = mark;
  const body = h("div", { class: "view" });
  if (place.run && state.loaded && !state.runs.some((run) => run.id === place.run)) {
    drawn = MISSING;  // until the list has it
    return void fill(main, empty("There is no such run", `${place.run} is not below ${state.dirs.join(", ")}.`));
  }
  const tabs = place.run && h("div", { class: "tabs", role: "tablist" }, RUN_TABS.map((tab, at) => h("a", { role: "tab", href: href({ run: place.run, tab }), class: tab === view ? "on" : "", "aria-selected": String(tab === view), title: `Key ${at + 1}` }, NAMES[tab])));
  fill(main, tabs, body);
  try {
    const module = await VIEWS[view]();
    if (mine.signal.aborted) return;
    await module.show(body, place, mine.signal);
  } catch (error) {
    if (error.name !== "AbortError" && !mine.signal.aborted) fill(body, fault(error.message));
  }
}

function home() {
  if (!state.loaded) return;
  if (!state.runs.length) {
    return void fill(main, empty("No runs yet", h("span", {}, "Nothing below ", h("code", {}, state.dirs.join(", ")), ". Start one with ", h("code", {}, "rl @ experiments/reverse-text/rl.toml"), " or ", h("code", {}, "snakemake -c all all"), "; it appears here by itself.")));
  }
  go({ run: state.runs[0].id }, { replace: true });
}

export function help() {
  const rows = [["/", "filter"], ["1 … 6", "tabs of a run"], ["j  k", "next, previous row"], ["Enter", "open the row"], ["[  ]", "previous, next episode"], ["Esc", "back"], ["e", "experiments"], ["t", "light or dark"], ["?", "this"]];
  const box = h("dialog", { onclick: (event) => event.target === box && box.close(), onclose: () => box.remove() }, h("h2", {}, "Keys"),
    h("table", {}, h("tbody", {}, rows.map(([key, text]) => h("tr", {}, h("td", {}, key.split("  ").map((one) => [h("kbd", {}, one), " "])), h("td", {}, text))))), h("p", {}, h("button", { onclick: () => box.close() }, "Close")));
  document.body.append(box);
  box.showModal();
}

async function refresh() {
  const first = !state.loaded;
  const found = await get("runs");
  Object.assign(state, { runs: found.runs, dirs: found.dirs, loaded: true, lost: "" });
  const place = where();
  header(place);
  listRuns(place);
  const there = state.runs.some((run) => run.id === place.run);
  if (first ? !place.run && !VIEWS[place.view] || place.run && !there : there && drawn === MISSING) show(place);
}

sideOnce();
onChange(show);
addEventListener("theme", () => show(where()));
keys({ help, theme, show });
show(where());
poll({ aborted: false }, 4000, async () => {
  try { await refresh(); } catch (error) {
    if (!state.loaded) fill(main, fault(error.message));
    else { state.lost = error.message; header(where()); }
    throw error;
  }
});
listen();
