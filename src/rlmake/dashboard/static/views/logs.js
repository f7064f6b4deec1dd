// Logs of all processes, merged by their times, followed as they grow.

import { ofRun, poll } from "../api.js";
import { bytes, empty, fill, h, search, select } from "../dom.js";
import { change } from "../router.js";

const TAIL = 150000, MOST = 6000, LEVELS = ["TRACE", "DEBUG", "INFO", "SUCCESS", "WARNING", "ERROR", "CRITICAL"];
const RANK = /^\[([A-Za-z_]+)(\d+)\]:?\s*/;  // torchrun's, before every line of a rank
const LINE = /^(?:\d{4}-\d\d-\d\d[T ])?(\d\d):(\d\d):(\d\d)(?:[.,]\d+)?\s*\|?\s*([A-Z]+)\s*\|?\s*(.*)$/;
const PLAIN = /^\[?(?:\d{4}-\d\d-\d\d[T ])?(\d\d):(\d\d):(\d\d)/;

export async function show(main, place, scope) {
  const run = place.run;
  let attempt = place.attempt || "latest", chosen = place.file ? new Set(place.file.split(",")) : null, level = place.level || "", text = place.q || "", follow = true;
  let files = [], lines = [], ends = new Map(), order = 0, known = "", open = null;
  const tools = h("div", { class: "bar sticky" }), names = h("div", { class: "bar" }), log = h("div", { class: "panel log", tabindex: "0", "aria-label": "Log" }), foot = h("p", { class: "muted small", style: { marginTop: "6px" } });
  fill(main, tools, names, log, foot);
  log.addEventListener("scroll", () => { follow = log.scrollHeight - log.scrollTop - log.clientHeight < 40; });

  const parse = (file, body) => {
    const component = file.component;
    let time = null;
    return body.split("\n").filter((row, at, all) => row !== "" || at < all.length - 1).map((row) => {
      const rank = RANK.exec(row), who = rank ? `${component} ${rank[1]}${rank[2]}` : component;
      if (rank) row = row.slice(rank[0].length);
      const match = LINE.exec(row), plain = match || PLAIN.exec(row);
      if (plain) time = Number(plain[1]) * 3600 + Number(plain[2]) * 60 + Number(plain[3]);
      const known = match && LEVELS.includes(match[4]);
      return { time: time ?? -1, order: order++, who, file: file.file, level: known ? match[4] : "", clock: plain ? `${plain[1]}:${plain[2]}:${plain[3]}` : "", text: known ? match[5] : row };
    });
  };
  const shown = (row) => (!level || LEVELS.indexOf(row.level || "INFO") >= LEVELS.indexOf(level)) && (!text || row.text.toLowerCase().includes(text.toLowerCase()));
  const node = (row) => h("div", { class: row.level, title: row.file }, h("span", {}, row.clock || "        "), h("span", { class: "who", title: row.who }, row.who), h("span", { class: "what" }, row.text));
  const draw = () => {
    const rows = lines.filter(shown);
    fill(log, rows.slice(-MOST).map(node), !rows.length && empty(lines.length ? "No line matches" : "Nothing is logged here yet", lines.length ? "Loosen the filter above." : ""));
    foot.textContent = `${rows.length.toLocaleString("en-US")} lines${rows.length > MOST ? `, the last ${MOST} shown` : ""}; the last ${bytes(TAIL)} of each file and what has come since`;
    if (follow) log.scrollTop = log.scrollHeight;
  };
  const merge = () => {
    // Times have no date: a file's own order stands, and a step back of more than half a day is the next day.
    const day = new Map();
    for (const row of [...lines].sort((a, b) => a.order - b.order)) {
      const last = day.get(row.file) || { time: -1, add: 0 };
      if (row.time >= 0 && last.time >= 0 && row.time < last.time - 43200) last.add += 86400;
      if (row.time >= 0) last.time = row.time;
      day.set(row.file, last);
      row.at = (row.time >= 0 ? row.time : last.time) + last.add;
    }
    lines.sort((a, b) => a.at - b.at || a.order - b.order);
    lines = lines.slice(-20000);
  };
  const wanted = () => files.filter((file) => (chosen ? chosen.has(file.file) : !file.rank && !(file.component.startsWith("env:") && files.length > 1)));
  const load = async () => {
    let fresh = false;
    const mine = ends;  // another one once this is begun anew
    await Promise.all(wanted().map(async (file) => {
      if (file.size === ends.get(file.file)) return;
      const from = ends.get(file.file), part = await ofRun(run, "log", { attempt, file: file.file, ...(from === undefined ? { tail: TAIL } : { start: String(from) }) }, scope);
      if (ends !== mine) return;
      if (part.size < (from || 0)) { ends.delete(file.file); lines = lines.filter((row) => row.file !== file.file); return; }
      ends.set(file.file, part.end);
      if (part.text) { lines.push(...parse(file, part.text)); fresh = true; }
    }));
    if (fresh) { merge(); draw(); }
  };
  const restart = () => { lines = []; ends = new Map(); follow = true; fill(log); return load().then(draw); };
  const bars = (attempts) => {
    fill(tools, h("div", { class: "grow" }, search(text, (value) => { text = value; change({ q: value }); draw(); }, "Filter lines", 120)),
      select([["", "all levels"], ["INFO", "info and above"], ["SUCCESS", "success and above"], ["WARNING", "warnings and errors"], ["ERROR", "errors"]], level, (value) => { level = value; change({ level: value }); draw(); }, "Level"),
      attempts.length > 1 && select([["latest", "latest attempt"], ...attempts.map((one) => [one, `attempt ${one}`])], attempt, (value) => { attempt = value; known = ""; open = null; change({ attempt: value }); files = []; restart(); round(); }, "Attempt"),
      h("button", { onclick: () => { follow = true; log.scrollTop = log.scrollHeight; } }, "To the end"));
    fill(names, files.map((file) => h("button", { "aria-pressed": String(wanted().includes(file)), title: `${file.file}, ${bytes(file.size)}`, onclick: () => { const now = new Set(wanted().map((one) => one.file)); if (now.has(file.file)) now.delete(file.file); else now.add(file.file); chosen = now; change({ file: [...now].join(",") }); bars(attempts); restart(); } }, file.rank ? `${file.component}: ${file.file.split("/").slice(-2).join("/")}` : file.component, " ", h("span", { class: "faint small" }, bytes(file.size)))));
  };
  const round = async () => {
    let found;
    try { found = await ofRun(run, "logfiles", { attempt }, scope); } catch (error) { if (error.status === 404) return void fill(log, empty("No logs", "This run has written none.")); throw error; }
    const mark = JSON.stringify([found.attempts, found.files.map((file) => file.file)]), anew = open !== null && found.attempt !== open;
    files = found.files;
    open = found.attempt;
    if (mark !== known) { known = mark; bars(found.attempts); }
    if (anew) return restart();  // the run was resumed: the latest attempt is another one now
    await load();
  };
  await round();
  if (files.length) draw();
  poll(scope, 2000, round);
}
