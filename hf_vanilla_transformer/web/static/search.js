// Beam search as in "Attention Is All You Need" (§6.1): a hypothesis scores log P / length penalty, and the search ends
// when no running hypothesis can win any more. Greedy search is the case of one beam.
//
// Shapes: K beams, V target vocabulary, P tokens of the prefix, the start token included.

/**
 * The divisor of a hypothesis's log-probability. The end token counts, the prefix does not.
 * "gnmt" is ((5 + length) / 6)^α (Wu et al. 2016, Eq. 14), "power" is Hugging Face's length^α.
 */
export function lengthPenalty(length, { length_penalty: alpha, formula }) {
  const n = Math.max(length, 1);
  return (formula === "gnmt" ? (5 + n) / 6 : n) ** alpha;
}

/** log Σ exp of a row of logits, subtracted from a logit to give its log-probability. */
export function logSumExp(logits) {
  let top = -Infinity;
  for (const x of logits) if (x > top) top = x;
  let sum = 0;
  for (const x of logits) sum += Math.exp(x - top);
  return top + Math.log(sum);
}

/** The `count` tokens with the highest logits, the best first, without those in the set `suppressed`. */
export function topTokens(logits, count, suppressed) {
  const best = []; // at most `count`, sorted
  for (let id = 0; id < logits.length; id++) {
    if (best.length === count && logits[id] <= logits[best[count - 1]]) continue;
    if (suppressed?.has(id)) continue;
    let at = best.length;
    while (at > 0 && logits[best[at - 1]] < logits[id]) at--;
    best.splice(at, 0, id);
    if (best.length > count) best.pop();
  }
  return best;
}

/**
 * Find the best hypotheses that start with `prefix`.
 *
 * @param decoder `await decoder.step(tokens, parents)` reads tokens of each beam (K arrays of equal length). Beam k
 *   continues beam parents[k] of the previous step. It returns K rows of V logits for the next token.
 * @param prefix token ids, the start token first.
 * @param settings num_beams, length_penalty, formula, early_stopping, eos_token_ids, forced_bos_token_id (the first
 *   token), forced_eos_token_id (the last), suppressed_tokens, begin_suppress_tokens (not the first one that is not
 *   forced), min_new_tokens and max_new_tokens (after the prefix), num_hypotheses (default 1): the paper's search ends when no
 *   running hypothesis can be one of the best num_hypotheses.
 * @param hooks signal: an AbortSignal, onStep(nodes): called and awaited after each step.
 * @returns {hypotheses: [{tokens, score, logProbability}] (without the prefix, the best first), nodes: the tree, a list
 *   of {parent, id, log_probability, state}}
 */
export async function beamSearch(decoder, prefix, settings, { signal, onStep } = {}) {
  const { num_beams: beams, max_new_tokens: limit } = settings;
  const nodes = [];
  let running = [{ tokens: [], logProbability: 0, node: -1 }];
  let logits = await decoder.step([prefix], [0]);
  let ended = [];
  for (let length = 1; ; length++) {
    signal?.throwIfAborted();
    const candidates = extend(running, logits, length, prefix.length === 1, settings);
    const ends = (each) => length === limit || settings.eos_token_ids.includes(each.tokens.at(-1));

    // Only the best K may end. The rest are candidates to continue.
    const finished = candidates.slice(0, beams).filter(ends);
    for (const each of finished) each.score = each.logProbability / lengthPenalty(length, settings);
    ended = [...ended, ...finished].sort((a, b) => b.score - a.score).slice(0, beams); // stable: earlier ones first
    running = candidates.filter((each) => !ends(each)).slice(0, beams);
    const kept = candidates.filter((each) => running.includes(each) || ended.includes(each));
    for (const each of kept) addNode(nodes, each, ended.includes(each) ? "ended" : "running");
    await onStep?.(nodes);
    if (isDone(running, ended, length, settings)) break;

    logits = await decoder.step(running.map((each) => [each.tokens.at(-1)]), running.map((each) => each.beam));
  }
  nodes[ended[0].node].state = "best";
  const hypotheses = ended.map(({ tokens, score, logProbability }) => ({ tokens, score, logProbability }));
  return { hypotheses, nodes };
}

/** The token that must come at this length, or null. `fromStart`: the prefix is the start token alone. */
function forcedToken(length, fromStart, settings) {
  const { forced_bos_token_id: bos, forced_eos_token_id: eos, max_new_tokens: limit } = settings;
  const token = length === limit && eos != null ? eos : length === 1 && fromStart ? bos : null;
  return (Array.isArray(token) ? token[0] : token) ?? null;
}

/** The tokens that must not come at this length. */
function bannedTokens(length, fromStart, settings) {
  const { suppressed_tokens: always = [], begin_suppress_tokens: atFirst = [], min_new_tokens: least = 0 } = settings;
  const first = fromStart && settings.forced_bos_token_id != null ? 2 : 1;
  return new Set([
    ...always, ...(length === first ? atFirst : []), ...(length <= least ? settings.eos_token_ids : []),
  ]);
}

/** The best continuations of all beams by one token, the best first. */
function extend(running, logits, length, fromStart, settings) {
  const { num_beams: beams, eos_token_ids: eos } = settings;
  const forced = forcedToken(length, fromStart, settings);
  const banned = bannedTokens(length, fromStart, settings);
  // Up to K candidates may end with each end token, and K more must be able to continue.
  const count = beams === 1 ? 1 : beams * Math.max(2, 1 + eos.length);
  const candidates = [];
  running.forEach((parent, beam) => {
    const normalizer = forced !== null ? 0 : logSumExp(logits[beam]);
    const tokens = forced !== null ? [forced] : topTokens(logits[beam], count, banned);
    for (const id of tokens) {
      const own = forced !== null ? 0 : logits[beam][id] - normalizer;
      const logProbability = parent.logProbability + own;
      candidates.push({ tokens: [...parent.tokens, id], logProbability, beam, parent: parent.node });
    }
  });
  return candidates.sort((a, b) => b.logProbability - a.logProbability).slice(0, count);
}

function addNode(nodes, hypothesis, state) {
  hypothesis.node = nodes.length;
  const { parent, tokens, logProbability } = hypothesis;
  nodes.push({ parent, id: tokens.at(-1), log_probability: logProbability, state });
}

/** Whether the ended hypotheses are final. */
function isDone(running, ended, length, settings) {
  const { num_beams: beams, max_new_tokens: limit, formula, early_stopping: early, length_penalty: alpha } = settings;
  if (running.length === 0 || (early === true && ended.length === beams)) return true;
  const enough = formula === "gnmt" ? (settings.num_hypotheses ?? 1) : beams;
  if (ended.length < enough) return false;
  // With the paper's penalty a longer hypothesis can still win. The bound is its score if all further tokens were
  // certain. Hugging Face's `length_penalty` compares at the present length unless early_stopping is "never".
  const grows = alpha > 0 && (formula === "gnmt" || early === "never");
  const bound = running[0].logProbability / lengthPenalty(grows ? limit : length, settings);
  return bound <= ended[enough - 1].score;
}
