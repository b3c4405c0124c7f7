// A conversation by voice: the server finds the turns in what the microphone has.

import { Refused, address } from "./api.js";
import { Microphone, base64Of } from "./sound.js";

export const TALK_HZ = 24000;
const LATE_CANCEL = "response_cancel_not_active";

export class Talk {
  #socket;
  #microphone = null;
  #on;

  // `on`: a function for each type of event that matters, and `level` and `closed`.
  // null, where the server has ended the conversation meanwhile, as `closed` was told.
  static async open({ model, voice, key, history, on }) {
    const url = address(`v1/realtime?model=${encodeURIComponent(model)}`);
    url.protocol = url.protocol.replace("http", "ws");
    const talk = new Talk();
    talk.#on = on;
    talk.#socket = new WebSocket(url, ["realtime", ...(key ? [`openai-insecure-api-key.${key}`] : [])]);
    await talk.#opened();
    talk.#configure(voice);
    for (const { role, text } of history) if (text) talk.#add(role, [textPart(role, text)]);
    try {
      talk.#microphone = await Microphone.open(TALK_HZ, (samples, peak) => talk.#hear(samples, peak));
    } catch (error) {
      talk.close();
      throw error;
    }
    if (talk.#socket.readyState === WebSocket.OPEN) return talk;
    talk.#mute();
    return null;
  }

  #opened() {
    return new Promise((resolve, reject) => {
      this.#socket.onopen = resolve;
      this.#socket.onclose = () => reject(new Refused(0, "The server takes no conversation; its key may be missing."));
      this.#socket.onmessage = ({ data }) => this.#take(JSON.parse(data));
    }).then(() => {
      this.#socket.onclose = ({ reason }) => this.#closed(reason);
    });
  }

  #configure(voice) {
    const input = { turn_detection: { type: "server_vad" }, transcription: {} };
    const output = voice ? { voice } : {};
    const session = { type: "realtime", output_modalities: ["audio"], audio: { input, output } };
    this.#send("session.update", { session });
  }

  say(parts) {
    this.#add("user", parts);
    this.#send("response.create");
  }

  cancel() {
    this.#send("response.cancel");
  }

  // What was not played of an answer leaves the conversation.
  truncate(itemId, playedS) {
    this.#send("conversation.item.truncate", {
      item_id: itemId,
      content_index: 0,
      audio_end_ms: Math.floor(playedS * 1000),
    });
  }

  close() {
    this.#mute();
    this.#socket.close();
  }

  #mute() {
    this.#microphone?.close();
    this.#microphone = null;
  }

  #add(role, content) {
    this.#send("conversation.item.create", { item: { type: "message", role, content } });
  }

  #hear(samples, peak) {
    this.#send("input_audio_buffer.append", { audio: base64Of(new Uint8Array(samples.buffer)) });
    this.#on.level(peak);
  }

  #send(type, fields = {}) {
    if (this.#socket.readyState === WebSocket.OPEN) this.#socket.send(JSON.stringify({ type, ...fields }));
  }

  #take(event) {
    if (event.type === "error" && event.error.code === LATE_CANCEL) return; // the answer had just ended
    this.#on[event.type]?.(event);
  }

  #closed(reason) {
    this.#mute();
    this.#on.closed(reason);
  }
}

function textPart(role, text) {
  return { type: role === "user" ? "input_text" : "output_text", text };
}
