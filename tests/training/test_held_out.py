"""Held-out validation pairs: no source of them is trained on, whatever the mixture, and overlap is reported."""

import re
from collections import Counter
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_vanilla_transformer.batches.corpus_tokenizers import train_tokenizers
from hf_vanilla_transformer.corpora import corpus
from hf_vanilla_transformer.corpora.corpus import load_corpus
from hf_vanilla_transformer.inference.distilled_text import SOURCE, TARGET
from hf_vanilla_transformer.training.run.recipes import parse_recipe
from hf_vanilla_transformer.training.run.run_data import load_data
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import error_of
from tests.trainer_helpers import as_flags, run_tiny

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


def write(files, pairs):
    for side, file in enumerate(files):
        file.write_text("".join(f"{pair[side]}\n" for pair in pairs), encoding="utf-8")


def parallel(folder, name, pairs):
    """Two files of parallel text."""
    files = [folder / f"{name}.en", folder / f"{name}.de"]
    write(files, pairs)
    return files


def distilled(folder, name, pairs):
    """The folder that `distil` would write."""
    inside = folder / name
    inside.mkdir()
    write([inside / SOURCE, inside / TARGET], pairs)
    return [inside]


def numbered(count):
    return [(f"text {number}", f"Text {number}") for number in range(count)]


def rows_of(split):
    return [(row["source"], row["target"]) for row in split]


@st.composite
def mixtures(draw):
    """Inputs of (kind, pairs, weight) in which sources repeat, also in other spellings."""
    inputs = []
    for number in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["human", "human", "teacher", "back"])) if number else "human"
        row = st.tuples(st.integers(0, 30), st.sampled_from(VARIANTS))
        pairs = []
        for item, variant in draw(st.lists(row, min_size=12, max_size=40)):
            source = variant(f"text {item}")
            target = variant(f"reference {item} {draw(st.integers(0, 1))}")
            if kind == "teacher" and draw(
                st.booleans()
            ):  # else a reference that `distil --references` adds
                target = f"teacher {item}"
            if kind == "back":
                source = f"teacher {target}"
            pairs.append((source, target))
        inputs.append((kind, pairs, draw(st.integers(1, 4))))
    return inputs


