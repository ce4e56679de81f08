"""`python -m tests.interop.exports_table MODEL` exports a quickstart's model and lets every engine translate greedily.

The sentences are the 1,000 held-out numbers of the recipe numbers_en_de; with `--sentences N` the first N of them.
"""

import argparse
import logging
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from hf_vanilla_transformer.data import load_tokenizers, number_pairs
from hf_vanilla_transformer.evaluation.loading import load_model
from hf_vanilla_transformer.evaluation.metrics import score_translations
from hf_vanilla_transformer.interop.exporting import export
from hf_vanilla_transformer.interop.translate_exported import Translator

SIZE, SEED = 20_000, 1  # of the recipe
Translate = Callable[[list[str]], list[str]]


def ours(folder: Path) -> Translate:
    """`generate`, in float32."""
    model = load_model(folder, "cpu", "float32").eval()
    source, target = load_tokenizers(folder)

    def translate(lines: list[str]) -> list[str]:
        batch = source(lines, return_tensors="pt", padding=True)
        words = model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], num_beams=1)
        return target.batch_decode(words, skip_special_tokens=True)

    return translate


def ctranslate2_engine(folder: Path, compute_type: str) -> Translate:
    """A folder of CTranslate2; each sentence may have as many words as with `generate`."""
    import ctranslate2

    engine = ctranslate2.Translator(
        str(folder), "cpu", compute_type=compute_type, intra_threads=torch.get_num_threads()
    )
    source, target = load_tokenizers(folder)

    def translate(lines: list[str]) -> list[str]:
        words = [source.convert_ids_to_tokens(row) for row in source(lines)["input_ids"]]
        results = engine.translate_batch(words, beam_size=1, max_decoding_length=max(map(len, words)) + 50)
        rows = [target.convert_tokens_to_ids(result.hypotheses[0]) for result in results]
        return target.batch_decode(rows, skip_special_tokens=True)

    return translate


def engines(model: Path, work: Path) -> dict[str, Translate]:
    """Every format, exported into `work`, by its name in the table."""
    for name, target_format in {"onnx": "onnx", "torch": "torch", "ct2": "ctranslate2"}.items():
        export(target_format, model, work / name)
    export("ctranslate2", model, work / "ct2_int8", quantization="int8")
    return {
        "this package": ours(model),
        "ONNX, onnxruntime": Translator(work / "onnx").translate,
        "torch.export": Translator(work / "torch").translate,
        "CTranslate2, float32": ctranslate2_engine(work / "ct2", "float32"),
        "CTranslate2, int8": ctranslate2_engine(work / "ct2_int8", "int8"),
    }


def translations(model: Path, lines: list[str], batch_size: int = 100) -> dict[str, list[str]]:
    """What every engine makes of the lines."""
    with tempfile.TemporaryDirectory() as work:
        found = {}
        for name, translate in engines(model, Path(work)).items():
            parts = (lines[start : start + batch_size] for start in range(0, len(lines), batch_size))
            found[name] = [line for part in parts for line in translate(part)]
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--sentences", type=int, default=1000)
    arguments = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    test = number_pairs(SIZE, SEED)["test"][: arguments.sentences]
    found = translations(arguments.model, test["source"])
    print("| engine | exact match | BLEU (`tok:char`) | the same as this package |\n|---|---|---|---|")
    for name, lines in found.items():
        scores = score_translations(lines, test["target"], tokenize="char")
        same = sum(mine == theirs for mine, theirs in zip(found["this package"], lines, strict=True))
        print(f"| {name} | {scores['exact_match']:.1f} % | {scores['bleu']:.2f} | {same} of {len(lines)} |")


if __name__ == "__main__":
    logging.getLogger("torch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    main()
