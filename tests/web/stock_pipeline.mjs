// The stock translation pipeline of transformers.js: node stock_pipeline.mjs FOLDER DTYPE < lines > translations as JSON
import path from "node:path";
import { text } from "node:stream/consumers";
import { env, pipeline } from "@huggingface/transformers";

const [folder, dtype, options = "{}"] = process.argv.slice(2);
env.allowRemoteModels = false;
env.localModelPath = path.dirname(folder);
const settings = { dtype, session_options: { intraOpNumThreads: 1 } };
const translator = await pipeline("translation", path.basename(folder), settings);
const found = [];
const started = performance.now();
for (const line of JSON.parse(await text(process.stdin))) {
  const [{ translation_text }] = await translator(line, JSON.parse(options));
  found.push(translation_text);
}
console.log(JSON.stringify({ found, seconds: (performance.now() - started) / 1000 }));
