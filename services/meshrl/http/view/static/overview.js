// Curves of metrics.jsonl, several runs over each other, that grow while they are watched.

import { colour, el, figure, fill, problemLine } from "./dom.js";
import { get, of } from "./api.js";

const PANELS = [
  ["score", "val/score/mean"],
  ["reward", "reward/mean"],
  ["response length", "response/length_mean"],
  ["entropy", "actor/entropy"],
  ["KL to the sampler", "actor/ppo_kl"],
  ["KL to the reference", "actor/kl_loss"],
  ["clip share", "actor/pg_clipfrac"],
  ["gradient norm", "actor/grad_norm"],
  ["tokens/s", "throughput/tokens_per_s"],
  ["staleness", "staleness/mean"],
];
const HEIGHT = 170;
const settings = { smoothing: 0, log: false, hidden: new Set(), more: [] };

export default function overview(place, context) {
  const data = new Map(); // run key to { generation, lines, curves, names }
  const panels = new Map(); // metric to its panel
  const problems = el("div");
  const grid = el("div", { class: "panels" });
  const chips = el("div", { class: "chips", role: "group", "aria-label": "Runs" });
  const known = el("datalist", { id: "metric-names" });
  let closed = false;

  const names = () => [...PANELS.map(([, name]) => name), ...settings.more];
  const visible = () => [...context.runs.keys()].filter((key) => !settings.hidden.has(key));

  async function load(key) {
    const held = data.get(key);
    const wanted = names();
    const fresh = !held || wanted.some((name) => !held.asked.has(name));
    const answer = await get(of(key, "metrics"), {
      name: wanted, generation: fresh ? -1 : held.generation, after: fresh ? 0 : held.lines,
    });
    if (closed) return;
    const curves = answer.after && held ? held.curves : {};
    for (const [name, curve] of Object.entries(answer.curves)) {
      const into = (curves[name] ??= { steps: [], values: [] });
      into.steps = into.steps.concat(curve.steps);
      into.values = into.values.concat(curve.values);
    }
    data.set(key, { ...answer, curves, asked: new Set(wanted) });
  }

  // One request a run at a time; what changes meanwhile is asked for afterwards.
  const loading = new Map();
  async function refresh(keys) {
    await Promise.all(keys.map(async (key) => {
      if (loading.has(key)) { loading.set(key, true); return; }
      do {
        loading.set(key, false);
        try { await load(key); } catch (error) { fill(problems, problemLine(error.message)); }
      } while (!closed && loading.get(key));
      loading.delete(key);
    }));
    if (!closed) draw();
  }

  function draw() {
    fill(problems, [...data.entries()].map(([key, { problem }]) =>
      problemLine(problem && (context.runs.size > 1 ? `${key}: ${problem}` : problem))));
    const all = [...new Set([...data.values()].flatMap((one) => one.names))].sort();
    fill(known, all.map((name) => el("option", { value: name })));
    const titles = new Map(PANELS.map(([title, name]) => [name, title]));
    for (const name of names()) {
      const runs = visible().filter((key) => data.get(key)?.curves[name]?.steps.length);
      // A metric that is zero throughout, such as the KL of a run without a reference, needs no room.
      const flat = !settings.more.includes(name) && name === "actor/kl_loss"
        && runs.every((key) => data.get(key).curves[name].values.every((value) => value === 0));
      let panel = panels.get(name);
      if (!runs.length || flat) {
        panel?.close();
        panels.delete(name);
        continue;
      }
      if (!panel) {
        panel = makePanel(name, titles.get(name) ?? name, context);
        panels.set(name, panel);
      }
      panel.draw(runs.map((key) => [key, data.get(key).curves[name]]));
    }
    const shown = names().filter((name) => panels.has(name)).map((name) => panels.get(name).element);
    if (shown.length !== grid.children.length || shown.some((one, at) => one !== grid.children[at]))
      fill(grid, shown);
    if (!shown.length) fill(grid, el("p", { class: "empty" }, "No step was made yet; curves appear as the run goes on."));
  }

  function drawChips() {
    fill(chips, [...context.runs.values()].map((run) => el("label", { class: "chip" },
      el("input", {
        type: "checkbox", checked: !settings.hidden.has(run.key),
        onchange: (event) => { settings.hidden[event.target.checked ? "delete" : "add"](run.key); draw(); },
      }),
      el("i", { style: { background: `var(${context.colourOf(run.key)})` } }),
      el("span", {}, run.key),
      el("small", {}, run.step === null ? "no step yet" : `step ${figure(run.step)}${run.up ? ", running" : ""}`))));
  }

  const smoothing = el("output", {}, figure(settings.smoothing));
  fill(place,
    el("div", { class: "bar" }, chips,
      el("label", {}, el("span", {}, "smoothing"), el("input", {
        type: "range", min: 0, max: 0.98, step: 0.02, value: settings.smoothing,
        oninput: (event) => { settings.smoothing = Number(event.target.value); smoothing.textContent = figure(settings.smoothing); draw(); },
      }), smoothing),
      el("label", {}, el("input", {
        type: "checkbox", checked: settings.log,
        onchange: (event) => { settings.log = event.target.checked; for (const panel of panels.values()) panel.reset(); draw(); },
      }), el("span", {}, "log axis")),
      el("label", { class: "wide" }, el("span", {}, "more"), el("input", {
        type: "text", placeholder: "any metric", onchange: (event) => {
          const name = event.target.value.trim();
          if (name && !names().includes(name)) settings.more.push(name);
          event.target.value = "";
          refresh([...context.runs.keys()]);
        },
      })), known),
    problems, grid,
    el("p", { class: "hint" }, "Drag to zoom, double-click to zoom out, click a point to read the rows of its step; or Tab to a curve, ← →, Enter."));
  place.querySelector("input[type=text]").setAttribute("list", "metric-names");
  drawChips();
  refresh([...context.runs.keys()]);

  return {
    update(states) { drawChips(); refresh(states.map((state) => state.key)); },
    close() { closed = true; for (const panel of panels.values()) panel.close(); },
  };
}

