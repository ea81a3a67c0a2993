// Chooses the view that the address names, and follows what changes on the server.

import { el, fill, problemLine } from "./dom.js";
import { follow, takeToken } from "./api.js";
import overview from "./overview.js";
import rollouts from "./rollouts.js";
import flow from "./flow.js";
import fleet from "./fleet.js";
import timeline from "./timeline.js";
import config from "./config.js";
import help from "./help.js";

const VIEWS = { overview, rollouts, flow, fleet, timeline, config, help };
const main = document.getElementById("main");
const runs = new Map();
let shown = null;

// What a view gets: the runs, the parameters of its address, and how to change them.
function contextOf(name, parameters) {
  return {
    runs,
    parameters,
    run: runs.get(parameters.get("run")) ?? runs.values().next().value,
    colourOf: (key) => `--run-${[...runs.keys()].indexOf(key) % 8}`,
    go: (changes, view = name) => {
      const next = new URLSearchParams(view === name ? parameters : "");
      for (const [key, value] of Object.entries(changes))
        value === null || value === "" ? next.delete(key) : next.set(key, value);
      location.hash = `#/${view}${next.size ? `?${next}` : ""}`;
    },
  };
}

function route() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const name = path in VIEWS ? path : "overview";
  const parameters = new URLSearchParams(query);
  const context = contextOf(name, parameters);
  fill(document.getElementById("nav"), Object.keys(VIEWS).map((each) => {
    const run = parameters.get("run");
    const href = `#/${each}${run ? `?run=${encodeURIComponent(run)}` : ""}`;
    return el("a", { href, "aria-current": each === name ? "page" : undefined }, each);
  }));
  document.title = `${name} · meshrl`;
  if (!runs.size) return;
  if (shown?.name === name && shown.view.changed?.(context)) return;
  shown?.view.close?.();
  const place = el("div", { class: `view ${name}` });
  fill(main, place);
  shown = { name, view: VIEWS[name](place, context) };
}

function say(text, bad = false) {
  const state = document.getElementById("state");
  state.textContent = text;
  state.className = bad ? "bad" : "";
}

// Signs that a run does not learn, each with a link to its paragraph.
function warn() {
  fill(document.getElementById("warnings"), [...runs.values()].flatMap((run) => run.warnings.map((one) =>
    el("p", { class: "warning" }, runs.size > 1 ? `${run.key}: ` : "", one.text, " ",
      el("a", { href: `#/help?sign=${encodeURIComponent(one.key)}` }, "What to do")))));
}

takeToken();
addEventListener("hashchange", () => (/^#token=/.test(location.hash) ? location.reload() : location.hash !== "#main" && route()));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  shown?.view.close?.();
  shown = null;
  route();
});
route();
follow(
  (states) => {
    const first = !runs.size;
    for (const state of states) runs.set(state.key, state);
    warn();
    const up = [...runs.values()].filter((run) => run.up).length;
    say(up ? `${up === 1 && runs.size === 1 ? "running" : `${up} of ${runs.size} running`}` : "not running");
    if (first) route();
    else shown?.view.update?.(states);
  },
  (why) => {
    say(why, true);
    if (!runs.size) fill(main, problemLine(why));
  },
);
