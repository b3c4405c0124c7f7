// OpenAI's own client in Node.
import OpenAI, { toFile } from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import {
  KEY, MAX_OBJECT_TOKENS, MAX_TOKENS, MODEL, QUESTION, SAID, SECOND_QUESTION, TOOL_RESULT, LAMP_SCHEMA, URL, doing, kept,
  read,
} from "./told.mjs";

const client = new OpenAI({ baseURL: URL, apiKey: KEY });
const asked = { model: MODEL, max_tokens: MAX_TOKENS, temperature: 0 };
const user = { role: "user", content: QUESTION };
const secondUser = { role: "user", content: SECOND_QUESTION };
const textPart = { type: "text", text: QUESTION };
const create = (messages, more = {}) => client.chat.completions.create({ ...asked, messages, ...more });
const text = (answer) => answer.choices[0].message.content;
let spoken;

await doing("models", async () => ({ ids: (await client.models.list()).data.map((model) => model.id) }));
await doing("chat", async () => {
  const answer = await create([user]);
  return { text: text(answer), finish: answer.choices[0].finish_reason, tokens: answer.usage.completion_tokens };
});
await doing("stream", async () => {
  let said = "";
  for await (const chunk of await create([user], { stream: true })) said += chunk.choices[0]?.delta.content ?? "";
  return { text: said };
});
await doing("second turn", async () => {
  const first = (await create([user])).choices[0].message;
  return { text: text(await create([user, first, secondUser])) };
});
await doing("image", async () => {
  const url = `data:image/png;base64,${read("picture.png").toString("base64")}`;
  return { text: text(await create([{ role: "user", content: [textPart, { type: "image_url", image_url: { url } }] }])) };
});
await doing("sound in", async () => {
  const sound = { data: read("question.wav").toString("base64"), format: "wav" };
  const content = [textPart, { type: "input_audio", input_audio: sound }];
  return { text: text(await create([{ role: "user", content }])) };
});
await doing("sound out", async () => {
  const sound = { modalities: ["text", "audio"], audio: { voice: "alloy", format: "wav" } };
  spoken = (await create([user], sound)).choices[0].message;
  return { file: kept("answer.wav", Buffer.from(spoken.audio.data, "base64")), text: spoken.audio.transcript };
});
await doing("spoken second turn", async () => ({ text: text(await create([user, spoken, secondUser])) }));
await doing("tool", async () => {
  const seen = {};
  const run = client.chat.completions.runTools({
    ...asked,
    max_tokens: MAX_OBJECT_TOKENS,
    messages: [user],
    tool_choice: { type: "function", function: { name: "set_lamp" } },
    tools: [{
      type: "function",
      function: {
        name: "set_lamp", description: "Sets the lamp.", parameters: LAMP_SCHEMA, parse: JSON.parse,
        function: (given) => { Object.assign(seen, { name: "set_lamp", arguments: given }); return TOOL_RESULT; },
      },
    }],
  });
  // With a tool that is named, it stops behind the tool's result.
  await run.done();
  const last = await create(run.messages, { tools: [{ type: "function", function: { name: "set_lamp", description: "Sets the lamp.", parameters: LAMP_SCHEMA } }] });
  return { ...seen, text: text(last) };
});
await doing("parse", async () => {
  const lamp = z.object({ color: z.enum(["red", "green"]), on: z.boolean() });
  const answer = await client.chat.completions.parse({
    ...asked, max_tokens: MAX_OBJECT_TOKENS, messages: [user], response_format: zodResponseFormat(lamp, "lamp"),
  });
  return { object: answer.choices[0].message.parsed };
});
await doing("transcription", async () => {
  const file = await toFile(read("question.wav"), "question.wav");
  return { text: (await client.audio.transcriptions.create({ model: MODEL, file })).text };
});
await doing("speech", async () => {
  const said = await client.audio.speech.create({ model: MODEL, input: SAID, voice: "alloy" });
  return { file: kept("speech.mp3", Buffer.from(await said.arrayBuffer())) };
});
const response = { model: MODEL, input: QUESTION, max_output_tokens: MAX_TOKENS, temperature: 0 };
await doing("responses", async () => ({ text: (await client.responses.create(response)).output_text }));
await doing("responses stream", async () => {
  let said = "";
  for await (const event of await client.responses.create({ ...response, stream: true })) {
    if (event.type === "response.output_text.delta") said += event.delta;
  }
  return { text: said };
});
