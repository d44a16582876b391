// The `openai` npm package against a full server: node retry.mjs URL MODEL. Prints the status of every try, then why the
// answer ended.
import OpenAI from "openai";

const watched = async (url, options) => {
  const response = await fetch(url, options);
  console.log(response.status);
  return response;
};
const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 20, fetch: watched });
const messages = [{ role: "user", content: "Say something." }];
const answer = await client.chat.completions.create({ model, messages, max_tokens: 2 });
console.log(answer.choices[0].finish_reason);
