// One row: what was asked, what was sampled token by token, and how it was judged.

import { el, figure, fill, problemLine, select } from "./dom.js";
import { get, of } from "./api.js";
import { fact } from "./fleet.js";

const COLOURS = [
  ["logprob", "log-prob of the sampler"], ["gap", "gap of trainer and sampler"], ["advantage", "advantage"],
  ["mask", "mask"], ["version", "version"],
];
const plural = (count, word) => `${figure(count)} ${word}${count === 1 ? "" : "s"}`;

export function rowView(bar, body, context, split, step) {
  const { parameters } = context;
  const number = Number(parameters.get("row"));
  let closed = false;
  const back = () => context.go({ row: null });
  const goTo = (change) => context.go({ row: Math.max(0, number + change) });
  fill(bar, el("button", { onclick: back }, "‹ all rows of the step"),
    el("span", { class: "pair" }, el("button", { onclick: () => goTo(-1), disabled: number <= 0, "aria-label": "Row before" }, "‹"),
      el("span", {}, `row ${figure(number)} of step ${figure(step)}`),
      el("button", { onclick: () => goTo(1), "aria-label": "Row after" }, "›")),
    select("colour", COLOURS, parameters.get("colour") ?? "logprob", (value) => context.go({ colour: value })),
    el("small", {}, "keys: j and k other rows, Esc back, ← → on tokens"));

  function onkey(event) {
    if (event.target.matches("input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") back();
    else if (event.key === "j") goTo(1);
    else if (event.key === "k") goTo(-1);
  }
  document.addEventListener("keydown", onkey);
  get(of(context.run.key, `rows/${split}/${step}/${number}`)).then(
    ({ row, problem }) => { if (!closed) row ? draw(row) : fill(body, problemLine(problem)); },
    (error) => { if (!closed) fill(body, problemLine(error.message)); });

  function draw(row) {
    fill(body,
      el("section", { class: "card" }, el("h2", {}, row.uid, row.outcome ? el("span", { class: `badge ${row.outcome}` }, row.outcome) : null),
        el("dl", { class: "facts" },
          fact("reward", figure(row.reward)),
          (row.reward_components ?? []).map(([name, value]) => fact(name, figure(value))),
          fact("advantage", figure(row.advantage)), fact("gap", figure(row.mismatch)), fact("staleness", figure(row.staleness)),
          fact("tokens", `${figure(row.prompt_length)} + ${figure(row.length)}`), fact("worker", row.worker || "–"),
          ...[["sampled", row.sample_s], ["waited for judge", row.score_wait_s], ["scored", row.score_s], ["waited to be trained", row.train_wait_s]]
            .filter(([, seconds]) => seconds != null).map(([name, seconds]) => fact(name, `${figure(seconds)} s`)),
          fact("source", row.data_source || "–"))),
      pictures(row.pictures ?? []),
      el("section", { class: "card" }, el("h2", {}, "Prompt"), asked(row)),
      response(row, parameters.get("colour") ?? "logprob"),
      el("section", { class: "card" }, el("h2", {}, "What the judge was given"),
        el("dl", { class: "given" }, given("response", row.response), given("ground truth", row.ground_truth), given("extra info", row.extra_info))));
  }
  return () => { closed = true; document.removeEventListener("keydown", onkey); };
}

const given = (name, text) => (text === null || text === undefined ? null : el("div", {}, el("dt", {}, name), el("dd", {}, el("pre", {}, text))));

// Thumbnails that the server has drawn: a page never shows a file of a prompt or of an environment.
function pictures(found) {
  if (!found.length) return null;
  const size = (one) => [one.width ? `${one.width} × ${one.height}` : null, one.bytes === null ? null : `${figure(one.bytes)} bytes`];
  return el("section", { class: "card" },
    el("h2", {}, "Pictures", el("small", {}, `${plural(found.length, "picture")}, in the order of their places`)),
    el("div", { class: "pictures" }, found.map((one, at) => el("figure", {},
      one.thumbnail ? el("img", { src: one.thumbnail, alt: `picture ${at + 1}` }) : null,
      el("figcaption", {}, el("b", {}, String(at + 1)), ` ${one.name.slice(0, 12)} `,
        el("small", {}, [...size(one), one.problem].filter(Boolean).join(", ")))))));
}

// A picture has a token for each of its patches: of so many equal ones a prompt shows one.
const folded = (text) => text.replace(/(<\|[a-z_]+\|>)(?: ?\1){3,}/g, (run, token) => `${token}×${run.split(token).length - 1}`);

function asked(row) {
  const messages = row.messages ?? [];
  const chat = messages.map(({ role, content }) => bubble(role ?? "", el("div", { class: "text" }, content ?? "")));
  if (!messages.length) return el("pre", {}, folded(row.prompt ?? ""));
  return [chat, el("details", {}, el("summary", {}, "as the model saw it"), el("pre", {}, folded(row.prompt ?? "")))];
}

const bubble = (role, ...content) => el("div", { class: "bubble" }, el("small", {}, role), content);

function response(row, colouring) {
  const count = row.length ?? row.response_ids?.length ?? 0;
  const texts = row.token_texts ?? (row.response_ids ?? []).map((id) => `[${id}]`);
  const { paint, legend } = painter(row, colouring, count);
  const told = el("output", { class: "told", role: "status" }, "Point at a token, or focus the text and use ← →.");
  const tokens = [];
  for (let at = 0; at < texts.length; at += 1) {
    const token = el("span", { class: "token" }, (texts[at] ?? "").replaceAll("\n", "↵\n"));
    const background = paint(at);
    if (background) token.style.background = background;
    if (row.loss_mask && !row.loss_mask[at]) token.classList.add("observed");
    token.dataset.at = at;
    tokens.push(token);
  }
  let current = -1;
  function show(at) {
    tokens[current]?.classList.remove("current");
    current = Math.max(0, Math.min(tokens.length - 1, at));
    const token = tokens[current];
    if (!token) return;
    token.classList.add("current");
    fill(told, facts(row, current).map(([name, value]) => el("span", {}, el("small", {}, name), value)));
    return token;
  }
  // A row of one turn is one part.
  const parts = row.parts?.length ? row.parts : [{ sampled: true, start: 0, end: texts.length }];
  const strip = el("div", {
    class: "strip", tabIndex: 0, role: "application", "aria-label": "Tokens of the response",
    onmouseover: (event) => { if (event.target.dataset.at) show(Number(event.target.dataset.at)); },
    onclick: (event) => { if (event.target.dataset.at) show(Number(event.target.dataset.at)); },
    onkeydown: (event) => {
      const moved = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (moved) { show(current + moved)?.scrollIntoView({ block: "nearest" }); event.preventDefault(); }
    },
  }, parts.map((part) => (row.parts?.length
    ? bubble(part.sampled ? "policy" : "observed, not trained", el("div", { class: "tokens" }, tokens.slice(part.start, part.end)))
    : el("div", { class: "tokens" }, tokens))));
  return el("section", { class: "card" },
    el("h2", {}, "Response", el("small", {}, [plural(count, "token"), row.turns > 1 ? plural(row.turns, "turn") : null].filter(Boolean).join(", "))),
    legend, row.token_texts ? null : el("p", { class: "note" }, "The tokenizer could not be read when these rows were logged: tokens are shown by number."),
    strip, told, calls(row));
}

function calls(row) {
  const called = (row.conversation ?? []).flatMap((message) => message.tool_calls ?? []);
  return called.length
    ? el("details", { class: "calls" }, el("summary", {}, plural(called.length, "tool call")),
      called.map((call) => bubble(call.name, el("pre", {}, call.arguments))))
    : null;
}

const versionOf = (row, at) => (row.spans ?? []).find((span) => span.start <= at && at < span.end);
const named = (span) => (span ? `${span.epoch}.${span.step}` : "–");
const gapOf = (row, at) => {
  const [trainer, sampler] = [row.trainer_logprobs?.[at], row.rollout_logprobs?.[at]];
  return trainer == null || sampler == null ? null : trainer - sampler;
};

function facts(row, at) {
  const trained = row.trained_mask?.[at], sampled = row.loss_mask?.[at];
  const optional = ["ref_logprobs", "values", "returns", "token_rewards", "importance_weights"]
    .filter((name) => row[name]?.[at] != null).map((name) => [name.replaceAll("_", " "), figure(row[name][at])]);
  return [
    ["token", String(at)], ["id", String(row.response_ids?.[at] ?? "–")], ["text", JSON.stringify(row.token_texts?.[at] ?? "")],
    ["sampler", figure(row.rollout_logprobs?.[at])], ["trainer", figure(row.trainer_logprobs?.[at])], ["gap", figure(gapOf(row, at))],
    ["advantage", figure(row.advantages?.[at])], ["version", named(versionOf(row, at))],
    ["", sampled === false ? "observed" : trained === false ? "sampled, not trained" : "sampled"], ...optional,
  ];
}

// What colours a token, and what the colours mean.
function painter(row, colouring, count) {
  const swatch = (background, text) => el("span", {}, el("i", { style: { background } }), text);
  const legend = (...parts) => el("p", { class: "legend" }, parts);
  const most = (valueOf, least) => {
    let found = least;
    for (let at = 0; at < count; at += 1) found = Math.max(found, Math.abs(valueOf(at) ?? 0));
    return found;
  };
  const twoSided = (valueOf, least, [up, down], name) => {
    const scale = most(valueOf, least);
    return {
      paint: (at) => {
        const value = valueOf(at);
        return value == null || value === 0 ? "" : `rgb(${value > 0 ? up : down} / ${(0.7 * Math.min(1, Math.abs(value) / scale)).toFixed(2)})`;
      },
      legend: legend(swatch(`rgb(${down} / .7)`, `${name} ${figure(-scale)}`), swatch("transparent", "0"), swatch(`rgb(${up} / .7)`, figure(scale))),
    };
  };
  if (colouring === "gap") return twoSided((at) => gapOf(row, at), 0.01, ["40 110 230", "220 60 40"], "trainer - sampler");
  if (colouring === "advantage") return twoSided((at) => row.advantages?.[at], 1e-6, ["30 150 80", "220 60 40"], "advantage");
  if (colouring === "mask") {
    const [trained, sampled] = ["rgb(40 110 230 / .3)", "rgb(220 150 30 / .4)"];
    return {
      paint: (at) => (row.trained_mask?.[at] ? trained : row.loss_mask?.[at] ? sampled : ""),
      legend: legend(swatch(trained, "trained"), swatch(sampled, "sampled, not trained"), swatch("transparent", "observed")),
    };
  }
  if (colouring === "version") {
    const versions = [...new Set((row.spans ?? []).map(named))];
    const tint = (version) => `color-mix(in srgb, var(--run-${versions.indexOf(version) % 8}) 30%, transparent)`;
    return {
      paint: (at) => { const span = versionOf(row, at); return span ? tint(named(span)) : ""; },
      legend: legend(versions.map((version) => swatch(tint(version), `version ${version}`))),
    };
  }
  return {
    paint: (at) => {
      const value = row.rollout_logprobs?.[at];
      return value == null ? "" : `rgb(225 110 20 / ${(0.75 * Math.min(1, -value / 4)).toFixed(2)})`;
    },
    legend: legend(swatch("transparent", "log-prob 0: certain"), swatch("rgb(225 110 20 / .4)", "-2"), swatch("rgb(225 110 20 / .75)", "-4 and less")),
  };
}
