// The page: wires chats and the sheet to the document.

import { forgetCache, get } from "./api.js";
import { Chat } from "./chat.js";
import { drawReads, sayReads } from "./reads.js";
import { draw } from "./sheet.js";

const POLL_MS = 500;
const at = (id) => document.getElementById(id);

const chats = [];
/** The elements of chats and of messages. */
const tabs = new Map();
const boxes = new WeakMap();
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
  // What is clicked must stay where it is while answers grow, so elements are changed, not made anew.
  at("tabs").append(...chats.filter((chat) => !tabs.has(chat)).map(newTab));
  for (const chat of chats) {
    const tab = tabs.get(chat);
    say(tab, (chat.busy ? "… " : "") + chat.title);
    tab.setAttribute("aria-selected", String(chat === current));
  }
}

function newTab(chat) {
  const tab = document.createElement("button");
  tab.type = "button";
  tab.role = "tab";
  tab.addEventListener("click", () => open(chat));
  tabs.set(chat, tab);
  return tab;
}

function showMessages() {
  const list = at("messages");
  const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
  const shown = current.messages.length ? current.messages.map(boxOf) : [empty()];
  const same = list.childElementCount === shown.length && shown.every((box, i) => box === list.children[i]);
  if (!same) list.replaceChildren(...shown);
  if (atEnd) list.scrollTop = list.scrollHeight;
  at("send").hidden = current.busy;
  at("stop").hidden = !current.busy;
  showReads();
}

function empty() {
  const hint = document.createElement("p");
  hint.className = "empty";
  hint.textContent =
    "Say something. Open a second chat with the same system prompt, and the sheet shows the blocks that both read.";
  return hint;
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

/** The element of a message, as the message is now. */
function boxOf(message) {
  let box = boxes.get(message);
  if (!box) {
    box = document.createElement("div");
    box.append(span("text"), span("facts"));
    boxes.set(message, box);
  }
  box.className = `message ${message.role}`;
  box.classList.toggle("growing", Boolean(message.growing));
  box.classList.toggle("error", Boolean(message.error));
  const [text, facts] = box.children;
  say(text, message.error ? `${message.text} ${message.error}`.trim() : message.text);
  say(facts, message.facts ?? "");
  facts.hidden = !message.facts;
  return box;
}

function span(name) {
  const made = document.createElement("span");
  made.className = name;
  return made;
}

/** Set a text where it is another one: a selection in it survives. */
function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
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
    at("n-speed").textContent = speed.toFixed(speed > 0 && speed < 10 ? 1 : 0);
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
at("new").addEventListener("click", newChat);
at("reset").addEventListener("click", () => {
  forgetCache().then(look, (error) => (at("sheet-text").textContent = error.message));
});

newChat();
sayModel();
lookForever();
