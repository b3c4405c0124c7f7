// What the page shows of a conversation: messages, and of an answer its sound and its times.

const PEAK_S = 0.02;
const BAR_PX = 4;

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function seconds(value) {
  return value === undefined || value === null ? "–" : `${value.toFixed(2)}\u00a0s`;
}

export class UserView {
  #text = element("p", { className: "text" });

  constructor(list, { text = "", files = [], isSpoken = false } = {}) {
    const speaker = element("h3", { textContent: "You" });
    this.article = element("article", { className: "message user" }, speaker, ...files.map(preview), this.#text);
    this.article.classList.toggle("spoken", isSpoken);
    this.show(text || (isSpoken ? "…" : ""));
    list.append(this.article);
  }

  show(text) {
    this.#text.textContent = text;
    this.#text.hidden = !text;
  }
}

export function preview(file) {
  const [kind] = file.type.split("/");
  const source = { src: file.url, className: "preview" };
  if (kind === "image") return element("img", { ...source, alt: file.name });
  const player = element(kind, { ...source, controls: true, preload: "metadata" });
  player.setAttribute("aria-label", file.name);
  return player;
}

export class AnswerView {
  #text = element("p", { className: "text" });
  #state = element("p", { className: "state", textContent: "waits for the first word …" });
  #wave = new Waveform();
  #again = element("button", { type: "button", className: "again", textContent: "Play again", hidden: true });
  #sound = element("div", { className: "sound", hidden: true }, this.#wave.canvas, this.#again);
  #times;

  // `onAgain`: what its button does. `askedS`: when it was asked for.
  constructor(list, onAgain, askedS) {
    this.#times = new Times(askedS);
    const speaker = element("h3", { textContent: "Model" });
    this.article = element(
      "article",
      { className: "message answer" },
      speaker,
      this.#text,
      this.#state,
      this.#sound,
      this.#times.details,
    );
    this.article.setAttribute("aria-busy", "true"); // a screen reader reads it once it is whole
    this.#again.addEventListener("click", onAgain);
    list.append(this.article);
  }

  addText(text) {
    this.#times.came("Text");
    this.#text.append(text);
    this.#state.textContent = "";
  }

  addSound(samples, rateHz) {
    this.#times.came("Sound");
    this.#sound.hidden = false;
    this.#state.textContent = "";
    this.#wave.add(samples, rateHz);
  }

  // `isFirst`: not again.
  played(playedS, gaps, isFirst) {
    if (isFirst) this.#times.played(gaps);
    this.#wave.played(playedS);
  }

  // `how`: a word or two, where it is not whole. `stages`: times of each by its name, where the server says them.
  end(how, stages, canPlayAgain) {
    this.article.setAttribute("aria-busy", "false");
    this.#state.textContent = how;
    this.#again.hidden = !canPlayAgain;
    this.#times.end(stages);
  }

  cut(how) {
    this.#state.textContent = how;
  }

  remove() {
    this.article.remove();
  }
}

class Waveform {
  canvas = element("canvas", { className: "wave" });
  #peaks = [];
  #rest = 0;
  #restSamples = 0;
  #totalS = 0;
  #playedS = 0;
  #isDue = false;

