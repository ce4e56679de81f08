// The page's engine in a browser: encoder and decoder in onnxruntime-web, in this tab. See README.md, "The interface of
// an engine". Only the arguments of `createEngine` need a browser: Node runs this file too.
//
// Shapes: K beams, S source length, T tokens of the call, P tokens in the KV cache, H heads, D d_model, V target vocabulary.

import { softmax } from "./attention.js";
import { beamSearch, logSumExp, topTokens } from "./search.js";
import { sentenceAt, splitLines, splitText, translatedParts } from "./sentences.js";

const MOST_KNOWN = 500; // translations of sentences that an engine remembers

/**
 * Load a model.
 *
 * @param site the content of site.json
 * @param dtype a key of site.dtypes
 * @param ort the module onnxruntime-web, or onnxruntime-node
 * @param Tokenizer of @huggingface/tokenizers
 * @param read `await read(path)` returns a file's bytes, a Uint8Array
 */
export async function createEngine({ site, dtype, ort, Tokenizer, read }) {
  const tokenizer = await loadTokenizer(site, Tokenizer, read);
  const { encoder, decoder } = site.dtypes[dtype];
  const sessions = [];
  for (const path of [encoder, decoder]) {
    const bytes = await read(path);
    sessions.push(
      await ort.InferenceSession.create(bytes).catch(() => {
        throw new Error(`${path} is damaged, or made for another version: export the site again.`);
      }),
    );
  }
  const model = new Model(ort, ...sessions);
  const engine = { site, tokenizer, model, known: new Map() };
  return { translate: (text, options) => translate(engine, text, options ?? {}) };
}

async function translate(engine, text, options) {
  const { source_language: from, target_language: to, task } = engine.site;
  const parts = task === "sequence" ? splitLines(text) : splitText(text, from);
  const sentence = sentenceAt(parts, options.caret ?? text.length);
  const picture = sentence === null ? emptyTranslation() : await pictureOf(engine, parts[sentence].text, options);
  const translations = [];
  for (const [i, part] of parts.entries()) {
    if (part.is_sentence) translations.push(i === sentence ? picture.text : await translateSentence(engine, part.text, options));
  }
  const targets = translatedParts(parts, translations, from, to);
  const pairs = parts.map(({ text: source, is_sentence }, i) => ({ source, target: targets[i], is_sentence }));
  return { ...picture, parts: pairs, sentence };
}

/** The translation of a sentence that the page does not show in detail. */
async function translateSentence(engine, sentence, { num_beams, signal }) {
  const { known, tokenizer } = engine;
  const key = `${num_beams} ${sentence}`;
  if (!known.has(key)) {
    const { hypotheses } = await search(engine, tokenizer.encode(sentence), { num_beams, signal });
    if (known.size >= MOST_KNOWN) known.clear();
    known.set(key, tokenizer.decode(hypotheses[0].tokens).trim());
  }
  return known.get(key);
}

/** The search for the translations of a source. They do not contain the prefix. */
async function search({ site, tokenizer, model }, source, options) {
  const { num_beams = site.search.num_beams, num_hypotheses = 1, prefix = [], signal, onStep } = options;
  const longest = site.search.max_positions ?? Infinity; // learned positions end
  if (source.length > longest) {
    throw new Error(`The source has ${source.length} tokens, but the model has positions for ${longest}.`);
  }
  const { max_new_tokens: given, max_length_over_source: over, eos_token_ids: ends } = site.search;
  await model.encode(source);
  if (ends.includes(prefix.at(-1))) return { hypotheses: [{ tokens: [], score: null, logProbability: 0 }] };
  // Of the whole translation, as in the graph, which does not know what was given.
  const limit = Math.min(Math.max((given ?? source.length + over) - prefix.length, 1), longest - prefix.length);
  if (limit < 1) throw new Error(`The beginning has ${prefix.length} tokens, but the model has positions for ${longest}.`);
  const settings = { ...site.search, num_beams, num_hypotheses, max_new_tokens: limit };
  const start = [site.search.decoder_start_token_id, ...prefix];
  return beamSearch(model, start, settings, {
    signal,
    onStep: onStep && ((nodes) => onStep(withText(nodes, tokenizer, prefix))),
  });
}

