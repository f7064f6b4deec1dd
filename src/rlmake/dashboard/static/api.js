// Questions to the server, and asking again while the page is looked at.

export class Fault extends Error {
  constructor(message, status) { super(message); this.status = status; }
}

export function query(pairs) {
  const found = new URLSearchParams();
  for (const [key, value] of Object.entries(pairs)) {
    if (value === null || value === undefined || value === "" || value === false) continue;
    for (const one of Array.isArray(value) ? value : [value]) found.append(key, one === true ? "1" : one);
  }
  return found.toString();
}

export async function get(path, pairs = {}, signal = undefined) {
  const rest = query(pairs);
  let answer;
  try {
    answer = await fetch(`/api/${path}${rest ? `?${rest}` : ""}`, { signal, headers: { accept: "application/json" } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Fault("The dashboard's server does not answer. Is it still running?", 0);
  }
  let body = null;
  try { body = await answer.json(); } catch (error) { if (error.name === "AbortError") throw error; /* else said below */ }
  if (!answer.ok) throw new Fault((body && body.error) || `The server answered ${answer.status}.`, answer.status);
  return body;
}

export const ofRun = (run, rest, pairs, signal) => get(`runs/${run.split("/").map(encodeURIComponent).join("/")}/${rest}`, pairs, signal);

// Calls `action` now and then every `wait` ms while the tab is visible and `scope` is alive; more slowly after faults.
export function poll(scope, wait, action) {
  let faults = 0;
  const round = async () => {
    if (scope.aborted) return;
    if (!document.hidden) {
      try { await action(); faults = 0; } catch (error) { if (error.name !== "AbortError") faults = Math.min(faults + 1, 5); }
    }
    if (!scope.aborted) setTimeout(round, wait * (1 + faults));
  };
  return round();
}
