"""Held-out validation pairs: no source of them is trained on, whatever the mixture, and overlap is reported."""

import re
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_vanilla_transformer.batches.corpus_tokenizers import train_tokenizers
from hf_vanilla_transformer.corpora.corpus import load_corpus
from hf_vanilla_transformer.inference.distilled_text import SOURCE, TARGET
from hf_vanilla_transformer.training.run.recipes import parse_recipe
from hf_vanilla_transformer.training.run.run import run_training
from hf_vanilla_transformer.training.run.run_data import load_data
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import error_of
from tests.trainer_helpers import TINY_RUN, as_flags

VARIANTS = [
    str,
    str.upper,
    lambda text: f" {text}  ",
    lambda text: text.replace(" ", "\u00a0"),
    str.title,
    lambda text: f"“{text}!”",
]


def key(text):
    return " ".join(re.findall(r"\w+", text.lower()))


def load(**flags):
    _, data_args, args = parse_recipe(as_flags({"output_dir": "unused", **flags}))
    return load_corpus(data_args, args.seed), data_args


def write(folder, name, pairs, distilled=False):
    """Two files of parallel text, or the folder that `distil` would write."""
    if distilled:
        folder, names = folder / name, (SOURCE, TARGET)
        folder.mkdir()
    else:
        names = (f"{name}.en", f"{name}.de")
    for side, file in enumerate(names):
        (folder / file).write_text("".join(f"{pair[side]}\n" for pair in pairs), encoding="utf-8")
    return [str(folder)] if distilled else [str(folder / file) for file in names]


@st.composite
def mixtures(draw):
    """Inputs of (kind, pairs, weight) in which sources repeat, also in other spellings."""
    inputs = []
    for number in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["human", "human", "teacher", "back"])) if number else "human"
        rows = draw(st.lists(st.tuples(st.integers(0, 30), st.sampled_from(VARIANTS)), min_size=12, max_size=40))
        pairs = []
        for item, variant in rows:
            source, target = variant(f"text {item}"), variant(f"reference {item} {draw(st.integers(0, 1))}")
            if kind == "teacher" and draw(st.booleans()):  # else a reference that `distil --references` adds
                target = f"teacher {item}"
            if kind == "back":
                source = f"teacher {target}"
            pairs.append((source, target))
        inputs.append((kind, pairs, draw(st.integers(1, 4))))
    return inputs