/** The translation of a sentence in detail. */
async function pictureOf(engine, sentence, options) {
  const { site, tokenizer, model } = engine;
  const { alternatives = 5, prefix = [] } = options;
  const isSequence = site.task === "sequence";
  const source = tokenizer.encode(sentence);
  // Of sequences the whole list is shown, so that the search goes on until it is final.
  const num_hypotheses = isSequence ? (options.num_beams ?? site.search.num_beams) : 1;
  const { hypotheses, nodes } = await search(engine, source, { ...options, num_hypotheses });
  const best = [...prefix, ...hypotheses[0].tokens];
  const { logits, cross, decoder } = await model.score([site.search.decoder_start_token_id, ...best.slice(0, -1)]);
  const detokenize = (ids) => tokenizer.decode(ids).trim();
  const shown = hypotheses.map(({ tokens, score }) => {
    const ids = [...prefix, ...tokens];
    return { text: detokenize(ids), score, tokens: ids, token_texts: tokenizer.surfaces(ids).map((token) => token.text) };
  });
  return {
    source: tokenizer.surfaces(source),
    text: detokenize(best),
    tokens: tokenizer.surfaces(best),
    ...probabilities(logits, best, alternatives, tokenizer),
    attention: cross.map((heads) => heads.map((rows) => rows.map((row) => softmax(row).map(toThreeDecimals)))),
    inside: options.inside && { cross, encoder: await model.encoderView(source), decoder },
    hypotheses: shown,
    predictions: isSequence ? predictionsOf(shown, hypotheses.map(({ logProbability }) => logProbability)) : undefined,
    tree: nodes && withText(nodes, tokenizer, prefix),
  };
}

/** The list of a server's `/predict`: each text once, with its best score and its share of the probability of all. */
function predictionsOf(hypotheses, logProbabilities) {
  const total = logSumExp(logProbabilities);
  const predictions = new Map();
  hypotheses.forEach(({ text, score }, i) => {
    if (!predictions.has(text)) predictions.set(text, { text, score, probability: 0 });
    predictions.get(text).probability += Math.exp(logProbabilities[i] - total);
  });
  return [...predictions.values()];
}

function emptyTranslation() {
  return { source: [], text: "", tokens: [], probabilities: [], attention: [], alternatives: [], hypotheses: [] };
}

/** The probabilities of each token and of its best alternatives, from the logits at its position. */
function probabilities(logits, ids, count, tokenizer) {
  const found = { probabilities: [], alternatives: [] };
  logits.forEach((row, position) => {
    const normalizer = logSumExp(row);
    const probability = (id) => Math.exp(row[id] - normalizer);
    const before = ids.slice(0, position);
    found.probabilities.push(probability(ids[position]));
    found.alternatives.push(
      topTokens(row, count).map((id) => ({ id, text: tokenizer.surface(before, id), probability: probability(id) })),
    );
  });
  return found;
}

/** The tree's nodes with the text of their tokens. */
function withText(nodes, tokenizer, prefix) {
  const ids = (index) => (index < 0 ? prefix : [...ids(nodes[index].parent), nodes[index].id]);
  return nodes.map((node) => (node.text ??= tokenizer.surface(ids(node.parent), node.id), { ...node }));
}

async function loadTokenizer(site, Tokenizer, read) {
  const [content, config] = await Promise.all(
    site.tokenizer.map(async (path) => {
      try {
        return JSON.parse(new TextDecoder().decode(await read(path)));
      } catch (error) {
        throw error instanceof SyntaxError ? new Error(`${path} is damaged: export the site again.`) : error;
      }
    }),
  );
  try {
    return new TextTokenizer(Tokenizer, content, config);
  } catch {
    throw new Error(`${site.tokenizer[0]} is damaged, or made for another version: export the site again.`);
  }
}

/** Converts text to ids and back, and gives the surface of each token. */
class TextTokenizer {
  constructor(Tokenizer, content, config) {
    // A typed special token is ordinary text, as in Python with split_special_tokens.
    const added = config.split_special_tokens ? content.added_tokens.filter((token) => !token.special) : content.added_tokens;
    this.encoder = new Tokenizer({ ...content, added_tokens: added }, config);
    this.decoder = new Tokenizer(content, config);
    this.special = new Map(content.added_tokens.filter((token) => token.special).map(({ id, content }) => [id, content]));
  }

  /** The ids of a sentence with its end token. */
  encode(sentence) {
    return this.encoder.encode(sentence).ids;
  }

  decode(ids) {
    const ordinary = ids.filter((id) => !this.special.has(id) && this.decoder.id_to_token(id) !== undefined);
    return ordinary.length === 0 ? "" : this.decoder.decode(ordinary, { skip_special_tokens: true });
  }

  /** The text that `id` adds to the ids before it, white space included. It is "" for a part of a character. */
  surface(before, id) {
    if (this.special.has(id)) return this.special.get(id);
    const text = whole(this.decode(before));
    const longer = whole(this.decode([...before, id]));
    const added = longer.startsWith(text) ? longer.slice(text.length) : longer;
    return added || (/^[Ġ▁]+$/.test(this.decoder.id_to_token(id)) ? " " : ""); // a space that decoding strips
  }

  surfaces(ids) {
    return ids.map((id, position) => ({ id, text: this.surface(ids.slice(0, position), id) }));
  }
}

/** Remove a character with missing bytes from the end. */
function whole(text) {
  return text.replace(/\uFFFD+$/, "");
}

/** The two graphs, and the KV cache of one sentence's beams. */
class Model {
  constructor(ort, encoder, decoder) {
    Object.assign(this, { ort, encoder, decoder });
    this.ownNames = decoder.outputNames.filter((name) => /^present\..*\.decoder\./.test(name));
    this.sourceNames = decoder.outputNames.filter((name) => /^present\..*\.encoder\./.test(name));
  }

