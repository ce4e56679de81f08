"""Folders of transformers' classes, and what is read and written around a conversion: files, options and the line."""

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from hf_vanilla_transformer.interop import (
    fairseq_folders,
    sources,
    torch_transformer,
    transformers_folders,
)
from hf_vanilla_transformer.interop.checkpoint import Checkpoint
from hf_vanilla_transformer.interop.converting import FORMATS, convert
from hf_vanilla_transformer.interop.marian import from_marian
from hf_vanilla_transformer.interop.vocabularies import PRETOKENIZED, TextSide
from hf_vanilla_transformer.utils.errors import UserError
from tests.interop.checkpoints import fairseq
from tests.interop.foreign import (
    assert_fields,
    write_fsmt_folder,
    write_m2m100_folder,
    write_opus_folder,
)
from tests.model_helpers import error_of, tiny_model

SAFETENSORS, BIN = "model.safetensors", "pytorch_model.bin"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({SAFETENSORS: {}, BIN: {}}, [SAFETENSORS]),
        ({BIN: {}}, [BIN]),
        ({BIN: {}, f"{SAFETENSORS}.index.json": {"a": "b.safetensors"}}, ["b.safetensors"]),
        ({f"{BIN}.index.json": {"a": "2.bin", "b": "1.bin", "c": "2.bin"}}, ["1.bin", "2.bin"]),
        ({f"{SAFETENSORS}.index.json": {"a": "../x/2.safetensors"}}, ["2.safetensors"]),
        ({f"{SAFETENSORS}.index.json": {}, BIN: {}}, []),
    ],
)
def test_weights_are_one_file_or_those_of_an_index(
    content: dict, expected: list[str], tmp_path: Path
) -> None:
    for name, parts in content.items():
        (tmp_path / name).write_text(json.dumps({"weight_map": parts}))
    assert sources.weight_files(tmp_path) == [tmp_path / name for name in expected]


def test_folder_without_weights_says_so(tmp_path: Path) -> None:
    message = error_of(sources.weight_files, tmp_path)
    assert (
        message == f"{tmp_path}: no weights: there is none of model.safetensors, pytorch_model.bin"
    )
    (tmp_path / f"{BIN}.index.json").write_text('{"weight_map": {"a": 3}}')
    assert "weight_map.a=3: text is needed" in error_of(sources.weight_files, tmp_path)


def test_parts_of_the_weights_have_no_tensor_twice(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.safetensors" for number in (1, 2)]

    def save(file: Path, *names: str) -> None:
        save_file({name: torch.ones(2) for name in names}, file)

    save(files[0], "net.x.weight", "net.y.bias")
    save(files[1], "net.z.weight")
    assert sources.read_parts(files, "x.weight").keys() == {"x.weight", "y.bias", "z.weight"}
    assert sources.read_parts(files).keys() == {"net.x.weight", "net.y.bias", "net.z.weight"}
    save(files[1], "net.z.weight", "net.y.bias")
    assert (
        error_of(sources.read_parts, files) == f"{files[1]}: net.y.bias is also in a file before it"
    )
    assert sources.read_parts([]) == {}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"num_beams": 1, "length_penalty": 1.0}),
        ({"num_beams": 4, "length_penalty": 0.5}, {"num_beams": 4, "length_penalty": 0.5}),
        (
            {
                "transformers_version": "1",
                "_x": 3,
                "unk_token_id": 5,
                "top_k": 7,
            },
            {"top_k": 7},
        ),
    ],
)
def test_model_gets_the_search_of_its_peer(settings: dict, expected: dict, tmp_path: Path) -> None:
    model = tiny_model()
    transformers_folders.set_generation_config(model, settings)
    assert_fields(model.generation_config, **expected)
    assert not hasattr(model.generation_config, "unk_token_id")
    assert not hasattr(model.generation_config, "_x")


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 0},
        {"num_beams": "x"},
        {"early_stopping": 3},
    ],
)
def test_search_that_does_not_exist_is_refused(settings: dict) -> None:
    assert "generation settings" in error_of(
        transformers_folders.set_generation_config, tiny_model(), settings
    )


@pytest.mark.parametrize(
    ("beams", "penalty", "stopping", "expected"),
    [
        (1, 0.5, True, (1.0, False)),
        (1, None, True, (None, False)),
        (2, 0.5, True, (0.5, True)),
        (3, None, False, (None, False)),
    ],
)
def test_greedy_search_has_no_settings_of_beams(
    beams: int, penalty: Any, stopping: bool, expected: tuple
) -> None:
    search = GenerationConfig(num_beams=beams, early_stopping=stopping)
    search.length_penalty = penalty
    transformers_folders.make_savable(search)
    assert (search.length_penalty, search.early_stopping) == expected


