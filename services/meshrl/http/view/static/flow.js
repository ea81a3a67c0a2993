// Where every admitted row is, what waits for whom, and the rows that were given up.

import { get, of, post } from "./api.js";
import { counted, el, figure, fill, problemLine, table } from "./dom.js";
import { asked, fact, runPicker } from "./fleet.js";

const STATES = ["queued", "leased", "pending", "ready", "taken", "settled"];
const sum = (counts) => Object.values(counts).reduce((total, count) => total + count, 0);

export default function flow(place, context) {
  const body = el("div");
  const said = el("p", { class: "note", role: "status" });
  let operates = false;
  fill(place, el("div", { class: "bar" }, runPicker(context)), said, body);
  get(of(context.run.key, "rights")).then((rights) => { operates = rights.replay; }, () => {});
  const replay = replayIn(context, said);
  return asked("flow", context, (answer) => {
    if (!answer.ledgers) { fill(body, problemLine(answer.problem)); return; }
    fill(body,
      answer.up ? null : el("p", { class: "note" }, "This run does not run now: the figures are those of its queue's files."),
      answer.ledgers.map(ledger), answer.up ? waiting(answer.waiting) : null, letters(answer.dead_letters, operates ? replay : null));
  });
}

function ledger(one) {
  const done = one.run.endsWith(".eval") ? "scored" : "trained";  // what is held out is not trained on
  const named = (kind) => (kind === "trained" ? done : kind);
  const order = Object.keys(one.resident).sort((a, b) => STATES.indexOf(a) - STATES.indexOf(b));
  const parts = [
    ["trained", "", one.trained],
    ...order.map((state) => ["resident", state, one.resident[state]]),
    ...Object.entries(one.filtered).map(([why, count]) => ["filtered", why, count]),
    ...Object.entries(one.stale).map(([why, count]) => ["stale", why, count]),
    ...Object.entries(one.dead_lettered).map(([why, count]) => ["dead-lettered", why, count]),
  ].filter(([, , count]) => count);
  const total = Math.max(1, one.admitted);
  const most = Math.max(1, ...parts.map(([, , count]) => count));
  return el("section", { class: "card" },
    el("h2", {}, one.run, el("span", { class: `badge ${one.balanced ? "serving" : "out"}` }, one.balanced ? "balanced" : "not balanced")),
    el("dl", { class: "facts" }, fact("admitted", figure(one.admitted)), fact(done, figure(one.trained)),
      fact("resident", figure(sum(one.resident))), fact("leased now", figure(one.resident.leased ?? 0)),
      fact("filtered", figure(sum(one.filtered))), fact("stale", figure(sum(one.stale))),
      fact("dead-lettered", figure(sum(one.dead_lettered)))),
    el("div", { class: "stack", role: "img", "aria-label": "Admitted rows by where they are" }, parts.map(([kind, why, count]) =>
      el("i", { class: kind, title: `${named(kind)} ${why}: ${figure(count)}`, style: { flexGrow: String(count / total) } }))),
    el("ul", { class: "parts" }, parts.map(([kind, why, count]) => el("li", {},
      el("span", { class: "what" }, el("i", { class: kind }), el("span", {}, named(kind)), why ? el("small", {}, why) : null),
      el("span", { class: "length" }, el("i", { class: kind, style: { width: `${(100 * count) / most}%` } })),
      el("b", {}, figure(count)), el("small", {}, `${((100 * count) / total).toFixed(1)} %`)))));
}

function waiting(waits) {
  const rows = waits.map((wait) => [
    el("b", {}, wait.who), wait.what, `${figure(Math.round(10 * wait.since_s) / 10)} s`, wait.owners.join(", ") || null,
    wait.rows ? `${wait.uids.join(", ")}${wait.rows > wait.uids.length ? `, ... (${wait.rows} in all)` : ""}` : null,
  ]);
  return el("section", { class: "card" }, el("h2", {}, "What waits"),
    rows.length ? table(["who", "waits for", "since", "ask", "rows"], rows, "What waits") : el("p", { class: "empty" }, "Nothing waits."));
}

// What the button of a reason does: admits its rows again, and says how many they were.
const replayIn = (context, said) => async (one, button) => {
  button.disabled = true;
  try {
    const { rows } = await post(of(context.run.key, "replay"), { stage: one.stage, outcome: one.outcome, reason: one.reason });
    said.textContent = `${counted(rows, "row is", "rows are")} admitted again.`;
  } catch (error) { said.textContent = error.message; button.disabled = false; }
};

function letters(found, replay) {
  const rows = found.map((one) => [one.stage, one.outcome, figure(one.rows), one.reason, one.uids.join(", "),
    ...(replay ? [el("button", { onclick: (event) => replay(one, event.target) }, "Replay")] : [])]);
  return el("section", { class: "card" }, el("h2", {}, "Rows given up"),
    rows.length
      ? [table(["stage", "outcome", "rows", "reason", "for example", ...(replay ? ["try again"] : [])], rows, "Rows given up"),
        replay ? null : el("p", { class: "note" }, "An operator admits them again with ", el("code", {}, "meshrl dead-letters replay UID"), " or ", el("code", {}, "--all"), ".")]
      : el("p", { class: "empty" }, "No row was given up."));
}
