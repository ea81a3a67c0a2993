// What each warning means: the paragraphs of docs/how-to/learning-fails.md.

import { el, fill, problemLine } from "./dom.js";
import { get } from "./api.js";

// Text with `code` and [links](to pages of the documentation), which are not served here.
function words(text) {
  return text.replace(/\[([^\]]*)\]\(([^)]*)\)/g, "$1 (docs/how-to/$2)").split("`")
    .map((part, at) => (at % 2 ? el("code", {}, part) : part));
}

export default function help(place, context) {
  let signs = [];
  function draw(parameters) {
    const chosen = parameters.get("sign");
    fill(place, el("h1", {}, "When a run does not learn"), signs.map((sign) =>
      el("section", { class: "card", id: `sign-${sign.key}`, "aria-current": sign.key === chosen ? "true" : undefined },
        el("h2", {}, sign.title),
        el("p", {}, words(sign.means)),
        el("p", { class: "note" }, "Shown by ", sign.metrics.map((name, at) => [at ? ", " : "", el("code", {}, name)])),
        el("pre", {}, sign.command),
        el("ul", {}, sign.change.map((one) => el("li", {}, words(one)))))));
    if (chosen) document.getElementById(`sign-${chosen}`)?.scrollIntoView();
  }
  get("signs").then((answer) => { signs = answer; draw(context.parameters); })
    .catch((error) => fill(place, problemLine(error.message)));
  return { changed(next) { draw(next.parameters); return true; } };
}
