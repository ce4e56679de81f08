// Loads the browser's engine: WebAssembly, the two libraries, and the files with their progress.

import { createEngine } from "./browser_engine.js";

// A module of one SIMD instruction, v128.const: a browser without SIMD cannot validate it.
const SIMD = new Uint8Array([
  0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 22, 1, 20, 0, 253, 12, ...new Array(16).fill(0), 11,
]);

/** Load onnxruntime-web, the tokenizer and a model. `onProgress(loaded, total)` counts bytes. */
export async function loadEngine(site, dtype, onProgress) {
  if (typeof WebAssembly !== "object" || !WebAssembly.validate(SIMD)) {
    throw new Error("This browser has no WebAssembly with SIMD, which the model needs: try a newer one.");
  }
  const { onnxruntime, wasm, tokenizers } = site.runtime;
  const total = site.dtypes[dtype].bytes + wasm.bytes;
  let loaded = 0;
  const progress = (bytes) => onProgress((loaded += bytes), total);
  const [ort, { Tokenizer }, wasmBinary] = await Promise.all([
    importModule(onnxruntime.url),
    importModule(tokenizers.url),
    read(wasm.url, progress, wasm.integrity),
  ]);
  ort.env.wasm.numThreads = 1; // threads need headers that a static host does not send
  ort.env.wasm.wasmBinary = wasmBinary.buffer;
  return createEngine({ site, dtype, ort, Tokenizer, read: (path) => read(path, progress) });
}

/** Import a module. The page's import map contains the hash of a module from a different host. */
async function importModule(url) {
  try {
    return await import(new URL(url, document.baseURI).href);
  } catch {
    throw new Error(`${url} cannot be loaded: is the network there, and the file unchanged?`);
  }
}

/** Read the bytes of a file. The browser checks an integrity hash. */
async function read(path, onBytes, integrity) {
  let response;
  try {
    response = await fetch(path, integrity ? { integrity } : {});
  } catch {
    throw new Error(`${path} cannot be loaded: is the network there, and the file unchanged?`);
  }
  if (!response.ok) throw new Error(`${path} is missing (status ${response.status}): export the site again.`);
  const parts = [];
  for (const reader = response.body.getReader(); ; ) {
    const { done, value } = await reader.read();
    if (done) break;
    parts.push(value);
    onBytes(value.length);
  }
  return new Uint8Array(await new Blob(parts).arrayBuffer());
}
