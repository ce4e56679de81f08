// The page's engine on a server. See README.md, "The interface of an engine".

/** An engine that sends each text to the server of the page. */
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
