// The `openai` npm package against a server: node check.mjs URL. Prints one JSON object of what it saw.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const { data } = await client.models.list();
const model = data[0].id;
const messages = [{ role: "user", content: "Say something." }];
const options = { model, messages, temperature: 0, max_tokens: 12 };

const whole = await client.chat.completions.create(options);
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...options, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}

const schema = {
  type: "object",
  properties: { colour: { enum: ["red", "green"] } },
  required: ["colour"],
  additionalProperties: false,
};
const structured = await client.chat.completions.create({
  ...options,
  max_tokens: 200,
  response_format: { type: "json_schema", json_schema: { name: "c", schema, strict: true } },
});
const tools = [{ type: "function", function: { name: "paint", parameters: schema } }];
const runner = client.chat.completions.stream({ ...options, max_tokens: 200, tools, tool_choice: "required", parallel_tool_calls: false });
const called = (await runner.finalChatCompletion()).choices[0];

const events = [];
for await (const event of await client.responses.create({ model, input: "Hi", max_output_tokens: 8, temperature: 0, stream: true })) {
  events.push(event.type);
}
let status = 0;
try {
  await client.chat.completions.create({ ...options, temperature: 7 });
} catch (error) {
  status = error.status;
}
console.log(
  JSON.stringify({
    whole: whole.choices[0].message.content,
    streamed,
    structured: JSON.parse(structured.choices[0].message.content),
    call: called.message.tool_calls[0].function,
    reason: called.finish_reason,
    events,
    status,
  }),
);
