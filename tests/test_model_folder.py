"""A damaged model folder is refused in one line, with the file, the field and its value, before a library reads it."""

import json
import math
import os
import pickle
import re
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
from hf_vanilla_transformer.text import load_tokenizers, save_tokenizers, train_tokenizer
from hf_vanilla_transformer.training.run.fine_tuning import load_base_model
from hf_vanilla_transformer.utils.model_folder import check_model_files, check_search
from hf_vanilla_transformer.utils.untrusted import read_safetensors_header
from tests.model_helpers import error_of, save_model, slow, with_paths

Damage = Callable[[Path], object]
Damaged = Callable[..., Path]

CONFIG = "config.json"
SEARCH = "generation_config.json"
TOKENIZER = "tokenizer_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "good"
    return save_model(folder, ["one two three"] * 3, vocab_size=265)


def write(name: str, content: str | bytes) -> Damage:
    content = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(content)


def remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink(missing_ok=True)


def instead(name: str, make: Callable[[Path], object]) -> Damage:
    """Put something else in the place of a file."""

    def change(folder: Path) -> None:
        remove(name)(folder)
        make(folder / name)

    return change


def fields(name: str, **values: Any) -> Damage:
    """Change fields of a JSON file."""

    def change(folder: Path) -> None:
        file = folder / name
        before = json.loads(file.read_text())
        file.write_text(json.dumps(before | values))

    return change


def cut(share: float) -> Damage:
    """Keep the first part of the weights, as a download that stopped."""

    def change(folder: Path) -> None:
        content = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(content[: int(share * len(content))])

    return change


def header(length: int, content: bytes) -> Damage:
    """Weights whose header says that it has this length."""
    return write(WEIGHTS, length.to_bytes(8, "little") + content)


