"""What each toolkit's options become: those of the model, those of the search, their defaults and their bounds.

The expected values are those of the toolkits: fairseq 0.12.2, Marian 1.12, OpenNMT-py 3.5, eole 0.6, JoeyNMT 2.3.
"""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_vanilla_transformer.interop import eole, fairseq, joeynmt, marian_npz, opennmt
from hf_vanilla_transformer.utils.errors import UserError
from tests.interop.checkpoints import FFN, HEADS, D
from tests.interop.checkpoints import eole as eole_files
from tests.interop.checkpoints import fairseq as fairseq_files
from tests.interop.checkpoints import joeynmt as joeynmt_files
from tests.interop.checkpoints import marian_npz as marian_files
from tests.interop.checkpoints import opennmt as opennmt_files
from tests.interop.foreign import assert_fields
from tests.model_helpers import error_of


def read_fairseq(folder: Path, changes: dict[str, Any]) -> Any:
    fairseq_files.save(folder / "model.pt", fairseq_files.weights(9, 8), **changes)
    return fairseq.from_fairseq(folder / "model.pt")


def read_fairseq_search(folder: Path, changes: dict[str, Any]) -> Any:
    fairseq_files.save_with_sections(folder / "model.pt", fairseq_files.weights(9, 8))
    state = torch.load(folder / "model.pt", weights_only=False)
    state["cfg"]["generation"] = changes
    torch.save(state, folder / "model.pt")
    return fairseq.from_fairseq(folder / "model.pt")


def read_marian(folder: Path, changes: dict[str, Any]) -> Any:
    marian_files.save(folder / "model.npz", marian_files.weights((9, 9)), **changes)
    return marian_npz.from_marian_npz(folder / "model.npz")


def read_marian_search(folder: Path, changes: dict[str, Any]) -> Any:
    lines = (f"{name.replace('_', '-')}: {str(value).lower()}\n" for name, value in changes.items())
    (folder / "decoder.yml").write_text("".join(lines) or "{}")
    return read_marian(folder, {})


def read_opennmt(folder: Path, changes: dict[str, Any]) -> Any:
    model, head = opennmt_files.weights((9, 8))
    content = {"model": model, "generator": head, "opt": Namespace(**{"heads": HEADS} | changes)}
    torch.save(content, folder / "model.pt")
    return opennmt.from_opennmt(folder / "model.pt")


def read_eole(folder: Path, changes: dict[str, Any]) -> Any:
    eole_files.save(folder, eole_files.weights(), changes)
    return eole.from_eole(folder)


def read_eole_training(folder: Path, changes: dict[str, Any]) -> Any:
    eole_files.save(folder, eole_files.weights(), training=changes)
    return eole.from_eole(folder)


def read_eole_search(folder: Path, changes: dict[str, Any]) -> Any:
    eole_files.save(folder, eole_files.weights(), inference=changes)
    return eole.from_eole(folder)


def read_joeynmt(folder: Path, changes: dict[str, Any]) -> Any:
    """`changes` are of both stacks."""
    given = joeynmt_files.options()
    for stack in ("encoder", "decoder"):
        given["model"][stack] |= changes
    joeynmt_files.save(folder, joeynmt_files.weights((7, 6)), given=given)
    return joeynmt.from_joeynmt(folder)


def read_joeynmt_search(folder: Path, changes: dict[str, Any]) -> Any:
    given = joeynmt_files.options() | {"testing": changes}
    joeynmt_files.save(folder, joeynmt_files.weights((7, 6)), given=given)
    return joeynmt.from_joeynmt(folder)


Read = Callable[[Path, dict[str, Any]], Any]
DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")


def dropouts(*values: float) -> dict[str, float]:
    return dict(zip(DROPOUTS, values, strict=True))


