// For the tests: prints the frames of docs/protocol.md that this client sends, and what it reads in those it gets.
// node frames.mjs FRAME… (hexadecimal)
import * as messages from "./messages.mjs";

const sends = [
  messages.hello("node"),
  messages.ping(1),
  messages.chat(1, [{ role: "user", content: "Hello" }], { temperature: 0, maxTokens: 32 }),
  messages.continueIds(2, [1000, 1001], { temperature: 0.7, topP: 0.9, seed: 42, maxTokens: 16 }, "job-7"),
  messages.credit([1, 2], [1, 1]),
  messages.cancel(2),
].map((message) => Buffer.from(messages.encode(message)).toString("hex"));

const reads = process.argv.slice(2).map((frame) => messages.read(messages.decode(Buffer.from(frame, "hex"))));
console.log(JSON.stringify({ sends, reads }, (_, value) => (typeof value === "bigint" ? String(value) : value)));
