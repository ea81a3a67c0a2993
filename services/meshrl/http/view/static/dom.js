// Makes elements. Text of models and data only ever becomes text nodes: nothing here parses markup.

export function el(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") made.className = value;
    else if (name === "style") Object.assign(made.style, value);
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name in made && !name.startsWith("aria")) made[name] = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

export function fill(parent, ...children) {
  parent.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
}

export const problemLine = (text) => (text ? el("p", { class: "problem", role: "alert" }, text) : null);

export function table(columns, rows, caption) {
  const head = el("tr", {}, columns.map((name) => el("th", { scope: "col" }, name)));
  const body = rows.map((cells) =>
    el("tr", {}, cells.map((cell, at) => el("td", { "data-label": columns[at] }, cell ?? "–"))));
  return el("div", { class: "scroll" }, el("table", { "aria-label": caption }, el("thead", {}, head), el("tbody", {}, body)));
}

export function select(label, options, value, onchange) {
  const box = el("select", { onchange: (event) => onchange(event.target.value) },
    options.map(([key, text]) => el("option", { value: key }, text)));
  box.value = value;
  return el("label", {}, el("span", {}, label), box);
}

export const counted = (count, one, many = `${one}s`) => `${figure(count)} ${count === 1 ? one : many}`;

export const figure = (value) => {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (value === 0 || (Number.isInteger(value) && size < 1e7)) return value.toLocaleString("en");
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2);
  return value.toLocaleString("en", { maximumSignificantDigits: size >= 1000 ? 5 : 4 });
};

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
