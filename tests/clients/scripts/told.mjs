// What the scripts share: what they ask, and how they say what they saw. `told.py` has the same for Python.
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";

export const [ADDRESS, MODEL, FOLDER] = process.argv.slice(2);
export const URL = `${ADDRESS}/v1`;
export const KEY = "none";
export const QUESTION = "Tell me.";
export const SECOND_QUESTION = "And then?";
export const SAID = "Good morning.";
export const MAX_TOKENS = 16;
export const MAX_OBJECT_TOKENS = 200;
export const TOOL_RESULT = "The lamp is set.";
export const LAMP_SCHEMA = {
  type: "object",
  properties: { color: { type: "string", enum: ["red", "green"] }, on: { type: "boolean" } },
  required: ["color", "on"],
  additionalProperties: false,
};

export const read = (name) => readFileSync(join(FOLDER, name));

/** Writes a file that the client was given; its name. */
export function kept(name, data) {
  writeFileSync(join(FOLDER, name), data);
  return name;
}

/** Tells what the block saw; a block that fails is told too, and the next ones go on. */
export async function doing(did, block) {
  try {
    console.log(JSON.stringify({ did, ok: true, seen: await block() }));
  } catch (error) {
    console.error(did, error);
    console.log(JSON.stringify({ did, ok: false, seen: { error: String(error) } }));
  }
}