def test_tokenizer_needs_all_of_its_files_or_none(tmp_path: Path) -> None:
    write_fsmt_folder(tmp_path)
    files = ("vocab-src.json", "vocab-tgt.json", "merges.txt")
    assert transformers_folders.load_tokenizer("FSMTTokenizer", tmp_path, files) is not None
    (tmp_path / "vocab-tgt.json").unlink()
    message = error_of(transformers_folders.load_tokenizer, "FSMTTokenizer", tmp_path, files)
    assert (
        message == f"{tmp_path}: the tokenizer needs {', '.join(files)}; there is no vocab-tgt.json"
    )
    for name in ("vocab-src.json", "merges.txt"):
        (tmp_path / name).unlink()
    assert transformers_folders.load_tokenizer("FSMTTokenizer", tmp_path, files) is None


def change_json(file: Path, **fields: Any) -> None:
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | fields))


def test_search_of_a_folder_is_in_its_own_file_or_in_the_configuration(tmp_path: Path) -> None:
    write_opus_folder(tmp_path)
    found = from_marian(tmp_path).model
    assert_fields(found.generation_config, num_beams=4, max_length=12)
    change_json(tmp_path / "config.json", num_beams=7, max_length=9, no_repeat_ngram_size=3)
    assert_fields(from_marian(tmp_path).model.generation_config, num_beams=4)
    (tmp_path / "generation_config.json").unlink()
    found = from_marian(tmp_path).model
    assert_fields(found.generation_config, num_beams=7, max_length=9, no_repeat_ngram_size=3)
    change_json(tmp_path / "config.json", quantization_config={"bits": 8})
    assert "quantised (quantization_config)" in error_of(from_marian, tmp_path)


def rewrite(folder: Path, change: Any) -> str:
    """Change the tensors of a folder of Marian, and return the notes of its conversion."""
    tensors = load_file(folder / SAFETENSORS)
    change(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / SAFETENSORS)
    return "; ".join(from_marian(folder).notes)


SHARED, SOURCE, TARGET = sources.EMBEDDINGS
OUTPUT = "lm_head.weight"


def test_matrices_that_a_configuration_ties_may_be_saved_once_or_differ(tmp_path: Path) -> None:
    write_opus_folder(tmp_path, decoder_attention_heads=4)
    names = (
        "model.shared.weight",
        "model.encoder.embed_tokens.weight",
        "model.decoder.embed_tokens.weight",
    )
    assert names == sources.EMBEDDINGS
    plain = from_marian(tmp_path)
    assert plain.notes == []
    matrix = plain.model.get_input_embeddings().weight.detach()

    def only(name: str) -> Any:
        def change(tensors: dict) -> None:
            for each in (*names, OUTPUT):
                tensors.pop(each, None)
            tensors[name] = matrix

        return change

    for name in names:
        assert rewrite(tmp_path, only(name)) == ""
    assert_fields(
        from_marian(tmp_path).model.config,
        share_encoder_decoder_embeddings=True,
        tie_word_embeddings=True,
    )
    tie = "config.json ties {} and {}, which differ: each is used as it is"
    note = rewrite(
        tmp_path,
        lambda tensors: tensors.update(
            {
                SOURCE: matrix,
                TARGET: matrix,
                OUTPUT: 2 * matrix,
            }
        ),
    )
    assert note == tie.format(TARGET, OUTPUT)
    note = rewrite(tmp_path, lambda tensors: tensors.update({TARGET: 2 * matrix}))
    assert note == tie.format(SOURCE, TARGET)
    note = rewrite(tmp_path, lambda tensors: tensors.update({SHARED: 3 * matrix}))
    assert note == "; ".join(
        [
            tie.format(SOURCE, TARGET),
            f"{SHARED} differs from the embeddings and from {OUTPUT}, so it is not used",
        ]
    )
    note = rewrite(tmp_path, lambda tensors: tensors.update({SHARED: matrix}))
    assert note == tie.format(SOURCE, TARGET)


def test_output_that_is_neither_saved_nor_tied_is_missing(tmp_path: Path) -> None:
    write_opus_folder(tmp_path)
    change_json(
        tmp_path / "config.json", tie_word_embeddings=False, share_encoder_decoder_embeddings=False
    )
    tensors = load_file(tmp_path / SAFETENSORS)
    tensors.pop(OUTPUT, None)
    save_file(tensors, tmp_path / SAFETENSORS)
    message = error_of(from_marian, tmp_path)
    assert message.startswith(
        f"{OUTPUT} is missing in the weights, and config.json does not tie it"
    )


