// Asks the server: the token comes with the address that `meshrl view` printed and goes into a header.

const KEY = "meshrl.view.token";

export function takeToken() {
  const match = /^#token=([\w-]+)$/.exec(location.hash);
  if (match) {
    localStorage.setItem(KEY, match[1]);
    history.replaceState(null, "", location.pathname + "#/overview");
  }
}

const headers = () => ({ Authorization: `Bearer ${localStorage.getItem(KEY) ?? ""}` });

export async function post(path, body) {
  const answer = await fetch(`api/${path}`, {
    method: "POST", headers: { ...headers(), "Content-Type": "application/json" }, body: JSON.stringify(body),
  });
  const told = await answer.json();
  if (!answer.ok || told.problem) throw new Error(told.problem || told.detail || `status ${answer.status}`);
  return told;
}

export async function get(path, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters))
    for (const one of Array.isArray(value) ? value : [value]) query.append(name, one);
  const answer = await fetch(`api/${path}?${query}`, { headers: headers() });
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.detail ?? `status ${answer.status}`);
  return body;
}

export const of = (key, rest) => `runs/${encodeURIComponent(key)}/${rest}`;

// Server-sent events read with fetch, since EventSource sends no header. Begins again when the server was away.
export async function follow(onStates, onAway) {
  for (;;) {
    try {
      const answer = await fetch("api/events", { headers: headers() });
      if (!answer.ok) throw new Error((await answer.json()).detail);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        const parts = (rest + value).split("\n\n");
        rest = parts.pop();
        for (const part of parts) if (part.startsWith("data: ")) onStates(JSON.parse(part.slice(6)));
      }
      onAway("the server ended; trying again");
    } catch (error) {
      onAway(error instanceof TypeError ? "the server is away; trying again" : error.message);
    }
    await new Promise((wake) => setTimeout(wake, 2000));
  }
}
