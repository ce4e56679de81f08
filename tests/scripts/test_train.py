"""`vanilla-transformer train` as a user runs it: input formats, user errors, and Ctrl-C."""

import json
from functools import partial

import pytest
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vanilla_transformer import Translator
from tests.trainer_helpers import TINY_RUN, as_flags, write_pairs

PAIRS = [
    ("One dog", "Ein Hund"),
    ("Two dogs, three cats", "Zwei Hunde, drei Katzen"),
    ("A cat", "Eine Katze"),
    ("Three dogs", "Drei Hunde"),
    ("Two cats", "Zwei Katzen"),
    ("One cat", "Eine Katze"),
]

TINY = as_flags(TINY_RUN | {"per_device_train_batch_size": 4, "max_steps": 2})


@pytest.fixture
def train(command, in_tmp_path, tmp_path):
    """Run the subcommand in an empty folder. Return exit status, standard output and standard error."""
    return partial(command, "train")


def parallel(folder, pairs=PAIRS, name="train"):
    """Write two text files. Return the flag that names them."""
    return as_flags(write_pairs(folder, pairs, name))


# 1. Input formats


def json_lines(path):
    rows = [
        {"translation": {"en": source, "de": target, "fr": "non"}, "id": 7}
        for source, target in PAIRS
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return ["--source_lang", "en", "--target_lang", "de"]


def csv_file(path):
    rows = [f'{number},"{source}","{target}"' for number, (source, target) in enumerate(PAIRS)]
    path.write_text("\n".join(["id,english,german", *rows]), encoding="utf-8")
    return ["--source_column", "english", "--target_column", "german"]


@pytest.mark.parametrize(("name", "write"), [("pairs.jsonl", json_lines), ("pairs.csv", csv_file)])
def test_files_with_columns(train, tmp_path, name, write):
    columns = write(tmp_path / name)
    files = [part for split in ("train", "validation", "test") for part in (f"--{split}", name)]
    status, printed, errors = train(*TINY, *files, *columns, "--output_dir", "run")
    assert status == 0, errors
    assert all(
        f"{split}: kept 6 of 6 pairs" in printed for split in ("train", "validation", "test")
    )
    results = json.loads((tmp_path / "run" / "all_results.json").read_text())
    assert results["test_sentences"] == 6 and "eval_bleu" in results
    # the joint tokenizer has learnt from both columns
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
    assert len(tokenizer.tokenize("cats")) < 4 and len(tokenizer.tokenize("Katze")) < 5


def test_separate_vocabularies_are_trained_and_resumed(train, tmp_path):
    files = [*parallel(tmp_path), *parallel(tmp_path, PAIRS[:3], "test")]
    flags = [*files, "--separate_vocabularies", "true", "--min_frequency", "1", "--save_steps", "1"]
    flags += ["--output_dir", "run"]
    status, printed, errors = train(*TINY, *flags)
    assert status == 0, errors
    run = tmp_path / "run"
    source, target = (
        AutoTokenizer.from_pretrained(run),
        AutoTokenizer.from_pretrained(run / "target_tokenizer"),
    )
    assert source.get_vocab() != target.get_vocab()
    assert f"tokenizer: {len(source):,} and {len(target):,} tokens" in printed
    config = AutoModelForSeq2SeqLM.from_pretrained(run).config
    assert (config.vocab_size, config.target_vocab_size) == (len(source), len(target))
    assert not config.share_encoder_decoder_embeddings
    translations = list(
        Translator.from_pretrained(run, device="cpu").translate(["One dog", ""], max_new_tokens=4)
    )
    assert len(translations) == 2 and translations[1] == ""
    # a resumed run keeps its two tokenizers
    status, _, errors = train(*TINY, *flags, "--max_steps", "3", "--resume_from_checkpoint", "true")
    assert status == 0, errors
    assert json.loads((run / "all_results.json").read_text())["train_updates"] == 3
    assert (run / "target_tokenizer").is_dir()


def test_lowercase_is_saved(train, tmp_path):
    flags = [*parallel(tmp_path), "--lowercase", "true"]
    status, _, errors = train(*TINY, *flags, "--output_dir", "run")
    assert status == 0, errors
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
    ids = tokenizer("Two DOGS")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "two dogs"


# 2. User errors


def output_is_a_file(folder):
    (folder / "run").write_text("precious")
    return parallel(folder)


def finished_run(folder):
    (folder / "run").mkdir()
    (folder / "run" / "model.safetensors").write_bytes(b"precious")
    (folder / "run" / "trainer_state.json").write_text("{}")
    return parallel(folder)


def and_flags(*flags):
    return lambda folder: [*parallel(folder), *flags]


USER_ERRORS = [
    (lambda _: ["--train", "no.en", "no.de"], "train: no.en"),
    (output_is_a_file, "output_dir run"),
    (finished_run, "output_dir run"),
    (lambda _: [], "train: "),
    (and_flags("--resume_from_checkpoint", "true"), "checkpoint"),
    (and_flags("--resume_from_checkpoint", "elsewhere"), "resume_from_checkpoint elsewhere"),
    (lambda folder: parallel(folder)[:2], "train.source is plain text"),
    (and_flags("--vocab_size", "99"), "vocab_size"),
    (and_flags("--bleu_tokenize", "moses"), "'moses'"),
    (and_flags("--label_smoothing_factor", "1.5"), "label_smoothing_factor"),
    (and_flags("--max_source_length", "1"), "longer"),
    (and_flags("--tokenizer_name", "elsewhere"), "elsewhere: cannot load the tokenizer"),
    (and_flags("--encoder_attention_heads", "3"), "encoder_attention_heads"),
    (lambda _: ["--train", "numbers", "--target_lang", "tlh"], "'tlh'"),
    (lambda _: ["--train", "numbers", "--numbers_size", "2000000"], "numbers_size"),
]


@pytest.mark.parametrize(("prepare", "message"), USER_ERRORS)
def test_user_errors_are_one_line(train, tmp_path, prepare, message):
    flags = prepare(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    status, _, errors = train(*TINY, "--output_dir", "run", *flags)
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert status == 2 and len(lines) == 1 and message in lines[0], errors
    assert "Traceback" not in errors
    assert before == {path: path.read_bytes() for path in before}  # no file of the user was changed


# 3. Ctrl-C