@pytest.mark.parametrize("pad", [1, 4])
def test_positions_of_fairseq_start_after_the_padding(pad: int, tmp_path: Path) -> None:
    write_m2m100_folder(tmp_path / "m2m", tokenizer=False, pad_token_id=pad)
    config = fairseq_folders.from_m2m100(tmp_path / "m2m").model.config
    assert_fields(config, position_offset=pad + 1, layer_norm_position="pre", pad_token_id=pad)
    assert_fields(config, position_encoding_type="sinusoidal_fairseq")


def test_fsmt_folder_has_the_special_tokens_of_its_tokenizer(tmp_path: Path) -> None:
    write_fsmt_folder(tmp_path)
    found = fairseq_folders.from_fsmt(tmp_path)
    assert_fields(
        found.model.config,
        unk_token_id=3,
        pad_token_id=1,
        decoder_eos_token_id=2,
        position_offset=2,
        layer_norm_position="post",
    )
    for name in ("vocab-src.json", "vocab-tgt.json", "merges.txt"):
        (tmp_path / name).unlink()
    assert fairseq_folders.from_fsmt(tmp_path).tokenizer is None


def test_m2m100_direction_is_one_of_its_languages(tmp_path: Path) -> None:
    write_m2m100_folder(tmp_path / "m2m")
    read = functools.partial(fairseq_folders.from_m2m100, tmp_path / "m2m")
    found = read(source_language="de", target_language="fr")
    tokens = found.tokenizer.convert_tokens_to_ids(["__de__", "__fr__"])
    assert found.tokenizer("a")["input_ids"][0] == tokens[0]
    assert_fields(found.model.generation_config, forced_bos_token_id=tokens[1])
    assert_fields(found.tokenizer, src_lang="de", tgt_lang="fr")
    assert found.tokenizer.init_kwargs["src_lang"] == "de"
    assert found.tokenizer.init_kwargs["tgt_lang"] == "fr"
    plain = read()
    assert_fields(plain.model.generation_config, forced_bos_token_id=None)
    assert plain.tokenizer.src_lang == "en"
    for name in ("source_language", "target_language"):
        assert error_of(read, **{name: "xx"}) == f"{name}=xx: the tokenizer has no such language"
    for file in ("vocab.json", "sentencepiece.bpe.model", "tokenizer_config.json"):
        (tmp_path / "m2m" / file).unlink()
    assert read().tokenizer is None
    assert (
        error_of(read, target_language="de")
        == "target_language=de: the tokenizer has no such language"
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("M2M100Tokenizer", "M2M100Tokenizer"),
        ("M2M100TokenizerFast", "M2M100Tokenizer"),
        (None, "M2M100Tokenizer"),
        ("BertTokenizer", None),
    ],
)
def test_m2m100_tokenizer_is_of_a_known_class(
    name: str | None, expected: str | None, tmp_path: Path
) -> None:
    write_m2m100_folder(tmp_path / "m2m")
    file = tmp_path / "m2m" / "tokenizer_config.json"
    change_json(file, tokenizer_class=name)
    if expected is None:
        message = error_of(fairseq_folders.from_m2m100, tmp_path / "m2m")
        assert (
            message == f"{file}: tokenizer_class={name} is none of M2M100Tokenizer, NllbTokenizer"
        )
    else:
        assert type(fairseq_folders.from_m2m100(tmp_path / "m2m").tokenizer).__name__ == expected


def test_checkpoint_without_text_has_its_notes_and_no_tokenizer() -> None:
    model = tiny_model()
    kept = ("encoder_attention_heads", "decoder_attention_heads", "final_layer_norm")
    fields = {name: getattr(model.config, name) for name in kept}
    plain = Checkpoint(model.state_dict(), str, fields, {"num_beams": 3})
    assert plain.converted().notes == []
    assert plain.converted().tokenizer is None
    assert_fields(plain.converted().model.generation_config, num_beams=3)
    special = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "</s>"}
    side = TextSide([*special.values(), *map(str, range(37))], special)
    noted = Checkpoint(
        model.state_dict(),
        str,
        fields,
        {},
        sides=[side, side],
        notes=["one"],
    )
    assert noted.converted().notes == [PRETOKENIZED, "one"]
    assert noted.converted().tokenizer("3 x")["input_ids"] == [6, 0, 2]


