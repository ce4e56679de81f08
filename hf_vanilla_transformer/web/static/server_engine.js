// The page's engine on a server. See README.md, "The interface of an engine".

/** An engine that sends each text to the server of the page, with the key that `key()` returns. */
export async function createEngine(key) {
  return { translate: (text, options) => translate(text, key(), options) };
}

async function translate(text, key, { caret, num_beams, alternatives, prefix, inside, signal } = {}) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  // JavaScript counts UTF-16 units, the server characters
  const characters = caret === undefined ? undefined : [...text.slice(0, caret)].length;
  const body = JSON.stringify({ text, caret: characters, num_beams, alternatives, prefix, inside });
  let response;
  try {
    response = await fetch("page/translate", { method: "POST", headers, body, signal });
  } catch (error) {
    throw signal?.aborted ? error : new Error("The server does not answer.");
  }
  const answer = await response.json().catch(() => ({}));
  if (response.ok) return answer;
  const error = new Error(answer.error ?? `The server answered with status ${response.status}.`);
  throw Object.assign(error, { needsKey: response.status === 403 });
}
