// Several models: which one is shown, and a row for each with what can be done to it.

import { post } from "/admin/server.js";
import { count, percent, size, span } from "/admin/words.js";

const at = (id) => document.getElementById(id);
const COLOURS = { ready: "green", loading: "yellow", waiting: "yellow", unloading: "yellow", failed: "red" };
const HELD = ["ready", "loading", "waiting"];
const rows = new Map();

function make(tag, name = "", text = "") {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== "") made.textContent = text;
  return made;
}

export function showChoice(state, onChoice) {
  const choice = at("choice");
  choice.hidden = state.models.length < 2;
  at("model").hidden = !choice.hidden;
  const names = state.models.map((model) => model.name);
  if ([...choice.options].map((option) => option.value).join("\n") !== names.join("\n")) {
    choice.replaceChildren(...names.map((name) => new Option(name, name)));
    choice.onchange = () => onChoice(choice.value);
  }
  if (document.activeElement !== choice) choice.value = state.model;
}

export function showModels(state, act) {
  at("models").hidden = !state.models.length;
  at("budget").textContent = `${size(state.claimed)} of ${size(state.budget)} claimed`;
  for (const model of state.models) {
    let row = rows.get(model.name);
    if (!row) {
      row = modelRow(model.name, act);
      rows.set(model.name, row);
      at("model-list").append(row.box);
    }
    row.update(model);
  }
}

// Rows are kept, so that a button doesn't vanish under a finger.
function modelRow(name, act) {
  const box = make("div", "held"), phase = make("span", "phase"), label = make("span", "label"), note = make("small");
  const figures = [make("span", "figure"), make("span", "figure"), make("span", "figure")];
  const load = make("button", "quiet"), pin = make("button", "quiet");
  let shown = null;
  box.dataset.model = name;
  label.append(make("span", "", name), note);
  for (const [button, what] of [[load, () => (HELD.includes(shown.state) ? "unload" : "load")], [pin, () => (shown.pinned ? "unpin" : "pin")]]) {
    button.type = "button";
    button.addEventListener("click", () => {
      button.disabled = true;
      act(post(`/models/${what()}`, { model: name }).finally(() => { button.disabled = false; }));
    });
  }
  load.dataset.action = "load";
  pin.dataset.action = "pin";
  box.append(phase, label, ...figures, load, pin);
  const figure = (index, value, about) => figures[index].replaceChildren(value, make("small", "", about));
  return {
    box,
    update(model) {
      shown = model;
      const loading = model.state === "loading" && model.progress;
      phase.textContent = loading ? `loading ${percent(model.progress)}` : model.state;
      phase.style.setProperty("--c", `var(--${COLOURS[model.state] ?? "dim"})`);
      const about = [...model.aliases];
      if (model.pinned) about.push("pinned");
      if (model.expires) about.push(`leaves after ${span(model.expires)} without streams`);
      if (model.state === "failed") about.push(model.message);
      note.textContent = about.join(" · ");
      label.title = model.message;
      figure(0, model.memory ? size(model.memory) : "–", `of ${size(model.claim)}`);
      figure(1, count(model.streams), "streams");
      figure(2, count(model.loads), "loads");
      load.textContent = HELD.includes(model.state) ? "Unload" : "Load";
      pin.textContent = model.pinned ? "Unpin" : "Pin";
    },
  };
}
