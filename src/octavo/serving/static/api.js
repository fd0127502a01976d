// What the page asks of its own server.

/** The sentence of an error answer. */
async function sentence(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

export async function get(path) {
  const response = await fetch(path);
  if (!response.ok) throw new Error(await sentence(response));
  return response.json();
}

export async function forgetCache() {
  const response = await fetch("/v1/cache", { method: "DELETE" });
  if (!response.ok) throw new Error(await sentence(response));
}

/** The chunks of a streamed chat, parsed. Gives {id} first: the request's name in the engine. */
export async function* streamChat(body, signal) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw new Error(await sentence(response));
  yield { id: response.headers.get("X-Request-Id") };
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    yield chunk;
  }
}

/** The data of each server-sent event of a body. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      const parts = text.split("\n\n");
      text = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
