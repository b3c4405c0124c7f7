// Both ends of the sound, in the audio thread: what is played, and what the microphone has.

const REPORT_EVERY_BLOCKS = 8;
const REFILL_S = 0.3; // once a player ran dry, it waits for so much: one gap sounds better than many

class PlayerProcessor extends AudioWorkletProcessor {
  constructor() {
    super();
    this.answers = [];
    this.blocks = 0;
    this.port.onmessage = ({ data }) => this.take(data);
  }

  take({ kind, id, samples }) {
    if (kind === "clear") {
      this.answers = [];
      return;
    }
    let answer = this.answers.find((each) => each.id === id);
    if (!answer) {
      answer = { id, chunks: [], offset: 0, queued: 0, played: 0, gaps: 0, isDry: false, isWhole: false };
      this.answers.push(answer);
    }
    if (kind === "end") {
      answer.isWhole = true;
    } else {
      answer.chunks.push(samples);
      answer.queued += samples.length;
    }
  }

  process(_, [[output]]) {
    let filled = 0;
    while (filled < output.length && this.answers.length) {
      const answer = this.answers[0];
      filled += this.fill(answer, output, filled);
      if (filled === output.length) break;
      if (!answer.isWhole) {
        this.runDry(answer);
        break;
      }
      this.answers.shift();
      this.report(answer, true);
    }
    this.blocks += 1;
    if (this.answers.length && this.blocks % REPORT_EVERY_BLOCKS === 0) this.report(this.answers[0], false);
    return true;
  }

  fill(answer, output, from) {
    if (answer.isDry && !answer.isWhole && answer.queued < REFILL_S * sampleRate) return 0;
    answer.isDry = answer.isDry && answer.queued === 0;
    let filled = 0;
    while (from + filled < output.length && answer.chunks.length) {
      const chunk = answer.chunks[0];
      const part = chunk.subarray(answer.offset, answer.offset + output.length - from - filled);
      output.set(part, from + filled);
      filled += part.length;
      answer.offset += part.length;
      if (answer.offset === chunk.length) {
        answer.chunks.shift();
        answer.offset = 0;
      }
    }
    answer.played += filled;
    answer.queued -= filled;
    return filled;
  }

  runDry(answer) {
    if (answer.isDry || answer.played === 0) return;
    answer.isDry = true;
    answer.gaps += 1;
  }

  report({ id, played, gaps }, hasEnded) {
    this.port.postMessage({ id, played, gaps, hasEnded });
  }
}

const MESSAGE_S = 0.04;

class MicrophoneProcessor extends AudioWorkletProcessor {
  constructor() {
    super();
    this.start();
  }

  start() {
    this.samples = new Int16Array(Math.round(MESSAGE_S * sampleRate));
    this.filled = 0;
    this.peak = 0;
  }

  process([[input]]) {
    for (const value of input ?? []) {
      this.peak = Math.max(this.peak, Math.abs(value));
      this.samples[this.filled++] = Math.max(-32768, Math.min(32767, Math.round(value * 32768)));
      if (this.filled === this.samples.length) {
        this.port.postMessage({ samples: this.samples, peak: this.peak }, [this.samples.buffer]);
        this.start();
      }
    }
    return true;
  }
}

registerProcessor("player", PlayerProcessor);
registerProcessor("microphone", MicrophoneProcessor);
