"""transformers 4 and 5: a model of this package as a `MarianMTModel`, and that folder converted back."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from hf_vanilla_transformer.interop.converting import convert
from hf_vanilla_transformer.interop.exporting import export

from .argos import train
from .environment import BEAMS, compare, install, run

PACKAGE = "transformers==4.57.1"
# Packages that version 4 needs in older versions than this environment has.
REQUIREMENTS = ["tokenizers==0.22.2", "huggingface_hub==0.36.2"]

# Its arguments: the exported folder, the sentences, the result.
TRANSLATE = f"""
import json, sys, numpy, torch
from transformers import MarianMTModel, MarianTokenizer
folder, sentences, result = sys.argv[1:]
model, tokenizer = MarianMTModel.from_pretrained(folder).eval(), MarianTokenizer.from_pretrained(folder)
lines, pairs, found = [], [], {{}}
names = model.config.vocab_size
with torch.no_grad():
    for number, text in enumerate(json.load(open(sentences))):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        written = model.generate(ids, num_beams={BEAMS}, max_new_tokens=60)[0].tolist()
        given = written[:-1] if written[-1] == model.config.eos_token_id else written
        pairs.append([ids[0].tolist(), given])
        found[str(number)] = model(ids, decoder_input_ids=torch.tensor([given])).logits[0].numpy()
        special = {{model.config.pad_token_id, model.config.eos_token_id, model.config.decoder_start_token_id}}
        lines.append(" ".join(str(each) for each in written[1:] if each not in special))
tokens = [str(number) for number in range(names)]
json.dump({{"pairs": pairs, "tokens": tokens, "lines": lines}}, open(result, "w"))
numpy.savez(result.replace(".json", ".npz"), **found)
"""


def compare_transformers(work: Path, major: int) -> tuple[float, int]:
    """See `compare`. The translations are compared by their ids."""
    folder = work / f"transformers-{major}"
    folder.mkdir(exist_ok=True)
    sentences, given, dumped = train(folder), folder / "sentences.json", folder / "dumped.json"
    given.write_text(json.dumps(sentences))
    export("marian", folder / "model", folder / "marian", overwrite=True)
    command = ("-c", TRANSLATE, folder / "marian", given, dumped)
    if major == 4:
        install(work, PACKAGE, *REQUIREMENTS)
        run(work, [PACKAGE, *REQUIREMENTS], *command)
    else:
        assert version("transformers").startswith(f"{major}.")
        subprocess.run(
            [sys.executable, *map(str, command)],
            check=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
    convert("marian", folder / "marian", folder / "converted", True)
    return compare(folder / "converted", dumped, json.loads(dumped.read_text())["lines"])
