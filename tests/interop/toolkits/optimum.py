"""optimum gets a model of this package as the folder that transformers.js loads."""

import json
import shutil
from pathlib import Path

import torch

from hf_vanilla_transformer.inference.loading import load_model
from hf_vanilla_transformer.interop import transformers_js
from hf_vanilla_transformer.text import load_tokenizers

from .argos import train
from .environment import SENTENCES, install, run
from .transformers_marian import PACKAGE, REQUIREMENTS

PACKAGES = [
    "optimum==2.1.0",
    "optimum-onnx==0.1.0",
    "onnx==1.23.2",
    "ml_dtypes==0.6.0",
    PACKAGE,
    *REQUIREMENTS,
]

# Its arguments: the folder, the sentences, the result.
TRANSLATE = """
import json, sys
from optimum.onnxruntime import ORTModelForSeq2SeqLM
from transformers import AutoTokenizer
folder, sentences, result = sys.argv[1:]
model, tokenizer = ORTModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
lines = []
for text in json.load(open(sentences)):
    written = model.generate(**tokenizer(text, return_tensors="pt"), num_beams=1, max_new_tokens=60)[0]
    lines.append(tokenizer.decode(written, skip_special_tokens=True))
json.dump(lines, open(result, "w"))
"""


def compare_optimum(work: Path) -> tuple[None, int]:
    """Nothing, because only translations are compared, and the number of equal ones, greedy."""
    install(work, *PACKAGES)
    folder = work / "optimum"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    sentences, given, result = (
        train(folder, sentencepiece=False),
        folder / "given.json",
        folder / "result.json",
    )
    given.write_text(json.dumps(sentences))
    model, same = load_model(folder / "model", "cpu").eval(), 0
    transformers_js.write(model, folder / "model", folder / "onnx", ("fp32",))
    run(work, PACKAGES, "-c", TRANSLATE, folder / "onnx", given, result)
    source, target = load_tokenizers(folder / "model")
    theirs = json.loads(result.read_text())
    for text, expected in zip(sentences, theirs, strict=True):
        ids = source(text, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            ours = model.generate(ids, num_beams=1, max_new_tokens=60)[0]
        same += target.decode(ours, skip_special_tokens=True).strip() == expected.strip()
    assert len(set(theirs)) > SENTENCES // 10, "the translations hardly differ from each other"
    return None, same
