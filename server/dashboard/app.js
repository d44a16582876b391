// The page: asks the server once a second how it stands and shows it. The chat is in chat.js, plots in charts.js, the
// prefixes in prefixes.js.

import { startChat } from "/admin/chat.js";
import { Chart } from "/admin/charts.js";
import { showChoice, showModels } from "/admin/models.js";
import { PrefixView } from "/admin/prefixes.js";
import { NeedsKey, post, request, setKey } from "/admin/server.js";
import { count, percent, size, span } from "/admin/words.js";

const INTERVAL = 1000, NOTICE = 6000, KEPT_LINES = 1500, SHOWN_STREAMS = 200;
const VIEWS = ["overview", "streams", "prefixes", "chat", "log"];
const PHASES = { running: "green", prefilling: "yellow", waiting: "blue", tokenizing: "dim" };
const at = (id) => document.getElementById(id);
const page = { samples: [], logOffset: 0, lines: [], minutes: 5, level: "all", paused: false, state: null, view: "overview", model: "", told: 0 };

function make(tag, name = "", text = "") {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== "") made.textContent = text;
  return made;
}

const grows = (of) => (now, before) => Math.max(0, (now[of] - before[of]) / Math.max(now.at - before.at, 1e-3));
const charts = [
  new Chart(at("charts"), "Throughput, tokens per second", [
    { name: "generated", color: "violet", of: grows("tokens") },
    { name: "prefilled", color: "blue", of: grows("prompt_tokens") },
  ], count),
  new Chart(at("charts"), "Rows in the engine", [
    { name: "running", color: "green", of: (now) => now.running },
    { name: "prefilling", color: "yellow", of: (now) => now.prefilling },
    { name: "waiting", color: "blue", of: (now) => now.waiting },
  ], count),
  new Chart(at("charts"), "Time to first token", [{ name: "mean", color: "yellow", of: (now) => now.ttft || null }], span),
  new Chart(at("charts"), "Between tokens", [
    { name: "mean", color: "green", of: (now) => now.itl || null },
    { name: "p95", color: "red", of: (now) => now.itl_p95 || null },
  ], span),
];

// Asking.

async function look() {
  const since = page.samples.at(-1)?.at ?? 0;
  const shown = page.view === "streams" ? SHOWN_STREAMS : 0;
  const log = page.view === "log" ? page.logOffset : -1;
  const model = page.model;
  const answer = await request(`/admin/api/state?since=${since}&streams=${shown}&log=${log}${of("&")}`);
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  const state = await answer.json();
  if (page.model !== model) return;  // another one was chosen meanwhile
  const columns = state.samples.columns;
  for (const row of state.samples.rows) page.samples.push(Object.fromEntries(columns.map((name, i) => [name, row[i]])));
  page.samples.splice(0, page.samples.length - 920);
  if (state.log) { page.logOffset = state.log.offset; addLines(state.log.lines); }
  page.state = state;
  show(state);
  if (page.view === "prefixes") { await prefixes.look(of("?")); prefixes.showTiers(tiers(state.prefix)); }
}

const of = (sign) => (page.model ? `${sign}model=${encodeURIComponent(page.model)}` : "");

function lookAt(model) {
  page.model = model;
  page.samples = [];
  rows.forEach((row) => row.box.remove());  // another model's streams may have the same numbers
  rows.clear();
  look().catch(() => {});
}

async function turn() {
  let wait = INTERVAL;
  try {
    if (!document.hidden) await look();
    if (Date.now() > page.told) at("banner").hidden = true;
  } catch (error) {
    if (error instanceof NeedsKey) { askForKey(); return; }
    at("banner").textContent = `No answer from the server: ${error.message}`;
    at("banner").hidden = false;
    setStatus("no answer");
    wait = 2 * INTERVAL;
  }
  setTimeout(turn, wait);
}

function askForKey() {
  const dialog = at("key-dialog");
  if (dialog.open) return;
  setStatus("locked");
  dialog.showModal();
}

at("key-form").addEventListener("submit", () => { setKey(at("key").value); at("key").value = ""; turn(); });
at("key-dialog").addEventListener("cancel", (event) => event.preventDefault());

// Showing.

