// The rollout workers of a run: what they serve, run and fail at.

import { el, figure, fill, problemLine, select, table } from "./dom.js";
import { get, of } from "./api.js";

const EVERY_MS = 2000;

// Asks again and again while the view is open; several views do.
export function asked(path, context, draw) {
  let closed = false, timer = 0;
  async function ask() {
    let answer;
    try { answer = await get(of(context.run.key, path)); } catch (error) { answer = { problem: error.message }; }
    if (closed) return;
    draw(answer);
    timer = setTimeout(ask, EVERY_MS);
  }
  ask();
  return { close() { closed = true; clearTimeout(timer); } };
}

export function runPicker(context, others = {}) {
  if (context.runs.size < 2) return null;
  return select("run", [...context.runs.keys()].map((key) => [key, key]), context.run.key, (key) => context.go({ run: key, ...others }));
}

export const meter = (share, title) =>
  el("span", { class: "meter", title }, el("i", { style: { width: `${100 * Math.min(1, Math.max(0, share || 0))}%` } }));

const lines = (...parts) => parts.filter((part) => part !== null).map((part) => el("div", {}, part));

export default function fleet(place, context) {
  const body = el("div");
  fill(place, el("div", { class: "bar" }, runPicker(context)), body);
  return asked("fleet", context, (answer) => {
    if (!answer.members) { fill(body, problemLine(answer.problem)); return; }
    const rows = answer.members.map((one) => [
      el("b", {}, one.name),
      el("span", { class: `badge ${one.state.toLowerCase()}` }, one.draining ? "draining" : one.state.toLowerCase()),
      one.version,
      one.carrier,
      one.answers ? el("span", {}, meter(one.running / one.capacity), ` ${one.running} of ${one.capacity}`) : null,
      one.answers ? figure(Math.round(one.tokens_per_s)) : null,
      one.last_sync_s === null ? null : lines(`${figure(one.last_sync_s)} s`,
        one.pause_s === null ? null : `${figure(1000 * one.pause_s)} ms paused`,
        one.moved_bytes ? `${figure(one.moved_bytes / 2 ** 20)} MiB` : null),
      one.answers ? lines(`${figure(Math.round(100 * one.error_rate))} %`, `breaker ${one.breaker}`) : null,
      one.answers ? `${figure(one.written)} / ${figure(one.failed)} / ${figure(one.lost)}` : null,
      figure(one.restarts),
      one.reason || (one.answers ? one.last_fault : one.state === "OUT" ? "" : "does not answer") || "",
    ]);
    const tokens = answer.members.reduce((sum, one) => sum + (one.tokens_per_s ?? 0), 0);
    fill(body, problemLine(answer.problem),
      el("dl", { class: "facts" },
        fact("version committed", answer.committed ?? "–"), fact("in transfer", answer.proposed ?? "–"),
        fact("workers", figure(answer.members.length)), fact("tokens/s sampled", figure(Math.round(tokens)))),
      table(["worker", "state", "version", "carrier", "requests", "tokens/s", "last sync", "errors",
        "rows written / failed / lost", "restarts", "reason"], rows, "Workers"));
  });
}

export const fact = (name, value) => el("div", {}, el("dt", {}, name), el("dd", {}, value));
