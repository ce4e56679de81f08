"""Fine-tuning: the tokenizer and sizes of the base model are kept. Both test sets are scored before and after."""

import contextlib
import io
import json
import re
import shutil
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sacrebleu
import torch
from num2words import num2words
from transformers import AutoModelForSeq2SeqLM, GenerationConfig, MarianTokenizer

from hf_vanilla_transformer import Translator, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.inference.languages import card_languages, model_languages
from hf_vanilla_transformer.interop.converting import convert
from hf_vanilla_transformer.interop.exporting import export
from hf_vanilla_transformer.interop.importers import IMPORTERS
from hf_vanilla_transformer.serving.languages import model_folders
from hf_vanilla_transformer.text import load_tokenizers, save_tokenizers, train_tokenizer
from hf_vanilla_transformer.text.language_tokens import MARKS
from hf_vanilla_transformer.text.vocabulary import extend_languages
from hf_vanilla_transformer.training.run import adapters, fine_tuning
from hf_vanilla_transformer.training.run.arguments import (
    DataArguments,
    ModelArguments,
    RunArguments,
)
from hf_vanilla_transformer.training.run.fine_tuning import (
    SCORES_BEFORE,
    add_languages,
    base_folder,
    check_fields,
    check_tokens_kept,
    describe_defaults,
    load_base_model,
    resumed_model,
    score_before,
)
from hf_vanilla_transformer.training.run.languages import run_languages
from hf_vanilla_transformer.training.run.recipes import parse_recipe
from hf_vanilla_transformer.training.run.run import run_training
from tests.interop.foreign import write_m2m100_folder, write_opus_folder, write_opus_tokenizer
from tests.model_helpers import SMALL_SIZES, error_of, slow, tiny_model
from tests.trainer_helpers import as_flags, assert_same_model, change_json, write_pairs