function setStatus(status) {
  const pill = at("status");
  pill.textContent = status;
  pill.className = `pill ${status === "ok" ? "ok" : ["loading", "draining", "degraded", "locked"].includes(status) ? "wait" : "bad"}`;
}

function show(state) {
  setStatus(state.status);
  at("model").textContent = state.model;
  showChoice(state, lookAt);
  at("model").title = state.context ? `context ${state.context} tokens` : "";
  const open = Object.values(state.phases).reduce((sum, value) => sum + value, 0);
  at("count").textContent = open || "";
  document.title = open ? `(${open}) Callboard` : "Callboard";
  if (page.view === "overview") showOverview(state);
  if (page.view === "streams") showStreams(state, open);
}

function showOverview(state) {
  showModels(state, act);
  const samples = page.samples, last = samples.at(-1), before = samples.at(-2);
  const speed = last && before ? grows("tokens")(last, before) : 0;
  const requests = Object.entries(state.requests);
  const bad = requests.filter(([key]) => /^(failed|rejected)/.test(key)).reduce((sum, [, value]) => sum + value, 0);
  const done = requests.reduce((sum, [, value]) => sum + value, 0);
  const prefix = state.prefix, hits = prefix.memory_tokens + prefix.ssd_tokens;
  const memory = state.actors.reduce((sum, actor) => sum + actor.memory, 0);
  const recent = (of) => samples.slice(-30).map((sample) => sample[of]).filter((value) => value > 0).at(-1) ?? 0;
  const tiles = [
    ["Tokens per second", count(speed), "", `${count(state.generated)} since the start`],
    ["Running streams", count(state.engine.running), "", `${state.engine.prefilling} prefilling, ${state.engine.waiting} waiting`],
    ["First token", span(recent("ttft")), "", "mean, latest"],
    ["Between tokens", span(recent("itl")), "", `95 % below ${span(recent("itl_p95"))}`],
    ["Prefix hits", percent(hits / Math.max(hits + prefix.computed_tokens, 1)), "", `${count(hits)} tokens not computed`],
    ["Requests", count(done), "", bad ? `${count(bad)} failed or refused` : "none failed"],
    ["Memory", size(memory), "", `up ${span(state.up)}`],
  ];
  at("tiles").replaceChildren(...tiles.map(([name, value, unit, note]) => {
    const tile = make("div", "tile"), strong = make("strong", "", value);
    tile.append(make("span", "", name), strong, ...(unit ? [make("small", "", unit)] : []), make("em", "", note));
    return tile;
  }));
  const end = Math.max(last?.at ?? 0, state.now - 1);
  charts.forEach((chart) => chart.draw(samples, end - page.minutes * 60, end));
  at("actors").replaceChildren(...state.actors.map((actor) => {
    const card = make("div", "actor"), head = make("b"), list = make("dl");
    head.append(make("i", `dot ${actor.state}`), actor.name);
    for (const [name, value] of [["state", actor.state], ["pid", actor.pid], ["epoch", actor.epoch], ["memory", size(actor.memory)], ["CPU time", span(actor.cpu)], ["restarts", actor.restarts]]) {
      list.append(make("dt", "", name), make("dd", "", String(value)));
    }
    card.append(head, list);
    return card;
  }));
  at("hits").textContent = `${percent(hits / Math.max(hits + prefix.computed_tokens, 1))} of ${count(hits + prefix.computed_tokens)} tokens found`;
  at("prefix").replaceChildren(...tiers(prefix));
  const parts = [["model", state.engine.in_model, "violet"], ["Python", state.engine.in_python, "yellow"], ["sockets", state.engine.in_sockets, "blue"]];
  const sum = parts.reduce((total, part) => total + part[1], 0) || 1;
  at("engine-time").replaceChildren(
    meter("Steps", `${count(state.engine.step)} · ${size(state.engine.memory)} in MLX`, parts.map(([, value, color]) => [value / sum, color])),
    meter("", parts.map(([name, value]) => `${name} ${percent(value / sum)}`).join(" · "), null),
  );
}

