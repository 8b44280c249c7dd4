// One client of JavaScript in a conversation with a tool: node talk.mjs CLIENT URL MODEL DIRECTORY, where DIRECTORY has
// node_modules with the client. Every reply goes back into the conversation as the client's own object.

import assert from "node:assert";
import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [, , name, url, model, directory] = process.argv;
const require = createRequire(join(directory, "package.json"));
const load = (module) => import(pathToFileURL(require.resolve(module)).href);

const city = { type: "string", enum: ["Rome", "Oslo"] };
const parameters = { type: "object", properties: { city }, required: ["city"], additionalProperties: false };
const description = "The weather of a city.";
const ask = [
  { role: "system", content: "Be brief." },
  { role: "user", content: "Is it warm in Rome?" },
];
const again = { role: "user", content: "And in Oslo?" };
const named = { type: "function", function: { name: "weather" } };
const result = { degrees: 31 };

async function openai(stream) {
  const { default: OpenAI } = await load("openai");
  const client = new OpenAI({ baseURL: url + "/v1", apiKey: "none", maxRetries: 0 });
  const tools = [{ type: "function", function: { name: "weather", description, parameters } }];
  const reply = async (messages, more) => {
    const body = { model, messages, max_tokens: 100, seed: 1, ...more };
    if (stream) return (await client.chat.completions.stream(body).finalChatCompletion()).choices[0].message;
    return (await client.chat.completions.create(body)).choices[0].message;
  };
  const messages = [...ask];
  const called = await reply(messages, { tools, tool_choice: named });
  const [call] = called.tool_calls;
  assert(city.enum.includes(JSON.parse(call.function.arguments).city));
  messages.push(called, { role: "tool", tool_call_id: call.id, content: JSON.stringify(result) });
  const told = await reply(messages, { tools, tool_choice: "none" });
  assert(told.content);
  messages.push(told, again);
  assert((await reply(messages)).content);
}

function aiSdk(chosen) {
  return async (stream) => {
    const { generateText, streamText, stepCountIs, jsonSchema, tool } = await load("ai");
    const languageModel = await chosen();
    const called = [];
    const execute = async (input) => {
      called.push(input.city);
      return result;
    };
    const weather = tool({ description, inputSchema: jsonSchema(parameters), execute });
    const reply = async (messages, more) => {
      const settings = { model: languageModel, messages, maxOutputTokens: 100, maxRetries: 0, ...more };
      if (!stream) return await generateText({ ...settings });
      const errors = [];
      const running = streamText({ ...settings, onError: ({ error }) => errors.push(error) });
      await running.consumeStream();
      if (errors.length) throw errors[0];
      return { text: await running.text, response: await running.response, steps: await running.steps };
    };
    // The first step must call; the second one, with the tool's result in the conversation, must write.
    const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? { type: "tool", toolName: "weather" } : "none" });
    const [system, first] = [ask[0].content, ask[1]];
    const done = await reply([first], { system, tools: { weather }, stopWhen: stepCountIs(2), prepareStep });
    assert.equal(done.steps.length, 2);
    assert(called.length && called.every((one) => city.enum.includes(one)));
    assert(done.text);
    const messages = [first, ...done.response.messages, again];
    assert((await reply(messages, { system, tools: { weather }, toolChoice: "none" })).text);
  };
}

const clients = {
  "openai-node": openai,
  "AI SDK, openai-compatible": aiSdk(async () => {
    const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
    return createOpenAICompatible({ name: "foretell", baseURL: url + "/v1", includeUsage: true })(model);
  }),
  "AI SDK, openai": aiSdk(async () => {
    const { createOpenAI } = await load("@ai-sdk/openai");
    return createOpenAI({ baseURL: url + "/v1", apiKey: "none" }).chat(model);
  }),
};

for (const stream of [false, true]) await clients[name](stream);
