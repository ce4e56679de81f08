"""`python -m tests.web.web_table MODEL` makes a model's site and compares what runs it with this package.

transformers.js's stock pipeline (Node, greedy) and the page's engine (Node and Chromium, with the model's own search)
translate the same sentences as `generate`, each in one thread. Without --source these are held-out numbers of the
recipe numbers_en_de. The table is Markdown.
"""

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sacrebleu
import torch

from hf_vanilla_transformer.data import load_tokenizers, number_pairs
from hf_vanilla_transformer.inference.loading import load_model
from hf_vanilla_transformer.inference.text_io import silence_transformers
from hf_vanilla_transformer.utils.markdown import markdown_table
from hf_vanilla_transformer.web.site import write_site
from tests.web.tools import opened, require_npm, run_node

SIZE, SEED = 20_000, 1  # of the recipe
DTYPES = ("fp32", "q8")

# In the page: the engine alone, without drawing. The first sentence warms it up.
MEASURE = """
const [lines, dtype, done] = arguments;
(async () => {
  const { loadEngine } = await import("./browser_runtime.js");
  const site = await (await fetch("site.json")).json();
  let started = performance.now();
  const engine = await loadEngine(site, dtype, () => {});
  const load = (performance.now() - started) / 1000;
  await engine.translate(lines[0]);
  started = performance.now();
  const found = [];
  for (const line of lines) {
    const { text, tokens } = await engine.translate(line);
    found.push({ text, tokens });
  }
  return { found, load, seconds: (performance.now() - started) / 1000 };
})().then(done, (error) => done({ error: error.message }));
"""


@dataclass
class Translations:
    """The results of one engine: texts, tokens without the start token where they are known, and seconds for all."""

    texts: list[str]
    tokens: list[list[int]] | None
    seconds: float
    load: float | None = None


def ours(folder: Path, lines: list[str], **settings: Any) -> Translations:
    """`generate` in float32, one sentence at a time."""
    model = load_model(folder).float().eval()
    source, target = load_tokenizers(folder)
    started, found = time.perf_counter(), []
    with torch.inference_mode():
        for line in lines:
            found.append(model.generate(**source(line, return_tensors="pt"), **settings)[0].tolist())
    texts = target.batch_decode(found, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return Translations([text.strip() for text in texts], [row[1:] for row in found], time.perf_counter() - started)


def from_page(answer: dict[str, Any]) -> Translations:
    if "found" not in answer or answer.get("error"):
        raise RuntimeError(answer.get("error"))
    tokens = [[token["id"] for token in each["tokens"]] for each in answer["found"]]
    return Translations([each["text"] for each in answer["found"]], tokens, answer["seconds"], answer.get("load"))


def in_node(site: Path, dtype: str, lines: list[str]) -> Translations:
    return from_page(run_node("page_engine.mjs", str(site), dtype, "{}", lines=lines))


def in_chromium(site: Path, dtype: str, lines: list[str]) -> Translations:
    with opened(site) as page:
        page.driver.set_script_timeout(1000)
        return from_page(page.driver.execute_async_script(MEASURE, lines, dtype))


def stock_pipeline(site: Path, dtype: str, lines: list[str]) -> Translations:
    answer = run_node("stock_pipeline.mjs", str(site / "model"), dtype, lines=lines)
    return Translations([text.strip() for text in answer["found"]], None, answer["seconds"])


def row(name: str, dtype: str, found: Translations, expected: Translations, references: list[str], tok: str) -> list:
    """One line of the table. `expected` is this package's with the same search."""
    same = sum(map(str.__eq__, found.texts, expected.texts))
    if found.tokens is not None and expected.tokens is not None:
        same = sum(mine == theirs for mine, theirs in zip(found.tokens, expected.tokens, strict=True))
    bleu = sacrebleu.corpus_bleu(found.texts, [references], tokenize=tok).score
    produced = sum(map(len, found.tokens or expected.tokens or []))
    load = "" if found.load is None else f"{found.load:.1f} s"
    return [name, dtype, f"{same} of {len(references)}", f"{bleu:.2f}", load, f"{1000 * found.seconds / produced:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--source", type=Path, help="lines to translate")
    parser.add_argument("--reference", type=Path, help="their translations")
    parser.add_argument("--sentences", type=int, default=200)
    arguments = parser.parse_args()
    silence_transformers()
    torch.set_num_threads(1)
    if arguments.source is None:
        test = number_pairs(SIZE, SEED)["test"]
        lines, references, tokenize = list(test["source"]), list(test["target"]), "char"
    else:
        files = arguments.source, arguments.reference
        lines, references = (path.read_text(encoding="utf-8").splitlines() for path in files)
        tokenize = "13a"
    lines, references = lines[: arguments.sentences], references[: arguments.sentences]
    greedy, searched = ours(arguments.model, lines, num_beams=1), ours(arguments.model, lines)
    table = [
        row("`generate`, greedy", "fp32", greedy, greedy, references, tokenize),
        row("`generate`", "fp32", searched, searched, references, tokenize),
    ]
    with tempfile.TemporaryDirectory() as temporary:
        site = Path(temporary) / "site"
        print(write_site(arguments.model, site, runtime=require_npm()).splitlines()[0].partition(": ")[2])
        for dtype in DTYPES:
            found = stock_pipeline(site, dtype, lines)
            table.append(row("transformers.js in Node, greedy", dtype, found, greedy, references, tokenize))
            for name, engine in (("page's engine in Node", in_node), ("page's engine in Chromium", in_chromium)):
                table.append(row(name, dtype, engine(site, dtype, lines), searched, references, tokenize))
    head = ["engine", "weights", "as `generate` does", "BLEU", "loading", "ms a token"]
    print(markdown_table(head, table))
    print(json.dumps({"sentences": len(lines), "tokenize": tokenize}))


if __name__ == "__main__":
    main()