function tiers(prefix) {
  const sum = Math.max(prefix.memory_tokens + prefix.ssd_tokens + prefix.computed_tokens, 1);
  return [
    meter("Memory", `${size(prefix.memory_bytes)} of ${size(prefix.memory_limit)} · ${prefix.memory_blocks} blocks`, [[prefix.memory_bytes / Math.max(prefix.memory_limit, 1), "violet"]]),
    meter("SSD", prefix.ssd_limit ? `${size(prefix.ssd_bytes)} of ${size(prefix.ssd_limit)}` : "off", [[prefix.ssd_bytes / Math.max(prefix.ssd_limit, 1), "blue"]]),
    meter("Prompt tokens", `${count(prefix.memory_tokens)} memory · ${count(prefix.ssd_tokens)} SSD · ${count(prefix.computed_tokens)} computed`,
      [[prefix.memory_tokens, "violet"], [prefix.ssd_tokens, "blue"], [prefix.computed_tokens, "line"]].map(([value, color]) => [value / sum, color])),
    meter("Waiting to be written", size(prefix.queued_bytes) + (prefix.faults ? ` · ${prefix.faults} faults` : ""), []),
  ];
}

function meter(name, text, parts) {
  const box = make("div", "meter"), line = make("div");
  line.append(make("span", "", name), make("span", "", text));
  box.append(line);
  if (parts) {
    const track = make("div", "track");
    for (const [part, color] of parts) {
      const piece = make("i");
      piece.style.width = `${Math.min(1, Math.max(0, part)) * 100}%`;
      piece.style.setProperty("--c", `var(--${color})`);
      track.append(piece);
    }
    box.append(track);
  }
  return box;
}

// Streams: rows are kept, so that a button doesn't vanish under a finger.

const rows = new Map();

function showStreams(state, open) {
  const list = at("stream-list");
  const seen = new Set();
  for (const stream of state.streams) {
    seen.add(stream.rid);
    let row = rows.get(stream.rid);
    if (!row) {
      row = streamRow(stream.rid);
      rows.set(stream.rid, row);
      list.append(row.box);
    }
    row.update(stream);
  }
  for (const [rid, row] of rows) {
    if (!seen.has(rid)) { row.box.remove(); rows.delete(rid); }
  }
  at("no-streams").hidden = open > 0;
  at("cancel-all").hidden = !state.streams.length;
  const phases = Object.entries(state.phases).filter(([, value]) => value).map(([phase, value]) => `${value} ${phase}`).join(", ");
  at("phases").textContent = open > state.streams.length ? `${phases}; the first ${state.streams.length} are shown` : phases;
}

function streamRow(rid) {
  const box = make("div", "stream"), phase = make("span", "phase"), label = make("span", "label");
  const name = make("span"), from = make("small"), progress = make("div", "progress"), text = make("small", "note");
  const track = make("div", "track"), done = make("i"), figures = [make("span", "figure"), make("span", "figure"), make("span", "figure")];
  const cancel = make("button", "danger quiet", "Cancel");
  box.dataset.rid = rid;
  cancel.type = "button";
  cancel.addEventListener("click", () => { cancel.disabled = true; act(post(`/admin/api/streams/${rid}/cancel${of("?")}`)); });
  label.append(name, from);
  track.append(done);
  progress.append(text, track);
  box.append(phase, label, progress, ...figures, cancel);
  const figure = (index, value, note) => figures[index].replaceChildren(value, make("small", "", note));
  return {
    box,
    update(stream) {
      phase.textContent = stream.phase;
      phase.style.setProperty("--c", `var(--${PHASES[stream.phase] ?? "dim"})`);
      name.textContent = stream.label || `stream ${rid}`;
      label.title = stream.label;
      from.textContent = stream.client;
      text.textContent = `${count(stream.prompt_tokens)} prompt${stream.cached_tokens ? ` (${count(stream.cached_tokens)} found)` : ""} + ${count(stream.tokens)} of ${count(stream.budget)}`;
      done.style.width = `${100 * stream.tokens / Math.max(stream.budget, 1)}%`;
      figure(0, stream.speed ? stream.speed.toFixed(1) : "–", "tokens/s");
      figure(1, stream.ttft >= 0 ? span(stream.ttft) : "–", "first token");
      figure(2, span(stream.seconds), "age");
    },
  };
}

