// Playing, hearing, and the 16-bit samples that the server sends and takes.

const WORKLETS = new URL("worklets.js", import.meta.url);

export function samplesOf(base64) {
  const text = atob(base64);
  const bytes = Uint8Array.from(text, (character) => character.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  return Float32Array.from({ length: bytes.length >> 1 }, (_, i) => view.getInt16(2 * i, true) / 32768);
}

export function base64Of(bytes) {
  let text = "";
  for (const byte of bytes) text += String.fromCharCode(byte);
  return btoa(text);
}

async function contextOf(rateHz) {
  const context = new AudioContext({ sampleRate: rateHz });
  await context.audioWorklet.addModule(WORKLETS);
  return context;
}

// Answers one after the other. Each has a listener, which is told how much was played, how many gaps it had, and its end.
export class Player {
  #rateHz = 0;
  #context = null;
  #node = null;
  #listeners = new Map();

  // To be called when the user does something: a browser lets no page sound before.
  async open(rateHz) {
    if (this.#rateHz !== rateHz) {
      await this.#context?.close();
      this.#rateHz = rateHz;
      this.#context = await contextOf(rateHz);
      this.#node = new AudioWorkletNode(this.#context, "player", { numberOfInputs: 0, outputChannelCount: [1] });
      this.#node.port.onmessage = ({ data }) => this.#told(data);
      this.#node.connect(this.#context.destination);
    }
    await this.#context.resume();
  }

  get isPlaying() {
    return this.#listeners.size > 0;
  }

  play(id, samples, listener) {
    this.#listeners.set(id, listener);
    this.#node.port.postMessage({ kind: "play", id, samples });
  }

  end(id) {
    if (this.#listeners.has(id)) this.#node.port.postMessage({ kind: "end", id });
  }

  // Silence at once, and for all that still comes of these answers: they are forgotten.
  clear() {
    this.#node?.port.postMessage({ kind: "clear" });
    this.#listeners.clear();
  }

  #told({ id, played, gaps, hasEnded }) {
    const listener = this.#listeners.get(id);
    if (hasEnded) this.#listeners.delete(id);
    listener?.({ playedS: played / this.#rateHz, gaps, hasEnded });
  }
}

// `onSound` gets 16-bit samples, and the loudest of them from 0 to 1.
export class Microphone {
  #context;
  #stream;

  static async open(rateHz, onSound) {
    if (!navigator.mediaDevices) {
      throw new Error("A browser gives its microphone to pages of localhost or HTTPS only.");
    }
    const microphone = new Microphone();
    const audio = { channelCount: 1, echoCancellation: true, noiseSuppression: true, autoGainControl: true };
    microphone.#stream = await navigator.mediaDevices.getUserMedia({ audio });
    try {
      await microphone.#listen(rateHz, onSound);
    } catch (error) {
      microphone.close();
      throw error;
    }
    return microphone;
  }

  async #listen(rateHz, onSound) {
    this.#context = await contextOf(rateHz);
    const node = new AudioWorkletNode(this.#context, "microphone", { numberOfOutputs: 0 });
    node.port.onmessage = ({ data }) => onSound(data.samples, data.peak);
    this.#context.createMediaStreamSource(this.#stream).connect(node);
    await this.#context.resume();
  }

  close() {
    for (const track of this.#stream.getTracks()) track.stop();
    this.#context?.close();
  }
}
