// The chat: one conversation, kept in this page, streamed from /v1/chat/completions.

import { NeedsKey, request } from "/admin/server.js";
import { span } from "/admin/words.js";

const at = (id) => document.getElementById(id);
let said = [];
let running = null;

function show(role, text) {
  const box = document.createElement("div");
  box.className = `said ${role}`;
  const body = document.createElement("span");
  body.textContent = text;
  box.append(body);
  at("messages").append(box);
  at("messages").scrollTop = at("messages").scrollHeight;
  return box;
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (block.startsWith("data: ") && block !== "data: [DONE]") yield JSON.parse(block.slice(6));
    }
  }
}

async function ask(text, model, onKey) {
  const system = at("system").value.trim();
  said.push({ role: "user", content: text });
  show("user", text);
  const box = show("assistant", "");
  box.classList.add("busy");
  running = new AbortController();
  at("send").hidden = true;
  at("halt").hidden = false;
  const body = { model, stream: true, stream_options: { include_usage: true }, messages: system ? [{ role: "system", content: system }, ...said] : said };
  if (at("temperature").value) body.temperature = Number(at("temperature").value);
  if (at("max-tokens").value) body.max_tokens = Number(at("max-tokens").value);
  const began = performance.now();
  let first = null, usage = null, answer = "", reason = "", drawing = null;
  const draw = () => {
    const list = at("messages"), below = list.scrollHeight - list.scrollTop - list.clientHeight < 60;
    box.firstChild.textContent = answer;
    if (below) list.scrollTop = list.scrollHeight;
  };
  try {
    const response = await begin(body);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const choice = event.choices?.[0];
      reason = choice?.finish_reason ?? reason;
      const piece = (choice?.delta?.reasoning_content ?? "") + (choice?.delta?.content ?? "");
      if (!piece) continue;
      first ??= performance.now();
      answer += piece;
      // At most once a frame: a fast model brings more pieces than a page can lay out.
      drawing ??= requestAnimationFrame(() => { drawing = null; draw(); });
    }
  } catch (error) {
    if (error instanceof NeedsKey) onKey();
    else if (error.name === "AbortError") reason = "stopped";
    else { box.classList.add("failed"); box.firstChild.textContent = answer || error.message; }
  }
  if (drawing !== null) cancelAnimationFrame(drawing);
  if (!box.classList.contains("failed")) draw();
  if (answer) said.push({ role: "assistant", content: answer });
  else said.pop();
  const seconds = (performance.now() - (first ?? began)) / 1000;
  const note = document.createElement("small");
  const parts = [];
  if (usage) parts.push(`${usage.completion_tokens} tokens`, `${((usage.completion_tokens - 1) / Math.max(seconds, 1e-3)).toFixed(1)} per second`);
  if (first) parts.push(`first after ${span((first - began) / 1000)}`);
  if (reason && reason !== "stop") parts.push(reason);
  note.textContent = parts.join(" · ");
  box.append(note);
  box.classList.remove("busy");
  at("messages").scrollTop = at("messages").scrollHeight;
  at("send").hidden = false;
  at("halt").hidden = true;
  running = null;
}

async function begin(body) {
  const answer = await request("/v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal: running.signal });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  return answer;
}

export function startChat(model, onKey) {
  const question = at("question");
  question.addEventListener("input", () => { question.style.height = "auto"; question.style.height = `${question.scrollHeight + 2}px`; });
  question.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); at("ask").requestSubmit(); }
  });
  at("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = question.value.trim();
    if (!text || running) return;
    question.value = "";
    question.style.height = "auto";
    ask(text, model(), onKey);
  });
  at("halt").addEventListener("click", () => running?.abort());
  at("forget").addEventListener("click", () => { running?.abort(); said = []; at("messages").replaceChildren(); });
}
