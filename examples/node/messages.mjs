// The messages this example sends and reads, as docs/protocol.md has them: arrays that begin with the tag.
import { decode as unpack, encode as pack } from "@msgpack/msgpack";

export const WELCOME = 20, REFUSED = 21, PONG = 22, ACCEPTED = 23, DELTAS = 24, CALL_FAILED = 29;

export const hello = (name) => [1, 1, name];
export const ping = (seq) => [2, seq];
export const cancel = (ref) => [4, ref];
export const credit = (refs, counts) => [5, refs, counts];

/** A chat to be streamed as text; sampling options stop where the rest are defaults. */
export const chat = (ref, messages, { temperature = null, topP = null, seed = null, maxTokens = null }) => [
  3, ref, [temperature, topP, seed, maxTokens], null, messages,
];

/** Ids in, ids out. */
export const continueIds = (ref, ids, { temperature = null, topP = null, seed = null, maxTokens = null }, label = "") => [
  3, ref, [temperature, topP, seed, maxTokens], null, null, packIds(ids), label, "", false, true,
];

/** Token ids as four bytes each, unsigned, little-endian. */
export function packIds(ids) {
  const bytes = new DataView(new ArrayBuffer(4 * ids.length));
  ids.forEach((id, i) => bytes.setUint32(4 * i, id, true));
  return new Uint8Array(bytes.buffer);
}

export function unpackIds(bin) {
  const bytes = new DataView(bin.buffer, bin.byteOffset, bin.byteLength);
  return Array.from({ length: bin.byteLength / 4 }, (_, i) => bytes.getUint32(4 * i, true));
}

export const encode = (message) => pack(message);

// 64-bit integers, such as the incarnation, come as BigInt: a JavaScript number would round them.
export const decode = (frame) => unpack(frame, { useBigInt64: true });

const number = (value) => Number(value);

/** What an array of the protocol brings, by name. Elements behind those we know are of a later server. */
export function read(message) {
  const [tag, ...fields] = message;
  switch (number(tag)) {
    case WELCOME:
      return { tag: WELCOME, version: number(fields[0]), incarnation: fields[1], window: number(fields[2]) };
    case REFUSED:
      return { tag: REFUSED, message: fields[1] };
    case PONG:
      return { tag: PONG, incarnation: fields[1] };
    case ACCEPTED:
      return { tag: ACCEPTED, ref: number(fields[0]), promptTokens: number(fields[2]) };
    case DELTAS: {
      const [refs, texts, ids, counts, ends = []] = fields;
      return {
        tag: DELTAS,
        deltas: refs.map((ref, i) => ({
          ref: number(ref), text: texts[i], ids: unpackIds(ids[i]), count: number(counts[i]),
        })),
        ends: ends.map(([ref, outcome, reason = "", code = "", text = "", usage = []]) => ({
          ref: number(ref), outcome, reason, code, message: text,
          promptTokens: number(usage[0] ?? 0), completionTokens: number(usage[1] ?? 0),
        })),
      };
    }
    case CALL_FAILED:
      return { tag: CALL_FAILED, ref: number(fields[0]), code: fields[1], message: fields[2] };
    default:
      return { tag: number(tag) }; // of a later version
  }
}