VALUES: list[tuple[str, Any, Any]] = [
    ("heads", 4, 4),
    ("heads", "4", 4),
    ("heads", None, None),
    ("heads", "4.5", "a whole number is needed"),
    ("heads", 4.0, "a whole number is needed"),
    ("heads", True, "a whole number is needed"),
    ("heads", "", "a whole number is needed"),
    ("layer_norm_eps", "1e-5", 1e-5),
    ("layer_norm_eps", 1, 1),
    ("layer_norm_eps", 0.5, 0.5),
    ("layer_norm_eps", False, "a number is needed"),
    ("layer_norm_eps", "nan", "a number is needed"),
    ("layer_norm_eps", math.inf, "a number is needed"),
    ("layer_norm_eps", "x", "a number is needed"),
    ("norm_first", True, True),
    ("norm_first", "true", True),
    ("norm_first", "YES", True),
    ("norm_first", "1", True),
    ("norm_first", False, False),
    ("norm_first", "False", False),
    ("norm_first", "no", False),
    ("norm_first", "0", False),
    ("norm_first", "maybe", "true or false is needed"),
    ("norm_first", 1, "true or false is needed"),
    ("activation", "gelu", "gelu"),
    ("activation", "7", "7"),
    ("activation", 7, "text is needed"),
    ("activation", True, "text is needed"),
    ("tokenizer", Path("x"), Path("x")),
    ("tokenizer", "x", "x"),
    ("tokenizer", 3, "text is needed"),
]


@pytest.mark.parametrize(("name", "value", "expected"), VALUES)
def test_option_of_a_conversion_has_the_type_of_its_argument(
    name: str, value: Any, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    @functools.wraps(torch_transformer.from_torch)
    def read(source: Path, **options: Any) -> None:
        given.update(options)
        raise UserError("read")

    monkeypatch.setattr(torch_transformer, "from_torch", read)
    (tmp_path / "in").mkdir()
    message = error_of(convert, "torch", tmp_path / "in", tmp_path / "out", **{name: value})
    if isinstance(expected, str) and expected.endswith("is needed"):
        assert message == f"{name}={value}: {expected}"
        assert not given
    else:
        assert message == f"{tmp_path / 'in'}: read"
        assert given == {name: expected}
        assert type(given[name]) is type(expected)


def test_format_and_options_that_do_not_exist_are_named_with_those_that_do(tmp_path: Path) -> None:
    message = error_of(convert, "bert", tmp_path, tmp_path / "out")
    assert message == f"format: 'bert' is none of {', '.join(FORMATS)}"
    message = error_of(convert, "joeynmt", tmp_path, tmp_path / "out", beams=3)
    assert message == "beams: joeynmt has no such option; it has none"
    message = error_of(convert, "m2m100", tmp_path, tmp_path / "out", beams=3)
    assert message == "beams: m2m100 has no such option; it has source_language, target_language"


def test_conversion_writes_a_new_folder_and_says_what_is_in_it(
    model_file: Path, tmp_path: Path
) -> None:
    fairseq.save(model_file, fairseq.weights(9, 8))
    output = tmp_path / "ours"
    count = sum(
        tensor.numel() for name, tensor in fairseq.weights(9, 8).items() if name.count(".") > 1
    )
    count -= 2  # the empty tables of positions
    line = convert("fairseq", model_file, output)
    assert line == f"{output}: {count:,} parameters, without a tokenizer: the files have none"
    assert not (output / "tokenizer_config.json").exists()
    assert str(output) in error_of(convert, "fairseq", model_file, output)
    fairseq.write_dictionaries(tmp_path, {"en": [*"abcde"], "de": [*"wxyz"]})
    line = convert("fairseq", model_file, output, True)
    assert line == f"{output}: {count:,} parameters, with its tokenizer ({PRETOKENIZED})"
    assert (output / "tokenizer_config.json").exists()
    assert "model.pt" in error_of(
        convert, "fairseq", tmp_path / "x.pt", tmp_path / "other"
    ).replace("x.pt", "model.pt")


@pytest.mark.parametrize(("place", "has_config"), [(".", True), (".", False), ("second", False)])
def test_adapter_is_no_whole_model(place: str, has_config: bool, tmp_path: Path) -> None:
    (tmp_path / "in" / place).mkdir(parents=True)
    (tmp_path / "in" / place / "adapter_config.json").write_text("{}")
    if has_config:
        (tmp_path / "in" / "config.json").write_text("{}")
    assert "merge_and_unload" in error_of(convert, "marian", tmp_path / "in", tmp_path / "out")


def test_adapter_is_not_left_out_of_a_model_to_be_fine_tuned(tmp_path: Path) -> None:
    write_opus_folder(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "merge_and_unload" in error_of(from_marian, tmp_path)


def test_adapter_in_another_folder_is_not_looked_at(tmp_path: Path) -> None:
    write_opus_folder(tmp_path / "in")
    (tmp_path / "in" / "second").mkdir()
    (tmp_path / "in" / "second" / "adapter_config.json").write_text("{}")
    assert "with its tokenizer" in convert("marian", tmp_path / "in", tmp_path / "out")
