// Requests to the server this page came from. Addresses are relative, so that a prefix of a proxy stays in force.
"use strict";

/** An error in words for the user. `status` is HTTP's, 0 where there was no answer. `asks`: no key was given yet. */
class Refusal extends Error {
  constructor(message, status = 0, asks = false) {
    super(message);
    this.status = status;
    this.asks = asks;
  }
}

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** What went wrong and how to mend it, from HTTP's status, the server's own words and its Retry-After. */
function explain(status, said, retryAfter, hasKey) {
  const words = said ? ` The server says: ${said}` : "";
  const seconds = Number.parseFloat(retryAfter);
  const when = seconds > 0 ? `in ${Math.ceil(seconds)} s` : "in a moment";
  if (status === 401 && !hasKey) return "This server asks for an API key. Enter it under “API key”, then run.";
  if (status === 401 || status === 403) {
    return `The server did not accept the API key (${status}). Enter the right one under “API key”.`;
  }
  if (status === 429) return `The server is busy and took no more requests (429). Try again ${when}.${words}`;
  if (status === 503) return `The server takes no requests now (503). Try again ${when}.${words}`;
  return `The server refused the request (${status}).${words}`;
}

async function refusal(response, hasKey) {
  let said = "";
  try {
    const body = await response.json();
    said = body.error?.message ?? (typeof body.detail === "string" ? body.detail : "");
  } catch {
    // Not JSON: a proxy's page, say. The status tells enough.
  }
  const words = explain(response.status, said, response.headers.get("Retry-After"), hasKey);
  return new Refusal(words, response.status, response.status === 401 && !hasKey);
}

async function request(path, options) {
  if (/[^\x20-\x7e]/.test(options.headers.Authorization ?? "")) {
    throw new Refusal("The API key has a character that no key can have: accents, blanks of other kinds, quotes. Copy it again.", 401);
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal("There is no connection to the server. Is it still running?");
  }
  if (!response.ok) throw await refusal(response, Boolean(options.headers.Authorization));
  return response;
}

/** The parsed chunks of a streamed answer, in order. Throws Refusal, or AbortError when `signal` aborts. */
async function* chunks(path, body, key, signal) {
  const response = await request(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers(key) },
    body: JSON.stringify(body),
    signal,
  });
  const lost = new Refusal("The connection was lost: the text ends where it was cut.");
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        throw error.name === "AbortError" ? error : lost;
      }
      if (part.done) throw lost; // a whole answer ends with [DONE]
      const lines = (rest + part.value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        let chunk;
        try {
          chunk = JSON.parse(data);
        } catch {
          throw new Refusal("The server sent something that is not JSON.");
        }
        if (chunk.error) throw new Refusal(`The server gave up on the request. It says: ${chunk.error.message}`);
        yield chunk;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // closes the connection: the server frees the request's place
  }
}

/** GET /v1/models: its list. Throws Refusal. */
async function models(key) {
  return (await (await request("v1/models", { headers: headers(key) })).json()).data ?? [];
}

/** POST /api/show: the template and the capabilities of a model, which it does not load; null where it cannot be had. */
async function about(model, key) {
  const sent = { method: "POST", headers: { "Content-Type": "application/json", ...headers(key) }, body: JSON.stringify({ model }) };
  try {
    return await (await request("api/show", sent)).json();
  } catch {
    return null;
  }
}

/** POST /v1/foretell/explain: the first steps of a text, taken apart. Throws Refusal. */
async function steps(body, key) {
  const sent = { method: "POST", headers: { "Content-Type": "application/json", ...headers(key) }, body: JSON.stringify(body) };
  return (await request("v1/foretell/explain", sent)).json();
}

/** The gauges of GET /metrics named foretell:*, by name without the prefix; null where there are none. Under ``plan``: what
    auto would do, [{ method, context, concurrency, guesses, speedup }]. model: whose they are, of several. */
async function gauges(key, model) {
  const text = await (await request("metrics", { headers: headers(key) })).text();
  const found = {};
  const cells = new Map();
  for (const [, name, labels, value] of text.matchAll(/^foretell:(\w+)(?:\{([^}\n]*)\})? (\S+)/gm)) {
    if (model && labels?.includes('model_name="') && !labels.includes(`model_name="${model}"`)) continue;
    const [, what] = name.match(/^planned_(guesses|speedup)$/) || [];
    if (!what) {
      found[name] = Number(value);
      continue;
    }
    const cell = cells.get(labels) || Object.fromEntries([...labels.matchAll(/(\w+)="([^"]*)"/g)].map(([, k, v]) => [k, v]));
    cells.set(labels, { ...cell, [what]: Number(value) });
  }
  if (!Object.keys(found).length) return null;
  return { ...found, plan: [...cells.values()] };
}
