// Streams the answer to one question: node chat.mjs "What is the capital of France?" [endpoint]
// Without an endpoint: $CALLBOARD_ENDPOINT, or the only running server's record. $CALLBOARD_KEYS is a client's key file.
import { readFileSync, readdirSync } from "node:fs";
import { homedir } from "node:os";
import { join } from "node:path";
import { Callboard } from "./callboard.mjs";

function findEndpoint() {
  if (process.env.CALLBOARD_ENDPOINT) return process.env.CALLBOARD_ENDPOINT;
  const folder = join(process.env.CALLBOARD_HOME ?? join(homedir(), ".callboard"), "run");
  const records = readdirSync(folder)
    .filter((file) => file.endsWith(".json"))
    .map((file) => JSON.parse(readFileSync(join(folder, file), "utf8")))
    .filter(({ pid }) => isAlive(pid));
  if (records.length !== 1) throw new Error(`${records.length} servers run; give the endpoint of one`);
  return records[0].endpoint;
}

function isAlive(pid) {
  try {
    return process.kill(pid, 0);
  } catch {
    return false;
  }
}

const [question, endpoint = findEndpoint()] = process.argv.slice(2);
const client = await Callboard.connect(endpoint, { keys: process.env.CALLBOARD_KEYS });
const deltas = client.chat([{ role: "user", content: question }], { temperature: 0, maxTokens: 60 });
for (let next = await deltas.next(); ; next = await deltas.next()) {
  if (next.done) {
    console.error(`\n[${next.value.reason}; ${next.value.promptTokens} + ${next.value.completionTokens} tokens]`);
    break;
  }
  process.stdout.write(next.value.text);
}
await client.close();