def weights(changed: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    """Change the first matrix of the weights."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        name = next(name for name, tensor in tensors.items() if tensor.dim() == 2)
        tensors[name] = changed(tensors[name])
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})

    return change


def instead_of_weights(name: str, content: str | bytes) -> Damage:
    """Another file, and no weights beside it."""

    def change(folder: Path) -> None:
        remove(WEIGHTS)(folder)
        write(name, content)(folder)

    return change


DEEP = "[" * 100_000
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"

# What is wrong with a file, and what the refusal says after its path.
FILES: dict[str, tuple[Damage, str]] = {
    "pointer as weights": (
        write(WEIGHTS, POINTER),
        f"{WEIGHTS} is a Git LFS pointer, .*: run git lfs pull",
    ),
    "pointer as tokenizer": (
        write("tokenizer.json", POINTER),
        "tokenizer.json is a Git LFS pointer",
    ),
    "no weights in the file": (write(WEIGHTS, ""), f"{WEIGHTS} is empty: download"),
    "no configuration in the file": (write(CONFIG, ""), f"{CONFIG} is empty"),
    "half of the weights": (cut(0.5), f"{WEIGHTS} is damaged or incomplete .*: download"),
    "a part of the header": (cut(0.01), f"{WEIGHTS} is damaged or incomplete"),
    "half of an archive": (
        instead_of_weights("pytorch_model.bin", b"PK\3\4" + bytes(100)),
        "pytorch_model.bin is incomplete",
    ),
    "header of 2^60 bytes": (header(2**60, b"{}"), f"{WEIGHTS} is damaged"),
    "header that is no JSON": (header(2, b"xx"), f"{WEIGHTS} is damaged"),
    "header that is deep": (header(len(DEEP), DEEP.encode()), f"{WEIGHTS} is damaged"),
    "header of other values": (header(9, b'{"a": [1]'), f"{WEIGHTS} is damaged"),
    "header of a list": (header(3, b"[1]"), f"{WEIGHTS} is damaged"),
    "deep configuration": (write(CONFIG, DEEP), f"{CONFIG} is damaged"),
    "deep search": (write(SEARCH, DEEP), f"{SEARCH} is damaged"),
    "list as configuration": (write(CONFIG, "[]"), f"{CONFIG} is damaged"),
    "pipe as weights": (instead(WEIGHTS, os.mkfifo), f"{WEIGHTS}: neither a file"),
    "pipe as card": (instead("README.md", os.mkfifo), "README.md: neither a file"),
    "folder as a search": (instead(SEARCH, Path.mkdir), f"{SEARCH}: a folder, or"),
    "folder as weights": (instead(WEIGHTS, Path.mkdir), f"{WEIGHTS}: a folder, or"),
    "link to nothing": (
        instead(TOKENIZER, lambda path: path.symlink_to("nowhere")),
        f"{TOKENIZER}: a folder, or",
    ),
    "index of a list": (write(INDEX, '{"weight_map": []}'), "weight_map=.*: an object"),
    "index without files": (write(INDEX, "{}"), "weight_map=None: an object"),
    "index of numbers": (write(INDEX, '{"weight_map": {"a": 3}}'), "weight_map=a dict: an object"),
    "index of another folder": (
        write(INDEX, '{"weight_map": {"a": "../model.safetensors"}}'),
        "weight_map=../model.safetensors: a file of this folder",
    ),
}

# Wrong values of fields, and what is needed.
FIELDS: list[tuple[str, str, Any, str]] = [
    (CONFIG, "encoder_layers", 10**9, "its weights allow"),
    (CONFIG, "encoder_layers", 1000, "its weights allow"),
    (CONFIG, "d_model", 2**16, "its weights allow"),
    (CONFIG, "vocab_size", 10**12, "its weights allow 262,144"),
    (CONFIG, "_attn_implementation", "x/kernel:f", "code of the Hub"),
    (CONFIG, "decoder_start_token_id", None, "ids"),
    (CONFIG, "decoder_start_token_id", 10**6, "ids"),
    (CONFIG, "num_beams", 10**9, "a whole number from 1 to 256"),
    (CONFIG, "dropout", math.nan, "a finite"),
    (CONFIG, "layer_norm_eps", math.inf, "a finite"),
    (CONFIG, "is_encoder_decoder", False, "true is needed"),
    (CONFIG, "architectures", "X", "a list of texts"),
    (CONFIG, "auto_map", ["x"], "an object"),
    (CONFIG, "model_type", 3, "text"),
    (CONFIG, "dtype", "float99", "a dtype, such as float32"),
    (CONFIG, "torch_dtype", "nn", "a dtype, such as float32"),
    (SEARCH, "num_beams", 10**9, "a whole number from 1 to 256"),
    (SEARCH, "num_beams", True, "a whole number from 1 to 256"),
    (SEARCH, "max_length", 10**12, "a whole number"),
    (SEARCH, "length_penalty", math.nan, "a finite"),
    (SEARCH, "eos_token_id", ["a"], "ids"),
    (SEARCH, "bad_words_ids", [3], "ids"),
    (TOKENIZER, "directions", [["a"]], "a list of pairs"),
    (TOKENIZER, "model_input_names", ["x"], "a list that begins"),
    (TOKENIZER, "task", ["x"], "text"),
    (TOKENIZER, "normalize_source", "x", "true or false"),
    (TOKENIZER, "language_marks", 3, "a list such as"),
    (TOKENIZER, "language_marks", ["x", False], "a list such as"),
    (TOKENIZER, "language_marks", ["target"], "a list such as"),
    (TOKENIZER, "language_tokens", {"de": 3}, "an object of texts"),
]
DAMAGES = {name: damage for name, (damage, _) in FILES.items()}
DAMAGES |= {f"{name}={value}": fields(file, **{name: value}) for file, name, value, _ in FIELDS}


# Damage that only the libraries see.
DAMAGES_IN_DEPTH: dict[str, tuple[Damage, str]] = {
    "no configuration": (remove(CONFIG), CONFIG),
    "no weights": (remove(WEIGHTS), ""),
    "no configuration of the tokenizer": (remove(TOKENIZER), "pad_token"),
    "width that no weight has": (fields(CONFIG, d_model=-8), "d_model"),
    "width as text": (fields(CONFIG, d_model="16"), "d_model"),
    "layers that the weights lack": (fields(CONFIG, encoder_layers=3), ""),
    "layers that are left": (fields(CONFIG, decoder_layers=1), ""),
    "heads": (fields(CONFIG, encoder_attention_heads=3), "heads"),
    "activation": (fields(CONFIG, activation_function="x"), "activation_function"),
    "quantisation": (
        fields(CONFIG, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        "bitsandbytes",
    ),
    "encoder alone": (fields(CONFIG, model_type="bert", architectures=["BertModel"]), "bert"),
    "tokenizer of a list": (write("tokenizer.json", "[]"), "tokenizer"),
    "tokenizer that is deep": (write("tokenizer.json", DEEP), "tokenizer"),
    "tokenizer that is no text": (write("tokenizer.json", b"\xff\0"), "tokenizer"),
    "weights that are no numbers": (weights(lambda weight: weight * math.nan), "finite"),
    "weights that are integers": (weights(lambda weight: weight.int()), "I32"),
    "weights of another shape": (weights(lambda weight: weight[1:].clone()), "shapes"),
    "weights of no tensors": (lambda folder: save_file({}, folder / WEIGHTS), ""),
    "pickle as weights": (instead_of_weights("pytorch_model.bin", pickle.dumps(Path)), ""),
    "index of nothing": (instead_of_weights(INDEX, '{"weight_map": {}}'), ""),
    "index of a missing file": (
        instead_of_weights(INDEX, '{"weight_map": {"a": "model-1.safetensors"}}'),
        "",
    ),
}


@pytest.fixture
def damaged(good: Path, tmp_path: Path) -> Damaged:
    """Copies the good folder with some damage."""

    def damaged(*damages: Damage, name: str = "model") -> Path:
        folder = shutil.copytree(good, tmp_path / name)
        for damage in damages:
            damage(folder)
        return folder

    return damaged


@pytest.mark.parametrize("name", FILES)
def test_gate_refuses_damage_in_one_line(name: str, damaged: Damaged) -> None:
    damage, expected = FILES[name]
    folder = damaged(damage)
    line = error_of(check_model_files, folder)
    assert re.match(f"{folder}/.*{expected}", line)
    assert len(line) < 400


def assert_names_field(
    folder: Path,
    file: str,
    name: str,
    value: Any,
    needed: str,
) -> None:
    fields(file, **{name: value})(folder)
    line = error_of(check_model_files, folder)
    assert line.startswith(f"{folder / file}: {name}=")
    assert f": {needed}" in line
    assert len(line) < 400


@pytest.mark.parametrize(("file", "name", "value", "needed"), FIELDS)
def test_gate_names_a_wrong_field(file, name, value, needed, damaged):
    assert_names_field(damaged(), file, name, value, needed)


def test_gate_takes_whole_folders(good: Path, tmp_path: Path) -> None:
    check_model_files(good)
    check_model_files(tmp_path)  # what is missing is for the loader to say
    tensors = read_safetensors_header(good / WEIGHTS)
    weights = load_model(good, "cpu").state_dict()
    assert tensors
    for name, tensor in tensors.items():
        assert tensor["shape"] == list(weights[name].shape)


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
    right = [None, least, most]
    wrong = [least - 1, most + 1, str(least)]
    if isinstance(most, float):
        kind = "a number"
        right.append(1)
        wrong.append(math.nan)
    else:
        kind = "a whole number"
        wrong.append(1.0)
    for name in names.split():
        for value in right:
            check_search("x", {name: value})
        for value in wrong:
            line = error_of(check_search, "x", {name: value})
            assert line == f"x: {name}={value}: {kind} from {least:g} to {most:g} is needed"


def write_fields(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("names", "most"),
    [
        ("layers encoder_layers decoder_layers num_hidden_layers", 1000),
        (
            "d_model hidden_size ffn_dim encoder_ffn_dim decoder_ffn_dim intermediate_size num_labels",
            2**16,
        ),
        ("vocab_size decoder_vocab_size", 2**18),
    ],
)
def test_sizes_without_weights_have_limits(
    names: str,
    most: int,
    tmp_path: Path,
) -> None:
    config = tmp_path / CONFIG
    for name in names.split():
        write_fields(config, **{name: most}, decoder_start_token_id=0)
        check_model_files(tmp_path)
        write_fields(config, **{name: most + 1})
        line = error_of(check_model_files, tmp_path)
        assert line.endswith(f"{name}={most + 1}: its weights allow {most:,} at most")


@pytest.mark.parametrize("file", [CONFIG, SEARCH])
@pytest.mark.parametrize("name", ["pad_token_id", "suppress_tokens", "bad_words_ids"])
def test_ids_are_below_the_size_of_the_vocabulary(
    name: str,
    file: str,
    tmp_path: Path,
) -> None:
    sizes = {
        "vocab_size": 7,
        "decoder_vocab_size": 9,
        "decoder_start_token_id": 0,
    }

    def write_ids(*ids: Any) -> None:
        values = [ids] if name == "bad_words_ids" else ids
        write_fields(tmp_path / file, **sizes, **{name: values})

    write_fields(tmp_path / CONFIG, **sizes)
    write_ids(-1, 0, 8)
    check_model_files(tmp_path)
    for wrong in (-2, 9, True, 1.0):
        write_ids(0, wrong)
        line = error_of(check_model_files, tmp_path)
        assert line.endswith(": ids of tokens below 9 are needed")


@pytest.mark.parametrize(
    ("names", "wrong", "needed"),
    [
        ("use_cache renormalize_logits remove_invalid_values do_sample", "x", "true or false"),
        ("return_dict_in_generate output_scores token_healing", 3, "true or false"),
        ("constraints force_words_ids sequence_bias", 3, "a list"),
        ("watermarking_config compile_config", 3, "an object"),
        ("early_stopping", "x", "true, false or never"),
        ("early_stopping", 1, "true, false or never"),
        ("early_stopping", ["never"], "true, false or never"),
        ("exponential_decay_length_penalty", "x", "a list"),
        ("stop_strings", 3, "text or a list"),
        ("cache_implementation", 3, "text"),
    ],
)
def test_setting_of_a_search_of_a_wrong_type_is_named(names, wrong, needed, damaged):
    for name in names.split():
        for file in (SEARCH, CONFIG):
            folder = damaged(name=f"{name} of {file}")
            assert_names_field(folder, file, name, wrong, needed)


@pytest.mark.parametrize(
    "right",
    [
        GenerationConfig(decoder_start_token_id=0).to_dict(),
        {
            "early_stopping": "never",
            "sequence_bias": [[[3], 1.0]],
            "stop_strings": "a",
            "top_p": 1,
            "do_sample": True,
        },
        {
            "early_stopping": True,
            "stop_strings": ["a"],
            "typical_p": 1.0,
            "epsilon_cutoff": 0.0,
            "temperature": 1,
        },
        {
            "exponential_decay_length_penalty": [5, 1.5],
            "watermarking_config": {},
            "cache_implementation": "static",
        },
        {"_name_or_path": "me/x", "_attn_implementation": "eager"},
    ],
)
def test_gate_takes_right_settings_of_a_search(
    right: dict[str, Any],
    damaged: Damaged,
) -> None:
    check_model_files(damaged(fields(SEARCH, **right)))
    check_model_files(damaged(fields(CONFIG, **right), name="old"))


TOKEN = {"content": "x"}
FLAGGED = {"content": "x", "lstrip": True, "__type": "AddedToken"}
NUMBERED = {"7": TOKEN}
NAMED = {"x": TOKEN}
NEGATIVE = {"-1": TOKEN}
TEXTS = ["x", "", "left"]
TEMPLATES = [{"a": "x"}, [{"name": "a", "template": "x"}]]
KINDS: list[Any] = [
    *(-1, 0, 3, 2.5, 1e30, True),
    *TEXTS,
    *(
        TOKEN,
        FLAGGED,
        {"content": ""},
        {"content": 3},
        {"content": "x", "lstrip": 3},
        {"lstrip": True},
    ),
    *({}, NUMBERED, NAMED, NEGATIVE, {"7": "x"}, {"7": {}}, {"a": 1}),
    *TEMPLATES,
    *([], ["x"], [3], [[]], [{"a": 1}], ["input_ids"], ["input_ids", 3], [TOKEN]),
]

ONE_TOKEN = "the text of a token", ["x", "left", TOKEN, FLAGGED]
MANY_TOKENS = (
    "a list or an object of tokens",
    [
        *([], ["x"], [TOKEN], ["input_ids"]),
        *({}, TOKEN, {"7": "x"}, {"a": "x"}, NUMBERED, NAMED, NEGATIVE),
    ],
)
SPECIAL = dict.fromkeys(("pad_token", "eos_token", "unk_token", "mask_token"), ONE_TOKEN)
SPECIAL |= dict.fromkeys(("extra_special_tokens", "additional_special_tokens"), MANY_TOKENS)

# File -> field -> what is needed, and the values of KINDS that are accepted.
OF_TOKENIZERS = {
    "special_tokens_map.json": SPECIAL,
    TOKENIZER: {
        **SPECIAL,
        "model_max_length": ("a whole number from 1", [3, 1e30]),
        "padding_side": ("left or right", ["left"]),
        "truncation_side": ("left or right", ["left"]),
        "tokenizer_class": ("text", TEXTS),
        "model_input_names": ("a list that begins with input_ids", [["input_ids"]]),
        "added_tokens_decoder": ("an object of tokens by their ids", [{}, NUMBERED]),
        "chat_template": (
            "text or an object of texts",
            [*TEXTS, *TEMPLATES, [], {}, TOKEN, {"content": ""}, {"7": "x"}, [TOKEN]],
        ),
    },
    "added_tokens.json": {"x": ("the id of a token", [0, 3])},
}


@pytest.mark.parametrize("file", OF_TOKENIZERS)
def test_field_of_a_tokenizer_accepts_the_right_kinds_of_values(
    file: str, damaged: Damaged
) -> None:
    for name, (needed, right) in OF_TOKENIZERS[file].items():
        folder = damaged(name=name)
        if not (folder / file).exists():
            (folder / file).write_text("{}")
        for value in KINDS:
            if repr(value) in map(repr, right):  # 1 is equal to True
                fields(file, **{name: value})(folder)
                check_model_files(folder)
            else:
                assert_names_field(folder, file, name, value, f"{needed} is needed")


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
def test_harmless_field_changes_no_token(
    good: Path,
    name: str,
    value: Any,
    damaged: Damaged,
    tmp_path: Path,
) -> None:
    folder = damaged(fields(TOKENIZER, **{name: value}))
    tokenizer, *_ = load_tokenizers(folder)
    saved = tmp_path / "saved"
    save_tokenizers(saved, tokenizer)
    ids = [
        load_tokenizers(each)[0](["one two three", "three </s> two"]).input_ids
        for each in (good, folder, saved)
    ]
    assert ids == [ids[0]] * 3


@pytest.mark.parametrize("name", ["pad_token", "eos_token"])
@pytest.mark.parametrize("side", ["", "target_tokenizer/"])
def test_special_tokens_of_the_model_are_those_of_its_tokenizers(
    name: str,
    side: str,
    tmp_path: Path,
) -> None:
    folder = save_model(
        tmp_path / "model",
        ["one two"] * 3,
        ["eins zwei"] * 3 if side else None,
    )
    load_tokenizers(folder)
    right = {"pad_token": "token 1, <pad>", "eos_token": "token 2, </s>"}[name]
    fields(f"{side}tokenizer_config.json", **{name: "<unk>"})(folder)
    line = error_of(Translator.from_pretrained, folder, "cpu")
    assert line.startswith(
        f"{folder / side}: {name}=<unk>: the model's is {right}, which would stay"
    )


@pytest.mark.parametrize("is_file", [False, True])
def test_folder_without_the_tokenizer_of_its_target_is_named(is_file: bool, tmp_path: Path) -> None:
    lines = ["one two three"] * 3, ["eins zwei"] * 3
    folder = save_model(tmp_path / "model", *lines)
    config = json.loads((folder / CONFIG).read_text())
    assert config["vocab_size"] != config["decoder_vocab_size"]
    shutil.rmtree(folder / "target_tokenizer")
    if is_file:
        (folder / "target_tokenizer").touch()
    line = error_of(load_tokenizers, folder)
    expected = f"{folder / 'target_tokenizer'} is a file" if is_file else "lacks target_tokenizer"
    assert expected in line


@pytest.mark.parametrize(
    ("sizes", "is_right"),
    [
        ((300, None), True),
        ((300, 300), True),
        ((300, 304), True),  # a multiple of 8
        ((300, 320), True),
        ((512, 300), True),
        ((304, 304), True),
        ((300, 310), False),
        ((310, 300), True),
        ((310, 320), True),  # of neither side alone
        ((300, 328), False),  # too many rows for a multiple of 8
        ((300, 296), False),  # fewer than tokens
    ],
)
def test_one_tokenizer_serves_vocabularies_that_are_padded(
    sizes: tuple[int, int | None], is_right: bool, tmp_path: Path
) -> None:
    tokenizer = train_tokenizer(["one two three four five six seven"] * 9, 300)
    rows = dict(zip(("vocab_size", "decoder_vocab_size"), sizes, strict=True))
    if len(tokenizer) != 300:
        tokenizer.add_tokens([f"<{number}>" for number in range(300 - len(tokenizer))])
    save_tokenizers(tmp_path, tokenizer)
    special = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "eos")
    }
    (tmp_path / CONFIG).write_text(json.dumps(rows | special))
    if is_right:
        load_tokenizers(tmp_path)
    else:
        assert "lacks target_tokenizer" in error_of(load_tokenizers, tmp_path)


PARTS = {
    "normalizer": "an object with a type",
    "pre_tokenizer": "an object with a type",
    "post_processor": "an object with a type",
    "decoder": "an object with a type",
    "model": "an object",
    "truncation": "an object",
    "padding": "an object",
    "added_tokens": "a list",
}
WRONG_PARTS = {
    "an object with a type": ["x", 3, True, [], {}],
    "an object": ["x", 3, True, []],
    "a list": ["x", 3, True, {"a": "list"}],
}


@pytest.mark.parametrize("name", PARTS)
def test_part_of_a_tokenizer_of_a_wrong_type_is_named(name: str, damaged: Damaged) -> None:
    needed = PARTS[name]
    folder = damaged()
    for value in WRONG_PARTS[needed]:
        fields("tokenizer.json", **{name: value})(folder)
        with pytest.raises(
            Exception, match="did not match|expected|missing"
        ):  # the library refuses it, too
            Tokenizer.from_file(str(folder / "tokenizer.json"))
        line = error_of(load_tokenizers, folder)
        assert line.startswith(f"{folder / 'tokenizer.json'}: {name}=")
        assert line.endswith(f": {needed} is needed")


def test_tokenizer_of_another_class_adds_tokens_that_the_model_lacks(damaged: Damaged) -> None:
    folder = damaged(fields(TOKENIZER, tokenizer_class="BertTokenizer"))
    line = error_of(load_tokenizers, folder)
    assert line.startswith(f"{folder}: its tokenizer, a BertTokenizer, adds token ")
    assert line.endswith("name the right tokenizer_class in tokenizer_config.json")


@pytest.mark.parametrize("load", [load_model, load_tokenizers, load_base_model, check_model_folder])
@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (write(WEIGHTS, POINTER), "run git lfs pull"),
        (fields(SEARCH, num_beams=10**9), "num_beams=1000000000: a whole number"),
        (fields(CONFIG, encoder_layers=10**9), "encoder_layers=1000000000: its weights allow"),
    ],
    ids=["weights", "search", "sizes"],
)
def test_loaders_pass_the_gate(load, damage, expected, damaged):
    with pytest.raises(ValueError, match=expected):
        load(damaged(damage))


COMMANDS = {
    "translate": "--model FOLDER --input TEXT",
    "predict": "--model FOLDER --input TEXT",
    "evaluate": "--model FOLDER --source TEXT --reference TEXT",
    "serve": "--model en-de=FOLDER --port 0",
    "train": "--model_name_or_path FOLDER --train TEXT TEXT.de --output_dir NEW",
    "convert": "--from marian FOLDER NEW",
    "publish": "FOLDER --repo-id me/x --dry-run",
}
FAST_COMMANDS = ["convert", "translate"]


@pytest.mark.parametrize(
    "name", [*FAST_COMMANDS, *slow(*sorted(COMMANDS.keys() - set(FAST_COMMANDS)))]
)
def test_commands_refuse_every_damage_in_one_line(
    name, tmp_path, damaged, command, bounded_memory, monkeypatch
):
    monkeypatch.setattr(
        "uvicorn.Server.run", lambda *_: None
    )  # a server that starts would never end
    for text in ("text", "text.de"):
        (tmp_path / text).write_text("one\n")
    new = tmp_path / "new"
    damages = DAMAGES | {kind: damage for kind, (damage, _) in DAMAGES_IN_DEPTH.items()}
    wrong = {}
    for number, (kind, damage) in enumerate(damages.items()):
        arguments = with_paths(
            COMMANDS[name].split(),
            FOLDER=damaged(damage, name=str(number)),
            TEXT=tmp_path / "text",
            NEW=new,
        )
        before = time.process_time()
        status, _, errors = command(name, *arguments)
        seconds = time.process_time() - before
        is_line = status == 2 and errors.startswith("error: ") and errors.count("\n") == 1
        if not is_line or seconds > 2 or new.exists():
            wrong[kind] = status, seconds, errors
    assert not wrong


@pytest.fixture
def bounded_memory() -> Iterator[None]:
    """Let this process take a gigabyte more, and not all that a damaged file asks for."""
    resource = pytest.importorskip("resource", reason="of Unix")
    before = resource.getrlimit(resource.RLIMIT_AS)
    _, hard = before
    pages, *_ = Path("/proc/self/statm").read_text().split()
    used = int(pages) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, hard))
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
def test_search_that_fails_is_one_line(settings, damaged):
    translator = Translator.from_pretrained(damaged(fields(SEARCH, **settings)), "cpu")
    assert "generate refuses these settings" in error_of(list, translator.translate(["one two"]))


@pytest.mark.parametrize("name", DAMAGES_IN_DEPTH)
def test_damage_that_libraries_see_names_its_reason(name: str, damaged: Damaged) -> None:
    damage, expected = DAMAGES_IN_DEPTH[name]
    folder = damaged(damage)
    assert expected in error_of(Translator.from_pretrained, folder, "cpu")


def test_deep_card_has_no_languages(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    card.write_text(f"---\n{DEEP}\n---\n")
    assert card_languages(tmp_path) == []
    card.write_text("---\nlanguage:\n- no\n- en\n---\n")
    assert card_languages(tmp_path) == ["no", "en"]


def with_backend(folder: Path, part: str, step: Any) -> Path:
    """Another part of the tokenizer in a folder."""
    tokenizer: Any = load_tokenizers(folder)[0]
    setattr(tokenizer.backend_tokenizer, part, step)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("part", "library"), [("normalizer", normalizers), ("decoder", decoders)])
def test_tokenizer_that_multiplies_a_text_is_refused(
    part: str,
    library: Any,
    damaged: Damaged,
) -> None:
    def tokenizer_of(replacements: int) -> Path:
        steps = library.Sequence([library.Replace("o", "oo")] * replacements)
        return with_backend(
            damaged(name=str(replacements)),
            part,
            steps,
        )

    load_tokenizers(tokenizer_of(9))
    line = error_of(load_tokenizers, tokenizer_of(40))
    assert f"its {part} makes texts 1,099,511,627,776 times as long" in line


def test_panic_of_a_tokenizer_is_a_user_error(damaged: Damaged) -> None:
    endless = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    folder = with_backend(damaged(), "pre_tokenizer", endless)
    translator = Translator.from_pretrained(folder, "cpu")
    assert "gave up on this text" in error_of(translator.encode, "a" * 60 + "!")
