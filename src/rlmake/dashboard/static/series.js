// Series of metrics: questions that come at the same moment go to the server together.

import { ofRun } from "./api.js";

const MOST = 32;

export function fetcher(run, scope) {
  let waiting = new Map(), timer = 0;
  const flush = async () => {
    timer = 0;
    const asked = [...waiting.entries()];
    waiting = new Map();
    for (let at = 0; at < asked.length; at += MOST) {
      const part = asked.slice(at, at + MOST);
      try {
        const answer = await ofRun(run, "series", { key: part.map(([key]) => key), points: 600 }, scope);
        for (const [key, calls] of part) calls.forEach((call) => call.done({ ...answer.series[key], whole: answer.whole }));
      } catch (error) { for (const [, calls] of part) calls.forEach((call) => call.fail(error)); }
    }
  };
  return (key) => new Promise((done, fail) => {
    if (!waiting.has(key)) waiting.set(key, []);
    waiting.get(key).push({ done, fail });
    if (!timer) timer = setTimeout(flush, 15);
  });
}

export function watch(run, scope, poll, action) {
  // Calls `action` when the metrics file has grown or the server has read more of it. `keys` is there when they changed.
  let mark = null, etag = "";
  return async () => {
    const answer = await ofRun(run, "keys", { etag }, scope);
    etag = answer.etag;
    const now = `${answer.size}|${answer.whole}`;
    if (mark !== null && now !== mark) action(answer);
    mark = now;
    return answer;
  };
}
