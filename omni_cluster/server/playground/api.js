// The server's API: its model, and the events of a streamed chat. All addresses are below the page's own.

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function address(path) {
  return new URL(path, document.baseURI);
}

function headersOf(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function answered(response) {
  if (response.ok) return response;
  const said = await response.json().catch(() => ({}));
  throw new Refused(response.status, said.error?.message ?? `The server answered ${response.status}.`);
}

export async function modelOf(key) {
  const response = await answered(await fetch(address("v1/models"), { headers: headersOf(key) }));
  return (await response.json()).data[0];
}

export async function* chat(body, key, signal) {
  const headers = { "Content-Type": "application/json", ...headersOf(key) };
  const request = { method: "POST", headers, body: JSON.stringify(body), signal };
  const response = await answered(await fetch(address("v1/chat/completions"), request));
  for await (const line of linesOf(response.body)) {
    if (!line.startsWith("data: ")) continue;
    const data = line.slice("data: ".length);
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new Refused(response.status, event.error.message);
    yield event;
  }
  throw new Error("The connection ended before the answer did.");
}

async function* linesOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let { done, value } = await reader.read(); !done; { done, value } = await reader.read()) {
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    yield* lines;
  }
}
