"""Marian, the trainer and the decoder of pymarian."""

from pathlib import Path

import torch

from hf_vanilla_transformer.inference.loading import load_model
from hf_vanilla_transformer.interop.converting import convert
from hf_vanilla_transformer.text import load_tokenizers

from .environment import BEAMS, SENTENCES, UPDATES, install, lines_of, run, write_corpus

PACKAGE = "pymarian==1.12.42"
PRE_NORM = (
    "--transformer-preprocess",
    "n",
    "--transformer-postprocess",
    "da",
    "--transformer-postprocess-top",
    "n",
)


def train(work: Path, folder: Path, options: tuple[str, ...]) -> None:
    sizes = (
        "--dim-emb 32 --transformer-dim-ffn 64 --transformer-heads 4 --enc-depth 2 --dec-depth 2"
    )
    steps = f"--after-batches {UPDATES} --mini-batch 64 --learn-rate 0.003 --lr-warmup 60 --transformer-dropout 0.1"
    rest = "--label-smoothing 0.1 --seed 1 --cpu-threads 1 --workspace 256 --quiet --overwrite"
    files = (
        "--train-sets",
        folder / "train.en",
        folder / "train.de",
        "--model",
        folder / "model.npz",
    )
    vocabularies = ("--vocabs", folder / "en.yml", folder / "de.yml")
    given = (*files, *vocabularies, *f"--type transformer {sizes} {steps} {rest}".split(), *options)
    run(work, [PACKAGE], "-m", "pymarian", "train", *given)


def compare_marian(work: Path, options: tuple[str, ...] = ()) -> tuple[float, int]:
    """The largest difference of a log-probability of a reference's token, and the number of equal translations.

    Marian prints the log-probabilities of the tokens of given translations, and no logits.
    """
    install(work, PACKAGE)
    folder = work / "_".join(["marian", *(name.strip("-") for name in options)])
    write_corpus(folder)
    for file in folder.glob("model.npz*"):
        file.unlink()  # it would continue with the files that exist
    train(work, folder, options)
    texts, vocabularies = (
        (folder / "test.en", folder / "test.de"),
        ("--vocabs", folder / "en.yml", folder / "de.yml"),
    )
    score = (
        "--model",
        folder / "model.npz",
        "--train-sets",
        *texts,
        "--word-scores",
        "--cpu-threads",
        1,
        "--quiet",
    )
    scored = run(work, [PACKAGE], "-m", "pymarian", "score", *score, *vocabularies).splitlines()
    search = (
        "--models",
        folder / "model.npz",
        "--beam-size",
        BEAMS,
        "--normalize",
        1,
        "--cpu-threads",
        1,
        "--quiet",
    )
    files = ("--input", texts[0], "--output", folder / "out")
    run(work, [PACKAGE], "-m", "pymarian", "decode", *search, *files, *vocabularies)
    convert("marian-npz", folder / "model.npz", folder / "converted", True)
    model = load_model(folder / "converted", "cpu").eval()
    source, target = load_tokenizers(folder / "converted")
    largest, same, written = 0.0, 0, lines_of(folder / "out")
    for line, reference, scores, theirs in zip(*map(lines_of, texts), scored, written, strict=True):
        ids, labels = (
            one(text, return_tensors="pt")["input_ids"]
            for one, text in ((source, line), (target, reference))
        )
        with torch.inference_mode():
            logits = model(input_ids=ids, labels=labels).logits[0]
            # --normalize 1, and Marian's limit of three times the source
            ours = model.generate(
                ids, num_beams=BEAMS, length_penalty=1.0, max_new_tokens=3 * ids.shape[1]
            )[0]
        found = logits.log_softmax(-1).gather(1, labels[0][:, None])[:, 0]
        expected = torch.tensor(
            [float(each) for each in scores.partition("WordScores= ")[2].split()]
        )
        largest = max(largest, (found - expected).abs().max().item())
        same += target.decode(ours, skip_special_tokens=True).strip() == theirs.strip()
    assert len(set(written)) > SENTENCES // 10, (
        f"{folder}: the translations hardly differ from each other"
    )
    return largest, same
