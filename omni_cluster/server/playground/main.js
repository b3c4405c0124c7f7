// The page: what the user does, and what comes of it.

import { Refused, chat, modelOf } from "./api.js";
import { Player, samplesOf } from "./sound.js";
import { TALK_HZ, Talk } from "./talk.js";
import { AnswerView, UserView, now } from "./view.js";

const KEY = "omni_cluster_key";
const NEAR_END_PX = 160;
const KINDS = ["image", "audio", "video"];
const NO_KEY = 401;

const part = (id) => document.getElementById(id);
const player = new Player();
const history = []; // {role, text, parts}: `text` of what was spoken comes later
let model = null;
let files = []; // {name, type, url, data}, not sent yet
let running = null; // {answer, abort}: what the server still makes
let talk = null;
let playing = null; // the answer that sounds

class Answer {
  static #count = 0;

  constructor(rateHz, askedS = now()) {
    this.id = ++Answer.#count;
    this.rateHz = rateHz;
    this.sound = [];
    this.playedS = 0;
    this.isSilenced = false;
    this.isReplay = false;
    this.itemId = null; // in a conversation by voice
    this.entry = { role: "assistant", text: "" };
    history.push(this.entry);
    this.view = new AnswerView(part("conversation"), () => this.playAgain(), askedS);
    follow();
  }

  addText(text) {
    if (!text) return;
    this.entry.text += text;
    this.view.addText(text);
    follow();
  }

  addSound(base64) {
    if (!base64 || this.isSilenced) return;
    const samples = samplesOf(base64);
    this.sound.push(samples);
    this.view.addSound(samples, this.rateHz);
    this.#play(samples);
    follow();
  }

  #play(samples) {
    playing = this;
    player.play(this.id, samples, (progress) => this.#played(progress));
    refresh();
  }

  #played({ playedS, gaps, hasEnded }) {
    this.playedS = playedS;
    this.view.played(playedS, gaps, !this.isReplay);
    if (!hasEnded) return;
    if (playing === this) playing = null;
    refresh();
  }

  async playAgain() {
    interrupt();
    await player.open(this.rateHz);
    this.isReplay = true;
    for (const samples of this.sound) this.#play(samples);
    player.end(this.id);
  }

  silence() {
    this.isSilenced = true;
  }

  end(how = "", stages = {}) {
    player.end(this.id);
    this.view.end(how, stages, this.sound.length > 0);
    if (running?.answer === this) running = null;
    follow();
    refresh();
  }

  drop() {
    history.splice(history.indexOf(this.entry), 1);
    this.view.remove();
  }
}

// ------------------------------------------------------------ by text and files

async function ask(text, attached) {
  interrupt();
  const question = { role: "user", text, parts: [...attached.map(chatPart), ...(text ? [{ type: "text", text }] : [])] };
  if (talk) {
    history.push(question);
    showUser({ text, files: attached });
    talk.say([...attached.map(talkPart), ...(text ? [{ type: "input_text", text }] : [])]);
    return;
  }
  const rateHz = model.sound?.sample_rate_hz;
  if (rateHz) await player.open(rateHz);
  history.push(question);
  const view = showUser({ text, files: attached });
  const body = bodyOf(Boolean(rateHz));
  const answer = new Answer(rateHz);
  const cut = new AbortController();
  running = { answer, abort: () => cut.abort() };
  refresh();
  try {
    answer.end("", await streamed(answer, body, cut.signal));
  } catch (error) {
    failed(error, answer, question, view);
  }
}

function bodyOf(wantsSound) {
  const messages = history
    .filter(({ text, parts }) => text || parts?.length)
    .map(({ role, text, parts }) => ({ role, content: parts ?? text }));
  const spoken = { modalities: ["text", "audio"], audio: { voice: part("voice").value, format: "pcm16" } };
  return { model: model.id, messages, stream: true, ...(wantsSound ? spoken : {}) };
}

