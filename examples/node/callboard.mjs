// A small client of Callboard: one DEALER socket, any number of streams. Written from docs/protocol.md alone.
import { readFileSync } from "node:fs";
import { Dealer } from "zeromq";
import * as messages from "./messages.mjs";

const PING_EVERY = 1000; // ms
const SILENCE_LIMIT = 3000; // ms without a word from the server

/** `await Callboard.connect(endpoint)`; with `keys`, a file of `callboard keys`, over tcp with CURVE. */
export class Callboard {
  #socket;
  #streams = new Map();
  #nextRef = 1;
  #heard = Date.now();
  #timer;
  #welcome = Promise.withResolvers?.() ?? deferred();
  #outbox = Promise.resolve(); // a ZeroMQ socket takes one send at a time

  static async connect(endpoint, { keys, name = "node" } = {}) {
    const client = new Callboard(endpoint, keys);
    client.#send(messages.hello(name));
    client.#read();
    const late = setTimeout(() => client.#lose(new Error(`no server answered at ${endpoint}`)), 5000);
    const welcome = await client.#welcome.promise.finally(() => clearTimeout(late));
    client.window = welcome.window;
    client.incarnation = welcome.incarnation;
    let seq = 0;
    client.#timer = setInterval(() => {
      if (Date.now() - client.#heard > SILENCE_LIMIT) client.#lose(new Error("the server was silent for 3 s"));
      else client.#send(messages.ping(++seq));
    }, PING_EVERY);
    return client;
  }

  constructor(endpoint, keys) {
    this.#socket = new Dealer({ linger: 0 });
    if (keys) {
      const { public: publicKey, secret, server } = JSON.parse(readFileSync(keys, "utf8"));
      Object.assign(this.#socket, { curvePublicKey: publicKey, curveSecretKey: secret, curveServerKey: server });
    }
    this.#socket.connect(endpoint);
  }

  /** Stream a chat: `for await (const delta of client.chat([{role, content}], {maxTokens}))`. */
  chat(chat, options = {}) {
    return this.#stream((ref) => messages.chat(ref, chat, options));
  }

  /** Continue token ids; deltas bring `ids`. */
  continueIds(ids, options = {}) {
    return this.#stream((ref) => messages.continueIds(ref, ids, options));
  }

  /** Cancel what is open and leave. */
  async close() {
    clearInterval(this.#timer);
    for (const ref of this.#streams.keys()) this.#send(messages.cancel(ref));
    await this.#outbox;
    this.#socket.close();
  }

  async *#stream(request) {
    const ref = this.#nextRef++;
    const stream = { items: [], wake: null };
    this.#streams.set(ref, stream);
    this.#send(request(ref));
    let used = 0;
    let ended = false;
    try {
      while (true) {
        while (!stream.items.length) await new Promise((resolve) => (stream.wake = resolve));
        const item = stream.items.shift();
        if (item instanceof Error) throw item;
        if (item.outcome) {
          ended = true;
          if (item.outcome === "finished" || item.outcome === "cancelled") return item;
          throw new Error(`${item.outcome}: ${item.code}: ${item.message}`);
        }
        yield item;
        // The consumer came back for more, so it has used the delta: the server may send another.
        if (++used >= this.window / 4) {
          this.#send(messages.credit([ref], [used]));
          used = 0;
        }
      }
    } finally {
      if (!ended) this.#send(messages.cancel(ref));
      this.#streams.delete(ref);
    }
  }

  #send(message) {
    const frame = messages.encode(message);
    this.#outbox = this.#outbox.then(() => this.#socket.closed || this.#socket.send(frame)).catch(() => {});
  }

  async #read() {
    for await (const [frame] of this.#socket) {
      this.#heard = Date.now();
      this.#take(messages.read(messages.decode(frame)));
    }
  }

  #take(message) {
    switch (message.tag) {
      case messages.WELCOME:
        this.#welcome.resolve(message);
        break;
      case messages.REFUSED:
        this.#lose(new Error(message.message));
        break;
      case messages.PONG:
        if (message.incarnation !== this.incarnation) this.#lose(new Error("the server was replaced"));
        break;
      case messages.DELTAS:
        for (const delta of message.deltas) this.#deliver(delta.ref, delta);
        for (const end of message.ends) this.#deliver(end.ref, end);
        break;
    }
  }

  #deliver(ref, item) {
    const stream = this.#streams.get(ref);
    if (!stream) return; // cancelled meanwhile
    stream.items.push(item);
    stream.wake?.();
  }

  #lose(error) {
    clearInterval(this.#timer);
    this.#welcome.reject(error);
    for (const ref of this.#streams.keys()) this.#deliver(ref, error);
    this.#socket.close();
  }
}

function deferred() {
  const parts = {};
  parts.promise = new Promise((resolve, reject) => Object.assign(parts, { resolve, reject }));
  return parts;
}
