"""fairseq 0.9, 0.10, 0.12 and its main branch, post-norm and pre-norm."""

import shutil
from pathlib import Path

from hf_vanilla_transformer.interop.converting import convert

from .environment import BEAMS, UPDATES, compare, install, install_source, run, write_corpus

# The main branch has no release of its own. Of the distributions with its code, this one has the source.
PACKAGES = {version: f"fairseq=={version}" for version in ("0.9.0", "0.10.2", "0.12.2")}
PACKAGES["main"] = "fairseq-fixed==0.12.3.1"
# pip cannot read the source distribution of 0.10.2, whose setup.py removes a link that is a folder there. Its wheel
# for an older Python has the same files. The compiled ones are not used.
WHEELS = {
    "fairseq==0.10.2": (
        "--only-binary",
        ":all:",
        "--python-version",
        "3.8",
        "--platform",
        "manylinux1_x86_64",
    )
}

# Its arguments: the data, the checkpoint, the source and target text, the result.
LOGITS = """
import json, sys, numpy, torch
from fairseq import checkpoint_utils
data, checkpoint, source, target, result = sys.argv[1:]
models, _, task = checkpoint_utils.load_model_ensemble_and_task([checkpoint], {"data": data})
model, pairs, found = models[0].eval(), [], {}
def ids(dictionary, line):
    return [*map(dictionary.index, line.split()), dictionary.eos()]
with torch.no_grad():
    for number, (a, b) in enumerate(zip(open(source), open(target))):
        a, b = ids(task.source_dictionary, a), ids(task.target_dictionary, b)
        b = [b[-1], *b[:-1]]
        pairs.append([a, b])
        logits, _ = model(torch.tensor([a]), torch.tensor([len(a)]), torch.tensor([b]))
        found[str(number)] = logits[0].numpy()
json.dump({"pairs": pairs, "tokens": task.target_dictionary.symbols}, open(result, "w"))
numpy.savez(result.replace(".json", ".npz"), **found)
"""


# Of each file: what today's Python or torch refuses, and what does the same. 0.10.2 knows the name that optional types
# had before Python 3.9, and 0.9.0 divides whole numbers with `div`.
PATCHES = {
    "dataclass/utils.py": (r"Union\[(.*), NoneType\]$", r"(Union\[.*, NoneType|Optional\[.*)\]$"),
    "search.py": (
        "vocab_size, out=self.beams_buf",
        "vocab_size, rounding_mode='floor', out=self.beams_buf",
    ),
}


def install_fairseq(work: Path, package: str) -> None:
    """Its source, with `PATCHES`."""
    if package in WHEELS:
        install(work, package, pip_options=WHEELS[package])
    else:
        install_source(work, package)
    for name, (old, new) in PATCHES.items():
        file = work / package / "fairseq" / name
        if file.is_file():
            file.write_text(file.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")


def options(folder: Path, data: Path, norm: str) -> list[object]:
    stacks = [
        f"--{stack}-{name}"
        for stack in ("encoder", "decoder")
        for name in ("embed-dim", "ffn-embed-dim")
    ]
    sizes = [part for name, size in zip(stacks, (32, 64) * 2, strict=True) for part in (name, size)]
    for stack in ("encoder", "decoder"):
        sizes += [f"--{stack}-layers", 2, f"--{stack}-attention-heads", 4]
        sizes += [f"--{stack}-normalize-before"] * (norm == "pre")
    steps = (
        f"--max-update {UPDATES} --batch-size 64 --no-epoch-checkpoints --disable-validation "
        "--seed 1 --num-workers 0"
    )
    rate = "--optimizer adam --lr 0.003 --lr-scheduler inverse_sqrt --warmup-updates 60 --warmup-init-lr 1e-07"
    smoothing = "--criterion label_smoothed_cross_entropy --label-smoothing 0.1 --cpu --dropout 0.1"
    languages = "--source-lang en --target-lang de --arch transformer_iwslt_de_en"
    return [
        data,
        *sizes,
        *f"{steps} {rate} {smoothing} {languages}".split(),
        "--save-dir",
        folder / "model",
    ]


def compare_fairseq(work: Path, version: str, norm: str) -> tuple[float, int]:
    """See `compare`."""
    package = PACKAGES[version]
    install_fairseq(work, package)
    folder = work / f"fairseq-{version}-{norm}"
    data, checkpoint = folder / "data", folder / "model" / "checkpoint_last.pt"
    shutil.rmtree(folder, ignore_errors=True)  # it would continue with the files that exist
    write_corpus(folder)
    names = ("--trainpref", "--validpref", "--testpref")
    prefixes = [
        each
        for name, part in zip(names, ("train", "dev", "test"), strict=True)
        for each in (name, folder / part)
    ]
    languages = ("--source-lang", "en", "--target-lang", "de")
    run(
        work,
        [package],
        "-m",
        "fairseq_cli.preprocess",
        *languages,
        *prefixes,
        "--destdir",
        data,
        "--workers",
        1,
    )
    run(work, [package], "-m", "fairseq_cli.train", *options(folder, data, norm))
    given = (
        data,
        *languages,
        "--path",
        checkpoint,
        "--beam",
        BEAMS,
        "--input",
        folder / "test.en",
        "--cpu",
    )
    written = run(work, [package], "-m", "fairseq_cli.interactive", *given)
    lines = [line.split("\t")[2] for line in written.splitlines() if line.startswith("H-")]
    texts = folder / "test.en", folder / "test.de"
    run(work, [package], "-c", LOGITS, data, checkpoint, *texts, folder / "dumped.json")
    convert("fairseq", checkpoint, folder / "converted", True, data=data)
    return compare(folder / "converted", folder / "dumped.json", lines)