  constructor() {
    this.canvas.setAttribute("role", "img");
    new ResizeObserver(() => this.#draw()).observe(this.canvas);
  }

  add(samples, rateHz) {
    const size = Math.round(PEAK_S * rateHz);
    for (const sample of samples) {
      this.#rest = Math.max(this.#rest, Math.abs(sample));
      if (++this.#restSamples === size) {
        this.#peaks.push(this.#rest);
        this.#rest = this.#restSamples = 0;
      }
    }
    this.#totalS += samples.length / rateHz;
    this.canvas.setAttribute("aria-label", `Waveform of ${seconds(this.#totalS)} of sound`);
    this.#drawSoon();
  }

  played(playedS) {
    this.#playedS = playedS;
    this.#drawSoon();
  }

  #drawSoon() {
    if (this.#isDue) return;
    this.#isDue = true;
    requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    this.#isDue = false;
    const { clientWidth: width, clientHeight: height } = this.canvas;
    const scale = devicePixelRatio || 1;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    const style = getComputedStyle(this.canvas);
    const colours = [style.getPropertyValue("--played"), style.getPropertyValue("--coming")];
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    const bars = Math.floor(width / BAR_PX);
    const loudest = Math.max(0.05, ...this.#peaks);
    for (let bar = 0; bar < bars; bar++) {
      const from = Math.floor((bar * this.#peaks.length) / bars);
      const until = Math.max(from + 1, Math.floor(((bar + 1) * this.#peaks.length) / bars));
      const peak = Math.max(0, ...this.#peaks.slice(from, until)) / loudest;
      const tall = Math.max(2, peak * (height - 2));
      context.fillStyle = colours[(bar / bars) * this.#totalS < this.#playedS ? 0 : 1];
      context.beginPath();
      context.roundRect(bar * BAR_PX, (height - tall) / 2, BAR_PX - 1.5, tall, 1);
      context.fill();
    }
  }
}

// When what came, as this page saw it, and when each stage made it, as the server says.
class Times {
  details = element("details", { className: "times", hidden: true });
  #summary = element("summary");
  #body = element("tbody");
  #askedS;
  #spans = new Map();
  #stages = {};
  #gaps = 0;

  constructor(askedS) {
    this.#askedS = askedS;
    const names = ["", "Timeline", "First", "Last", "Tokens", "Transfer, median", "longest"];
    const head = element("tr", {}, ...names.map((name) => element("th", { textContent: name, scope: "col" })));
    head.firstChild.textContent = "Stage";
    const table = element("table", {}, element("thead", {}, head), this.#body);
    const scroller = element("div", { className: "scroller", tabIndex: 0, role: "region" }, table);
    scroller.setAttribute("aria-label", "Times of the stages");
    this.details.append(this.#summary, scroller);
  }

  came(name) {
    const atS = now() - this.#askedS;
    const [firstS] = this.#spans.get(name) ?? [atS];
    this.#spans.set(name, [firstS, atS]);
    this.#summarise();
  }

  played(gaps) {
    this.#gaps = gaps;
    this.came("Playing");
    this.#show();
  }

  end(stages = {}) {
    this.#spans.set("Request", [0, now() - this.#askedS]);
    this.#stages = stages;
    this.#summarise();
    this.#show();
  }

  #summarise() {
    const first = (name) => seconds(this.#spans.get(name)?.[0]);
    const whole = this.#spans.get("Request")?.[1];
    const parts = [`first text ${first("Text")}`, `first sound ${first("Sound")}`];
    if (whole !== undefined) parts.push(`whole ${seconds(whole)}`);
    if (this.#gaps) parts.push(`${this.#gaps} ${this.#gaps === 1 ? "gap" : "gaps"}`);
    this.#summary.textContent = parts.join(" · ");
    this.details.hidden = false;
  }

  #show() {
    const own = [...this.#spans].map(([name, [firstS, lastS]]) => ({ name, firstS, lastS, kind: "seen" }));
    const made = Object.entries(this.#stages).map(([name, times]) => ({
      name,
      firstS: times.first_s,
      lastS: times.last_s,
      tokens: times.tokens,
      medianS: times.handover_p50_s,
      longestS: times.handover_max_s,
      kind: "stage",
    }));
    const spans = [...own.filter(({ name }) => name === "Request"), ...made, ...own.filter(({ name }) => name !== "Request")];
    const endS = Math.max(...spans.map(({ lastS }) => lastS ?? 0), 0.001);
    this.#body.replaceChildren(...spans.map((span) => line(span, endS)));
  }
}

function line({ name, firstS, lastS, tokens, medianS, longestS, kind }, endS) {
  const bar = element("span", { className: `bar ${kind}` });
  bar.style.marginInlineStart = `${(100 * (firstS ?? 0)) / endS}%`;
  bar.style.width = `${(100 * ((lastS ?? 0) - (firstS ?? 0))) / endS}%`;
  const cells = [seconds(firstS), seconds(lastS), tokens ?? "–", milliseconds(medianS), milliseconds(longestS)];
  return element(
    "tr",
    {},
    element("th", { textContent: name, scope: "row" }),
    element("td", { className: "track" }, bar),
    ...cells.map((text) => element("td", { textContent: text })),
  );
}

function milliseconds(valueS) {
  return valueS === undefined || valueS === null ? "–" : `${(valueS * 1000).toFixed(1)}\u00a0ms`;
}

export function now() {
  return performance.now() / 1000;
}
