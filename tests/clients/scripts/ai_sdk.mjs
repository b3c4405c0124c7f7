// The AI SDK: `@ai-sdk/openai` (its default is the responses API) and `@ai-sdk/openai-compatible`.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateSpeech, generateText, isStepCount, streamText, tool, transcribe } from "ai";
import { z } from "zod";
import {
  KEY, MAX_OBJECT_TOKENS, MAX_TOKENS, MODEL, QUESTION, SAID, SECOND_QUESTION, TOOL_RESULT, URL, doing, kept, read,
} from "./told.mjs";

const openai = createOpenAI({ baseURL: URL, apiKey: KEY });
const compatible = createOpenAICompatible({ name: "omni", baseURL: URL, apiKey: KEY, supportsStructuredOutputs: true });
const lamp = z.object({ color: z.enum(["red", "green"]), on: z.boolean() });
const user = { role: "user", content: QUESTION };
const secondUser = { role: "user", content: SECOND_QUESTION };
const withPart = (part) => [{ role: "user", content: [{ type: "text", text: QUESTION }, part] }];

// By itself the provider sends references to what it takes to be stored.
const UNSTORED = { openai: { store: false } };

async function ask(prefix, model, providerOptions = {}) {
  const asked = { model, temperature: 0, maxOutputTokens: MAX_TOKENS, maxRetries: 0, providerOptions };
  const said = async (messages) => (await generateText({ ...asked, messages })).text;
  await doing(prefix.trim() || "chat", async () => ({ text: await said([user]) }));
  await doing(`${prefix}stream`, async () => {
    let text = "";
    const result = streamText({ ...asked, messages: [user], onError: ({ error }) => { throw error; } });
    for await (const piece of result.textStream) text += piece;
    return { text };
  });
  await doing(`${prefix}second turn`, async () => {
    const first = await generateText({ ...asked, messages: [user] });
    return { text: await said([user, ...first.response.messages, secondUser]) };
  });
  await doing(`${prefix}image`, async () => {
    const part = { type: "file", mediaType: "image/png", data: read("picture.png") };
    return { text: await said(withPart(part)) };
  });
  await doing(`${prefix}sound in`, async () => {
    const part = { type: "file", mediaType: "audio/wav", data: read("question.wav") };
    return { text: await said(withPart(part)) };
  });
  await doing(`${prefix}structured`, async () => {
    const output = Output.object({ schema: lamp });
    return { object: (await generateText({ ...asked, maxOutputTokens: MAX_OBJECT_TOKENS, output, messages: [user] })).output };
  });
  await doing(`${prefix}tool`, async () => {
    const seen = {};
    const set_lamp = tool({
      // By itself the responses provider asks for arguments that are any object.
      description: "Sets the lamp.", inputSchema: lamp, strict: true,
      execute: async (given) => { Object.assign(seen, { name: "set_lamp", arguments: given }); return TOOL_RESULT; },
    });
    const result = await generateText({
      ...asked, maxOutputTokens: MAX_OBJECT_TOKENS, messages: [user], tools: { set_lamp }, stopWhen: isStepCount(2),
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? { type: "tool", toolName: "set_lamp" } : "none" }),
    });
    return { ...seen, text: result.text };
  });
}

await ask("", compatible(MODEL));
await ask("openai chat ", openai.chat(MODEL));
await ask("responses ", openai(MODEL), UNSTORED);
await doing("speech", async () => {
  const { audio } = await generateSpeech({ model: openai.speech(MODEL), text: SAID, maxRetries: 0 });
  return { file: kept("speech.mp3", audio.uint8Array) };
});
await doing("transcription", async () => {
  const { text } = await transcribe({ model: openai.transcription(MODEL), audio: read("question.wav"), maxRetries: 0 });
  return { text };
});
