// OpenAI's own client in Node: a realtime session by Node's own WebSocket, with the server's turn detection.
// It speaks TLS whatever its base URL says, so what ends TLS stands before the server, as it does in production.
import { execFileSync, spawn } from "node:child_process";
import { connect } from "node:net";
import { createServer } from "node:tls";
import { fileURLToPath } from "node:url";
import { setTimeout as sleep } from "node:timers/promises";
import OpenAI from "openai";
import { OpenAIRealtimeWebSocket } from "openai/realtime/websocket";
import {
  ADDRESS, FOLDER, KEY, LAMP_SCHEMA, MAX_OBJECT_TOKENS, MAX_TOKENS, MODEL, QUESTION, TOOL_RESULT, doing, kept, read,
} from "./told.mjs";

const TEXT = "response.output_audio_transcript.delta";
const SOUND = "response.output_audio.delta";
const LONG_TOKENS = 4096;
const PIECE_BYTES = 4800;
const PIECE_MS = 100;
const PATIENCE_MS = 120_000;
const WAV_HEADER_BYTES = 44;
process.env.NODE_TLS_REJECT_UNAUTHORIZED = "0"; // the certificate is its own
const client = new OpenAI({ baseURL: `https://127.0.0.1:${await tlsPort()}/v1`, apiKey: KEY });