at("cancel-all").addEventListener("click", async () => {
  const rids = [...rows.keys()];
  if (await confirmed(`Cancel ${rids.length} ${rids.length === 1 ? "stream" : "streams"}?`)) {
    act(Promise.all(rids.map((rid) => post(`/admin/api/streams/${rid}/cancel${of("?")}`))));
  }
});
at("replace").addEventListener("click", async () => {
  if (await confirmed("Replace the engine? Streams pause and go on in the new one.")) act(post(`/admin/api/engine/replace${of("?")}`));
});

function act(work) {
  work.catch((error) => {
    if (error instanceof NeedsKey) { askForKey(); return; }
    at("banner").textContent = error.message;
    at("banner").hidden = false;
    page.told = Date.now() + NOTICE;
  });
}

function confirmed(text) {
  const dialog = at("confirm");
  at("confirm-text").textContent = text;
  dialog.showModal();
  // The close event comes a moment later, when the next question may be open already: an answer is what was pressed.
  return new Promise((done) => {
    const over = new AbortController();
    const answer = (yes) => { over.abort(); done(yes); };
    dialog.addEventListener("submit", (event) => answer(event.submitter.value === "yes"), { signal: over.signal });
    dialog.addEventListener("close", () => { if (!dialog.open) answer(false); }, { signal: over.signal });
  });
}

const prefixes = new PrefixView();

// The log.

const ANSI = /\u001b\[[0-9;]*m/g;

function addLines(lines) {
  if (!lines.length) return;
  for (const line of lines) page.lines.push(parse(line.replace(ANSI, "")));
  page.lines.splice(0, page.lines.length - KEPT_LINES);
  if (!page.paused) showLines();
}

function parse(line) {
  try {
    const { event, level, timestamp, actor, pid: _pid, epoch: _epoch, ...rest } = JSON.parse(line);
    const others = Object.entries(rest).map(([key, value]) => `${key}=${typeof value === "string" ? value : JSON.stringify(value)}`).join(" ");
    return { text: `${actor ?? ""} ${event} ${others}`, level, time: (timestamp ?? "").slice(11, 19), actor: actor ?? "", event: String(event), rest: others };
  } catch {
    return { text: line, level: /\b(error|warning)\b/.exec(line)?.[1] ?? "info", time: "", actor: "", event: line, rest: "" };
  }
}

function showLines() {
  const list = at("lines"), wanted = at("filter").value.toLowerCase();
  const below = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
  const severe = new Set(["warning", "error", "critical", "stderr"]);
  const shown = page.lines.filter((line) => (page.level === "all" || severe.has(line.level)) && (!wanted || line.text.toLowerCase().includes(wanted)));
  list.replaceChildren(...shown.slice(-500).map((line) => {
    const row = make("div", line.level);
    row.append(make("time", "", line.time), " ", make("span", "who", line.actor), " ", line.event, " ", make("span", "rest", line.rest));
    return row;
  }));
  if (below) list.scrollTop = list.scrollHeight;
}

at("filter").addEventListener("input", showLines);
at("pause").addEventListener("click", () => {
  page.paused = !page.paused;
  at("pause").textContent = page.paused ? "Go on" : "Pause";
  if (!page.paused) showLines();
});

// Buttons that choose one of several, and the views.

function choose(attribute, then) {
  const buttons = document.querySelectorAll(`[data-${attribute}]`);
  for (const button of buttons) {
    button.addEventListener("click", () => {
      buttons.forEach((other) => other.classList.toggle("on", other === button));
      then(button.dataset[attribute]);
    });
  }
}

choose("minutes", (minutes) => { page.minutes = Number(minutes); if (page.state) showOverview(page.state); });
choose("tier", (tier) => prefixes.only(tier));
choose("level", (level) => { page.level = level; showLines(); });

function toView() {
  page.view = VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "overview";
  for (const view of VIEWS) {
    at(view).hidden = view !== page.view;
    at(`tab-${view}`).classList.toggle("on", view === page.view);
  }
  window.scrollTo(0, 0);
  if (page.state && page.view !== "streams") show(page.state);
  if (page.view === "log") { showLines(); at("lines").scrollTop = at("lines").scrollHeight; }
  if (page.view === "chat") at("question").focus();
}

addEventListener("hashchange", toView);
addEventListener("resize", () => charts.forEach((chart) => chart.redraw()));
startChat(() => page.state?.model ?? "", askForKey);
toView();
turn();
