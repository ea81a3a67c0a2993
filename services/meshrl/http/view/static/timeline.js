// One optimizer step over time: who was busy, and what waited; from the spans of the services.

import { el, figure, fill, problemLine, table } from "./dom.js";
import { get, of } from "./api.js";
import { runPicker } from "./fleet.js";

const MOST_LINES = 10;

// Spans into lines in which none overlaps another; what finds no line shares the last one.
function lines(spans) {
  const ends = [];
  return spans.map((span) => {
    let at = ends.findIndex((end) => end <= span.start_s);
    if (at < 0) at = Math.min(ends.length, MOST_LINES - 1);
    ends[at] = Math.max(ends[at] ?? 0, span.end_s);
    return [span, at];
  });
}

const facts = (span) => Object.entries(span.attributes).map(([name, value]) => `${name} ${value}`).join(", ");

function lane({ service, spans }, seconds) {
  const placed = lines(spans);
  const deep = 1 + Math.max(0, ...placed.map(([, at]) => at));
  return el("div", { class: "lane" }, el("b", {}, service),
    el("div", { class: "track", style: { height: `${deep * 16}px` } }, placed.map(([span, at]) => {
      const from = Math.max(0, span.start_s), to = Math.min(seconds, span.end_s);
      return el("i", {
        class: `span ${span.name.split("/")[0].toLowerCase()}`,
        title: `${span.name}: ${figure(span.end_s - span.start_s)} s, from ${figure(span.start_s)} s. ${facts(span)}`,
        style: { left: `${(100 * from) / seconds}%`, width: `${(100 * (to - from)) / seconds}%`, top: `${16 * at}px` },
      });
    })));
}

// Seconds in which at least one span of a name ran.
function busy(spans, seconds) {
  let total = 0, until = 0;
  for (const span of [...spans].sort((a, b) => a.start_s - b.start_s)) {
    const from = Math.max(until, span.start_s, 0), to = Math.min(seconds, span.end_s);
    if (to > from) total += to - from;
    until = Math.max(until, to);
  }
  return total;
}

function summary(answer) {
  const rows = answer.lanes.flatMap(({ service, spans }) =>
    [...new Set(spans.map((span) => span.name))].map((name) => {
      const own = spans.filter((span) => span.name === name);
      const took = busy(own, answer.seconds);
      return [el("b", {}, service), el("span", {}, el("i", { class: `key ${name.split("/")[0].toLowerCase()}` }), ` ${name}`), figure(own.length),
        `${figure(took)} s`, `${figure(Math.round((100 * took) / answer.seconds))} %`];
    }));
  return table(["service", "work", "spans", "busy", "of the step"], rows, "Work of the step");
}

export default function timeline(place, context) {
  const body = el("div");
  const step = context.parameters.get("step");
  let closed = false, asking = false;
  async function load() {
    if (asking) return;
    asking = true;
    let answer;
    try { answer = await get(of(context.run.key, "timeline"), step ? { step } : {}); } catch (error) { answer = { lanes: [], problem: error.message }; }
    asking = false;
    if (!closed) draw(answer);
  }
  function draw(answer) {
    const to = (number) => () => context.go({ step: String(number) });
    const shown = answer.step ?? answer.last;
    fill(body, problemLine(answer.problem),
      answer.last === undefined ? null : el("div", { class: "bar" },
        el("button", { disabled: shown <= answer.first, onclick: to(shown - 1), "aria-label": "Step before" }, "‹"),
        el("label", {}, el("span", {}, "step"), el("input", { type: "number", value: String(shown), min: String(answer.first), max: String(answer.last), onchange: (event) => to(event.target.value)() })),
        el("button", { disabled: shown >= answer.last, onclick: to(shown + 1), "aria-label": "Step after" }, "›"),
        el("button", { disabled: !step, onclick: () => context.go({ step: null }) }, "newest")),
      answer.lanes.length ? [
        el("section", { class: "card" },
          el("h2", {}, `Step ${answer.step}`, el("small", {}, `${figure(answer.seconds)} s; rows that are not traced are not shown`)),
          el("div", { class: "lanes", role: "img", "aria-label": `Work of the services over ${figure(answer.seconds)} s` }, answer.lanes.map((one) => lane(one, answer.seconds))),
          answer.left_out ? el("p", { class: "note" }, `${figure(answer.left_out)} short spans are left out.`) : null),
        el("section", { class: "card" }, summary(answer)),
        el("p", { class: "note" }, "One row from prompt to gradient: ", el("code", {}, "meshrl trace UID"))] : null);
  }
  fill(place, el("div", { class: "bar" }, runPicker(context, { step: null })), body);
  load();
  return { update() { if (!step) load(); }, close() { closed = true; } };
}
