// The tree of prefix blocks. It is asked for only while it is looked at, and every few seconds, as the engine has to
// look its blocks through for it.

import { request } from "/admin/server.js";
import { count, size, span } from "/admin/words.js";

const INTERVAL = 5000, DEEPEST = 8;
const at = (id) => document.getElementById(id);

function make(tag, name = "", text = "") {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== "") made.textContent = text;
  return made;
}

export class PrefixView {
  #asked = 0;
  #query = "";
  #tree = null;
  #tier = "all";

  // Ask again when it is time. `query` says which of several models it is about.
  async look(query) {
    if (query !== this.#query) {
      this.#asked = 0;
      this.#query = query;
      this.#tree = null;
      at("tree").replaceChildren();
    }
    if (Date.now() - this.#asked < INTERVAL) return;
    this.#asked = Date.now();
    const answer = await request(`/admin/api/prefixes${query}`);
    const body = await answer.json();
    if (!answer.ok) {
      at("tree-note").textContent = body.error.message;
      return;
    }
    const columns = body.chains.columns;
    this.#tree = { ...body, chains: body.chains.rows.map((row) => Object.fromEntries(columns.map((name, i) => [name, row[i]]))) };
    this.#show();
  }

  only(tier) {
    this.#tier = tier;
    if (this.#tree) this.#show();
  }

  showTiers(meters) {
    at("tiers").replaceChildren(...meters);
  }

  #show() {
    const tree = this.#tree, tier = this.#tier, chains = tree.chains;
    const levels = [];
    for (const chain of chains) levels.push(chain.parent < 0 ? 0 : levels[chain.parent] + 1);
    const rows = chains.map((chain, i) => [chain, levels[i]])
      .filter(([chain]) => tier === "all" || chain[`${tier}_blocks`] > 0)
      .map(([chain, level]) => chainRow(chain, level, tree.now));
    at("tree").replaceChildren(...(rows.length ? [heading(), ...rows] : []));
    at("tree").hidden = !rows.length;
    at("no-prefixes").hidden = rows.length > 0;
    const tiers = [[tree.memory_looked, tree.memory_blocks, "in memory"], [tree.ssd_looked, tree.ssd_blocks, "on the SSD"]];
    const parts = tiers.filter(([, all]) => all).map(([looked, all, where]) => `${looked < all ? `${count(looked)} of ` : ""}${count(all)} blocks ${where}`);
    at("tree-note").textContent = `${chains.length} chains${tree.left_out ? ", others are left out" : ""}${parts.length ? " · " : ""}${parts.join(", ")}`;
  }
}

function heading() {
  const row = make("div", "chain head");
  row.append(...["prefix", "after", "tokens", "memory", "SSD", "found", "last used"].map((name) => make("span", "", name)));
  return row;
}

function chainRow(chain, level, now) {
  const row = make("div", "chain"), name = make("span", "name"), bar = make("i");
  name.style.setProperty("--level", Math.min(level, DEEPEST));
  bar.className = chain.memory_blocks ? (chain.ssd_blocks ? "both" : "memory") : "ssd";
  name.append(bar, chain.name, ...(chain.pinned ? [make("b", "", "pinned")] : []));
  const cells = [
    chain.depth < 0 ? "…" : count(chain.depth),
    count(chain.tokens),
    chain.memory_blocks ? size(chain.memory_bytes) : "–",
    chain.ssd_blocks ? size(chain.ssd_bytes) : "–",
    chain.hits ? `${count(chain.hits)}×` : "–",
    chain.used ? `${span(Math.max(1, now - chain.used))} ago` : "–",
  ];
  row.append(name, ...cells.map((text) => make("span", "", text)));
  row.title = `${chain.memory_blocks} blocks in memory, ${chain.ssd_blocks} on the SSD`;
  return row;
}