async function streamed(answer, body, signal) {
  let stages = {};
  for await (const event of chat(body, key(), signal)) {
    const delta = event.choices?.[0]?.delta ?? {};
    answer.addText(typeof delta.content === "string" ? delta.content : "");
    answer.addSound(delta.audio?.data);
    stages = event.omni?.stages ?? stages;
  }
  return stages;
}

function failed(error, answer, question, view) {
  if (error.name === "AbortError") {
    answer.end("interrupted");
    return;
  }
  tell(error);
  answer.end("ended early");
  if (answer.entry.text) return;
  answer.drop();
  history.splice(history.indexOf(question), 1);
  view.article.remove();
  part("text").value ||= question.text;
}

function chatPart({ type, data }) {
  const kind = `${type.split("/")[0]}_url`;
  return { type: kind, [kind]: { url: data } };
}

function talkPart({ data }) {
  return { type: "input_image", image_url: data };
}

// ------------------------------------------------------------ by voice

async function startTalk() {
  interrupt();
  part("notice").textContent = "";
  const button = part("talk");
  button.disabled = true;
  try {
    await player.open(TALK_HZ);
    const on = talkEvents();
    const voice = part("voice").value;
    talk = await Talk.open({ model: model.id, voice, key: key(), history: [...history], on });
    part("listening").textContent = talk ? "listening" : "";
  } catch (error) {
    tell(error);
  }
  button.disabled = false;
  refresh();
}

function talkEvents() {
  const answers = new Map();
  const turns = new Map();
  let spokenS = null; // when the turn ended that is answered next
  const answerOf = ({ response_id: id }) => answers.get(id);
  return {
    "input_audio_buffer.speech_started": ({ item_id: id }) => {
      silence();
      turns.set(id, newTurn());
    },
    "input_audio_buffer.speech_stopped": () => {
      spokenS = now();
    },
    "conversation.item.input_audio_transcription.completed": ({ item_id: id, transcript }) => {
      const turn = turns.get(id);
      if (!turn) return;
      turn.entry.text = transcript;
      turn.view.show(transcript || "(no words)");
    },
    "response.created": ({ response }) => {
      const answer = new Answer(TALK_HZ, spokenS ?? now());
      spokenS = null;
      answers.set(response.id, answer);
      running = { answer, abort: () => talk.cancel() };
      refresh();
    },
    "response.output_item.added": (event) => {
      answerOf(event).itemId = event.item.id;
    },
    "response.output_audio_transcript.delta": (event) => answerOf(event)?.addText(event.delta),
    "response.output_audio.delta": (event) => answerOf(event)?.addSound(event.delta),
    "response.done": ({ response }) => {
      const answer = answers.get(response.id);
      answers.delete(response.id);
      if (response.status === "failed") tell(new Error(response.status_details?.error?.message ?? "The answer failed."));
      answer.end(response.status === "cancelled" || answer.isSilenced ? "interrupted" : "");
      if (!answer.entry.text) answer.drop();
    },
    error: ({ error }) => tell(new Error(error.message)),
    level: (peak) => part("talk").style.setProperty("--level", peak.toFixed(2)),
    closed: (reason) => {
      talk = null;
      for (const answer of answers.values()) answer.end("interrupted");
      part("listening").textContent = "";
      if (reason && !part("notice").textContent) tell(new Error(`The conversation ended: ${reason}.`));
      refresh();
    },
  };
}

function newTurn() {
  const entry = { role: "user", text: "" };
  history.push(entry);
  return { entry, view: showUser({ isSpoken: true }) };
}

function stopTalk() {
  interrupt();
  talk.close();
}

// ------------------------------------------------------------ interruption

// Nothing sounds any more; of an answer in a conversation by voice, the rest is forgotten.
function silence() {
  player.clear();
  running?.answer.silence();
  const answer = playing;
  playing = null;
  if (!answer) return;
  answer.silence();
  answer.view.cut("interrupted");
  if (talk && answer.itemId && !answer.isReplay) talk.truncate(answer.itemId, answer.playedS);
}