/** The port of a server that ends TLS and passes all on. */
async function tlsPort() {
  const files = ["-keyout", `${FOLDER}/key.pem`, "-out", `${FOLDER}/cert.pem`];
  execFileSync("openssl", ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=127.0.0.1", ...files]);
  const { hostname, port } = new globalThis.URL(ADDRESS);
  const server = createServer({ key: read("key.pem"), cert: read("cert.pem") }, (outer) => {
    const inner = connect(port, hostname);
    outer.pipe(inner).pipe(outer);
    for (const [one, other] of [[outer, inner], [inner, outer]]) {
      one.on("error", () => other.destroy()).on("close", () => other.destroy());
    }
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  server.unref();
  return server.address().port;
}

async function until(look) {
  for (const ends = Date.now() + PATIENCE_MS; Date.now() < ends; await sleep(20)) {
    const found = await look();
    if (found) return found;
  }
  throw new Error(`never came: ${look}`);
}

/** A session, all that it was told, and a microphone that is on. */
class Talk {
  events = [];
  errors = [];
  #said = Buffer.alloc(0);

  constructor() {
    this.session = new OpenAIRealtimeWebSocket({ model: MODEL }, client);
    this.session.on("event", (event) => this.events.push(event));
    this.session.on("error", (error) => this.errors.push(String(error.message)));
  }

  async open() {
    await this.until("session.created");
    this.mic = setInterval(() => {
      const piece = Buffer.alloc(PIECE_BYTES);
      this.#said.copy(piece);
      this.#said = this.#said.subarray(PIECE_BYTES);
      this.session.send({ type: "input_audio_buffer.append", audio: piece.toString("base64") });
    }, PIECE_MS);
    return this;
  }

  say(name) {
    this.#said = Buffer.concat([this.#said, read(name).subarray(WAV_HEADER_BYTES)]);
  }

  of(kind, since = 0) {
    return this.events.slice(since).filter((event) => event.type === kind);
  }

  until(kind, since = 0) {
    return until(() => this.of(kind, since)[0]);
  }

  text(since = 0) {
    return this.of(TEXT, since).map((event) => event.delta).join("");
  }

  async update(session) {
    const since = this.events.length;
    this.session.send({ type: "session.update", session: { type: "realtime", ...session } });
    await this.until("session.updated", since);
  }

  close() {
    clearInterval(this.mic);
    this.session.close();
  }
}

const talk = () => new Talk().open();

async function counted(name, ...labels) {
  const lines = (await (await fetch(`${ADDRESS}/metrics`)).text()).split("\n");
  const ours = lines.filter((line) => line.startsWith(name) && labels.every((label) => line.includes(label)));
  return ours.reduce((sum, line) => sum + Number(line.split(" ").at(-1)), 0);
}

const cancelled = () => counted("omni_cluster_stage_requests_total", 'stage="thinker"', 'outcome="cancelled"');

const usageOf = ({ usage }) => ({
  "text in": usage.input_token_details.text_tokens,
  "sound in": usage.input_token_details.audio_tokens,
  "text out": usage.output_token_details.text_tokens,
});

async function turns() {
  const it = await talk();
  let first;
  await it.update({ max_output_tokens: MAX_TOKENS });
  await doing("spoken turn", async () => {
    it.say("first.wav");
    first = (await it.until("response.done")).response;
    const sound = Buffer.concat(it.of(SOUND).map((event) => Buffer.from(event.delta, "base64")));
    return { text: it.text(), file: kept("spoken.pcm", sound), errors: it.errors };
  });
  await doing("second turn", async () => {
    const since = it.events.length;
    it.say("second.wav");
    const second = (await it.until("response.done", since)).response;
    it.session.send({ type: "conversation.item.retrieve", item_id: first.output[0].id });
    const { item } = await it.until("conversation.item.retrieved");
    const isKept = item.content[0].transcript === first.output[0].content[0].transcript;
    return { text: it.text(since), first: usageOf(first), second: usageOf(second), kept: isKept, errors: it.errors };
  });
  it.close();
}

async function interruption() {
  const it = await talk();
  await it.update({ max_output_tokens: LONG_TOKENS });
  await doing("interruption", async () => {
    it.say("first.wav");
    await it.until(TEXT);
    let since = it.events.length;
    it.say("second.wav");
    await it.until("input_audio_buffer.speech_started", since);
    const { response } = await it.until("response.done", since);
    await it.update({ max_output_tokens: MAX_TOKENS });
    since = it.events.findIndex((event) => event.type === "response.done") + 1;
    await it.until("response.done", since);
    const late = it.events.slice(since).filter((event) => event.response_id === response.id).map((event) => event.type);
    const { status, status_details: { reason } } = response;
    return { status, reason, late, text: it.text(since), errors: it.errors };
  });
  it.close();
}

async function tool() {
  const it = await talk();
  await doing("tool", async () => {
    const lamp = { type: "function", name: "set_lamp", description: "Sets the lamp.", parameters: LAMP_SCHEMA };
    const named = { type: "function", name: "set_lamp" };
    await it.update({ tools: [lamp], tool_choice: named, max_output_tokens: MAX_OBJECT_TOKENS });
    it.say("first.wav");
    const [call] = (await it.until("response.done")).response.output;
    const item = { type: "function_call_output", call_id: call.call_id, output: TOOL_RESULT };
    const since = it.events.length;
    it.session.send({ type: "conversation.item.create", item });
    it.session.send({ type: "response.create", response: { tool_choice: "none", max_output_tokens: MAX_TOKENS } });
    await it.until("response.done", since);
    return { name: call.name, arguments: JSON.parse(call.arguments), text: it.text(since), errors: it.errors };
  });
  it.close();
}

/** In a process of its own, which is killed: this WebSocket only closes in good order. */
async function answeredLong() {
  const it = await talk();
  await it.update({ max_output_tokens: LONG_TOKENS });
  it.say("first.wav");
  await it.until(TEXT);
  console.log("answered");
}

async function droppedConnection() {
  await doing("dropped connection", async () => {
    const before = await cancelled();
    const child = spawn(process.execPath, [fileURLToPath(import.meta.url), ...process.argv.slice(2, 5), "drop"]);
    await new Promise((resolve, reject) => {
      child.stdout.once("data", resolve);
      child.once("exit", reject);
    });
    child.kill("SIGKILL");
    await until(async () => (await counted("omni_cluster_ingress_sessions")) === 0);
    const ended = (await cancelled()) - before;
    const it = await talk();
    const content = [{ type: "input_text", text: QUESTION }];
    it.session.send({ type: "conversation.item.create", item: { type: "message", role: "user", content } });
    it.session.send({ type: "response.create", response: { max_output_tokens: MAX_TOKENS } });
    await it.until("response.done");
    it.close();
    return { cancelled: ended, text: it.text(), errors: it.errors };
  });
}

if (process.argv[5] === "drop") {
  await answeredLong();
  await sleep(PATIENCE_MS);
} else {
  await turns();
  await interruption();
  await tool();
  await droppedConnection();
}
process.exit(0); // sockets that are closing would keep it