@given(mixtures(), st.integers(1, 6), st.integers(0, 3), st.booleans())
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_no_held_out_source_is_trained_on(tmp_path_factory, inputs, count, seed, bidirectional):
    folder, files = tmp_path_factory.mktemp("mixture"), []
    for number, (kind, pairs, _) in enumerate(inputs):
        files += write(folder, str(number), pairs, distilled=kind != "human")
    flags = {"train": files, "train_weights": [weight for *_, weight in inputs], "held_out_pairs": count, "seed": seed}
    human = [pair for kind, pairs, _ in inputs if kind == "human" for pair in pairs]
    try:
        corpus, _ = load(**flags, bidirectional=bidirectional)
    except UserError as error:
        assert str(error).startswith("held_out_pairs")
        assert len({key(source) for source, _ in human}) < 10
        return
    train, validation = ([(row["source"], row["target"]) for row in corpus.pairs[split]] for split in corpus.pairs)
    held_out = {key(source) for source, _ in validation}
    assert validation and not held_out & {key(source) for source, _ in train}
    forward = validation[: len(validation) // 2] if bidirectional else validation
    assert len({key(source) for source, _ in forward}) == len(forward) <= count
    assert set(forward) <= set(human), "never the text of a teacher"
    references = {key(target) for _, target in forward}
    if bidirectional:
        assert not held_out & {key(target) for _, target in train}
    else:  # everything else is trained on as often as before
        expected = Counter()
        for kind, pairs, weight in inputs:
            for pair in pairs:
                if key(pair[0]) not in held_out and not (kind != "human" and key(pair[1]) in references):
                    expected[pair] += weight
        assert Counter(train) == expected


def test_distilled_text_alone_has_no_pairs_to_hold_out(tmp_path):
    files = write(tmp_path, "taught", [(f"text {number}", f"Text {number}") for number in range(40)], distilled=True)
    for train in (files, [str(tmp_path / "taught" / name) for name in (SOURCE, TARGET)]):
        assert error_of(load, train=train, held_out_pairs=3).startswith("held_out_pairs")


def test_tokenizer_is_trained_on_the_split_that_is_trained_on(tmp_path):
    pairs = [(f"{word} " * 3, f"{word[::-1]} " * 3) for word in (chr(97 + n) * (3 + n) for n in range(20))]
    files, vocabularies = write(tmp_path, "a", pairs), []
    for seed in (1, 2, 1, 3):
        corpus, data_args = load(train=files, held_out_pairs=2, seed=seed, min_frequency=1)
        (tokenizer, _) = train_tokenizers(corpus, 600, data_args)
        vocabularies.append(tokenizer.get_vocab())
        for row in corpus.pairs["validation"]:
            assert "Ġ" + row["source"].split()[0] not in tokenizer.get_vocab()
    assert vocabularies[0] == vocabularies[2] != vocabularies[1] != vocabularies[3]


def test_tokenizer_learns_from_a_sample_that_the_seed_draws(tmp_path):
    words = [chr(97 + number) * (3 + number) for number in range(20)]
    files, learned, said = write(tmp_path, "a", [(f"x {word}", f"x {word.upper()}") for word in words]), [], []
    corpus, data_args = load(train=files, min_frequency=1, tokenizer_sentences=12)
    for seed in (1, 2, 1):
        (tokenizer, _) = train_tokenizers(corpus, 1000, data_args, seed, said.append)
        learned.append({word for word in words if f"Ġ{word}" in tokenizer.get_vocab()})
        assert learned[-1] == {word for word in words if f"Ġ{word.upper()}" in tokenizer.get_vocab()}
    assert learned[0] == learned[2] != learned[1]
    assert len(learned[0]) == 6
    assert said == ["tokenizer: learns from 12 of 40 sentences, drawn by seed"] * 3
    # symbols that a sample lacks would be unknown
    corpus, data_args = load(train=files, tokens="words", tokenizer_sentences=2)
    (tokenizer, _) = train_tokenizers(corpus, 1000, data_args, 1, said.append)
    assert {*words, *map(str.upper, words)} < tokenizer.get_vocab().keys()
    assert len(said) == 3


def test_limit_of_evaluation_pairs_takes_a_share_of_each_input(tmp_path):
    files = [
        file
        for name, size in (("a", 30), ("b", 10))
        for file in write(tmp_path, name, [(f"{name} {number}", "x") for number in range(size)])
    ]
    inputs = {"train": files, "validation": files, "test": files}
    corpus, _ = load(**inputs, max_test_samples=8, max_eval_samples=4)
    expected = [f"a {number}" for number in range(6)] + ["b 0", "b 1"]
    assert corpus.pairs["test"]["source"][:] == expected
    assert corpus.pairs["validation"]["source"][:] == ["a 0", "a 1", "a 2", "b 0"]
    for split, count in {"test": 8, "validation": 4}.items():
        assert corpus.summary(split).startswith(f"{count} pairs; ")


def test_card_of_a_run_describes_the_pairs_that_were_used(tmp_path, capsys):
    text = [(f"text {number}", f"Text {number}") for number in range(60)]
    flags = {"train": write(tmp_path, "a", text), "held_out_pairs": 6, "max_steps": 1, "vocab_size": 5000}
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "no", "output_dir": tmp_path / "run"}
    run_training(*parse_recipe(as_flags(TINY_RUN | settings | flags)))
    card = (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    assert "54 pairs; kept 60 of 60" in card and "6 pairs" in card
    assert "The 6 validation sentences were translated with 4 beams" in card
    fingerprints = re.findall("fingerprint `(.*?)`", card)
    assert len(set(fingerprints)) == 2, "of the training and of the validation pairs"
    assert re.search(r"^tokenizer: \d+ tokens.*5,000", capsys.readouterr().out, re.MULTILINE), "fewer than wished"


@pytest.mark.parametrize("split", ["validation", "test", "base_test"])
def test_overlap_of_given_evaluation_data_is_reported(tmp_path, split, capsys):
    train = write(tmp_path, "train", [(f"text {number}", f"Text {number}") for number in range(20)])
    known = [("TEXT 3", "x"), ("text  4", "y"), ("text 4", "z"), ("new", "w"), ("Text 5", "v")]
    load(**{"train": train, split: write(tmp_path, "known", known)})
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1 and "4 of 5" in warnings[0] and split in warnings[0]
    load(**{"train": train, split: write(tmp_path, "new", known[3:4])})
    assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize("built_in", [False, True])
def test_runs_that_differ_by_seed_are_scored_on_the_same_pairs(built_in, tmp_path):
    text = write(tmp_path, "a", [(f"text {number}", f"Text {number}") for number in range(60)])
    flags = {"train": text, "held_out_pairs": 3}
    if built_in:
        flags = {"train": "numbers", "test": "numbers", "numbers_size": 60}
    scored = []
    for seed in (1, 2):
        parsed = parse_recipe(as_flags({"output_dir": "unused", "vocab_size": 300, "seed": seed, **flags}))
        splits = load_data(parsed, None, None).corpus.pairs
        scored.append([list(splits[split]) for split in splits if split != "train"])
    assert scored[0] == scored[1] and scored[0] != []


def test_pairs_that_were_held_out_have_no_overlap(tmp_path, capsys):
    train = write(tmp_path, "train", [(f"text {number}", f"Text {number}") for number in range(60)])
    corpus, _ = load(train=train, held_out_pairs=6)
    assert len(corpus.pairs["validation"]) == 6 and "warning" not in capsys.readouterr().out
