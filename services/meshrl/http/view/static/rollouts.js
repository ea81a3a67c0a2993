// The rows of a step: groups side by side or a table, and one row with its tokens.

import { counted, el, figure, fill, problemLine, select, table } from "./dom.js";
import { get, of } from "./api.js";
import { runPicker } from "./fleet.js";
import { rowView } from "./row.js";

const LIMIT = { groups: 10, rows: 50 };
const SORTS = ["reward", "advantage", "mismatch", "staleness", "length", "turns", "task"];

export default function rollouts(place, context) {
  const { parameters } = context;
  const asked = (name, otherwise = "") => parameters.get(name) ?? otherwise;
  const split = asked("split", "train"), layout = asked("layout", "groups");
  const bar = el("div", { class: "bar" }), body = el("div");
  let closed = false, close = () => {};
  fill(place, bar, body);
  start().catch((error) => fill(body, problemLine(error.message)));

  async function start() {
    const { files, problem } = await get(of(context.run.key, "steps"));
    const steps = files.filter((file) => file.split === split).map((file) => file.step);
    if (closed) return;
    if (!files.length) { fill(bar, runPicker(context)); fill(body, problemLine(problem) ?? nothing()); return; }
    const step = parameters.has("step") ? Number(asked("step")) : steps.at(-1);
    if (parameters.has("row")) {
      close = rowView(bar, body, context, split, step);
      return;
    }
    toolbar(steps, step);
    await page(step);
  }

  const nothing = () => el("p", { class: "empty" }, "No rows were logged: the recipe says so (trainer.log_rows), or no step was made yet.");

  function toolbar(steps, step) {
    const at = steps.indexOf(step);
    const listed = at < 0 && step !== undefined ? [...steps, step].sort((a, b) => a - b) : steps;
    const goTo = (number) => context.go({ step: number, page: null });
    const field = (name, label, placeholder) => el("label", { class: "wide" }, el("span", {}, label), el("input", {
      type: "search", value: asked(name), placeholder, onchange: (event) => context.go({ [name]: event.target.value, page: null }),
    }));
    fill(bar, runPicker(context, { step: null, page: null }),
      select("rows of", [["train", "training"], ["eval", "evaluation"]], split, (value) => context.go({ split: value, step: null, page: null })),
      el("span", { class: "pair" },
        el("button", { disabled: at <= 0, "aria-label": "Step before", onclick: () => goTo(steps[at - 1]) }, "‹"),
        select("step", listed.map((one) => [one, String(one)]), step, goTo),
        el("button", { disabled: at < 0 || at === steps.length - 1, "aria-label": "Step after", onclick: () => goTo(steps[at + 1]) }, "›")),
      select("as", [["groups", "groups"], ["rows", "table"]], layout, (value) => context.go({ layout: value, page: null })),
      select("sort by", [["", "file order"], ...SORTS.flatMap((name) => [[`${name} up`, `${name}, lowest first`], [`${name} down`, `${name}, highest first`]])],
        asked("sort"), (value) => context.go({ sort: value, page: null })),
      field("where", "filter", "reward < 0.5 and outcome == 'ok'"), field("search", "search", "text of prompts and responses"));
  }

  async function page(step) {
    if (step === undefined) { fill(body, nothing()); return; }
    const number = Number(asked("page", "0")), limit = LIMIT[layout] ?? LIMIT.groups;
    const [sort, direction] = asked("sort").split(" ");
    body.setAttribute("aria-busy", "true");
    const answer = await get(of(context.run.key, `rows/${split}/${step}`), {
      sort, descending: direction === "down", where: asked("where"), search: asked("search"),
      grouped: layout === "groups", offset: number * limit, limit,
    });
    if (closed) return;
    body.removeAttribute("aria-busy");
    const href = (row) => {
      const next = new URLSearchParams(parameters);
      next.set("step", step);
      next.set("row", row.number);
      return `#/rollouts?${next}`;
    };
    const unit = layout === "groups" ? "groups" : "rows";
    const last = Math.max(0, Math.ceil(answer.matching / limit) - 1);
    const turn = (change, text) => (last ? el("button", {
      disabled: number + change < 0 || number + change > last, onclick: () => context.go({ page: number + change }),
    }, text) : null);
    const from = number * limit + 1, to = Math.min(answer.matching, from + limit - 1);
    const pages = el("div", { class: "bar pages" }, turn(-1, "‹"),
      el("span", {}, answer.matching ? `${unit} ${figure(from)} to ${figure(to)} of ${figure(answer.matching)}` : `no ${unit}`,
        el("small", {}, ` · ${figure(answer.matching_rows ?? answer.matching)} of ${counted(answer.rows, "row")}`)),
      turn(1, "›"));
    fill(body, problemLine(answer.problem), answer.problem ? null : pages,
      layout === "groups" ? answer.page.map((rows) => group(rows, href)) : tableOf(answer.page, href));
  }

  return { close() { closed = true; close(); } };
}

function group(rows, href) {
  const rewards = rows.map((row) => row.reward).filter((one) => one !== null && one !== undefined);
  const mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
  return el("section", { class: "card group" },
    el("h2", {}, rows[0].task, el("small", {}, `${rows[0].data_source ?? ""} · ${counted(rows.length, "row")} · mean reward ${figure(mean)}`)),
    el("p", { class: "prompt" }, rows[0].prompt ?? ""),
    el("div", { class: "side" }, rows.map((row) => el("a", { class: `row${row.asked ? "" : " aside"}`, href: href(row) },
      el("span", { class: "head" }, el("b", {}, figure(row.reward)), outcome(row),
        el("small", {}, `advantage ${figure(row.advantage)}`)),
      el("span", { class: "text" }, row.response ?? ""),
      el("small", {}, [
        `${figure(row.length)} tokens`, row.turns > 1 ? `${row.turns} turns` : null, `staleness ${figure(row.staleness)}`,
        `gap ${figure(row.mismatch)}`, row.worker,
      ].filter(Boolean).join(" · "))))));
}

const outcome = (row) => (row.outcome ? el("span", { class: `badge ${row.outcome}` }, row.outcome) : null);

function tableOf(rows, href) {
  return table(["row", "reward", "advantage", "gap", "staleness", "tokens", "outcome", "worker", "response"], rows.map((row) => [
    el("a", { class: "row-link", href: href(row) }, `${row.task}/${row.index}`), figure(row.reward), figure(row.advantage), figure(row.mismatch),
    figure(row.staleness), figure(row.length), outcome(row), row.worker, el("span", { class: "text" }, row.response ?? ""),
  ]), "Rows");
}

