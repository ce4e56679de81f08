"""OpenNMT-py 1, 2 and 3. All are pre-norm."""

from pathlib import Path

import yaml

from hf_vanilla_transformer.interop.converting import convert

from . import environment
from .environment import BEAMS, compare, install, lines_of, run, write_corpus

UPDATES = 2 * environment.UPDATES  # its search without a length penalty prefers short translations

# versions 1 and 2 keep their vocabularies in objects of torchtext
PACKAGES = {
    "1.2.0": ["OpenNMT-py==1.2.0", "torchtext==0.4.0"],
    "2.3.0": ["OpenNMT-py==2.3.0", "torchtext==0.5.0"],
    "3.5.1": ["OpenNMT-py==3.5.1"],
}

# Its arguments: the checkpoint, the source and target text, the result.
LOGITS = """
import json, sys, types, numpy, torch
from onmt.model_builder import load_test_model
checkpoint, source, target, result = sys.argv[1:]
settings = dict(models=[checkpoint], gpu=-1, fp32=True, data_type="text", world_size=1, precision="fp32")
vocabularies, model, _ = load_test_model(types.SimpleNamespace(**settings), model_path=checkpoint)
model.eval()
is_old = hasattr(vocabularies["src"], "base_field")
def tokens(side):
    one = vocabularies[side]
    return list(one.base_field.vocab.itos if is_old else one.ids_to_tokens)
sides = [tokens("src"), tokens("tgt")]
ids = [{token: number for number, token in enumerate(side)} for side in sides]
pairs, found = [], {}
with torch.no_grad():
    for number, (a, b) in enumerate(zip(open(source), open(target))):
        a, b = [ids[0][each] for each in a.split()], [ids[1][each] for each in ["<s>", *b.split(), "</s>"]]
        shape = (-1, 1, 1) if is_old else (1, -1, 1)  # (S, B, 1), later (B, S, 1)
        states, _ = model(torch.tensor(a).view(shape), torch.tensor(b).view(shape), torch.tensor([len(a)]))
        head = model.generator[0] if isinstance(model.generator, torch.nn.Sequential) else model.generator
        pairs.append([a, b[:-1]])
        found[str(number)] = head(states).flatten(0, 1).numpy()
json.dump({"pairs": pairs, "tokens": sides[1]}, open(result, "w"))
numpy.savez(result.replace(".json", ".npz"), **found)
"""


def options(folder: Path, version: str) -> list[str]:
    width = "-hidden_size" if version >= "3" else "-rnn_size"
    network = f"-layers 2 -heads 4 -transformer_ff 64 {width} 32 -word_vec_size 32 -dropout 0.1 -position_encoding"
    kind = "-encoder_type transformer -decoder_type transformer"
    steps = (
        f"-train_steps {UPDATES} -save_checkpoint_steps {UPDATES} -valid_steps {10 * UPDATES} "
        "-batch_size 64 -seed 1"
    )
    rate = "-optim adam -learning_rate 2 -decay_method noam -warmup_steps 60"
    # otherwise version 3 reads 262,144 sentences before the first update
    bucket = "-num_workers 0 -bucket_size 400" if version >= "3" else ""
    return [
        *f"{network} {kind} {steps} {rate} {bucket}".split(),
        "-save_model",
        str(folder / "model"),
    ]


def train(work: Path, version: str, folder: Path) -> None:
    files = [
        folder / f"{part}.{language}" for part in ("train", "dev") for language in ("en", "de")
    ]
    if version < "2":
        names = ("-train_src", "-train_tgt", "-valid_src", "-valid_tgt")
        given = [part for pair in zip(names, files, strict=True) for part in pair]
        run(
            work,
            PACKAGES[version],
            "-m",
            "onmt.bin.preprocess",
            *given,
            "-save_data",
            folder / "data",
            "-overwrite",
        )
        run(
            work,
            PACKAGES[version],
            "-m",
            "onmt.bin.train",
            "-data",
            folder / "data",
            *options(folder, version),
        )
        return
    corpora = {
        name: {"path_src": str(files[start]), "path_tgt": str(files[start + 1]), "transforms": []}
        for name, start in (("corpus", 0), ("valid", 2))
    }
    vocabularies = {f"{side}_vocab": str(folder / f"vocab.{side}") for side in ("src", "tgt")}
    recipe = {"save_data": str(folder), "overwrite": True, "data": corpora, **vocabularies}
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(recipe))
    run(work, PACKAGES[version], "-m", "onmt.bin.build_vocab", "-config", config, "-n_sample", "-1")
    run(
        work,
        PACKAGES[version],
        "-m",
        "onmt.bin.train",
        "-config",
        config,
        *options(folder, version),
    )


def compare_opennmt(work: Path, version: str) -> tuple[float, int]:
    """See `compare`."""
    install(work, *PACKAGES[version])
    folder = work / f"opennmt-{version}"
    write_corpus(folder)
    train(work, version, folder)
    checkpoint, source = folder / f"model_step_{UPDATES}.pt", folder / "test.en"
    given = ("-model", checkpoint, "-src", source, "-output", folder / "out", "-beam_size", BEAMS)
    if version >= "3":
        given += ("-max_length_ratio", 0)  # of a batch
    run(work, PACKAGES[version], "-m", "onmt.bin.translate", *given)
    run(
        work,
        PACKAGES[version],
        "-c",
        LOGITS,
        checkpoint,
        source,
        folder / "test.de",
        folder / "dumped.json",
    )
    convert("opennmt", checkpoint, folder / "converted", True)
    return compare(folder / "converted", folder / "dumped.json", lines_of(folder / "out"))