function makePanel(name, title, context) {
  const value = el("output");
  const holder = el("div", { class: "plot" });
  const element = el("section", { class: "panel", "data-metric": name }, el("h2", {}, title, value), el("small", {}, name), holder);
  let plot = null;
  let runs = [];
  let latest = [];

  const width = () => Math.max(holder.clientWidth, 200);
  const observer = new ResizeObserver(() => plot?.setSize({ width: width(), height: HEIGHT }));
  observer.observe(holder);

  function open(index) {
    const step = latest[0]?.[index];
    if (step === undefined) return;
    const at = runs.findIndex((_, number) => latest[2 * number + 1][index] != null);
    const key = runs[Math.max(at, 0)];
    context.go({ run: key, step: Math.round(step), split: name.startsWith("val/") ? "eval" : null }, "rollouts");
  }

  function make() {
    const line = colour("--line"), dim = colour("--dim");
    const axis = { stroke: dim, grid: { stroke: line, width: 1 }, ticks: { stroke: line, size: 4 }, font: "11px system-ui" };
    const series = runs.flatMap((key) => {
      const stroke = colour(context.colourOf(key));
      const shared = { spanGaps: true, points: { size: 5, fill: stroke } };
      return [
        { ...shared, label: `${key} raw`, stroke: `${stroke}55`, width: 1, points: { show: false } },
        { ...shared, label: key, stroke, width: 1.75, value: (_, one) => figure(one) },
      ];
    });
    plot = new uPlot({
      width: width(), height: HEIGHT, series: [{ label: "step" }, ...series],
      scales: { x: { time: false }, y: settings.log ? { distr: 3 } : { range: (_, low, high) => rangeOf(low, high) } },
      axes: [{ ...axis, size: 26 }, { ...axis, size: 52, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : figure(tick))) }],
      legend: { show: false }, padding: [8, 10, 0, 0], cursor: { sync: { key: "overview" }, points: { size: 6 }, y: false },
      hooks: { setCursor: [(one) => tell(one.cursor.idx)] },
    }, latest, holder);
    let pressed = 0;
    plot.over.tabIndex = 0;
    plot.over.setAttribute("role", "application");
    plot.over.setAttribute("aria-label", `${title}: arrow keys move, Enter opens the rows of the step`);
    plot.over.addEventListener("mousedown", (event) => { pressed = event.clientX; });
    plot.over.addEventListener("click", (event) => {
      if (Math.abs(event.clientX - pressed) < 4 && plot.cursor.idx != null) open(plot.cursor.idx);
    });
    plot.over.addEventListener("keydown", (event) => {
      const moved = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      const last = latest[0].length - 1;
      const index = plot.cursor.idx ?? last;
      if (moved) {
        goto(Math.min(last, Math.max(0, index + moved)));
        event.preventDefault();
      } else if (event.key === "Enter") open(index);
    });
  }

  function goto(index) { plot.setCursor({ left: plot.valToPos(latest[0][index], "x"), top: 10 }); }

  // The value under the cursor; the last one without it.
  function tell(index) {
    const parts = runs.map((key, number) => {
      const values = latest[2 * number + 2];
      let at = index ?? values.length - 1;
      while (index == null && at > 0 && values[at] == null) at -= 1;
      return values[at] == null ? null : el("b", { style: { color: `var(${context.colourOf(key)})` } }, figure(values[at]));
    });
    fill(value, index == null ? null : el("small", {}, `step ${figure(latest[0][index])}`), parts);
  }

  return {
    element,
    draw(curves) {
      const keys = curves.map(([key]) => key);
      const walking = plot && document.activeElement === plot.over && plot.cursor.idx != null;
      const at = walking ? latest[0][plot.cursor.idx] : null;
      const positive = (values) => (settings.log ? values.map((one) => (one > 0 ? one : null)) : values);
      latest = uPlot.join(curves.map(([, curve]) => {
        const { steps, values } = lastOfStep(curve);
        const smooth = smoothed(values, settings.smoothing);
        return [steps, positive(settings.smoothing ? values : values.map(() => null)), positive(smooth)];
      }));
      if (plot && keys.join("\n") !== runs.join("\n")) {
        // Whoever walks along the curve by keyboard stays on it, at the same step.
        plot.destroy();
        runs = keys;
        make();
        if (at !== null) plot.over.focus();
      } else if (plot) plot.setData(latest);
      else {
        runs = keys;
        requestAnimationFrame(() => { if (!plot && element.isConnected) { make(); tell(null); } });
      }
      tell(plot?.cursor.idx ?? null);
      const index = at === null ? -1 : latest[0].indexOf(at);
      if (index >= 0) queueMicrotask(() => goto(index)); // after uPlot has laid its scales
    },
    reset() { plot?.destroy(); plot = null; },
    close() { observer.disconnect(); plot?.destroy(); plot = null; element.remove(); },
  };
}

// A constant is drawn in the middle, and zero at the bottom.
function rangeOf(low, high) {
  if (low === null || low === undefined) return [0, 1];
  if (low !== high) return uPlot.rangeNum(low, high, 0.1, true);
  return low === 0 ? [0, 1] : [low - Math.abs(low) / 2, low + Math.abs(low) / 2];
}

// The last value of each step, in the order of steps.
function lastOfStep({ steps, values }) {
  const last = new Map(steps.map((step, at) => [step, values[at]]));
  const order = [...last.keys()].sort((a, b) => a - b);
  return { steps: order, values: order.map((step) => last.get(step)) };
}

// Exponential moving average without the pull towards the first value.
function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0, scale = 0;
  return values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    scale = weight * scale + (1 - weight);
    return sum / scale;
  });
}
