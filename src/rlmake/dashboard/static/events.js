// Commands from POST /api/view: every open page goes where they say.

import { toast } from "./dom.js";
import { go } from "./router.js";

const KEYS = ["run", "tab", "step", "kind", "subset", "episode", "line", "trace", "branch", "report"];

const BACKGROUND_MS = 60000;
let source = null, timer = 0;

// A browser keeps six connections to one server, so a tab that has long been in the background lets go of its own.
export function listen() {
  connect();
  document.addEventListener("visibilitychange", () => {
    clearTimeout(timer);
    if (document.hidden) timer = setTimeout(close, BACKGROUND_MS);
    else connect();
  });
  addEventListener("pagehide", close);
  addEventListener("pageshow", connect);
}

function close() {
  source?.close();
  source = null;
}

function connect() {
  if (source) return;
  source = new EventSource("/api/view/events");
  source.addEventListener("view", (event) => {
    let command;
    try { command = JSON.parse(event.data); } catch { return; }
    const pairs = Object.fromEntries(KEYS.filter((key) => command[key] !== undefined).map((key) => [key, String(command[key])]));
    if (!pairs.tab) pairs.tab = pairs.report ? "report" : pairs.line ? "traces" : "overview";
    if (command.highlight) pairs.highlight = JSON.stringify(command.highlight);
    go(pairs);
    toast(command.replayed ? "Shown: what was asked for before this page was open." : "Shown: what an agent or script asked for.");
  });
}
