"""Fine-tuning: the tokenizer and sizes of the base model are kept. Both test sets are scored before and after."""

import contextlib
import io
import json
import shutil
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
import torch
from num2words import num2words
from transformers import AutoModelForSeq2SeqLM, GenerationConfig, MarianTokenizer

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.inference.languages import card_languages, model_languages
from hf_vanilla_transformer.interop.converting import convert
from hf_vanilla_transformer.interop.exporting import export
from hf_vanilla_transformer.interop.importers import IMPORTERS
from hf_vanilla_transformer.serving.languages import model_folders
from hf_vanilla_transformer.text import load_tokenizers, save_tokenizers, train_tokenizer
from hf_vanilla_transformer.text.vocabulary import extend_languages
from hf_vanilla_transformer.training.run import adapters
from hf_vanilla_transformer.training.run.arguments import DataArguments, ModelArguments, RunArguments
from hf_vanilla_transformer.training.run.fine_tuning import (
    SCORES_BEFORE,
    check_fields,
    describe_defaults,
    load_base_model,
)
from hf_vanilla_transformer.training.run.recipes import parse_recipe
from hf_vanilla_transformer.training.run.run import run_training
from hf_vanilla_transformer.utils.errors import UserError
from tests.interop.foreign import write_m2m100_folder, write_opus_folder, write_opus_tokenizer
from tests.model_helpers import SMALL_SIZES, error_of, randomise, slow, tiny_model
from tests.trainer_helpers import as_flags, assert_same_model, write_pairs