@given(
    inputs=mixtures(),
    count=st.integers(1, 6),
    seed=st.integers(0, 3),
    bidirectional=st.booleans(),
)
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@pytest.mark.slow
def test_no_held_out_source_is_trained_on(tmp_path_factory, inputs, count, seed, bidirectional):
    folder = tmp_path_factory.mktemp("mixture")
    files = []
    human = []
    for number, (kind, pairs, _) in enumerate(inputs):
        if kind == "human":
            human += pairs
        write_input = parallel if kind == "human" else distilled
        files += write_input(folder, str(number), pairs)
    try:
        corpus, _ = load(
            train=files,
            train_weights=[weight for *_, weight in inputs],
            held_out_pairs=count,
            seed=seed,
            bidirectional=bidirectional,
        )
    except UserError as error:
        assert str(error).startswith("held_out_pairs")
        assert len({key(source) for source, _ in human}) < 10
        return
    train, validation = map(rows_of, corpus.pairs.values())
    held_out = {key(source) for source, _ in validation}
    assert held_out
    assert not held_out & {key(source) for source, _ in train}
    forward = validation[: len(validation) // 2] if bidirectional else validation
    assert len({key(source) for source, _ in forward}) == len(forward) <= count
    assert set(forward) <= set(human), "never the text of a teacher"
    if bidirectional:
        assert not held_out & {key(target) for _, target in train}
        return
    # everything else is trained on as often as before
    references = {key(target) for _, target in forward}
    expected = Counter()
    for kind, pairs, weight in inputs:
        for source, target in pairs:
            of_teacher = kind != "human" and key(target) in references
            if key(source) not in held_out and not of_teacher:
                expected[source, target] += weight
    assert Counter(train) == expected


def test_distilled_text_alone_has_no_pairs_to_hold_out(tmp_path):
    (folder,) = distilled(tmp_path, "taught", numbered(40))
    for train in ([folder], [folder / SOURCE, folder / TARGET]):
        assert error_of(load, train=train, held_out_pairs=3).startswith("held_out_pairs")


WORDS = [chr(97 + number) * (3 + number) for number in range(20)]


def test_tokenizer_is_trained_on_the_split_that_is_trained_on(tmp_path):
    pairs = [(f"{word} {word} {word}", word.upper()) for word in WORDS]
    files = parallel(tmp_path, "a", pairs)
    vocabularies = []
    for seed in (1, 2, 1, 3):
        corpus, data_args = load(train=files, held_out_pairs=2, seed=seed, min_frequency=1)
        tokenizer, _ = train_tokenizers(corpus, 600, data_args)
        vocabulary = tokenizer.get_vocab()
        vocabularies.append(vocabulary)
        for source, _ in rows_of(corpus.pairs["validation"]):
            assert "Ġ" + source.split()[0] not in vocabulary
    assert vocabularies[0] == vocabularies[2] != vocabularies[1] != vocabularies[3]


def test_tokenizer_learns_from_a_sample_that_the_seed_draws(tmp_path):
    pairs = [(f"x {word}", f"x {word.upper()}") for word in WORDS]
    files = parallel(tmp_path, "a", pairs)
    learned = []
    said = []
    corpus, data_args = load(train=files, min_frequency=1, tokenizer_sentences=12)
    for seed in (1, 2, 1):
        tokenizer, _ = train_tokenizers(corpus, 1000, data_args, seed, said.append)
        vocabulary = tokenizer.get_vocab()
        words = [word for word in WORDS if f"Ġ{word}" in vocabulary]
        assert words == [word for word in WORDS if f"Ġ{word.upper()}" in vocabulary]
        learned.append(words)
    assert learned[0] == learned[2] != learned[1]
    assert len(learned[0]) == 6
    assert said == ["tokenizer: learns from 12 of 40 sentences, drawn by seed"] * 3


def test_tokenizer_of_words_learns_from_all_sentences(tmp_path):
    """Symbols that a sample lacks would be unknown."""
    pairs = [(word, word.upper()) for word in WORDS]
    files = parallel(tmp_path, "a", pairs)
    corpus, data_args = load(train=files, tokens="words", tokenizer_sentences=2)
    tokenizer, _ = train_tokenizers(corpus, 1000, data_args, 1, pytest.fail)
    vocabulary = tokenizer.get_vocab()
    for source, target in pairs:
        assert source in vocabulary
        assert target in vocabulary


def test_limit_of_evaluation_pairs_takes_a_share_of_each_input(tmp_path):
    files = [
        *parallel(tmp_path, "a", [(f"a {number}", "x") for number in range(30)]),
        *parallel(tmp_path, "b", [(f"b {number}", "x") for number in range(10)]),
    ]
    corpus, _ = load(
        train=files,
        validation=files,
        test=files,
        max_test_samples=8,
        max_eval_samples=4,
    )
    for split, expected in (
        ("test", ["a 0", "a 1", "a 2", "a 3", "a 4", "a 5", "b 0", "b 1"]),
        ("validation", ["a 0", "a 1", "a 2", "b 0"]),
    ):
        assert corpus.pairs[split]["source"][:] == expected
        assert corpus.summary(split).startswith(f"{len(expected)} pairs; ")


def test_card_of_a_run_describes_the_pairs_that_were_used(tmp_path, capsys):
    run_tiny(
        tmp_path / "run",
        train=parallel(tmp_path, "a", numbered(60)),
        held_out_pairs=6,
        max_steps=1,
        vocab_size=5000,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="no",
    )
    card = (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    assert "54 pairs; kept 60 of 60" in card
    assert "6 pairs" in card
    assert "The 6 validation sentences were translated with 4 beams" in card
    fingerprints = re.findall("fingerprint `(.*?)`", card)
    assert len(set(fingerprints)) == 2, "of the training and of the validation pairs"
    assert re.search(r"^tokenizer: \d+ tokens.*5,000", capsys.readouterr().out, re.MULTILINE), (
        "fewer than wished"
    )


def warnings(capsys):
    printed = capsys.readouterr().out
    return [line for line in printed.splitlines() if line.startswith("warning: ")]


@pytest.mark.parametrize("split", ["validation", "test", "base_test"])
def test_overlap_of_given_evaluation_data_is_reported(tmp_path, split, capsys):
    train = parallel(tmp_path, "train", numbered(20))
    known = [
        ("TEXT 3", "x"),
        ("text  4", "y"),
        ("text 4", "z"),
        ("Text 5", "v"),
        ("new", "w"),
    ]
    load(**{"train": train, split: parallel(tmp_path, "known", known)})
    (line,) = warnings(capsys)
    assert "4 of 5" in line
    assert split in line
    load(**{"train": train, split: parallel(tmp_path, "new", known[-1:])})
    assert warnings(capsys) == []


@pytest.mark.parametrize("built_in", [False, True])
def test_runs_that_differ_by_seed_are_scored_on_the_same_pairs(built_in, tmp_path):
    flags = {"train": parallel(tmp_path, "a", numbered(60)), "held_out_pairs": 3}
    if built_in:
        flags = {"train": "numbers", "test": "numbers", "numbers_size": 60}
    scored = []
    for seed in (1, 2):
        fields = {**flags, "output_dir": "unused", "vocab_size": 300, "seed": seed}
        splits = load_data(parse_recipe(as_flags(fields)), None, None).corpus.pairs
        del splits["train"]
        scored.append([rows_of(pairs) for pairs in splits.values()])
    assert scored[0] == scored[1] != []


def test_pairs_that_were_held_out_have_no_overlap(tmp_path, capsys):
    files = parallel(tmp_path, "train", numbered(60))
    corpus, _ = load(train=files, held_out_pairs=6)
    assert len(corpus.pairs["validation"]) == 6
    assert warnings(capsys) == []


def test_forms_of_two_batches_have_another_fingerprint(tmp_path, monkeypatch):
    """The forms of the same pairs, as one text, are the same."""
    monkeypatch.setattr(corpus, "ROWS_READ", 1)
    files = tmp_path / "x.en", tmp_path / "x.de"
    write(files, [("one", "eins"), ("two", "zwei")])
    found = set()
    for forms in ({"one": "a", "two": "bc"}, {"one": "ab", "two": "c"}):
        form = Mock(side_effect=lambda text, forms=forms: (forms[text], None), problem=None)
        monkeypatch.setattr(corpus, "SourceForm", lambda *_, form=form, **__: form)
        loaded, _ = load(train=[*map(str, files)], source_form="m:form")
        found.add(loaded.fingerprint("train"))
    assert len(found) == 2
