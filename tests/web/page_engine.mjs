// The page's engine in Node: node page_engine.mjs SITE DTYPE OPTIONS < lines > translations as JSON
import { readFile } from "node:fs/promises";
import path from "node:path";
import { text } from "node:stream/consumers";
import { pathToFileURL } from "node:url";
import { Tokenizer } from "@huggingface/tokenizers";
import onnxruntime from "onnxruntime-node";

const [folder, dtype, options] = process.argv.slice(2);
const { createEngine } = await import(pathToFileURL(path.join(folder, "browser_engine.js")));
const read = async (file) => new Uint8Array(await readFile(path.join(folder, file)));
const site = JSON.parse(new TextDecoder().decode(await read("site.json")));
const ort = {
  Tensor: onnxruntime.Tensor,
  InferenceSession: {
    create: (bytes) => onnxruntime.InferenceSession.create(bytes, { intraOpNumThreads: 1, logSeverityLevel: 4 }),
  },
};
const found = [];
let started, error;
try {
  const engine = await createEngine({ site, dtype, ort, Tokenizer, read });
  started = performance.now();
  for (const line of JSON.parse(await text(process.stdin))) found.push(await engine.translate(line, JSON.parse(options)));
} catch (caught) {
  error = caught.message;
}
console.log(JSON.stringify({ found, seconds: (performance.now() - started) / 1000, error }));
