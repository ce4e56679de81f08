"""A damaged model folder is refused in one line, with the file, the field and its value, before a library reads it."""

import json
import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from transformers import GenerationConfig

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.inference.languages import card_languages
from hf_vanilla_transformer.inference.loading import check_model_folder, load_model
from hf_vanilla_transformer.text import load_tokenizers, save_tokenizers
from hf_vanilla_transformer.training.run.fine_tuning import load_base_model
from hf_vanilla_transformer.utils.model_folder import check_model_files, check_search
from hf_vanilla_transformer.utils.untrusted import read_safetensors_header
from tests.model_helpers import error_of, save_model, with_paths

Damage = Callable[[Path], object]

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "good", ["one two three"] * 3, vocab_size=265)


def write(name: str, content: str) -> Damage:
    return lambda folder: (folder / name).write_text(content, encoding="utf-8")


def fields(name: str, **values: Any) -> Damage:
    """Change fields of a JSON file."""

    def change(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def config(**values: Any) -> Damage:
    return fields("config.json", **values)


def search(**values: Any) -> Damage:
    return fields("generation_config.json", **values)


def cut(share: float) -> Damage:
    """Keep the first part of the weights, as a download that stopped."""

    def change(folder: Path) -> None:
        content = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(content[: int(share * len(content))])

    return change


def pipe_as_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


def first_half_of_an_archive(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    (folder / "pytorch_model.bin").write_bytes(b"PK\3\4" + bytes(100))


def instead(name: str, make: Callable[[Path], object]) -> Damage:
    """Put something else in the place of a file."""

    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return change


def link(path: Path) -> None:
    path.symlink_to("nowhere")


def weights(changed: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    """Change the first matrix of the weights."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        name = next(name for name, tensor in tensors.items() if tensor.dim() == 2)
        save_file(tensors | {name: changed(tensors[name])}, folder / WEIGHTS, {"format": "pt"})

    return change


def pickle_as_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Path))


def index_of(files: dict[str, str]) -> Damage:
    def change(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))

    return change


def header_with(length: int, content: bytes) -> Damage:
    """Weights whose header says that it has this length."""
    return lambda folder: (folder / WEIGHTS).write_bytes(length.to_bytes(8, "little") + content)


DEEP = "[" * 100_000
DAMAGES: dict[str, tuple[Damage, str]] = {
    "pointer as weights": (write(WEIGHTS, POINTER), f"{WEIGHTS} is a Git LFS pointer, .*: run git lfs pull"),
    "pointer as tokenizer": (write("tokenizer.json", POINTER), "tokenizer.json is a Git LFS pointer"),
    "pointer as configuration": (write("config.json", POINTER), "config.json is a Git LFS pointer"),
    "no weights in the file": (write(WEIGHTS, ""), f"{WEIGHTS} is empty: download"),
    "no tokenizer in the file": (write("tokenizer.json", ""), "tokenizer.json is empty"),
    "no configuration in the file": (write("config.json", ""), "config.json is empty"),
    "half of the weights": (cut(0.5), f"{WEIGHTS} is damaged or incomplete .*: download"),
    "a part of the header": (cut(0.01), f"{WEIGHTS} is damaged or incomplete"),
    "half of an archive": (first_half_of_an_archive, "pytorch_model.bin is incomplete"),
    "header of 2^60 bytes": (header_with(2**60, b"{}"), f"{WEIGHTS} is damaged"),
    "header that is no JSON": (header_with(2, b"xx"), f"{WEIGHTS} is damaged"),
    "header that is deep": (header_with(len(DEEP), DEEP.encode()), f"{WEIGHTS} is damaged"),
    "header of other values": (header_with(9, b'{"a": [1]}'[:9]), f"{WEIGHTS} is damaged"),
    "header of a list": (header_with(3, b"[1]"), f"{WEIGHTS} is damaged"),
    "pipe as weights": (pipe_as_weights, f"{WEIGHTS}: neither a file"),
    "deep configuration": (write("config.json", DEEP), "config.json is damaged"),
    "deep search": (write("generation_config.json", DEEP), "generation_config.json is damaged"),
    "list as configuration": (write("config.json", "[]"), "config.json is damaged"),
    "layers": (config(encoder_layers=10**9), "config.json: encoder_layers=1000000000: "),
    "a few layers": (config(encoder_layers=1000), "config.json: encoder_layers=1000: "),
    "width": (config(d_model=2**16), "config.json: d_model=65536: "),
    "vocabulary": (config(vocab_size=10**12), "config.json: vocab_size=1000000000000: "),
    "kernel of the Hub": (config(_attn_implementation="x/kernel:f"), "config.json: _attn_implementation=x/kernel:f"),
    "no start": (config(decoder_start_token_id=None), "config.json: decoder_start_token_id=None: ids"),
    "start beyond the vocabulary": (config(decoder_start_token_id=10**6), "decoder_start_token_id=1000000: ids"),
    "beams": (search(num_beams=10**9), "generation_config.json: num_beams=1000000000: a whole number from 1 to 256"),
    "beams as truth": (search(num_beams=True), "generation_config.json: num_beams=True"),
    "length": (search(max_length=10**12), "generation_config.json: max_length=1000000000000"),
    "penalty": (search(length_penalty=float("nan")), "generation_config.json: length_penalty=nan: a finite"),
    "old settings of a search": (config(num_beams=10**9), "config.json: num_beams=1000000000"),
    "end as text": (search(eos_token_id=["a"]), "generation_config.json: eos_token_id="),
    "bad words": (search(bad_words_ids=[3]), "generation_config.json: bad_words_ids="),
    "directions": (fields("tokenizer_config.json", directions=[["a"]]), "tokenizer_config.json: directions="),
    "inputs of other names": (fields("tokenizer_config.json", model_input_names=["x"]), "model_input_names="),
    "no inputs": (fields("tokenizer_config.json", model_input_names=[]), "model_input_names="),
    "inputs as text": (fields("tokenizer_config.json", model_input_names="input_ids"), "model_input_names="),
    "task as a list": (fields("tokenizer_config.json", task=["x"]), "tokenizer_config.json: task="),
    "class as a number": (fields("tokenizer_config.json", tokenizer_class=3), "tokenizer_class=3: text is"),
    "normalisation as text": (fields("tokenizer_config.json", normalize_source="x"), "normalize_source=x: true or"),
    "tokens as a list": (fields("tokenizer_config.json", added_tokens_decoder=[1]), "added_tokens_decoder="),
    "marks as a number": (fields("tokenizer_config.json", language_marks=3), "language_marks=3: a list"),
    "dropout that is no number": (config(dropout=float("nan")), "config.json: dropout=nan: a finite"),
    "epsilon that is no number": (config(layer_norm_eps=float("inf")), "config.json: layer_norm_eps=inf: a finite"),
    "mark of no side": (fields("tokenizer_config.json", language_marks=["x", False]), "language_marks=.*a list such"),
    "one mark": (fields("tokenizer_config.json", language_marks=["target"]), "language_marks=.*a list such"),
    "numbers as languages": (fields("tokenizer_config.json", language_tokens={"de": 3}), "language_tokens=.*of texts"),
    "name of a class": (config(architectures="X"), "config.json: architectures=X: a list of texts"),
    "list of code": (config(auto_map=["x"]), "config.json: auto_map="),
    "type as a number": (config(model_type=3), "config.json: model_type=3: text"),
    "index of a list": (write(f"{WEIGHTS}.index.json", '{"weight_map": []}'), r"index.json: weight_map=.*: an object"),
    "index without files": (write(f"{WEIGHTS}.index.json", "{}"), "index.json: weight_map=None: an object"),
    "index of numbers": (write(f"{WEIGHTS}.index.json", '{"weight_map": {"a": 3}}'), "weight_map=a dict: an object"),
    "index of another folder": (
        write(f"{WEIGHTS}.index.json", '{"weight_map": {"a": "../model.safetensors"}}'),
        r"weight_map=../model.safetensors: a file of this folder",
    ),
    "decoder alone": (config(is_encoder_decoder=False), "config.json: is_encoder_decoder=False: true"),
    "sampling as text": (search(do_sample="x"), "generation_config.json: do_sample=x: true or false is needed"),
    "folder as a search": (instead("generation_config.json", Path.mkdir), "generation_config.json: a folder, or"),
    "folder as weights": (instead(WEIGHTS, Path.mkdir), f"{WEIGHTS}: a folder, or"),
    "link to nothing": (instead("tokenizer_config.json", link), "tokenizer_config.json: a folder, or"),
    "pipe as card": (instead("README.md", os.mkfifo), "README.md: neither a file"),
}

LIMITS = {
    "num_beams num_return_sequences": (1, 256),
    "num_beam_groups": (1, 1),
    "max_length": (2, 100_000),
    "max_new_tokens": (1, 100_000),
    "max_length_over_source min_length min_new_tokens no_repeat_ngram_size": (0, 100_000),
    "encoder_no_repeat_ngram_size top_k": (0, 100_000),
    "repetition_penalty encoder_repetition_penalty": (0.001, 1000.0),
    "temperature diversity_penalty penalty_alpha guidance_scale max_time": (0.0, 1e6),
    "top_p min_p top_h typical_p epsilon_cutoff eta_cutoff": (0.0, 1.0),
    "length_penalty paper_length_penalty": (-1e6, 1e6),
}


@pytest.mark.parametrize("names", LIMITS)
def test_settings_of_a_search_have_limits(names: str) -> None:
    least, most = LIMITS[names]
    kind = "a number" if isinstance(most, float) else "a whole number"
    for name in names.split():
        for value in (None, least, most, *([1] if kind == "a number" else [])):
            check_search("x", {name: value})
        for value in (least - 1, most + 1, str(least), *([1.0] if kind == "a whole number" else [float("nan")])):
            line = error_of(check_search, "x", {name: value})
            assert line == f"x: {name}={value}: {kind} from {least:g} to {most:g} is needed"


@pytest.mark.parametrize(
    ("names", "most"),
    [
        ("layers encoder_layers decoder_layers num_hidden_layers", 1000),
        ("d_model hidden_size ffn_dim encoder_ffn_dim decoder_ffn_dim intermediate_size num_labels", 2**16),
        ("vocab_size decoder_vocab_size", 2**18),
    ],
)
def test_sizes_without_weights_have_limits(names: str, most: int, tmp_path: Path) -> None:
    for name in names.split():
        (tmp_path / "config.json").write_text(json.dumps({name: most, "decoder_start_token_id": 0}))
        check_model_files(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps({name: most + 1}))
        assert error_of(check_model_files, tmp_path).endswith(f"{name}={most + 1}: its weights allow {most:,} at most")


def test_ids_are_below_the_size_of_the_vocabulary(tmp_path: Path) -> None:
    for name, wrap in (("pad_token_id", list), ("suppress_tokens", list), ("bad_words_ids", lambda ids: [list(ids)])):
        for file in ("config.json", "generation_config.json"):
            sizes = {"vocab_size": 7, "decoder_vocab_size": 9, "decoder_start_token_id": 0}
            (tmp_path / "config.json").write_text(json.dumps(sizes))
            fields_of_file = {**sizes, name: wrap((-1, 0, 8))}
            (tmp_path / file).write_text(json.dumps(fields_of_file))
            check_model_files(tmp_path)
            for wrong in (-2, 9, True, 1.0):
                (tmp_path / file).write_text(json.dumps({**fields_of_file, name: wrap((0, wrong))}))
                assert error_of(check_model_files, tmp_path).endswith(": ids of tokens below 9 are needed")
            (tmp_path / file).unlink()


# Damage that only the libraries see.
DAMAGES_IN_DEPTH: dict[str, tuple[Damage, str]] = {
    "no configuration": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), ""),
    "no configuration of the tokenizer": (lambda folder: (folder / "tokenizer_config.json").unlink(), "pad_token"),
    "width that no weight has": (config(d_model=-8), "d_model"),
    "width as text": (config(d_model="16"), "d_model"),
    "layers that the weights lack": (config(encoder_layers=3), ""),
    "layers that are left": (config(decoder_layers=1), ""),
    "heads": (config(encoder_attention_heads=3), "heads"),
    "activation": (config(activation_function="x"), "activation_function"),
    "quantisation": (
        config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        "bitsandbytes",
    ),
    "encoder alone": (config(model_type="bert", architectures=["BertModel"]), "bert"),
    "tokenizer of a list": (write("tokenizer.json", "[]"), "tokenizer"),
    "tokenizer that is deep": (write("tokenizer.json", DEEP), "tokenizer"),
    "tokenizer that is no text": (lambda folder: (folder / "tokenizer.json").write_bytes(b"\xff\0"), "tokenizer"),
    "weights that are no numbers": (weights(lambda weight: weight * float("nan")), "finite"),
    "weights that are integers": (weights(lambda weight: weight.int()), "I32"),
    "weights of another shape": (weights(lambda weight: weight[1:].clone()), "shapes"),
    "weights of no tensors": (lambda folder: save_file({}, folder / WEIGHTS), ""),
    "pickle as weights": (pickle_as_weights, ""),
    "index of nothing": (index_of({}), ""),
    "index of a missing file": (index_of({"a": "model-1.safetensors"}), ""),
}


def damaged(good: Path, tmp_path: Path, damage: Damage) -> Path:
    folder = shutil.copytree(good, tmp_path / "model")
    damage(folder)
    return folder


@pytest.mark.parametrize("name", DAMAGES)
def test_gate_refuses_damage_in_one_line(good: Path, name: str, tmp_path: Path) -> None:
    damage, expected = DAMAGES[name]
    folder = damaged(good, tmp_path, damage)
    line = error_of(check_model_files, folder)
    assert line.startswith(str(folder)) and len(line) < 400
    pytest.raises(ValueError, check_model_files, folder).match(expected)


def test_gate_takes_whole_folders(good: Path, tmp_path: Path) -> None:
    check_model_files(good)
    check_model_files(tmp_path)  # what is missing is for the loader to say
    header = read_safetensors_header(good / WEIGHTS)
    shapes = {name: list(weight.shape) for name, weight in load_model(good, "cpu").state_dict().items()}
    assert header and all(entry["shape"] == shapes[name] for name, entry in header.items())


@pytest.mark.parametrize(
    ("name", "wrong", "needed"),
    [
        *((name, "x", "true or false") for name in ("use_cache", "renormalize_logits", "remove_invalid_values")),
        *((name, 3, "true or false") for name in ("return_dict_in_generate", "output_scores", "token_healing")),
        *((name, 3, "a number from 0 to 1") for name in ("top_p", "min_p", "typical_p", "epsilon_cutoff")),
        *((name, "x", "a number") for name in ("top_p", "temperature", "diversity_penalty", "guidance_scale")),
        *((name, 3, "a list") for name in ("constraints", "force_words_ids", "sequence_bias")),
        *((name, 3, "an object") for name in ("watermarking_config", "compile_config")),
        *(("early_stopping", value, "true, false or never") for value in ("x", 1, ["never"])),
        ("exponential_decay_length_penalty", "x", "a list"),
        ("stop_strings", 3, "text or a list"),
        ("cache_implementation", 3, "text"),
    ],
)
def test_setting_of_a_search_of_a_wrong_type_is_named(good, name, wrong, needed, tmp_path):
    for file in ("generation_config.json", "config.json"):
        folder = damaged(good, tmp_path / file, fields(file, **{name: wrong}))
        line = error_of(check_model_files, folder)
        assert line.startswith(f"{folder / file}: {name}=") and f": {needed}" in line


@pytest.mark.parametrize(
    "right",
    [
        GenerationConfig(decoder_start_token_id=0).to_dict(),
        {"early_stopping": "never", "sequence_bias": [[[3], 1.0]], "stop_strings": "a", "top_p": 1, "do_sample": True},
        {"early_stopping": True, "stop_strings": ["a"], "typical_p": 1.0, "epsilon_cutoff": 0.0, "temperature": 1},
        {"exponential_decay_length_penalty": [5, 1.5], "watermarking_config": {}, "cache_implementation": "static"},
    ],
    ids=["defaults", "never", "true", "nested"],
)
def test_gate_takes_right_settings_of_a_search(good: Path, right: dict[str, Any], tmp_path: Path) -> None:
    check_model_files(damaged(good, tmp_path, search(**right)))
    check_model_files(damaged(good, tmp_path / "old", config(**right)))


NUMBERS = [-1, 0, 3, 2.5, 1e30, True]
TEXTS = ["x", "", "left"]
TOKENS = [{"content": "x"}, {"content": "x", "lstrip": True, "__type": "AddedToken"}]
NO_TOKENS = [{"content": ""}, {"content": 3}, {"content": "x", "lstrip": 3}, {"lstrip": True}]
NUMBERED = [{}, {"7": TOKENS[0]}]
NOT_NUMBERED = [{"7": "x"}, {"7": {}}, {"x": TOKENS[0]}, {"-1": TOKENS[0]}]
TEMPLATES = [{"a": "x"}, [{"name": "a", "template": "x"}]]
LISTS = [[], ["x"], [3], [[]], [{"a": 1}], ["input_ids"], ["input_ids", 3]]
KINDS = [*NUMBERS, *TEXTS, *TOKENS, *NO_TOKENS, *NUMBERED, *NOT_NUMBERED, *TEMPLATES, *LISTS, {"a": 1}, [TOKENS[0]]]

ONE_TOKEN = "the text of a token", ["x", "left", *TOKENS]
MANY_TOKENS = (
    "a list or an object of tokens",
    [[], ["x"], [TOKENS[0]], ["input_ids"], {}, {"7": "x"}, {"7": TOKENS[0]}, {"content": "x"}, TEMPLATES[0]]
    + [{"x": TOKENS[0]}, {"-1": TOKENS[0]}],
)
SPECIAL = {name: ONE_TOKEN for name in ("pad_token", "eos_token", "unk_token", "mask_token")}
SPECIAL |= {name: MANY_TOKENS for name in ("extra_special_tokens", "additional_special_tokens")}

# File and field: what is needed, and the values of KINDS that are accepted.
OF_TOKENIZERS = {
    **{("tokenizer_config.json", name): accepted for name, accepted in SPECIAL.items()},
    **{("special_tokens_map.json", name): accepted for name, accepted in SPECIAL.items()},
    ("tokenizer_config.json", "model_max_length"): ("a whole number from 1", [3, 1e30]),
    ("tokenizer_config.json", "padding_side"): ("left or right", ["left"]),
    ("tokenizer_config.json", "truncation_side"): ("left or right", ["left"]),
    ("tokenizer_config.json", "tokenizer_class"): ("text", TEXTS),
    ("tokenizer_config.json", "model_input_names"): ("a list that begins with input_ids", [["input_ids"]]),
    ("tokenizer_config.json", "added_tokens_decoder"): ("an object of tokens by their ids", NUMBERED),
    ("tokenizer_config.json", "chat_template"): (
        "text or an object of texts",
        [*TEXTS, *TEMPLATES, [], {}, {"content": "x"}, {"content": ""}, {"7": "x"}, [TOKENS[0]]],
    ),
    ("added_tokens.json", "x"): ("the id of a token", [0, 3]),
}


@pytest.mark.parametrize(("file", "name"), OF_TOKENIZERS)
def test_field_of_a_tokenizer_accepts_the_right_kinds_of_values(good, file, name, tmp_path):
    needed, right = OF_TOKENIZERS[file, name]
    right = [repr(value) for value in right]  # 1 is equal to True
    folder = shutil.copytree(good, tmp_path / "model")
    if not (folder / file).exists():
        (folder / file).write_text("{}")
    for value in KINDS:
        fields(file, **{name: value})(folder)
        if repr(value) in right:
            check_model_files(folder)
        else:
            line = error_of(check_model_files, folder)
            assert line.startswith(f"{folder / file}: {name}=") and line.endswith(f": {needed} is needed")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokenizer_class", "Nope"),
        ("tokenizer_class", ""),
        ("chat_template", {"a": "x"}),
        ("model_max_length", 3),
        ("truncation_side", "left"),
        ("mask_token", "<unk>"),
    ],
)
def test_harmless_field_changes_no_token(good: Path, name: str, value: Any, tmp_path: Path) -> None:
    texts = ["one two three", "three </s> two"]
    expected = load_tokenizers(good)[0](texts).input_ids
    tokenizer = load_tokenizers(damaged(good, tmp_path, fields("tokenizer_config.json", **{name: value})))[0]
    save_tokenizers(tmp_path / "saved", tokenizer)
    for loaded in (tokenizer, load_tokenizers(tmp_path / "saved")[0]):
        assert loaded(texts).input_ids == expected


@pytest.mark.parametrize("name", ["pad_token", "eos_token"])
@pytest.mark.parametrize("side", ["", "target_tokenizer/"])
def test_special_tokens_of_the_model_are_those_of_its_tokenizers(name: str, side: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", ["one two"] * 3, ["eins zwei"] * 3 if side else None)
    load_tokenizers(folder)
    right = {"pad_token": "token 1, <pad>", "eos_token": "token 2, </s>"}[name]
    fields(f"{side}tokenizer_config.json", **{name: "<unk>"})(folder)
    line = error_of(Translator.from_pretrained, folder, "cpu")
    assert line.startswith(f"{folder / side}: {name}=<unk>: the model's is {right}, which would stay")


STEPS = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"), "an object with a type")
PARTS = STEPS | {"model": "an object", "truncation": "an object", "padding": "an object", "added_tokens": "a list"}


@pytest.mark.parametrize("name", PARTS)
def test_part_of_a_tokenizer_of_a_wrong_type_is_named(good: Path, name: str, tmp_path: Path) -> None:
    wrong = ["x", 3, True, {"a": "list"} if name == "added_tokens" else [], *([{}] if name in STEPS else [])]
    folder = damaged(good, tmp_path, lambda folder: None)
    for value in wrong:
        fields("tokenizer.json", **{name: value})(folder)
        with pytest.raises(Exception, match="did not match|expected|missing"):  # the library refuses it, too
            Tokenizer.from_file(str(folder / "tokenizer.json"))
        line = error_of(load_tokenizers, folder)
        assert line.startswith(f"{folder / 'tokenizer.json'}: {name}=") and line.endswith(f": {PARTS[name]} is needed")


def test_tokenizer_of_another_class_adds_tokens_that_the_model_lacks(good: Path, tmp_path: Path) -> None:
    folder = damaged(good, tmp_path, fields("tokenizer_config.json", tokenizer_class="BertTokenizer"))
    line = error_of(load_tokenizers, folder)
    assert line.startswith(f"{folder}: its tokenizer, a BertTokenizer, adds token ")
    assert line.endswith("name the right tokenizer_class in tokenizer_config.json")


@pytest.mark.parametrize("load", [load_model, load_tokenizers, load_base_model, check_model_folder])
@pytest.mark.parametrize("name", ["pointer as weights", "beams", "layers"])
def test_loaders_pass_the_gate(good: Path, load: Callable[[Path], Any], name: str, tmp_path: Path) -> None:
    damage, expected = DAMAGES[name]
    with pytest.raises(ValueError, match=expected):
        load(damaged(good, tmp_path, damage))


COMMANDS = {
    "translate": "--model FOLDER --input TEXT",
    "predict": "--model FOLDER --input TEXT",
    "evaluate": "--model FOLDER --source TEXT --reference TEXT",
    "serve": "--model en-de=FOLDER --port 0",
    "train": "--model_name_or_path FOLDER --train TEXT TEXT.de --output_dir NEW",
    "convert": "--from marian FOLDER NEW",
    "publish": "FOLDER --repo-id me/x --dry-run",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_refuse_every_damage_in_one_line(good, name, tmp_path, command, bounded_memory, monkeypatch):
    monkeypatch.setattr("uvicorn.Server.run", lambda *_: None)  # a server that starts would never end
    for text in ("text", "text.de"):
        (tmp_path / text).write_text("one\n")
    wrong = {}
    for number, (kind, (damage, _)) in enumerate((DAMAGES | DAMAGES_IN_DEPTH).items()):
        folder = shutil.copytree(good, tmp_path / str(number))
        damage(folder)
        paths = {"FOLDER": folder, "TEXT": tmp_path / "text", "NEW": tmp_path / "new"}
        before = time.process_time()
        status, _, errors = command(name, *with_paths(COMMANDS[name].split(), **paths))
        seconds = time.process_time() - before
        is_line = status == 2 and errors.startswith("error: ") and errors.count("\n") == 1
        if not is_line or seconds > 2 or (tmp_path / "new").exists():
            wrong[kind] = status, seconds, errors
    assert not wrong


@pytest.fixture
def bounded_memory() -> Iterator[None]:
    """Let this process take a gigabyte more, and not all that a damaged file asks for."""
    resource = pytest.importorskip("resource", reason="of Unix")
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


# A search that only transformers has, and that fails as soon as it runs.
@pytest.mark.parametrize(
    "settings",
    [
        {"decoder_start_token_id": [1, 2]},
        {"stop_strings": ["a"]},
        {"exponential_decay_length_penalty": [1]},
        {"sequence_bias": []},
        {"guidance_scale": 2.0},
        {"constraints": [1]},
        {"bad_words_ids": []},
    ],
    ids=str,
)
def test_search_that_fails_is_one_line(good, settings, tmp_path):
    translator = Translator.from_pretrained(damaged(good, tmp_path, search(**settings)), "cpu")
    assert "generate refuses these settings" in error_of(list, translator.translate(["one two"]))


@pytest.mark.parametrize("name", DAMAGES_IN_DEPTH)
def test_damage_that_libraries_see_names_its_reason(good: Path, name: str, tmp_path: Path) -> None:
    damage, expected = DAMAGES_IN_DEPTH[name]
    folder = damaged(good, tmp_path, damage)
    assert expected in error_of(Translator.from_pretrained, folder, "cpu")


def test_deep_card_has_no_languages(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\n" + DEEP + "\n---\n")
    assert card_languages(tmp_path) == []
    (tmp_path / "README.md").write_text("---\nlanguage:\n- no\n- en\n---\n")
    assert card_languages(tmp_path) == ["no", "en"]


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_tokenizer_that_multiplies_a_text_is_refused(good: Path, part: str, tmp_path: Path) -> None:
    library: Any = {"normalizer": normalizers, "decoder": decoders}[part]

    def tokenizer_of(replacements: int) -> Path:
        folder = shutil.copytree(good, tmp_path / str(replacements))
        tokenizer: Any = load_tokenizers(folder)[0]
        steps = library.Sequence([library.Replace("o", "oo")] * replacements)
        setattr(tokenizer.backend_tokenizer, part, steps)
        tokenizer.save_pretrained(folder)
        return folder

    load_tokenizers(tokenizer_of(9))
    assert f"its {part} makes texts 1,099,511,627,776 times as long" in error_of(load_tokenizers, tokenizer_of(40))


def test_panic_of_a_tokenizer_is_a_user_error(good: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(good, tmp_path / "model")
    tokenizer: Any = load_tokenizers(folder)[0]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    tokenizer.save_pretrained(folder)
    translator = Translator.from_pretrained(folder, "cpu")
    assert "gave up on this text" in error_of(translator.encode, "a" * 60 + "!")
