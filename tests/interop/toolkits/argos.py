"""Argos Translate gets a model of this package as an .argosmodel."""

import json
import os
import shutil
from pathlib import Path

import torch

from hf_vanilla_transformer.corpora import number_pairs
from hf_vanilla_transformer.inference.loading import load_model
from hf_vanilla_transformer.interop.exporting import export
from hf_vanilla_transformer.text import load_tokenizers, save_tokenizers, train_tokenizer
from hf_vanilla_transformer.text.tokenizer_training import train_sentencepiece_tokenizer
from hf_vanilla_transformer.training.run.recipes import parse_recipe
from hf_vanilla_transformer.training.run.run import run_training

from .environment import SENTENCES, install, run

PACKAGES = {
    "argostranslate 1.11.0": ["argostranslate==1.11.0", "minisbd==0.9.5", "sacremoses==0.1.1"],
    "argos-translate-lt 1.12.1": [
        "argos-translate-lt==1.12.1",
        "minisbd==0.9.5",
        "sacremoses==0.1.1",
    ],
}

# Its arguments: the package, the sentences, the result. It has no network, where Argos fetches its sentence splitter.
# Each line is one sentence, and a splitter that does not split takes its place.
TRANSLATE = """
import json, socket, sys
def refuse(*arguments, **options):
    raise OSError("no network")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
from argostranslate import package, sbd, translate
sbd.MiniSBDSentencizer.__init__ = lambda self, pkg: None
sbd.MiniSBDSentencizer.split_sentences = lambda self, text: [text]
file, sentences, result = sys.argv[1:]
package.install_from_path(file)
lines = [translate.translate(line, "en", "de") for line in json.load(open(sentences))]
json.dump(lines, open(result, "w"))
"""


def train(folder: Path, sentencepiece: bool = True) -> list[str]:
    """A model of number words with a tokenizer of SentencePiece or BPE. Returns sentences that it has not seen."""
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier call
    splits = number_pairs(4000, 1, held_out=SENTENCES)
    texts = [text for side in ("source", "target") for text in splits["train"][side]]
    trained = (
        train_sentencepiece_tokenizer(texts, 400) if sentencepiece else train_tokenizer(texts, 400)
    )
    save_tokenizers(folder / "tokenizer", trained)
    fields = {
        **{"train": "numbers", "validation": "numbers", "test": "numbers", "numbers_size": 4000},
        **{"source_lang": "en", "target_lang": "de", "tokenizer_name": folder / "tokenizer"},
        **{
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
        },
        **{
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "dropout": 0.0,
            "max_steps": 200,
        },
        **{
            "per_device_train_batch_size": 64,
            "learning_rate": 0.003,
            "warmup_steps": 100,
            "eval_strategy": "no",
        },
        **{"save_strategy": "no", "output_dir": folder / "model", "use_cpu": True},
        **{"max_eval_samples": 8, "max_test_samples": 8, "disable_tqdm": True},
    }
    given = [part for name, value in fields.items() for part in (f"--{name}", str(value))]
    run_training(*parse_recipe(given))
    return list(splits["validation"]["source"])[:SENTENCES]


def compare_argos(work: Path, version: str, beams: int) -> tuple[None, int]:
    """Nothing, because Argos has no logits, and the number of equal translations."""
    packages = PACKAGES[version]
    install(work, *packages)
    folder = work / f"argos-{version.split()[0]}-{beams}"
    folder.mkdir(exist_ok=True)
    sentences = train(folder)
    file, given, result = (
        folder / name for name in ("en_de.argosmodel", "sentences.json", "translations.json")
    )
    file.unlink(missing_ok=True)
    export("argos", folder / "model", file, languages=("en", "de"))
    given.write_text(json.dumps(sentences))
    # where it keeps packages and settings. Its default computes in int8
    homes = {f"XDG_{name}_HOME": str(folder / name.lower()) for name in ("DATA", "CONFIG", "CACHE")}
    os.environ.update({**homes, "ARGOS_BEAM_SIZE": str(beams), "ARGOS_COMPUTE_TYPE": "float32"})
    run(work, packages, "-c", TRANSLATE, file, given, result)
    model, same = load_model(folder / "model", "cpu").eval(), 0
    source, target = load_tokenizers(folder / "model")
    theirs = json.loads(result.read_text())
    for text, expected in zip(sentences, theirs, strict=True):
        ids = source(text, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            # Argos has this penalty whatever the model's is
            ours = model.generate(ids, num_beams=beams, length_penalty=0.2, max_new_tokens=256)[0]
        same += target.decode(ours, skip_special_tokens=True).strip() == expected
    assert len(set(theirs)) > SENTENCES // 10, "the translations hardly differ from each other"
    return None, same
