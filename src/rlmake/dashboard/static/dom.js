// Building the page. Text goes in as text: nothing here, or anywhere else, parses HTML.

export function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  set(node, props);
  add(node, children);
  return node;
}

const SVG = "http://www.w3.org/2000/svg";
export function s(tag, props = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(props)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(key, value);
  }
  add(node, children);
  return node;
}

function set(node, props) {
  for (const [key, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "class") node.className = value;
    else if (key === "data") Object.assign(node.dataset, value);
    else if (key === "style") Object.assign(node.style, value);
    else if (key === "value") node.value = value;
    else if (value === true) node.setAttribute(key, "");
    else node.setAttribute(key, value);
  }
}

function add(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

export function fill(node, ...children) {
  node.replaceChildren();
  add(node, children);
  return node;
}

export function empty(title, text = "") {
  return h("div", { class: "empty" }, h("b", {}, title), text);
}

export function fault(text) {
  return h("p", { class: "fault", role: "alert" }, text);
}

// What an answer of the server says was left out: `torn` lines of `file`, and a `fault` of what holds them.
export function left(answer, file) {
  const torn = answer.torn ? `${number(answer.torn)} ${answer.torn === 1 ? "line" : "lines"} of ${file} could not be read` : "";
  return [torn, answer.fault].filter(Boolean).map((text) => h("p", { class: "hint" }, text));
}

export function select(options, value, onchange, label) {
  const node = h("select", { "aria-label": label, onchange: () => onchange(node.value) },
    options.map(([key, text]) => h("option", { value: key, selected: String(key) === String(value ?? "") }, text)));
  return node;
}

export function search(value, oninput, placeholder, wait = 200) {
  let timer = 0;
  const node = h("input", { type: "search", value: value || "", placeholder, "aria-label": placeholder, data: { filter: "1" }, spellcheck: "false", autocomplete: "off",
    oninput: () => { clearTimeout(timer); timer = setTimeout(() => oninput(node.value), wait); } });
  return node;
}

export function toast(text) {
  const box = document.getElementById("toast"), item = h("div", {}, text);
  box.append(item);
  setTimeout(() => item.remove(), 5000);
}

// ---- numbers and times as people read them
export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return Number(value.toPrecision(digits)).toLocaleString("en-US", { maximumFractionDigits: 6 });
}

export function bytes(size) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let place = 0;
  while (size >= 1000 && place < units.length - 1) { size /= 1000; place += 1; }
  return `${place ? size.toFixed(1) : size} ${units[place]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 99.95) return `${value.toFixed(1)} s`;
  const whole = Math.round(value), minutes = Math.round(value / 60);  // rounded first: 60 s are a minute
  return whole < 6000 ? `${Math.floor(whole / 60)} min ${whole % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function ago(time) {
  const age = Date.now() / 1000 - time;
  if (!time) return "–";
  if (age < 60) return "just now";
  if (age < 3600) return `${Math.floor(age / 60)} min ago`;
  if (age < 86400) return `${Math.floor(age / 3600)} h ago`;
  return `${Math.floor(age / 86400)} d ago`;
}

export function clock(time) {
  return time ? new Date(time * 1000).toLocaleString("sv-SE") : "–";
}

export function pill(text, kind = "") {
  return h("span", { class: `pill ${kind}` }, text);
}

export function when(element, callback) {
  // Calls back once the element comes near the visible part of the page.
  const watcher = new IntersectionObserver((entries) => {
    if (entries.some((entry) => entry.isIntersecting)) { watcher.disconnect(); callback(); }
  }, { rootMargin: "300px" });
  watcher.observe(element);
  return () => watcher.disconnect();
}
