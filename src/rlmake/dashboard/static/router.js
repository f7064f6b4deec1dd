// The address says everything: /?run=…&tab=…&… ; going back goes back.

const listeners = new Set();
export const RUN_TABS = ["overview", "metrics", "config", "traces", "logs", "report"];

export function where() {
  return Object.fromEntries(new URLSearchParams(location.search));
}

export function href(pairs) {
  const found = new URLSearchParams();
  for (const [key, value] of Object.entries(pairs)) {
    if (value !== null && value !== undefined && value !== "" && value !== false) found.set(key, value === true ? "1" : value);
  }
  const text = found.toString();
  return text ? `/?${text}` : "/";
}

export function go(pairs, { replace = false, quiet = false } = {}) {
  const target = href(pairs);
  if (target !== location.pathname + location.search) history[replace ? "replaceState" : "pushState"](null, "", target);
  if (!quiet) tell();
}

// Change some of the address and keep the rest; quiet: the view has drawn it already.
export function change(pairs, options = { replace: true, quiet: true }) {
  go({ ...where(), ...pairs }, options);
}

export function onChange(listener) { listeners.add(listener); }
// Draw what the address says anew.
export function tell() { for (const listener of listeners) listener(where()); }

addEventListener("popstate", tell);
addEventListener("click", (event) => {
  const link = event.target.closest && event.target.closest("a[href]");
  if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey || link.target) return;
  const url = new URL(link.href, location.href);
  if (url.origin !== location.origin || url.pathname !== "/") return;
  if (url.hash) {  // a place in what is shown: drawing it anew would lose the place
    const place = url.search === location.search && document.getElementById(decoded(url.hash.slice(1)));
    if (place) { event.preventDefault(); place.scrollIntoView(); }
    return;
  }
  event.preventDefault();
  go(Object.fromEntries(url.searchParams));
});

function decoded(text) {
  try { return decodeURIComponent(text); } catch { return text; }
}
