"""`python -m tests.interop.exports_table MODEL` exports a quickstart's model and compares every engine with it.

Each engine translates greedily, and computes its logits for this package's translations. The sentences are the 1,000
held-out numbers of the recipe numbers_en_de, or with `--sentences N` the first N of them.

Shapes: B batch, S source length, T target length, V target vocabulary.
"""

import argparse
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import MarianMTModel, PreTrainedModel
from transformers.utils import logging as transformers_logging

from hf_vanilla_transformer.corpora import number_pairs
from hf_vanilla_transformer.evaluation import score_translations
from hf_vanilla_transformer.generation_vanilla_transformer import MAX_LENGTH_OVER_SOURCE
from hf_vanilla_transformer.inference.loading import load_model
from hf_vanilla_transformer.interop.exporting import export
from hf_vanilla_transformer.text import load_tokenizers
from hf_vanilla_transformer.utils.markdown import markdown_table
from tests.interop.exports import OnnxTranslator
from tests.interop.imports_table import Records, run

SIZE, SEED = 20_000, 1  # of the recipe
OURS = "this package"


class Engine(Protocol):
    """Something that translates, and computes the logits (B, T, V) of a translation.

    It may generate `MAX_LENGTH_OVER_SOURCE` tokens more than the source has.
    """

    def translate(self, lines: list[str]) -> list[str]: ...

    def logits(self, ids: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        """For sources (B, S), their mask, and decoder inputs (B, T), padded on the right."""


class HuggingFace:
    """A model with `generate`, in float32."""

    def __init__(self, model: PreTrainedModel, folder: Path):
        self.model = model.eval()
        self.source, self.target = load_tokenizers(folder)

    def translate(self, lines: list[str]) -> list[str]:
        batch = self.source(lines, return_tensors="pt", padding=True)
        return self.target.batch_decode(self.generate(**batch), skip_special_tokens=True)

    def generate(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, 1 + T), the start token first."""
        longest = input_ids.shape[1] + MAX_LENGTH_OVER_SOURCE
        return self.model.generate(
            input_ids, attention_mask=attention_mask, num_beams=1, max_new_tokens=longest
        )

    def logits(self, ids: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        return self.model(input_ids=ids, attention_mask=mask, decoder_input_ids=target).logits


class Onnx:
    """A folder of graphs, one token a step with their KV cache."""

    def __init__(self, folder: Path):
        self.translator = OnnxTranslator(folder)

    def translate(self, lines: list[str]) -> list[str]:
        return self.translator.translate(lines)

    def logits(self, ids: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        return self.translator.graphs.all_logits(ids, mask, target, 1)


class CTranslate2:
    """A folder of CTranslate2. Its logits are computed with the translation as a forced prefix."""

    def __init__(self, folder: Path, compute_type: str):
        import ctranslate2

        threads = torch.get_num_threads()
        self.engine = ctranslate2.Translator(
            str(folder), "cpu", compute_type=compute_type, intra_threads=threads
        )
        self.source, self.target = load_tokenizers(folder)

    def translate(self, lines: list[str]) -> list[str]:
        tokens = [self.source.convert_ids_to_tokens(row) for row in self.source(lines)["input_ids"]]
        longest = max(map(len, tokens)) + MAX_LENGTH_OVER_SOURCE
        results = self.engine.translate_batch(tokens, beam_size=1, max_decoding_length=longest)
        rows = [self.target.convert_tokens_to_ids(result.hypotheses[0]) for result in results]
        return self.target.batch_decode(rows, skip_special_tokens=True)

    def logits(self, ids: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        sources = [row[real].tolist() for row, real in zip(ids, mask.bool(), strict=True)]
        results = self.engine.translate_batch(
            [self.source.convert_ids_to_tokens(row) for row in sources],
            [
                self.target.convert_ids_to_tokens(row) for row in target[:, 1:].tolist()
            ],  # it adds the start
            beam_size=1,
            max_decoding_length=target.shape[1],
            min_decoding_length=0,  # otherwise it masks the end-of-sentence token at first
            return_logits_vocab=True,
        )
        return torch.from_numpy(
            np.array([[np.array(step) for step in result.logits[0]] for result in results])
        )


def onnx(model: Path, work: Path) -> Engine:
    export("onnx", model, work / "onnx")
    return Onnx(work / "onnx")


def ctranslate2_float32(model: Path, work: Path) -> Engine:
    export("ctranslate2", model, work / "ct2")
    return CTranslate2(work / "ct2", "float32")


def ctranslate2_int8(model: Path, work: Path) -> Engine:
    export("ctranslate2", model, work / "ct2_int8", quantization="int8")
    return CTranslate2(work / "ct2_int8", "int8")


def marian(model: Path, work: Path) -> Engine:
    export("marian", model, work / "marian")
    return HuggingFace(
        MarianMTModel.from_pretrained(work / "marian", dtype=torch.float32), work / "marian"
    )


# The name in the table: the library whose version is printed, and the export to a folder.
ENGINES: dict[str, tuple[str, Callable[[Path, Path], Engine]]] = {
    "ONNX": ("onnxruntime", onnx),
    "CTranslate2, float32": ("ctranslate2", ctranslate2_float32),
    "CTranslate2, int8": ("ctranslate2", ctranslate2_int8),
    "MarianMTModel": ("transformers", marian),
}

# The tests of refusals.
REFUSALS = {
    "ONNX": "test_exported_programs.py::test_export_refuses_adapters",
    "CTranslate2": "test_ctranslate2.py::test_ctranslate2_export_names_unsupported_options",
    "MarianMTModel": "test_marian.py::test_marian_export_names_unsupported_options",
}


@dataclass
class Found:
    """The translations of an engine, and the largest difference of its logits from ours."""

    lines: list[str] = field(default_factory=list)
    difference: float = 0.0


@torch.no_grad()
def compare(
    model: Path, lines: Sequence[str], names: Iterable[str] = ENGINES, batch_size: int = 100
) -> tuple[dict[str, Found], float]:
    """The translations of this package and of each engine, and the largest of our logits."""
    ours = HuggingFace(load_model(model, "cpu", "float32"), model)
    found = {OURS: Found()}
    largest = 0.0
    with tempfile.TemporaryDirectory() as work:
        engines = {name: ENGINES[name][1](model, Path(work)) for name in names}
        found |= {name: Found() for name in engines}
        for start in range(0, len(lines), batch_size):
            part = list(lines[start : start + batch_size])
            batch = ours.source(part, return_tensors="pt", padding=True)
            tokens = ours.generate(**batch)
            found[OURS].lines += ours.target.batch_decode(tokens, skip_special_tokens=True)
            given = batch["input_ids"], batch["attention_mask"], tokens[:, :-1]
            written = tokens[:, 1:].ne(ours.target.pad_token_id)  # (B, T)
            expected = ours.logits(*given)[written]
            largest = max(largest, expected.abs().max().item())
            for name, engine in engines.items():
                difference = (engine.logits(*given)[written] - expected).abs().max().item()
                found[name].difference = max(found[name].difference, difference)
                found[name].lines += engine.translate(part)
    return found, largest


def table(found: dict[str, Found], targets: Sequence[str]) -> str:
    """As Markdown."""
    head = "engine|checked with|logits differ by|exact match|BLEU (`tok:char`)|the same as this package"
    rows = []
    for name, each in found.items():
        scores = score_translations(each.lines, targets, tokenize="char")
        same = sum(
            mine == theirs for mine, theirs in zip(found[OURS].lines, each.lines, strict=True)
        )
        peer = (
            ()
            if name == OURS
            else (
                f"{ENGINES[name][0]} {version(ENGINES[name][0])}",
                f"{each.difference:.1e}",
            )
        )
        scored = (
            f"{scores['exact_match']:.1f} %",
            f"{scores['bleu']:.2f}",
            f"{same} of {len(each.lines)}",
        )
        rows.append([name, *(peer or ("", "")), *scored])
    return markdown_table(head.split("|"), rows)


def refusals(records: Records) -> list[str]:
    """A line for each kind of format."""
    refused = {
        name: records.found[test.partition("::")[0], "not exported"]
        for name, test in REFUSALS.items()
    }
    return [f"Refused by {name}: {'; '.join(found)}." for name, found in refused.items()]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--sentences", type=int, default=1000)
    arguments = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    test = number_pairs(SIZE, SEED)["test"][: arguments.sentences]
    found, largest = compare(arguments.model, test["source"])
    print(table(found, test["target"]))
    print(f"\nThe largest logit is {largest:.1f}.")
    records = run(REFUSALS.values())
    print(*refusals(records), sep="\n")
    return records.print_failures()


if __name__ == "__main__":
    logging.getLogger("torch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    sys.exit(main())
