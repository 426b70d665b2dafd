// The server's HTTP API. Every failure is an Error with the server's own words.

function headers(key) {
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

async function checked(response) {
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const error = new Error(body?.error?.message ?? `the server answered with status ${response.status}`);
  error.status = response.status;
  throw error;
}

/** What the server is: its model, sizes and depth. */
export async function serverInfo(key) {
  const response = await checked(await fetch("server_info", { headers: headers(key) }));
  return response.json();
}

/** The chunks of a streamed answer, as they come. `warn` takes the fields of the request that had no effect, if any. */
export async function* stream(path, body, key, signal, warn) {
  const request = { method: "POST", headers: headers(key), body: JSON.stringify(body), signal };
  const response = await checked(await fetch(path, request));
  const ignored = response.headers.get("Warning")?.match(/"ignored: (.*)"/);
  if (ignored) warn(ignored[1]);
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    yield chunk;
  }
  throw new Error("the connection ended before the answer did");
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const complete = (text + value).split("\n\n");
    text = complete.pop();
    for (const event of complete) {
      if (event.startsWith("data: ")) yield event.slice("data: ".length); // else a ping
    }
  }
}