function interrupt() {
  silence();
  running?.abort();
  running = null;
  refresh();
}

// ------------------------------------------------------------ files

async function attach(chosen) {
  for (const file of chosen) {
    const kind = file.type.split("/")[0];
    if (!KINDS.includes(kind)) {
      tell(new Error(`${file.name} is no picture, sound or film.`));
    } else if (talk && kind !== "image") {
      tell(new Error(`${file.name} is no picture, which is all that a conversation by voice takes; end it first.`));
    } else {
      files.push({ name: file.name, type: file.type, url: URL.createObjectURL(file), data: await dataUrlOf(file) });
    }
  }
  showFiles();
}

function dataUrlOf(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function showFiles() {
  const items = files.map((file) => {
    const item = document.createElement("li");
    const remove = document.createElement("button");
    Object.assign(remove, { type: "button", textContent: "×", title: "Remove" });
    remove.setAttribute("aria-label", `Remove ${file.name}`);
    remove.addEventListener("click", () => {
      files = files.filter((each) => each !== file);
      showFiles();
    });
    item.append(file.name, remove);
    return item;
  });
  part("files").replaceChildren(...items);
  refresh();
}

// ------------------------------------------------------------ the page

function key() {
  return sessionStorage.getItem(KEY) ?? "";
}

function tell(error) {
  part("notice").textContent = error.message;
  if (error instanceof Refused && error.status === NO_KEY) part("access").showPopover();
}

function showUser(what) {
  part("welcome").hidden = true;
  const view = new UserView(part("conversation"), what);
  follow(true);
  return view;
}

function follow(always = false) {
  const { scrollHeight, scrollTop, clientHeight } = document.querySelector("main");
  if (always || scrollHeight - scrollTop - clientHeight < NEAR_END_PX) {
    document.querySelector("main").scrollTop = scrollHeight;
  }
}

function refresh() {
  part("stop").hidden = !(running || playing);
  part("send").disabled = !model || !(part("text").value.trim() || files.length);
  part("talk").disabled = !model?.sound;
  part("talk").setAttribute("aria-pressed", String(Boolean(talk)));
  part("voice").disabled = Boolean(talk);
}

function fit() {
  const text = part("text");
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight}px`;
  refresh();
}

function send() {
  const text = part("text").value.trim();
  if (!model || !(text || files.length)) return;
  const attached = files;
  files = [];
  part("text").value = "";
  part("notice").textContent = "";
  showFiles();
  fit();
  ask(text, attached);
}

async function connect() {
  part("notice").textContent = ""; // not later: what is told meanwhile is about something else
  try {
    model = await modelOf(key());
    part("model").textContent = model.id;
    part("voice").replaceChildren(...model.voices.map((name) => new Option(name)));
  } catch (error) {
    part("model").textContent = "not connected";
    tell(error);
  }
  refresh();
}

function listen() {
  part("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  part("text").addEventListener("input", fit);
  part("text").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  part("attach").addEventListener("click", () => part("picker").click());
  part("picker").addEventListener("change", ({ target }) => {
    attach([...target.files]);
    target.value = "";
  });
  part("talk").addEventListener("click", () => (talk ? stopTalk() : startTalk()));
  part("stop").addEventListener("click", interrupt);
  part("use-key").addEventListener("click", () => {
    sessionStorage.setItem(KEY, part("key").value.trim());
    part("access").hidePopover();
    connect();
  });
  for (const starter of document.querySelectorAll(".starters button")) {
    starter.addEventListener("click", () => model && ask(starter.textContent, []));
  }
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") interrupt();
  });
  document.addEventListener("dragover", (event) => {
    event.preventDefault();
    document.body.classList.add("dropping");
  });
  document.addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) document.body.classList.remove("dropping");
  });
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    document.body.classList.remove("dropping");
    attach([...event.dataTransfer.files]);
  });
  document.addEventListener("paste", (event) => attach([...event.clipboardData.files]));
}

listen();
refresh();
connect();
