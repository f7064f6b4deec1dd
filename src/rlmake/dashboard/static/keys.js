// One place for the keyboard. Views mark what can be reached: [data-filter], tr[data-pick], [data-key="["].

import { go, RUN_TABS, where } from "./router.js";

export function keys({ help, theme }) {
  addEventListener("keydown", (event) => {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) || event.target.isContentEditable;
    if (event.key === "Escape") return leave(event, typing);
    if (typing || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const place = where();
    if (event.key === "/") { event.preventDefault(); (document.querySelector("main [data-filter]") || document.querySelector("[data-filter]"))?.focus(); }
    else if (event.key === "?") help();
    else if (event.key === "t") theme();
    else if (event.key === "e") go({ view: "project" });
    else if (/^[1-6]$/.test(event.key) && place.run) go({ run: place.run, tab: RUN_TABS[event.key - 1] });
    else if (event.key === "j" || event.key === "k") move(event.key === "j" ? 1 : -1);
    else if (event.key === "Enter") { const row = document.querySelector("tr.cursor"); if (row && event.target.tagName !== "BUTTON" && event.target.tagName !== "A") row.click(); }
    else document.querySelector(`main [data-key="${CSS.escape(event.key)}"]`)?.click();
  });
}

function leave(event, typing) {
  if (typing) return event.target.blur();
  if (document.body.classList.contains("side")) return document.body.classList.remove("side");
  document.querySelector('main [data-key="Escape"]')?.click();
}

function move(by) {
  const rows = [...document.querySelectorAll("tr[data-pick]")];
  if (!rows.length) return;
  const at = rows.findIndex((row) => row.classList.contains("cursor"));
  const next = rows[Math.max(0, Math.min(rows.length - 1, at < 0 ? 0 : at + by))];
  rows[at]?.classList.remove("cursor");
  next.classList.add("cursor");
  next.scrollIntoView({ block: "nearest" });
}