  integers(rows) {
    const data = BigInt64Array.from(rows.flat(), BigInt);
    return new this.ort.Tensor("int64", data, [rows.length, rows[0].length]);
  }

  /** Encode a source for the following calls of `step` and `score`. */
  async encode(ids) {
    this.mask = ids.map(() => 1);
    this.states = (await this.runEncoder(ids, ["last_hidden_state"])).last_hidden_state;
    this.source = null; // cross-attention keys and values, which the first call of the decoder computes
    this.own = null;
  }

  runEncoder(ids, names) {
    const feeds = { input_ids: this.integers([ids]), attention_mask: this.integers([ids.map(() => 1)]) };
    return this.encoder.run(feeds, names);
  }

  async encoderView(ids) {
    return stackView("encoder", await this.runEncoder(ids, this.encoder.outputNames));
  }

  /** `beamSearch`'s decoder: K rows of logits after the last of each beam's tokens. */
  async step(tokens, parents) {
    if (this.own) this.own = this.own.map((tensor) => selectRows(this.ort, tensor, parents));
    const outputs = await this.run(tokens, this.own, ["logits", ...this.ownNames]);
    this.own = this.ownNames.map((name) => outputs[name]);
    const { data, dims } = outputs.logits; // (K, T, V)
    const [beams, length, vocabulary] = dims;
    return Array.from({ length: beams }, (_, beam) => {
      const end = (beam + 1) * length * vocabulary;
      return data.subarray(end - vocabulary, end);
    });
  }

  /** The logits (T rows of V) after each of these tokens, cross-attention's scores and the view of the decoder. */
  async score(tokens) {
    const names = this.decoder.outputNames.filter((name) => !name.startsWith("present."));
    const outputs = await this.run([tokens], null, names);
    const [logits] = nested(outputs.logits, Number);
    return { logits, cross: layersOf("cross_scores", outputs), decoder: stackView("decoder", outputs) };
  }

  async run(tokens, own, names) {
    const feeds = {
      input_ids: this.integers(tokens),
      encoder_attention_mask: this.integers(tokens.map(() => this.mask)),
      encoder_hidden_states: this.states,
      use_cache_branch: new this.ort.Tensor("bool", [this.source !== null], [1]),
    };
    // One source serves all beams: its keys and values are (1, H, S, ·), and are broadcast over K.
    this.sourceNames.forEach((name, i) => (feeds[pastOf(name)] = this.source?.[i] ?? this.empty(pastOf(name))));
    this.ownNames.forEach((name, i) => (feeds[pastOf(name)] = own?.[i] ?? this.empty(pastOf(name))));
    const outputs = await this.decoder.run(feeds, this.source ? names : [...names, ...this.sourceNames]);
    this.source ??= this.sourceNames.map((name) => outputs[name]);
    return outputs;
  }

  /** An input of the cache with no tokens, (1, H, 0, ·). */
  empty(name) {
    const { shape } = this.decoder.inputMetadata.find((each) => each.name === name);
    return new this.ort.Tensor("float32", new Float32Array(0), [1, shape[1], 0, shape[3]]);
  }
}

/** A stack's outputs: scores (layers × H × T × T), norms (layers + 1 × T) and positions (T × D). */
function stackView(stack, outputs) {
  const [norms] = nested(outputs[`${stack}_norms`], same);
  return { scores: layersOf(`${stack}_scores`, outputs), norms, positions: nested(outputs[`${stack}_positions`], same) };
}

/** The outputs of all layers, without their batch axis. */
function layersOf(name, outputs) {
  const layers = Object.keys(outputs).filter((each) => each.startsWith(`${name}.`));
  return layers.map((_, layer) => nested(outputs[`${name}.${layer}`], same)[0]);
}

const same = (number) => number;

const toThreeDecimals = (number) => Math.round(number * 1000) / 1000;

const pastOf = (name) => name.replace("present", "past_key_values");

/** Select the rows of a tensor (K, …) from which the beams continue. */
function selectRows(ort, { data, dims }, rows) {
  if (rows.length === dims[0] && rows.every((row, i) => row === i)) return new ort.Tensor("float32", data, dims);
  const size = data.length / dims[0];
  const selected = new Float32Array(rows.length * size);
  rows.forEach((row, i) => selected.set(data.subarray(row * size, (row + 1) * size), i * size));
  return new ort.Tensor("float32", selected, [rows.length, ...dims.slice(1)]);
}

/** A tensor as nested arrays. The innermost rows stay typed arrays unless `convert` changes their numbers. */
function nested({ data, dims }, convert) {
  if (dims.length === 1) return convert === Number ? data : Array.from(data, convert);
  const size = data.length / dims[0];
  return Array.from({ length: dims[0] }, (_, i) =>
    nested({ data: data.subarray(i * size, (i + 1) * size), dims: dims.slice(1) }, convert),
  );
}
