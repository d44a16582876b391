// Talks to the server. The API key stays in this tab's storage and goes along with every request.

const NAME = "callboard-key";

export class NeedsKey extends Error {}

export function setKey(key) {
  sessionStorage.setItem(NAME, key);
}

export async function request(path, options = {}) {
  const key = sessionStorage.getItem(NAME);
  const headers = { ...(options.body !== undefined ? { "content-type": "application/json" } : {}), ...(key ? { authorization: `Bearer ${key}` } : {}) };
  const answer = await fetch(path, { cache: "no-store", ...options, headers });
  if (answer.status === 401) throw new NeedsKey();
  return answer;
}

export async function post(path, body = {}) {
  const answer = await request(path, { method: "POST", body: JSON.stringify(body) });
  if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error?.message ?? `HTTP ${answer.status}`);
  return answer;
}