PAIRS = [
    ("one dog", "ein Hund"),
    ("two dogs", "zwei Hunde"),
    ("three cats", "drei Katzen"),
    ("a ball", "ein Ball"),
    ("one cat", "eine Katze"),
    ("two cats in the snow", "zwei Katzen im Schnee"),
    ("three dogs", "drei Hunde"),
    ("one ball", "x"),
]
SOURCES = [source for source, _ in PAIRS]
TARGETS = [target for _, target in PAIRS]
UNIT = '<tu><tuv xml:lang="en"><seg>{}</seg></tuv><tuv xml:lang="de"><seg>{}</seg></tuv></tu>'
SETTINGS: dict[str, Any] = {
    "max_steps": 4,
    "save_steps": 2,
    "per_device_train_batch_size": 4,
    "logging_steps": 1,
    "generation_max_length": 8,
    "disable_tqdm": True,
    "use_cpu": True,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Flags for training text, a test set and a test set of the base model."""
    folder = tmp_path_factory.mktemp("text")
    fields = write_pairs(folder, PAIRS)
    fields |= write_pairs(folder, PAIRS[:3], "test")
    fields |= write_pairs(folder, PAIRS[3:], "base_test")
    return fields


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of ours with random weights and the settings of a finished run."""
    folder = tmp_path_factory.mktemp("base") / "ours"
    tokenizer = train_tokenizer(SOURCES + TARGETS, 300)
    model = tiny_model(vocab_size=len(tokenizer), dropout=0.1)
    model.generation_config.num_beams = 2
    model.save_pretrained(folder)
    save_tokenizers(folder, tokenizer)
    return folder


@pytest.fixture(scope="module")
def opus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as of an OPUS-MT model: SentencePiece, swish, bad_words_ids."""
    pytest.importorskip("sentencepiece", reason="the extra `convert` is not installed")
    folder = tmp_path_factory.mktemp("base") / "opus"
    write_opus_folder(folder)
    return folder


def run(output: Path, **fields: Any) -> dict[str, Any]:
    flags = as_flags({**SETTINGS, **fields, "output_dir": output})
    return run_training(*parse_recipe(flags), importers=IMPORTERS)


def fine_tune(
    output: Path, base: Path, text: dict[str, list[Path]], **fields: Any
) -> dict[str, Any]:
    return run(output, **{"model_name_or_path": base, **text, **fields})


@pytest.fixture(scope="module")
def tuned(base, text, tmp_path_factory):
    """A run from `base`: its folder, results and standard output."""
    folder = tmp_path_factory.mktemp("tuned") / "run"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        results = fine_tune(
            folder,
            base,
            text,
            dropout=0.3,
            generation_max_length=40,
            max_steps=30,
        )
    return folder, results, printed.getvalue()


def test_fine_tuning_keeps_tokenizer_sizes_and_search_settings(base: Path, tuned: tuple) -> None:
    folder, _, _ = tuned
    new, old = (AutoModelForSeq2SeqLM.from_pretrained(each) for each in (folder, base))
    expected = old.config.to_dict() | {"dropout": 0.3, "_name_or_path": str(folder)}
    assert new.config.to_dict() == expected
    assert new.generation_config.num_beams == 2
    after, before = (load_tokenizers(each)[0] for each in (folder, base))
    assert before.get_vocab() == after.get_vocab()
    assert before(SOURCES)["input_ids"] == after(SOURCES)["input_ids"]


def test_vocabulary_size_of_the_recipe_of_the_base_counts_no_languages(base: Path) -> None:
    def check(size: int) -> None:
        check_fields("base", config, tokenizer, ModelArguments(vocab_size=size), DataArguments())

    translator = load_base_model(str(base))
    tokenizer = translator.tokenizers[0]
    config = translator.model.config
    size = config.vocab_size
    directions = [("en", "de"), ("de", "en")]
    assert extend_languages(translator.model, tokenizer, directions, {}) == ["de", "en"]
    assert config.vocab_size == size + 2
    check(size)
    for other in (size - 1, size + 1):
        assert (
            error_of(check, other)
            == f"vocab_size: {other}: fine-tuning keeps {size + 2} of base, leave it out of flags and recipe"
        )


def test_languages_of_the_base_travel_with_the_model(text: dict, tmp_path: Path) -> None:
    base = tmp_path / "base"
    # CTranslate2 has one number of heads
    write_opus_folder(base, encoder_attention_heads=4, decoder_attention_heads=4)
    change_json(
        base / "tokenizer_config.json", source_lang="en", target_lang="de"
    )  # as in every OPUS-MT folder
    tuned = tmp_path / "tuned"
    again = tmp_path / "again"
    fine_tune(tuned, base, text, max_steps=1)
    fine_tune(again, tuned, text, max_steps=1)
    for folder in (tuned, again):
        assert model_folders([str(folder)]) == {("en", "de"): folder}
        assert card_languages(folder) == ["en", "de"]
    export("argos", again, tmp_path / "again.argosmodel")
    with zipfile.ZipFile(tmp_path / "again.argosmodel") as archive:
        assert "translate-en_de-1_0/metadata.json" in archive.namelist()


@pytest.mark.parametrize("named_by", ["files", *slow("recipe", "memory", "columns")])
def test_languages_of_a_run_are_in_its_card_and_its_tokenizer(
    tmp_path: Path, text: dict, named_by: str
) -> None:
    folder = tmp_path / "run"
    contents = {
        "a.en": "\n".join(SOURCES),
        "a.de": "\n".join(TARGETS),
        "a.tmx": "<tmx><body>" + "".join(UNIT.format(*pair) for pair in PAIRS) + "</body></tmx>",
        "a.tsv": "\n".join(["en\tde", *map("\t".join, PAIRS)]),
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    fields: dict[str, dict[str, Any]] = {
        "files": {"train": [tmp_path / "a.en", tmp_path / "a.de"]},
        "recipe": {"train": text["train"], "source_lang": "en", "target_lang": "de"},
        "memory": {"train": [tmp_path / "a.tmx"]},
        "columns": {"train": [tmp_path / "a.tsv"], "source_column": "en", "target_column": "de"},
    }
    run(folder, **SMALL_SIZES, **fields[named_by], vocab_size=300, max_steps=1)
    assert card_languages(folder) == ["en", "de"]
    pytest.importorskip("ctranslate2", reason="the extra `ctranslate2` is not installed")
    exported = tmp_path / "exported"  # has no card
    export("ctranslate2", folder, exported)
    assert model_languages(exported) == ("en", "de")
    settings = json.loads((exported / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert not settings.keys() & {"is_local", "local_files_only"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"directions": ["en-de"], "train": ["a.en", "a.de"]}, None),
        ({"source_lang": "fr", "target_lang": "it"}, ("fr", "it")),
        ({"source_lang": "fr", "data": "no folder"}, None),
        ({"train": ["a.en", "a.de"], "source_lang": "fr"}, ("en", "de")),
        ({"train": ["a.en.gz", "a.de.gz"], "target_lang": "fr"}, ("en", "de")),
        ({"train": ["a.pt-BR", "a.en-GB"]}, ("pt-BR", "en-GB")),
        ({"train": ["a.tmx"]}, ("en", "de")),
        ({"train": ["a.tmx"], "source_lang": "de"}, ("de", "en")),
        ({"train": ["a.tmx"], "target_lang": "en"}, ("de", "en")),
        ({"train": ["a.src", "a.tgt"]}, None),  # no known languages
        ({"train": ["a.en", "b.en"]}, None),
        ({"train": ["a.tsv"], "source_column": "it", "target_column": "fr"}, ("it", "fr")),
        ({"train": ["a.tsv"], "source_column": "it", "target_column": "text"}, None),
        ({"train": ["a.tsv", "a.en", "a.de"]}, ("en", "de")),
    ],
    ids=str,
)
def test_languages_of_a_run_are_those_of_the_first_place_that_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict, expected: tuple | None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.tmx").write_text(f"<tmx><body>{UNIT}</body></tmx>", encoding="utf-8")
    for name in fields.get("train", []):
        (tmp_path / name).touch()
    args = RunArguments(str(tmp_path))
    assert run_languages(DataArguments(**fields), args) == expected
    args.model_name_or_path = "opus-mt-es-ru"
    of_base = fields.keys() & {"directions"} or fields.keys() >= {"source_lang", "target_lang"}
    assert run_languages(DataArguments(**fields), args) == (expected if of_base else ("es", "ru"))


def chrf(model: Path, files: list[Path], **search: Any) -> float:
    """The score of the translations of a model folder."""
    sources, references = (file.read_text("utf-8").splitlines() for file in files)
    translations = list(Translator.from_pretrained(model, "cpu").translate(sources, **search))
    return sacrebleu.corpus_chrf(translations, [references]).score


def test_scores_before_are_those_of_the_base_model(
    base: Path, text: dict[str, list[Path]], tuned: tuple
) -> None:
    folder, results, _ = tuned
    for split in ("test", "base_test"):
        for prefix, model in (("before_", base), ("", folder)):
            expected = chrf(model, text[split])
            assert results[f"{prefix}{split}_chrf"] == pytest.approx(expected, abs=1e-6)
    assert results["test_chrf"] != results["before_test_chrf"]
    written = json.loads((folder / "all_results.json").read_text())
    assert written["before_test_chrf"] == results["before_test_chrf"]


@pytest.mark.slow
def test_resumed_run_ends_with_the_same_weights_and_scores(
    base: Path, text: dict, tmp_path: Path
) -> None:
    resumed = tmp_path / "resumed"
    expected = fine_tune(tmp_path / "whole", base, text)
    own_base = shutil.copytree(base, tmp_path / "base")
    fine_tune(tmp_path / "cut", own_base, text, save_total_limit=5)
    resumed.mkdir()
    for name in ("checkpoint-2", SCORES_BEFORE):
        (tmp_path / "cut" / name).rename(resumed / name)
    # The base model is not needed again.
    shutil.rmtree(own_base)
    results = fine_tune(resumed, own_base, text, resume_from_checkpoint=True)
    assert_same_model(tmp_path / "whole", resumed)
    scores = {name for name in expected if "test_" in name and name.endswith(("bleu", "chrf"))}
    assert len(scores) == 8
    for name in scores:
        assert results[name] == expected[name], name


def test_optimizer_defaults_are_said_and_differ_from_fresh_weights(tuned: tuple) -> None:
    def defaults(args: RunArguments) -> tuple[Any, ...]:
        return args.lr_scheduler_type, args.warmup_steps, args.logging_steps

    _, _, fresh = parse_recipe([])
    _, _, changed = parse_recipe(["--model_name_or_path", "x"])
    assert defaults(fresh) == ("inverse_sqrt", 4000, 500)
    assert defaults(changed) == ("linear", 0.05, 0.05)
    # the paper's schedule after 200,000 updates, d_model^-0.5 · 200000^-0.5, with d_model = 32
    rate = f"{32**-0.5 * 200_000**-0.5:.3g}"
    said = f"learning_rate {rate}, lr_scheduler_type linear, warmup_steps 0.05, per_device_train_batch_size 4 "
    assert said in tuned[2]
    changed.learning_rate = 1.0
    changed.max_tokens_per_batch = 256
    assert "warmup_steps 0.05, max_tokens_per_batch 256 " in describe_defaults(changed)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("d_model", 64),
        ("vocab_size", 10),
        ("activation_function", "gelu"),
        ("preset", "base"),
        ("tokenizer_name", "other"),
        ("separate_vocabularies", True),
        ("lowercase", True),
    ],
)
def test_field_that_contradicts_the_base_model_is_refused(base, text, tmp_path, field, value):
    run = tmp_path / "run"
    message = error_of(fine_tune, run, base, text, **{field: value})
    assert message.startswith(f"{field}: {value}: ")
    assert not run.exists()


@pytest.mark.parametrize("content", [None, "{}", '{"model_type": "bart"}', "["])
def test_folder_of_another_model_is_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
    assert str(tmp_path) in error_of(load_base_model, str(tmp_path))


@pytest.mark.parametrize("has_target", [True, False])
def test_importers_convert_models_of_other_types(tmp_path: Path, has_target: bool) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bart"}', encoding="utf-8")
    source, target = (train_tokenizer(lines, 300) for lines in (SOURCES, TARGETS))
    foreign = SimpleNamespace(
        model=tiny_model().double(),
        tokenizer=source,
        target_tokenizer=target if has_target else None,
    )
    importers = {"bart": lambda folder: foreign if folder == tmp_path else None}
    translator = load_base_model(str(tmp_path), importers=importers)
    assert translator.model.dtype == torch.float32
    assert translator.tokenizers == (source, target if has_target else source)
    foreign.tokenizer = None
    message = error_of(load_base_model, str(tmp_path), importers=importers)
    assert message.endswith(" has no tokenizer: add its files to the folder")
    message = error_of(load_base_model, str(tmp_path), importers={"mbart": None, "t5": None})
    assert "this package's models and those of transformers' mbart, t5 can be" in message
    assert "this package's models can be" in error_of(load_base_model, str(tmp_path))


def test_folder_of_the_base_is_fetched_only_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(
        fine_tuning, "from_hub", lambda *request: asked.append(request) or tmp_path / "fetched"
    )
    args = RunArguments(str(tmp_path))
    assert base_folder(args, fetch=True) is None
    args.model_name_or_path = str(tmp_path)
    assert base_folder(args, fetch=True) == base_folder(args, fetch=False) == tmp_path
    args.model_name_or_path = "some/model"
    assert base_folder(args, fetch=False) is None
    assert not asked
    assert base_folder(args, fetch=True) == tmp_path / "fetched"
    assert asked == [("some/model", "model_name_or_path: ")]


def test_fields_that_repeat_the_base_model_are_accepted(base: Path) -> None:
    translator = load_base_model(str(base))
    config = translator.model.config
    own = ModelArguments(  # equal, but other objects
        d_model=config.d_model,
        layer_norm_eps=float(str(config.layer_norm_eps)),
        activation_function="".join(config.activation_function),
        vocab_size=int(str(config.vocab_size)),
        dropout=0.7,
    )
    check_fields("base", config, translator.tokenizers[0], own, DataArguments())


@pytest.mark.parametrize(
    ("side", "marks"), [("source", ["target", False]), ("target", [None, True])]
)
def test_language_tokens_are_on_the_side_that_is_asked_for(
    base: Path, side: str, marks: list[Any]
) -> None:
    translator = load_base_model(str(base))
    add_languages(translator, DataArguments(directions=["en-de"], language_token=side))
    assert translator.tokenizers[0].init_kwargs[MARKS] == marks


@pytest.mark.parametrize(
    ("fields", "kept", "refused"),
    [
        ({}, (None, "chars"), None),
        ({"tokens": "chars"}, ("chars", "chars"), None),
        ({"tokens": "chars"}, ("chars", "words"), "tokens: chars: "),
        ({"tokens": "chars"}, (None, None), "tokens: chars: "),
        ({"source_tokens": "words"}, ("words", "chars"), None),
        ({"source_tokens": "words"}, ("chars", "words"), "source_tokens: words: "),
        ({"target_tokens": "words"}, ("words", "chars"), "target_tokens: words: "),
        ({"tokens": "chars", "target_tokens": "words"}, ("chars", "words"), None),
    ],
    ids=str,
)
def test_kinds_of_tokens_are_those_of_the_base(fields: dict, kept: tuple, refused: str) -> None:
    tokenizers = [SimpleNamespace(init_kwargs={"tokens": kind} if kind else {}) for kind in kept]
    data_args = DataArguments(task="sequence", **fields)
    if refused is None:
        check_tokens_kept("base", tokenizers, data_args)
    else:
        assert error_of(check_tokens_kept, "base", tokenizers, data_args).startswith(refused)


def test_resumed_model_has_sizes_and_search_of_its_checkpoint(base: Path) -> None:
    class Own(VanillaTransformerForConditionalGeneration):
        pass

    new = ModelArguments(dropout=0.0, label_smoothing=0.2)
    for model_class in (None, Own):
        model = resumed_model(base, new, DataArguments(), model_class)
        assert type(model) is (model_class or VanillaTransformerForConditionalGeneration)
        config = model.config
        assert (config.dropout, config.label_smoothing, config.d_model) == (0.0, 0.2, 32)
        assert model.generation_config.num_beams == 2
    assert resumed_model(base, ModelArguments(), DataArguments()).config.dropout == 0.1
    wrong = ModelArguments(d_model=64)
    assert error_of(resumed_model, base, wrong, DataArguments()).startswith("d_model: 64: ")


def test_scores_before_of_a_changed_split_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def kept(**fields: Any) -> dict[str, Any]:
        args = SimpleNamespace(output_dir=str(tmp_path))
        run = SimpleNamespace(args=args, checkpoint=tmp_path / "checkpoint-1", **fields)
        return score_before(SimpleNamespace(other_facts=now), run)

    scores = {"before_test_bleu": 1.0, "before_base_test_bleu": 2.0, "before_eval_bleu": 3.0}
    then = {"test data": "a", "base_test data": "e", "validation data": "b"}
    now = {"test data": "c", "base_test data": "d", "validation data": "b"}
    state = SimpleNamespace(settings=then)
    monkeypatch.setattr(fine_tuning, "read_run_state", lambda checkpoint: state)
    file = tmp_path / SCORES_BEFORE
    assert kept() == {}
    assert not file.exists()
    capsys.readouterr()
    file.write_text(json.dumps(scores), encoding="utf-8")
    del scores["before_test_bleu"], scores["before_base_test_bleu"]
    assert kept() == json.loads(file.read_text(encoding="utf-8")) == scores
    printed = capsys.readouterr().out
    assert printed.startswith("test: not the split that the base model was scored on")
    assert printed.count("\n") == 2


def test_opus_folder_is_fine_tuned_with_its_tokenizer_and_search(
    opus: Path, text: dict, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    results = fine_tune(folder, opus, text)
    assert {
        "before_test_bleu",
        "test_bleu",
        "before_base_test_bleu",
        "base_test_bleu",
    } <= results.keys()
    tokenizer, target_tokenizer = load_tokenizers(folder)
    assert isinstance(tokenizer, MarianTokenizer)
    assert target_tokenizer is tokenizer
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert model.config.model_type == "vanilla_transformer"
    assert model.config.activation_function == "swish"
    assert model.generation_config.bad_words_ids == [[tokenizer.pad_token_id]]
    assert model.generation_config.num_beams == 4
    written = model.generate(**tokenizer(SOURCES, padding=True, return_tensors="pt"))
    assert len(written) == len(SOURCES)


def test_average_and_sample_limits_go_with_fine_tuning(base, text, tmp_path, capsys):
    folder = tmp_path / "run"
    results = fine_tune(
        folder,
        base,
        text,
        validation=text["test"],
        average_last=2,
        eval_strategy="steps",
        eval_steps=2,
        max_test_samples=2,
    )
    assert {"eval_bleu_single", "eval_bleu_averaged", "before_test_bleu"} <= results.keys()
    assert results["test_sentences"] == 2
    assert results["epoch"] == 2
    # the same sentences, which are translated by the weights before the first update
    before = results["before_eval_chrf"]
    assert before == pytest.approx(chrf(base, text["test"], max_length=8), abs=1e-6)
    assert f"{before:.2f}" in (folder / "README.md").read_text("utf-8")
    assert "test: translating 2 sentences, 2 beams" in capsys.readouterr().out


# The gain over fresh weights


def spelt_out(kind: str) -> list[tuple[str, str]]:
    """3,000 English and German number words. `kind` is cardinal or ordinal."""
    pairs = []
    for number in range(3000):
        english = num2words(number, to=kind, lang="en")
        german = num2words(number, to=kind, lang="de")
        pairs.append((english, german))
    return pairs


@pytest.mark.slow  # trains three small models
def test_opus_folder_gains_on_new_text_and_on_fresh_weights(tmp_path: Path) -> None:
    """Cardinal numbers, then ordinal ones. The bar is 5 BLEU (of characters) over fresh weights at equal updates."""
    pytest.importorskip("sentencepiece", reason="the extra `convert` is not installed")
    pairs = {"old": spelt_out("cardinal"), "new": spelt_out("ordinal")}
    tokenizer = tmp_path / "tokenizer"
    sources, targets = zip(*pairs["old"], *pairs["new"], strict=True)
    write_opus_tokenizer(tokenizer, (), list(sources), list(targets))
    MarianTokenizer.from_pretrained(tokenizer).save_pretrained(tokenizer)
    texts = {}
    for name, rows in pairs.items():
        train = [pair for row, pair in enumerate(rows) if row % 30 != 7]
        texts[name] = write_pairs(tmp_path / name, train)
        texts[name] |= write_pairs(tmp_path / name, rows[7::30], "test")
    common = {
        "per_device_train_batch_size": 64,
        "logging_steps": 100,
        "bleu_tokenize": "char",
        "save_strategy": "no",
        "generation_max_length": "null",
    }
    fresh = {
        **common,
        **SMALL_SIZES,
        "d_model": 64,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "activation_function": "swish",
        "position_encoding_type": "sinusoidal_split",
        "lm_head_bias": True,
        "dropout": 0.0,
        "learning_rate": 0.004,
        "warmup_steps": 100,
        "tokenizer_name": tokenizer,
    }
    run(tmp_path / "base", **fresh, **texts["old"], max_steps=700)
    opus = tmp_path / "opus"
    export("marian", tmp_path / "base", opus)
    search = GenerationConfig.from_pretrained(opus)
    search.bad_words_ids = [[len(MarianTokenizer.from_pretrained(opus)) - 1]]
    search.save_pretrained(opus)
    tuned = run(
        tmp_path / "tuned",
        **common,
        **texts["new"],
        base_test=texts["old"]["test"],
        model_name_or_path=opus,
        learning_rate=0.001,
        max_steps=150,
    )
    new_weights = run(tmp_path / "fresh", **fresh, **texts["new"], max_steps=150)
    found = {name: round(value, 1) for name, value in tuned.items() if name.endswith("test_bleu")}
    print(found, "fresh weights:", round(new_weights["test_bleu"], 1))
    assert tuned["test_bleu"] > tuned["before_test_bleu"]
    assert tuned["test_bleu"] >= new_weights["test_bleu"] + 5
    assert {"before_base_test_bleu", "base_test_bleu"} <= tuned.keys()


@pytest.mark.parametrize("language", [None, "de"])
def test_model_of_many_languages_needs_its_target_language(text, tmp_path, language):
    m2m = tmp_path / "m2m"
    base = tmp_path / "base"
    write_m2m100_folder(m2m)
    change_json(m2m / "tokenizer_config.json", tgt_lang=None)
    convert("m2m100", m2m, base, target_language=language)
    if language is None:
        message = error_of(fine_tune, tmp_path / "run", base, text, max_steps=1)
        assert re.match("model_name_or_path: .*directions", message)
    else:
        assert fine_tune(tmp_path / "run", base, text, max_steps=1)["train_updates"] == 1


# LoRA


def test_adapters_are_made_without_a_warning_of_libraries(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs PEFT")
    args = RunArguments(str(tmp_path), model_name_or_path="base", lora_r=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapted = adapters.add_lora(tiny_model(), args)
    assert any("lora_A" in name for name, _ in adapted.named_parameters())


@pytest.mark.filterwarnings("ignore:Could not find a config file")
def test_adapter_is_saved_and_merged_with_twice_its_product(tmp_path: Path, capsys) -> None:
    """The scale α / r is 2: the merged weight is W + 2 B A."""
    peft = pytest.importorskip("peft", reason="needs PEFT")
    args = RunArguments(str(tmp_path), model_name_or_path="base", lora_r=3)
    model = tiny_model()
    whole = model.num_parameters()
    adapted = adapters.add_lora(model, args)
    rank_rows = {name: each for name, each in adapted.named_parameters() if each.requires_grad}
    trained = sum(each.numel() for each in rank_rows.values())
    targets = "q_proj, k_proj, v_proj, out_proj, fc1, fc2"
    said = f"LoRA: {trained:,} of {whole + trained:,} parameters are trained, in {targets}\n"
    assert capsys.readouterr().out == said
    layer = model.model.encoder.layers[0].fc1
    start = layer.weight.detach().clone()
    factors = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    for factor in factors:
        torch.nn.init.normal_(factor)
    first, second = (factor.detach().clone() for factor in factors)
    assert first.shape[0] == 3
    unwrapping = SimpleNamespace(unwrap_model=lambda wrapped: wrapped)
    trainer = SimpleNamespace(accelerator=unwrapping, model=adapted, args=args)
    adapters.merge_lora(trainer, tmp_path)
    assert trainer.model is trainer.model_wrapped
    merged = trainer.model.model.encoder.layers[0].fc1.weight
    torch.testing.assert_close(merged, start + 2 * second @ first)
    saved = peft.PeftConfig.from_pretrained(tmp_path / "adapter")
    assert saved.base_model_name_or_path == "base"


@pytest.mark.slow
def test_lora_run_ends_with_the_merged_model_and_its_adapter(
    base: Path, text: dict, tmp_path: Path, capsys
) -> None:
    def train(folder: Path, **fields: Any) -> dict[str, Any]:
        return fine_tune(
            folder,
            base,
            text,
            lora_r=2,
            learning_rate=0.01,
            lr_scheduler_type="constant",
            **fields,
        )

    peft = pytest.importorskip("peft", reason="needs PEFT")
    whole = tmp_path / "whole"
    resumed = tmp_path / "resumed"
    results = train(whole)
    assert "LoRA: " in capsys.readouterr().out
    assert results["before_test_bleu"] >= 0
    train(resumed, max_steps=2)
    train(resumed, resume_from_checkpoint=True)
    assert_same_model(whole, resumed)
    merged = load_base_model(str(whole)).model.state_dict()
    start = load_base_model(str(base)).model.state_dict()
    adapted = peft.PeftModel.from_pretrained(load_base_model(str(base)).model, whole / "adapter")
    expected = adapted.merge_and_unload().state_dict()
    for name, weight in merged.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6)
        changed = name.split(".")[-2] in adapters.TARGETS and name.endswith("weight")
        assert weight.equal(start[name]) is not changed, name
    config = json.loads((whole / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["base_model_name_or_path"] == str(base)
    assert list(Translator.from_pretrained(whole, device="cpu").translate(["one dog"]))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"average_last": 2}, "average_last"),
        ({"ema_decay": 0.9}, "ema_decay"),
        ({"muon": True}, "muon"),
        ({"lora_r": -1}, "lora_r"),
        ({"model_name_or_path": "null"}, "lora_r"),
    ],
)
def test_lora_refuses_what_it_cannot_train(base, text, tmp_path, fields, name):
    pytest.importorskip("peft", reason="needs PEFT")
    message = error_of(fine_tune, tmp_path / "run", base, text, **{"lora_r": 2, **fields})
    assert message.startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("search", "fields", "name"),
    [
        ({"temperature": 0.7}, {}, "temperature"),
        ({}, {"test_num_beams": 1, "test_length_penalty": 0.6}, "length_penalty"),
    ],
    ids=["of the base", "of the run"],
)
def test_search_that_cannot_be_saved_is_refused_before_training(
    base, text, tmp_path, search, fields, name
):
    """transformers saves no generation config with settings that another one disables."""
    folder = shutil.copytree(base, tmp_path / "base")
    file = folder / "generation_config.json"
    change_json(file, **search)
    line = error_of(fine_tune, tmp_path / "run", folder, text, **fields)
    assert line.startswith(f"{file}: ")
    assert name in line
    assert not list((tmp_path / "run").glob("checkpoint-*"))
