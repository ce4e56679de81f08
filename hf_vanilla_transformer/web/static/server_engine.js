// The page's engine where a server computes: see README.md, "The interface of an engine".

/** An engine that asks the server from which the page came. */
export async function createEngine() {
  return { translate };
}

async function translate(text, { num_beams, alternatives, prefix, signal } = {}) {
  const response = await fetch("page/translate", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ text, num_beams, alternatives, prefix }),
    signal,
  });
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) {
    throw new Error(answer.error ?? `The server answered with status ${response.status}.`);
  }
  return answer;
}
