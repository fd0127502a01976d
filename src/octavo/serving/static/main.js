// The page: wires chats and the sheet to the document.

import { forgetCache, get } from "./api.js";
import { Chat } from "./chat.js";
import { drawReads, sayReads } from "./reads.js";
import { draw } from "./sheet.js";

const POLL_MS = 500;
const at = (id) => document.getElementById(id);

const chats = [];
let current = null;
let lastLook = null;
let shownReads = null;

// ---- chats

function newChat() {
  // A new chat starts from the system prompt and settings of the one before.
  const chat = new Chat(chats.length + 1, current ?? {});
  chat.changed = () => {
    if (chat === current) showMessages();
    showTabs();
  };
  chats.push(chat);
  open(chat);
}

function open(chat) {
  current = chat;
  at("system").value = chat.system;
  at("temperature").value = chat.temperature;
  at("top-k").value = chat.topK;
  at("attn-topk").value = chat.attnTopk ?? "";
  at("max-tokens").value = chat.maxTokens;
  showTabs();
  showMessages();
  at("input").focus();
}

function showTabs() {
  const tabs = chats.map((chat) => {
    const tab = document.createElement("button");
    tab.type = "button";
    tab.role = "tab";
    tab.textContent = (chat.busy ? "… " : "") + chat.title;
    tab.setAttribute("aria-selected", String(chat === current));
    tab.addEventListener("click", () => open(chat));
    return tab;
  });
  const add = document.createElement("button");
  add.type = "button";
  add.id = "new";
  add.textContent = "New chat";
  add.addEventListener("click", newChat);
  at("tabs").replaceChildren(...tabs, add);
}

function showMessages() {
  const list = at("messages");
  const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
  const shown = current.messages.map(element);
  if (!shown.length) {
    const empty = document.createElement("p");
    empty.className = "empty";
    empty.textContent =
      "Say something. Open a second chat with the same system prompt, and the sheet shows the blocks that both read.";
    shown.push(empty);
  }
  list.replaceChildren(...shown);
  if (atEnd) list.scrollTop = list.scrollHeight;
  at("send").hidden = current.busy;
  at("stop").hidden = !current.busy;
  showReads();
}

function showReads() {
  const { reads, topk } = current;
  // It is asked for at every piece of an answer.
  if (reads === shownReads) return;
  shownReads = reads;
  at("reads-figure").hidden = !reads;
  if (!reads) return;
  drawReads(at("reads"), reads);
  at("reads-text").textContent = sayReads(reads, topk);
}

function element(message) {
  const box = document.createElement("div");
  box.className = `message ${message.role}`;
  box.classList.toggle("growing", Boolean(message.growing));
  const text = document.createElement("span");
  text.className = "text";
  text.textContent = message.text;
  box.append(text);
  if (message.error) {
    box.classList.add("error");
    text.textContent = `${message.text} ${message.error}`.trim();
  }
  if (message.facts) {
    const facts = document.createElement("span");
    facts.className = "facts";
    facts.textContent = message.facts;
    box.append(facts);
  }
  return box;
}

function number(id, fallback) {
  const value = at(id).valueAsNumber;
  return Number.isFinite(value) ? value : fallback;
}

function readSettings() {
  current.system = at("system").value;
  current.temperature = number("temperature", 0.7);
  current.topK = number("top-k", 0);
  current.attnTopk = number("attn-topk", null);
  current.maxTokens = number("max-tokens", 512);
}

function send() {
  const text = at("input").value.trim();
  if (!text || current.busy) return;
  at("input").value = "";
  readSettings();
  current.send(text);
}

// ---- the engine

async function look() {
  if (document.hidden) return;
  let view;
  try {
    view = await get("/v1/cache");
  } catch (error) {
    at("sheet-text").textContent = error.message;
    return;
  }
  const mine = new Set(current?.requestId ? [current.requestId] : []);
  at("sheet-text").textContent = draw(at("sheet"), view, mine);
  at("n-running").textContent = view.requests.running;
  at("n-waiting").textContent = view.requests.waiting;
  at("n-hits").textContent = `${(100 * view.prefix_cache.hit_rate).toFixed(0)}%`;
  const now = performance.now();
  if (lastLook) {
    const speed = (1000 * (view.tokens.generated - lastLook.generated)) / (now - lastLook.time);
    at("n-speed").textContent = speed.toFixed(speed < 10 ? 1 : 0);
  }
  lastLook = { time: now, generated: view.tokens.generated };
}

async function lookForever() {
  for (;;) {
    await look();
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

async function sayModel() {
  try {
    const [model] = (await get("/v1/models")).data;
    at("model").textContent = `${model.id}, context ${model.max_model_len} tokens`;
  } catch (error) {
    at("model").textContent = error.message;
  }
}

// ---- wiring

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
at("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
at("stop").addEventListener("click", () => current.stop());
for (const id of ["system", "temperature", "top-k", "attn-topk", "max-tokens"]) at(id).addEventListener("change", readSettings);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") current.stop();
  else if (event.altKey && event.code === "KeyN") {
    event.preventDefault();
    newChat();
  } else if (event.altKey && /^Digit[1-9]$/.test(event.code)) {
    const chat = chats[Number(event.code.at(-1)) - 1];
    if (chat) {
      event.preventDefault();
      open(chat);
    }
  }
});
at("reset").addEventListener("click", () => {
  forgetCache().then(look, (error) => (at("sheet-text").textContent = error.message));
});

newChat();
sayModel();
lookForever();
