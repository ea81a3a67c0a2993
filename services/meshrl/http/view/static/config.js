// The recipe of a run: what differs from the defaults, and from another run.

import { el, fill, problemLine, select, table } from "./dom.js";
import { get, of } from "./api.js";
import { runPicker } from "./fleet.js";

export default function config(place, context) {
  const { parameters } = context;
  const other = context.runs.has(parameters.get("other")) ? parameters.get("other") : "";
  const shown = parameters.get("show") ?? (other ? "other" : "changed");
  const body = el("div");
  let entries = [], problem = "";
  const search = el("input", { type: "search", placeholder: "key or value", oninput: draw });
  const others = [...context.runs.keys()].filter((key) => key !== context.run.key);
  fill(place,
    el("div", { class: "bar" }, runPicker(context, { other: null, show: null }),
      others.length ? select("beside", [["", "nothing"], ...others.map((key) => [key, key])], other, (key) => context.go({ other: key, show: null })) : null,
      select("show", [["changed", "differs from its default"], ...(other ? [["other", `differs from ${other}`]] : []), ["all", "every key"]], shown,
        (value) => context.go({ show: value })),
      el("label", { class: "wide" }, el("span", {}, "find"), search)),
    body);

  function draw() {
    const text = search.value.toLowerCase();
    const chosen = entries.filter((one) =>
      (shown === "all" || (shown === "other" ? one.differs : one.changed))
      && [one.key, one.value, one.other, one.doc].some((part) => part?.toLowerCase().includes(text)));
    const columns = ["key", context.run.key, ...(other ? [other] : []), "default"];
    const rows = chosen.map((one) => [
      el("span", {}, el("code", {}, one.key), one.doc ? el("small", { class: "doc" }, one.doc) : null),
      el("code", { class: one.changed ? "changed" : "" }, one.value ?? "–"),
      ...(other ? [el("code", { class: one.differs ? "changed" : "" }, one.other ?? "–")] : []),
      el("code", {}, one.default ?? "–"),
    ]);
    fill(body, problemLine(problem), rows.length ? table(columns, rows, "Configuration")
      : problem ? null : el("p", { class: "empty" }, "No key to show."));
  }
  get(of(context.run.key, "config"), other ? { other } : {}).then(
    (answer) => { ({ entries, problem } = answer); draw(); },
    (error) => { problem = error.message; draw(); });
  return {};
}