@pytest.mark.parametrize(
    ("read", "changes", "expected"),
    [
        (
            read_fairseq,
            {"dropout": None, "activation_fn": None, "no_scale_embedding": None},
            {
                **dropouts(0.0, 0.0, 0.0),
                "activation_function": "relu",
                "scale_embedding": True,
                "layer_norm_position": "post",
                "encoder_attention_heads": HEADS,
                "bos_token_id": 0,
                "pad_token_id": 1,
                "eos_token_id": 2,
                "unk_token_id": 3,
                "decoder_start_token_id": 2,
                "position_encoding_type": "sinusoidal_fairseq",
                "encoder_ffn_dim": FFN,
            },
        ),
        (
            read_fairseq,
            {"dropout": 0.4, "attention_dropout": 0.2, "relu_dropout": 0.3},
            dropouts(0.4, 0.2, 0.3),
        ),
        (
            read_fairseq,
            {
                "dropout": 0,
                "activation_dropout": 0.1,
                "relu_dropout": 0.3,
                "no_scale_embedding": True,
            },
            {**dropouts(0.0, 0.0, 0.1), "scale_embedding": False},
        ),
        (
            read_fairseq,
            {"encoder_attention_heads": 2, "decoder_attention_heads": 4},
            {"encoder_attention_heads": 2, "decoder_attention_heads": 4},
        ),
        (
            read_marian,
            {"transformer_ffn_activation": None},
            {
                **dropouts(0.0, 0.0, 0.0),
                "activation_function": "silu",
                "layer_norm_position": "post",
                "layer_norm_eps": 1e-6,
                "scale_embedding": True,
                "max_position_embeddings": 1024,
                "eos_token_id": 0,
                "unk_token_id": 1,
                "bos_token_id": None,
                "pad_token_id": 9,
            },
        ),
        (
            read_marian,
            {
                "transformer_dropout": 0.1,
                "transformer_dropout_attention": 0.2,
                "transformer_dropout_ffn": 0.3,
                "transformer_heads": 4,
            },
            {
                **dropouts(0.1, 0.2, 0.3),
                "encoder_attention_heads": 4,
                "decoder_attention_heads": 4,
            },
        ),
        (
            read_opennmt,
            {},
            {
                **dropouts(0.1, 0.1, 0.1),
                "activation_function": "relu",
                "layer_norm_eps": 1e-6,
                "layer_norm_position": "pre",
                "scale_embedding": True,
                "unk_token_id": 0,
                "pad_token_id": 1,
                "bos_token_id": 2,
                "eos_token_id": 3,
                "decoder_start_token_id": 2,
            },
        ),
        (
            read_opennmt,
            {"dropout": [0.3, 0.5], "attention_dropout": 0.2, "norm_eps": 1e-3},
            {**dropouts(0.3, 0.2, 0.3), "layer_norm_eps": 1e-3},
        ),
        (read_opennmt, {"dropout": [0], "attention_dropout": 0.0}, dropouts(0.0, 0.0, 0.0)),
        (
            read_eole,
            {},
            {
                "activation_function": "relu",
                "layer_norm_eps": 1e-5,
                "layer_norm_position": "pre",
                "position_encoding_type": "sinusoidal",
                "scale_embedding": True,
                "encoder_attention_heads": HEADS,
                "decoder_attention_heads": HEADS,
            },
        ),
        (
            read_eole,
            {"encoder.heads": 2, "decoder.heads": 6, "decoder.heads_kv": 6},
            {"encoder_attention_heads": 2, "decoder_attention_heads": 6},
        ),
        (
            read_eole,
            {"mlp_activation_fn": "gelu-tanh", "head_dim": 4},
            {
                "activation_function": "gelu_pytorch_tanh",
                "head_dim": 4,
                "value_head_dim": 4,
            },
        ),
        (read_eole_training, {}, dropouts(0.3, 0.1, 0.3)),
        (
            read_eole_training,
            {"dropout": [0.0], "attention_dropout": [0.2, 0.4]},
            dropouts(0.0, 0.2, 0.0),
        ),
        (
            read_joeynmt,
            {},
            {
                **dropouts(0.1, 0.1, 0.1),
                "activation_function": "relu",
                "layer_norm_eps": 1e-6,
                "scale_embedding": True,
                "unk_token_id": 0,
                "pad_token_id": 1,
                "bos_token_id": 2,
                "eos_token_id": 3,
                "decoder_start_token_id": 2,
            },
        ),
        (read_joeynmt, {"dropout": None}, dropouts(0.1, 0.1, 0.1)),
        (
            read_joeynmt,
            {"dropout": 0.25, "num_heads": 6},
            {
                **dropouts(0.25, 0.25, 0.25),
                "encoder_attention_heads": 6,
                "decoder_attention_heads": 6,
            },
        ),
    ],
)
def test_options_of_a_toolkit_become_fields(
    read: Read, changes: dict, expected: dict, tmp_path: Path
) -> None:
    config = read(tmp_path, changes).model.config
    if "encoder_attention_heads" not in expected:
        expected = expected | {"encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS}
    assert_fields(config, **expected)


def test_decoder_gives_the_dropout_of_joeynmt(tmp_path: Path) -> None:
    given = joeynmt_files.options()
    given["model"]["encoder"]["dropout"] = 0.3
    joeynmt_files.save(tmp_path, joeynmt_files.weights((7, 6)), given=given)
    assert_fields(joeynmt.from_joeynmt(tmp_path).model.config, **dropouts(0.1, 0.1, 0.1))


def wide(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights with 24 features instead of 12, which the usual 4 and 8 heads divide."""
    wider = {}
    for name, tensor in tensors.items():
        for dimension, size in enumerate(tensor.shape):
            if size == D:
                tensor = torch.cat([tensor, tensor], dim=dimension)
        wider[name] = tensor
    return wider


def test_heads_have_the_usual_number_of_each_toolkit(tmp_path: Path) -> None:
    given = joeynmt_files.options()
    for stack in given["model"].values():
        del stack["num_heads"]
        stack["hidden_size"] = 2 * D
    weights = {
        name: tensor for name, tensor in joeynmt_files.weights((7, 6)).items() if ".pe" not in name
    }
    joeynmt_files.save(tmp_path / "joey", wide(weights), given=given)
    found = joeynmt.from_joeynmt(tmp_path / "joey").model.config
    assert_fields(found, encoder_attention_heads=4, decoder_attention_heads=8)

    arrays = {name: torch.from_numpy(array) for name, array in marian_files.weights((9, 9)).items()}
    wider = {name: tensor.numpy() for name, tensor in wide(arrays).items()}
    marian_files.save(tmp_path / "model.npz", wider, transformer_heads=None)
    found = marian_npz.from_marian_npz(tmp_path / "model.npz").model.config
    assert_fields(found, encoder_attention_heads=8, decoder_attention_heads=8)

    model, head = opennmt_files.weights((9, 8))
    model = {name: tensor for name, tensor in model.items() if "pe.pe" not in name}
    content = {"model": wide(model), "generator": wide(head), "opt": Namespace(dropout=[0.1])}
    torch.save(content, tmp_path / "model.pt")
    found = opennmt.from_opennmt(tmp_path / "model.pt").model.config
    assert_fields(found, encoder_attention_heads=8, decoder_attention_heads=8)

    tensors = {name: tensor for name, tensor in eole_files.weights().items() if ".pe" not in name}
    eole_files.save(
        tmp_path / "eole",
        wide(tensors),
        {"heads": None, "encoder.heads": None, "decoder.heads": None},
    )
    found = eole.from_eole(tmp_path / "eole").model.config
    assert_fields(found, encoder_attention_heads=8, decoder_attention_heads=8)


@pytest.mark.parametrize(
    ("read", "changes", "expected"),
    [
        (
            read_fairseq_search,
            {},
            {
                "num_beams": 5,
                "length_penalty": 1.0,
                "min_new_tokens": 1,
                "no_repeat_ngram_size": 0,
                "suppress_tokens": [1],
                "forced_eos_token_id": 2,
                "early_stopping": True,
                "max_new_tokens": 201,
                "decoder_start_token_id": 2,
            },
        ),
        (
            read_fairseq_search,
            {"beam": 2, "lenpen": -0.5, "min_len": 0, "no_repeat_ngram_size": 3, "max_len_b": 1},
            {
                "num_beams": 2,
                "length_penalty": -0.5,
                "min_new_tokens": 0,
                "no_repeat_ngram_size": 3,
                "early_stopping": True,
                "max_new_tokens": 2,
            },
        ),
        (
            read_fairseq_search,
            {"beam": 1, "unnormalized": False, "max_len_a": 0},
            {"num_beams": 1, "early_stopping": None, "max_new_tokens": 201},
        ),
        (
            read_fairseq_search,
            {"unnormalized": True, "lenpen": 2.0, "max_len_a": 0.5, "max_len_b": 9},
            {"length_penalty": 0.0, "max_new_tokens": None},
        ),
        (
            read_marian_search,
            {},
            {"num_beams": 12, "length_penalty": 0.0, "decoder_start_token_id": 9},
        ),
        (read_marian_search, {"normalize": False}, {"length_penalty": 0.0}),
        (read_marian_search, {"normalize": True}, {"length_penalty": 1.0}),
        (
            read_marian_search,
            {"normalize": 1, "beam_size": 1},
            {"length_penalty": 1.0, "num_beams": 1},
        ),
        (
            read_marian_search,
            {"normalize": 0.6, "beam_size": 2},
            {"length_penalty": 0.6, "num_beams": 2},
        ),
        (
            read_fairseq,
            {},
            {
                "num_beams": 5,
                "length_penalty": 1.0,
                "min_new_tokens": 1,
                "max_new_tokens": 201,
            },
        ),
        (
            read_opennmt,
            {},
            {
                "num_beams": 5,
                "length_penalty": 0.0,
                "max_new_tokens": 100,
                "beam_search_rule": "opennmt2",
                "counted_prefix": 1,
            },
        ),
        (
            read_eole_search,
            {},
            {
                "num_beams": 5,
                "length_penalty": 1.0,
                "max_new_tokens": 250,
                "min_new_tokens": 0,
                "no_repeat_ngram_size": 0,
                "suppress_tokens": None,
                "beam_search_rule": "opennmt3",
                "counted_prefix": 1,
            },
        ),
        (
            read_eole_search,
            {"beam_size": 1, "max_length": 1, "ban_unk_token": False, "alpha": 0.3},
            {"num_beams": 1, "max_new_tokens": 1, "length_penalty": 0.3, "suppress_tokens": None},
        ),
        (
            read_eole_search,
            {"length_penalty": "wu"},
            {"length_penalty": None, "paper_length_penalty": 1.0},
        ),
        (
            read_eole_search,
            {"length_penalty": "wu", "alpha": 0.6, "beam_size": 4, "max_length": 80},
            {
                "length_penalty": None,
                "paper_length_penalty": 0.6,
                "num_beams": 4,
                "max_new_tokens": 80,
            },
        ),
        (
            read_eole_search,
            {
                "length_penalty": "none",
                "min_length": 2,
                "block_ngram_repeat": 3,
                "ban_unk_token": True,
            },
            {
                "length_penalty": 0.0,
                "min_new_tokens": 2,
                "no_repeat_ngram_size": 3,
                "suppress_tokens": [0],
            },
        ),
        (
            read_joeynmt_search,
            {},
            {
                "num_beams": 1,
                "length_penalty": None,
                "paper_length_penalty": 0.0,
                "min_new_tokens": 1,
                "max_new_tokens": None,
                "no_repeat_ngram_size": None,
                "repetition_penalty": None,
                "beam_search_rule": "joeynmt",
                "suppress_tokens": [2, 1],
            },
        ),
        (
            read_joeynmt_search,
            {"beam_size": 2, "beam_alpha": 0.7, "min_output_length": 0, "max_output_length": 1},
            {
                "num_beams": 2,
                "paper_length_penalty": 0.7,
                "min_new_tokens": 0,
                "max_new_tokens": 1,
            },
        ),
        (
            read_joeynmt_search,
            {"alpha": 0.2, "beam_alpha": 0.7, "max_output_length": 0, "no_repeat_ngram_size": 1},
            {
                "paper_length_penalty": 0.2,
                "max_new_tokens": None,
                "no_repeat_ngram_size": None,
                "encoder_no_repeat_ngram_size": None,
            },
        ),
        (
            read_joeynmt_search,
            {"repetition_penalty": 1, "no_repeat_ngram_size": 2, "generate_unk": True},
            {
                "repetition_penalty": None,
                "encoder_repetition_penalty": None,
                "no_repeat_ngram_size": 2,
                "encoder_no_repeat_ngram_size": 2,
                "suppress_tokens": [2, 1],
            },
        ),
        (
            read_joeynmt_search,
            {"repetition_penalty": 1.25, "generate_unk": False},
            {
                "repetition_penalty": 1.25,
                "encoder_repetition_penalty": 0.8,
                "suppress_tokens": [0, 2, 1],
            },
        ),
    ],
)
def test_options_of_a_toolkit_become_settings_of_the_search(
    read: Read, changes: dict, expected: dict, tmp_path: Path
) -> None:
    assert_fields(read(tmp_path, changes).model.generation_config, **expected)


# the lowest whole numbers, which the weights of a test may contradict
LOWEST = [
    (read_fairseq, "encoder_attention_heads", 1),
    (read_fairseq_search, "beam", 1),
    (read_fairseq_search, "min_len", 0),
    (read_fairseq_search, "no_repeat_ngram_size", 0),
    (read_fairseq_search, "max_len_b", 1),
    (read_marian, "transformer_heads", 1),
    (read_marian_search, "beam_size", 1),
    (read_opennmt, "heads", 1),
    (read_eole, "encoder.heads", 1),
    (read_eole, "head_dim", 1),
    (read_eole_search, "beam_size", 1),
    (read_eole_search, "max_length", 1),
    (read_eole_search, "min_length", 0),
    (read_eole_search, "block_ngram_repeat", 0),
    (read_joeynmt, "num_heads", 1),
    (read_joeynmt, "hidden_size", 1),
    (read_joeynmt, "ff_size", 1),
    (read_joeynmt_search, "beam_size", 1),
    (read_joeynmt_search, "min_output_length", 0),
]


def named(option: str, value: object) -> str:
    return f"{option.rpartition('.')[2]}={value}".replace("_", "-")


@pytest.mark.parametrize(("read", "option", "lowest"), LOWEST)
def test_whole_number_is_refused_below_its_bound(
    read: Read, option: str, lowest: int, tmp_path: Path
) -> None:
    refusal = error_of(read, tmp_path, {option: lowest - 1}).replace("_", "-")
    assert named(option, lowest - 1) in refusal
    try:
        read(tmp_path, {option: lowest})
    except UserError as error:
        assert named(option, lowest) not in str(error).replace("_", "-")


@pytest.mark.parametrize(
    ("read", "option", "value"),
    [
        (read_fairseq, "decoder_attention_heads", None),
        (read_fairseq, "decoder_embed_dim", D + 1),
        (read_fairseq, "decoder_input_dim", D - 1),
        (read_fairseq, "arch", "lightconv"),
        (read_opennmt, "norm_eps", -1e-6),
        (read_eole, "norm_eps", -1e-6),
        (read_eole, "decoder.heads_kv", HEADS + 1),
        (read_eole, "encoder.mlp_activation_fn", "gelu"),
        (read_eole_training, "dropout", -0.1),
        (read_eole_training, "attention_dropout", [-0.1]),
        (read_joeynmt, "dropout", -0.1),
        (read_joeynmt, "alpha", 1.5),
    ],
)
def test_option_out_of_bounds_is_refused_by_name(
    read: Read, option: str, value: Any, tmp_path: Path
) -> None:
    error = error_of(read, tmp_path, {option: value})
    assert named(option, value).replace("[-0.1]", "-0.1") in error.replace("_", "-")


def test_joeynmt_sizes_have_its_defaults(tmp_path: Path) -> None:
    given = joeynmt_files.options()
    del given["model"]["encoder"]["ff_size"]
    joeynmt_files.save(tmp_path, joeynmt_files.weights((7, 6)), given=given)
    message = f"encoder_ffn_dim=2048, but the weights have {FFN}"
    assert error_of(joeynmt.from_joeynmt, tmp_path).endswith(message)
    del given["model"]["encoder"]["hidden_size"]
    joeynmt_files.save(tmp_path, joeynmt_files.weights((7, 6)), given=given)
    assert f"hidden_size: encoder and decoder have 512 and {D}" in error_of(
        joeynmt.from_joeynmt, tmp_path
    )


@pytest.mark.parametrize(
    ("changes", "notes"),
    [
        ({"max_output_length": 9}, []),
        ({"max_output_length": 0}, ["1.5 times"]),
        ({"max_output_length": 9, "no_repeat_ngram_size": 2}, ["exempts special tokens"]),
        ({"max_output_length": 9, "no_repeat_ngram_size": 1}, []),
        ({"max_output_length": 9, "repetition_penalty": 1.1}, ["exempts special tokens"]),
        ({"max_output_length": 9, "repetition_penalty": 1.0}, []),
    ],
)
def test_differences_of_the_search_of_joeynmt_are_named(
    changes: dict, notes: list[str], tmp_path: Path
) -> None:
    found = read_joeynmt_search(tmp_path, changes).notes
    assert len(found) == len(notes)
    for note, expected in zip(found, notes, strict=True):
        assert expected in note


def test_notes_of_a_conversion_are_those_that_concern_it(tmp_path: Path) -> None:
    assert read_fairseq(tmp_path, {}).notes == []
    assert read_opennmt(tmp_path, {}).notes == ["the checkpoint contains no vocabularies"]
    eole_notes = read_eole(tmp_path, {}).notes
    assert eole_notes[-1] == eole.SEARCH_NOTE
    assert (
        "`generate` has no inference.ratio, so it is dropped"
        in read_eole_search(tmp_path, {"ratio": 1.5}).notes
    )
    assert read_marian(tmp_path, {}).notes == []
