// One conversation: its settings, its messages, and the answer under way. Knows nothing of the page.

import { streamChat } from "./api.js";

export class Chat {
  constructor(number, settings = {}) {
    this.number = number;
    this.system = settings.system ?? "";
    this.temperature = settings.temperature ?? 0.7;
    this.topK = settings.topK ?? 0;
    /** Keys that attention keeps (attn_topk); null leaves it to the server. */
    this.attnTopk = settings.attnTopk ?? null;
    this.maxTokens = settings.maxTokens ?? 512;
    this.messages = [];
    /** usage.attn_reads[0] and usage.attn_topk of the last answer, where its attention was top-k. */
    this.reads = null;
    this.topk = null;
    this.requestId = null;
    this.abort = null;
    /** Called after every change. */
    this.changed = () => {};
  }

  get title() {
    const first = this.messages.find((message) => message.role === "user");
    return first ? first.text.slice(0, 40) : `Chat ${this.number}`;
  }

  get busy() {
    return this.abort !== null;
  }

  stop() {
    this.abort?.abort();
  }

  /** Send a message and follow the answer to its end. */
  async send(text) {
    if (this.busy) return;
    this.messages.push({ role: "user", text });
    const body = {
      messages: this.#history(),
      temperature: this.temperature,
      top_k: this.topK,
      max_tokens: this.maxTokens,
      attn_explain: true,
    };
    if (this.attnTopk !== null) body.attn_topk = this.attnTopk;
    const answer = { role: "assistant", text: "", growing: true, facts: "", error: "" };
    this.messages.push(answer);
    this.abort = new AbortController();
    this.changed();
    const start = performance.now();
    let first = null;
    let usage = null;
    try {
      for await (const chunk of streamChat(body, this.abort.signal)) {
        if (!chunk.object) {
          this.requestId = chunk.id;
          continue;
        }
        usage = chunk.usage ?? usage;
        const piece = chunk.choices[0]?.delta?.content;
        if (piece) {
          first ??= performance.now();
          answer.text += piece;
          this.changed();
        }
      }
      answer.facts = facts(usage, start, first);
      this.reads = usage?.attn_reads?.[0] ?? null;
      this.topk = usage?.attn_topk ?? null;
    } catch (error) {
      if (error.name === "AbortError") answer.facts = "stopped";
      else answer.error = error.message;
    } finally {
      answer.growing = false;
      this.abort = null;
      this.requestId = null;
      this.changed();
    }
  }

  /** What the model is given: the system prompt, and every turn that has an answer or asks for one. */
  #history() {
    const turns = this.messages
      .filter((message) => !message.error)
      .map(({ role, text }) => ({ role, content: text }));
    return this.system ? [{ role: "system", content: this.system }, ...turns] : turns;
  }
}

function facts(usage, start, first) {
  if (!usage) return "";
  const tokens = usage.completion_tokens;
  const cached = usage.prompt_tokens_details.cached_tokens;
  const parts = [`${tokens} token${tokens === 1 ? "" : "s"}`];
  if (first !== null) {
    const seconds = (performance.now() - first) / 1000;
    if (tokens > 1 && seconds > 0) parts.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
    parts.push(`first after ${((first - start) / 1000).toFixed(2)} s`);
  }
  parts.push(`${cached} of ${usage.prompt_tokens} prompt tokens cached`);
  return parts.join(" · ");
}