SOURCES = ["one dog", "two dogs", "three cats", "a ball", "one cat", "two cats in the snow", "three dogs", "one ball"]
TARGETS = ["ein Hund", "zwei Hunde", "drei Katzen", "ein Ball", "eine Katze", "zwei Katzen im Schnee", "drei Hunde"]
TARGETS += ["x"]
PAIRS = list(zip(SOURCES, TARGETS, strict=True))
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
    test, base_test = write_pairs(folder, PAIRS[:3], "test"), write_pairs(folder, PAIRS[3:], "base_test")
    return write_pairs(folder, PAIRS) | test | base_test


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of ours with random weights and the settings of a finished run."""
    folder = tmp_path_factory.mktemp("base") / "ours"
    tokenizer = train_tokenizer(SOURCES + TARGETS, 300)
    model = randomise(tiny_model(vocab_size=len(tokenizer), dropout=0.1))
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


def fine_tune(output: Path, base: Path, text: dict[str, list[Path]], **fields: Any) -> dict[str, Any]:
    flags = as_flags({**SETTINGS, "model_name_or_path": base, **text, **fields})
    return run_training(*parse_recipe(["--output_dir", str(output), *flags]), importers=IMPORTERS)


@pytest.fixture(scope="module")
def tuned(base, text, tmp_path_factory):
    """A run from `base`: its folder, results and standard output."""
    folder, printed = tmp_path_factory.mktemp("tuned") / "run", io.StringIO()
    with contextlib.redirect_stdout(printed):
        results = fine_tune(folder, base, text, dropout=0.3, generation_max_length=40, max_steps=30)
    return folder, results, printed.getvalue()


def test_fine_tuning_keeps_tokenizer_sizes_and_search_settings(base: Path, tuned: tuple) -> None:
    folder, _, _ = tuned
    model, own = (AutoModelForSeq2SeqLM.from_pretrained(each) for each in (folder, base))
    new, old = model.config.to_dict(), own.config.to_dict()
    assert {name for name in old if name != "_name_or_path" and new[name] != old[name]} == {"dropout"}
    assert new["dropout"] == 0.3 and model.generation_config.num_beams == 2
    before, after = load_tokenizers(base)[0], load_tokenizers(folder)[0]
    assert before.get_vocab() == after.get_vocab() and before(SOURCES)["input_ids"] == after(SOURCES)["input_ids"]


def test_vocabulary_size_of_the_recipe_of_the_base_counts_no_languages(base: Path) -> None:
    translator = load_base_model(str(base))
    tokenizer, config = translator.tokenizers[0], translator.model.config
    size = config.vocab_size
    assert extend_languages(translator.model, tokenizer, [("en", "de"), ("de", "en")], {}) == ["de", "en"]
    assert config.vocab_size == size + 2
    check_fields("base", config, tokenizer, ModelArguments(vocab_size=size), DataArguments())
    for other in (size - 1, size + 1):
        error = error_of(check_fields, "base", config, tokenizer, ModelArguments(vocab_size=other), DataArguments())
        assert error == f"vocab_size: {other}: fine-tuning keeps {size + 2} of base, leave it out"


def test_languages_of_the_base_travel_with_the_model(text: dict, tmp_path: Path) -> None:
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}  # CTranslate2 has one number
    write_opus_folder(base := tmp_path / "base", **heads)
    settings = json.loads((base / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings |= {"source_lang": "en", "target_lang": "de"}  # as in every OPUS-MT folder
    (base / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    fine_tune(tmp_path / "tuned", base, text, max_steps=1)
    fine_tune(tmp_path / "again", tmp_path / "tuned", text, max_steps=1)
    for folder in (tmp_path / "tuned", tmp_path / "again"):
        assert model_folders([str(folder)]) == {("en", "de"): folder}
        assert card_languages(folder) == ["en", "de"]
    export("argos", tmp_path / "again", tmp_path / "again.argosmodel")
    with zipfile.ZipFile(tmp_path / "again.argosmodel") as archive:
        assert "translate-en_de-1_0/metadata.json" in archive.namelist()


@pytest.mark.parametrize(
    "named_by",
    ["files", *slow("recipe", "memory", "columns")],
)
def test_languages_of_a_run_are_in_its_card_and_its_tokenizer(tmp_path: Path, text: dict, named_by: str) -> None:
    flags: dict[str, Any] = {"train": [tmp_path / "a.en", tmp_path / "a.de"]}
    for file, source in zip(flags["train"], text["train"], strict=True):
        shutil.copyfile(source, file)
    if named_by == "memory":
        flags["train"] = [tmp_path / "a.tmx"]
        units = "".join(UNIT.format(*pair) for pair in zip(SOURCES, TARGETS, strict=True))
        flags["train"][0].write_text(f"<tmx><body>{units}</body></tmx>", encoding="utf-8")
    elif named_by == "columns":
        flags = {"train": [tmp_path / "a.tsv"], "source_column": "en", "target_column": "de"}
        rows = ["en\tde", *map("\t".join, zip(SOURCES, TARGETS, strict=True))]
        flags["train"][0].write_text("\n".join(rows), encoding="utf-8")
    elif named_by == "recipe":
        flags = {"train": text["train"], "source_lang": "en", "target_lang": "de"}
    flags |= {"output_dir": tmp_path / "run", "vocab_size": 300, "max_steps": 1}
    recipe = as_flags(SETTINGS | SMALL_SIZES | flags)
    run_training(*parse_recipe(recipe), importers=IMPORTERS)
    assert card_languages(tmp_path / "run") == ["en", "de"]
    pytest.importorskip("ctranslate2", reason="the extra `ctranslate2` is not installed")
    export("ctranslate2", tmp_path / "run", tmp_path / "exported")  # has no card
    settings = json.loads((tmp_path / "exported/tokenizer_config.json").read_text(encoding="utf-8"))
    assert model_languages(tmp_path / "exported") == ("en", "de") and not {"is_local", "local_files_only"} & set(
        settings
    )


def test_scores_before_are_those_of_the_base_model(base: Path, text: dict[str, list[Path]], tuned: tuple) -> None:
    folder, results, _ = tuned
    for split in ("test", "base_test"):
        sources, references = (file.read_text("utf-8").splitlines() for file in text[split])
        for prefix, model in (("before_", base), ("", folder)):
            translations = list(Translator.from_pretrained(model, "cpu").translate(sources))
            expected = sacrebleu.corpus_chrf(translations, [references]).score
            assert results[f"{prefix}{split}_chrf"] == pytest.approx(expected, abs=1e-6), (prefix, split)
    assert results["test_chrf"] != results["before_test_chrf"]
    assert json.loads((folder / "all_results.json").read_text())["before_test_chrf"] == results["before_test_chrf"]


@pytest.mark.slow
def test_resumed_run_ends_with_the_same_weights_and_scores(base: Path, text: dict, tmp_path: Path) -> None:
    whole = fine_tune(tmp_path / "whole", base, text)
    own_base = shutil.copytree(base, tmp_path / "base")
    fine_tune(tmp_path / "cut", own_base, text, save_total_limit=5)
    (tmp_path / "resumed").mkdir()
    for name in ("checkpoint-2", SCORES_BEFORE):
        (tmp_path / "cut" / name).rename(tmp_path / "resumed" / name)
    # The base model is not needed again.
    shutil.rmtree(own_base)
    resumed = fine_tune(tmp_path / "resumed", own_base, text, resume_from_checkpoint=True)
    assert_same_model(tmp_path / "whole", tmp_path / "resumed")
    scores = {name: value for name, value in whole.items() if "test_" in name and name.endswith(("bleu", "chrf"))}
    assert len(scores) == 8 and scores == {name: resumed[name] for name in scores}


def test_optimizer_defaults_are_said_and_differ_from_fresh_weights(tuned: tuple) -> None:
    fresh, changed = (parse_recipe(flags)[2] for flags in ([], ["--model_name_or_path", "x"]))
    assert (fresh.lr_scheduler_type, fresh.warmup_steps, fresh.logging_steps) == ("inverse_sqrt", 4000, 500)
    assert (changed.lr_scheduler_type, changed.warmup_steps, changed.logging_steps) == ("linear", 0.05, 0.05)
    # the paper's schedule after 200,000 updates, d_model^-0.5 · 200000^-0.5, with d_model = 32
    rate = f"{32**-0.5 * 200_000**-0.5:.3g}"
    said = f"learning_rate {rate}, lr_scheduler_type linear, warmup_steps 0.05, per_device_train_batch_size 4 "
    assert said in tuned[2]
    changed.learning_rate, changed.max_tokens_per_batch = 1.0, 256
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
    assert error_of(fine_tune, tmp_path / "run", base, text, **{field: value}).startswith(f"{field}: {value}: ")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("content", [None, "{}", '{"model_type": "bart"}', "["])
def test_folder_of_another_model_is_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
    assert str(tmp_path) in error_of(load_base_model, str(tmp_path))


def test_opus_folder_is_fine_tuned_with_its_tokenizer_and_search(opus: Path, text: dict, tmp_path: Path) -> None:
    results = fine_tune(tmp_path / "run", opus, text)
    assert {"before_test_bleu", "test_bleu", "before_base_test_bleu", "base_test_bleu"} <= results.keys()
    tokenizer, target_tokenizer = load_tokenizers(tmp_path / "run")
    assert isinstance(tokenizer, MarianTokenizer) and target_tokenizer is tokenizer
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run")
    assert model.config.model_type == "vanilla_transformer" and model.config.activation_function == "swish"
    pad = tokenizer.pad_token_id
    assert model.generation_config.bad_words_ids == [[pad]] and model.generation_config.num_beams == 4
    written = model.generate(**tokenizer(SOURCES, padding=True, return_tensors="pt"))
    assert written.shape[0] == len(SOURCES)


def test_average_and_sample_limits_go_with_fine_tuning(base, text, tmp_path, capsys):
    validation = {"validation": text["test"]}
    fields = {"average_last": 2, "eval_strategy": "steps", "eval_steps": 2}
    results = fine_tune(tmp_path / "run", base, text | validation, **fields, max_test_samples=2)
    assert {"eval_bleu_single", "eval_bleu_averaged", "before_test_bleu"} <= results.keys()
    assert results["test_sentences"] == 2 and results["epoch"] == 2
    # the same sentences, which are translated by the weights before the first update
    sources, references = (file.read_text("utf-8").splitlines() for file in text["test"])
    shown = Translator.from_pretrained(base, "cpu").translate(sources, max_length=8)
    expected = sacrebleu.corpus_chrf(list(shown), [references]).score
    assert results["before_eval_chrf"] == pytest.approx(expected, abs=1e-6)
    card = (tmp_path / "run" / "README.md").read_text("utf-8")
    assert f"{results['before_eval_chrf']:.2f}" in card
    assert "test: translating 2 sentences, 2 beams" in capsys.readouterr().out


# The gain over fresh weights


def spelt_out(kind: str) -> tuple[list[str], list[str]]:
    """3,000 English and German number words. `kind` is cardinal or ordinal."""
    return tuple([num2words(number, to=kind, lang=lang) for number in range(3000)] for lang in ("en", "de"))  # type: ignore


def write_tokenizer(folder: Path, sources: list[str], targets: list[str]) -> None:
    write_opus_tokenizer(folder, (), sources, targets)
    MarianTokenizer.from_pretrained(folder).save_pretrained(folder)


@pytest.mark.slow  # trains three small models
def test_opus_folder_gains_on_new_text_and_on_fresh_weights(tmp_path: Path) -> None:
    """Cardinal numbers, then ordinal ones. The bar is 5 BLEU (of characters) over fresh weights at equal updates."""
    pytest.importorskip("sentencepiece", reason="the extra `convert` is not installed")
    old, new = spelt_out("cardinal"), spelt_out("ordinal")
    write_tokenizer(tmp_path / "tokenizer", old[0] + new[0], old[1] + new[1])
    texts = {}
    for name, lines in (("old", old), ("new", new)):
        pairs = list(zip(*lines, strict=True))
        train = write_pairs(tmp_path / name, [pair for row, pair in enumerate(pairs) if row % 30 != 7])
        texts[name] = train | write_pairs(tmp_path / name, pairs[7::30], "test")
    sizes = SMALL_SIZES | {"d_model": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    marian = {"activation_function": "swish", "position_encoding_type": "sinusoidal_split", "lm_head_bias": True}
    learning = {"dropout": 0.0, "learning_rate": 0.004, "warmup_steps": 100}
    fresh = sizes | marian | learning | {"tokenizer_name": tmp_path / "tokenizer"}
    common: dict[str, Any] = {"per_device_train_batch_size": 64, "logging_steps": 100, "bleu_tokenize": "char"}
    common |= {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}

    def run(name: str, text: dict[str, list[Path]], updates: int, **fields: Any) -> dict[str, Any]:
        flags = as_flags({**common, **text, **fields, "max_steps": updates, "output_dir": tmp_path / name})
        return run_training(*parse_recipe(flags), importers=IMPORTERS)

    run("base", texts["old"], 700, **fresh)
    export("marian", tmp_path / "base", tmp_path / "opus")
    search = GenerationConfig.from_pretrained(tmp_path / "opus")
    search.bad_words_ids = [[len(MarianTokenizer.from_pretrained(tmp_path / "opus")) - 1]]
    search.save_pretrained(tmp_path / "opus")
    base_test = {f"base_{name}": file for name, file in texts["old"].items() if name.startswith("test")}
    tuned = run("tuned", texts["new"] | base_test, 150, model_name_or_path=tmp_path / "opus", learning_rate=0.001)
    new_weights = run("fresh", texts["new"], 150, **fresh)
    found = {name: round(value, 1) for name, value in tuned.items() if name.endswith("test_bleu")}
    print(found, "fresh weights:", round(new_weights["test_bleu"], 1))
    assert tuned["test_bleu"] > tuned["before_test_bleu"]
    assert tuned["test_bleu"] >= new_weights["test_bleu"] + 5
    assert {"before_base_test_bleu", "base_test_bleu"} <= tuned.keys()


@pytest.mark.parametrize("language", [None, "de"])
def test_model_of_many_languages_needs_its_target_language(text, tmp_path, language):
    write_m2m100_folder(tmp_path / "m2m")
    settings = tmp_path / "m2m" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tgt_lang": None}))
    convert("m2m100", tmp_path / "m2m", tmp_path / "base", target_language=language)
    flags = {**text, **SETTINGS, "model_name_or_path": tmp_path / "base", "output_dir": tmp_path / "run"}
    run = parse_recipe(as_flags(flags | {"max_steps": 1}))
    if language is None:
        with pytest.raises(UserError, match="^model_name_or_path: .*directions"):
            run_training(*run)
    else:
        assert run_training(*run)["train_updates"] == 1


# LoRA


def test_adapters_are_made_without_a_warning_of_libraries(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs PEFT")
    args = RunArguments(str(tmp_path), model_name_or_path="base", lora_r=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapted = adapters.add_lora(tiny_model(), args)
    assert any("lora_A" in name for name, _ in adapted.named_parameters())


@pytest.mark.slow
def test_lora_run_ends_with_the_merged_model_and_its_adapter(base: Path, text: dict, tmp_path: Path, capsys) -> None:
    peft = pytest.importorskip("peft", reason="needs PEFT")
    settings = {"lora_r": 2, "learning_rate": 0.01}
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    results = fine_tune(whole, base, text, **settings, lr_scheduler_type="constant")
    assert "LoRA: " in capsys.readouterr().out and results["before_test_bleu"] >= 0
    fine_tune(resumed, base, text, **settings, lr_scheduler_type="constant", max_steps=2)
    fine_tune(resumed, base, text, **settings, lr_scheduler_type="constant", resume_from_checkpoint=True)
    assert_same_model(whole, resumed)
    merged, start = (load_base_model(str(folder)).model for folder in (whole, base))
    adapted = peft.PeftModel.from_pretrained(start, whole / "adapter").merge_and_unload()
    changed = {name for name, weight in start.state_dict().items() if name.split(".")[-2] in adapters.TARGETS}
    first = load_base_model(str(base)).model.state_dict()
    for name, weight in merged.state_dict().items():
        torch.testing.assert_close(weight, adapted.state_dict()[name], rtol=0, atol=1e-6)
        assert weight.equal(first[name]) == (name not in changed or name.endswith("bias")), name
    config = json.loads((whole / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["base_model_name_or_path"] == str(base)
    assert list(Translator.from_pretrained(whole, device="cpu").translate(["one dog"]))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"average_last": 2}, "average_last"),
        ({"ema_decay": 0.9}, "ema_decay"),
        ({"lora_r": -1}, "lora_r"),
        ({"model_name_or_path": None}, "lora_r"),
    ],
)
def test_lora_refuses_what_it_cannot_train(base, text, tmp_path, fields, name):
    pytest.importorskip("peft", reason="needs PEFT")
    fields = {"model_name_or_path": base, "lora_r": 2} | fields
    fields = {field: value for field, value in fields.items() if value is not None}
    flags = ["--output_dir", str(tmp_path / "run"), *as_flags({**SETTINGS, **text, **fields})]
    assert error_of(lambda: run_training(*parse_recipe(flags))).startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("search", "fields"),
    [({"temperature": 0.7}, {}), ({}, {"test_num_beams": 1, "test_length_penalty": 0.6})],
    ids=["of the base", "of the run"],
)
def test_search_that_cannot_be_saved_is_refused_before_training(base, text, tmp_path, search, fields):
    """transformers saves no generation config with settings that another one disables."""
    folder = shutil.copytree(base, tmp_path / "base")
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | search))
    line = error_of(fine_tune, tmp_path / "run", folder, text, **fields)
    assert line.startswith(f"{file}: ") and ("temperature" if search else "length_penalty") in line
    assert not list((tmp_path / "run").glob("checkpoint-*"))
