"""The roles of tensors around `torch.nn.Transformer`, which follow from names and shapes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_vanilla_transformer.interop import torch_roles
from tests.model_helpers import error_of

WIDTH = 4
PATHS = {"encoder": "t.encoder", "decoder": "t.decoder"}


def stacks(prefix: str = "t.", layers: int = 1) -> dict[str, Tensor]:
    model = nn.Transformer(
        d_model=WIDTH,
        nhead=2,
        num_encoder_layers=layers,
        num_decoder_layers=layers,
        dim_feedforward=6,
        batch_first=True,
    )
    return {f"{prefix}{name}": tensor for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["decoder.layers.0.multihead_attn.in_proj_weight"], True),
        ([".layers.0.multihead_attn.in_proj_weight"], True),
        (["layers.0.multihead_attn.in_proj_weight"], True),
        (["x", "a.b.layers.0.multihead_attn.in_proj_weight"], True),
        (["decoder.layers.1.multihead_attn.in_proj_weight"], False),
        (["mylayers.0.multihead_attn.in_proj_weight"], False),
        (["decoder.layers.0.self_attn.in_proj_weight"], False),
        (["decoder.layers.0.multihead_attn.in_proj_weight.x"], False),
        ([], False),
    ],
)
def test_transformer_has_a_cross_attention_in_its_first_layer(
    names: list[str], expected: bool
) -> None:
    assert torch_roles.is_transformer(names) is expected


@pytest.mark.parametrize("prefix", ["", "t.", "a.b."])
def test_stacks_are_told_apart_by_the_cross_attention(prefix: str) -> None:
    tensors = stacks(prefix, layers=2) | {"x.weight": torch.ones(1)}
    paths = {"encoder": f"{prefix}encoder", "decoder": f"{prefix}decoder"}
    assert torch_roles.paths_of_stacks(tensors) == {stack: [path] for stack, path in paths.items()}
    assert torch_roles.stack_paths(tensors, "f") == paths


def test_other_numbers_of_stacks_are_named() -> None:
    one = stacks("")
    only = {name: tensor for name, tensor in one.items() if name.startswith("encoder")}
    two = stacks("b.") | stacks("a.")
    for tensors, listed in (
        (only, "1 encoders (encoder) and 0 decoders ()"),
        (two, "2 encoders (a.encoder, b.encoder) and 2 decoders (a.decoder, b.decoder)"),
        ({"x": torch.ones(1)}, "0 encoders () and 0 decoders ()"),
    ):
        message = error_of(torch_roles.stack_paths, tensors, "f")
        assert message.startswith(
            f"f: there are {listed} of torch.nn.Transformer among {len(tensors)} tensors"
        )


@pytest.mark.parametrize(
    ("name", "located"),
    [
        (
            "model.encoder.layers.0.self_attn.q_proj.weight",
            ("layers.0.self_attn.in_proj_weight", 0),
        ),
        (
            "model.encoder.layers.2.self_attn.k_proj.weight",
            ("layers.2.self_attn.in_proj_weight", 4),
        ),
        ("model.encoder.layers.0.self_attn.v_proj.bias", ("layers.0.self_attn.in_proj_bias", 8)),
        ("model.encoder.layers.0.self_attn.out_proj.weight", "layers.0.self_attn.out_proj.weight"),
        ("model.encoder.layers.0.self_attn_layer_norm.bias", "layers.0.norm1.bias"),
        ("model.encoder.layers.1.final_layer_norm.weight", "layers.1.norm2.weight"),
        ("model.encoder.layers.0.fc1.weight", "layers.0.linear1.weight"),
        ("model.encoder.layers.0.fc2.bias", "layers.0.linear2.bias"),
        ("model.encoder.layer_norm.weight", "norm.weight"),
        (
            "model.decoder.layers.0.cross_attn.q_proj.bias",
            ("layers.0.multihead_attn.in_proj_bias", 0),
        ),
        (
            "model.decoder.layers.0.cross_attn.v_proj.weight",
            ("layers.0.multihead_attn.in_proj_weight", 8),
        ),
        (
            "model.decoder.layers.0.cross_attn.out_proj.bias",
            "layers.0.multihead_attn.out_proj.bias",
        ),
        ("model.decoder.layers.0.cross_attn_layer_norm.bias", "layers.0.norm2.bias"),
        ("model.decoder.layers.0.self_attn_layer_norm.bias", "layers.0.norm1.bias"),
        ("model.decoder.layers.1.final_layer_norm.weight", "layers.1.norm3.weight"),
        ("model.decoder.layer_norm.bias", "norm.bias"),
    ],
)
def test_our_parameters_are_located_in_the_stacks(name: str, located: Any) -> None:
    stack = name.split(".")[1]
    found = torch_roles.locate_in_stacks(PATHS, WIDTH)(name)
    if isinstance(located, str):
        assert found == f"t.{stack}.{located}"
    else:
        tensor, start = located
        assert found == (f"t.{stack}.{tensor}", slice(start, start + WIDTH), False)


@pytest.mark.parametrize(
    ("others", "kept"),
    [
        ({}, []),
        ({"x.weight": torch.ones(2), "y.bias": torch.ones(2)}, ["x.weight", "y.bias"]),
        ({"x.step": torch.tensor(3), "x.flag": torch.tensor(True)}, []),
        ({"x.weight": torch.tensor([3]), "x.bias": torch.tensor([3])}, ["x.weight", "x.bias"]),
        ({"x.scale": torch.ones(2)}, ["x.scale"]),
    ],
)
def test_integers_are_no_weights_unless_their_names_say_so(
    others: dict[str, Tensor], kept: list[str]
) -> None:
    own = stacks("")
    assert list(torch_roles.one_model(own | others)) == [*own, *kept]


@pytest.mark.parametrize("average", ["ema.", "ema_model.x."])
def test_averages_next_to_a_model_are_left_out(average: str) -> None:
    own = stacks("")
    for prefix in ("", "model."):
        both = stacks(average) | {f"{prefix}{name}": tensor for name, tensor in own.items()}
        found = torch_roles.one_model(both)
        assert found.keys() == own.keys()
        assert all(found[name] is own[name] for name in own)


def around(names: dict[str, tuple[int, ...]], **given: str) -> torch_roles.Around:
    tensors = stacks() | {name: torch.ones(shape) for name, shape in names.items()}
    chosen = {name: given.get(name) for name in ("source", "target", "output")}
    return torch_roles.around_stacks(tensors, PATHS, WIDTH, **chosen)


MATRIX = (9, WIDTH)


@pytest.mark.parametrize(
    ("source", "target", "output"),
    [
        ("src_tok_emb.weight", "tgt_tok_emb.weight", "generator.weight"),
        ("source_embedding.weight", "target_embedding.weight", "fc.weight"),
        ("enc_word.weight", "dec_word.weight", "proj.weight"),
        ("lut_in.weight", "lut_out.weight", "head.weight"),
        ("input.tok.weight", "output.tok.weight", "linear.weight"),
        ("SRC_EMBED.weight", "TRG_EMBED.weight", "unembed.weight"),
        ("a.in.embed.weight", "a.out.embed.weight", "lm_head.weight"),
        ("tok_in.weight", "tok_dec.weight", "final_unemb.weight"),
    ],
)
def test_matrices_around_the_stacks_are_known_by_words(
    source: str, target: str, output: str
) -> None:
    names = {
        source: MATRIX,
        target: MATRIX,
        output: MATRIX,
        output.replace("weight", "bias"): (9,),
    }
    assert around(names) == (source, target, output, [])


def test_one_embedding_serves_both_sides() -> None:
    found = around({"embedding.weight": MATRIX, "out.weight": MATRIX})
    assert found == ("embedding.weight", "embedding.weight", "out.weight", [])


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({"pos_encoder.pe": (5, 1, WIDTH)}, ["pos_encoder.pe"]),
        ({"pe": (5, WIDTH)}, ["pe"]),
        ({"x.pe": (1, 5, WIDTH), "peel": (WIDTH,)}, ["x.pe"]),
        ({"my_pe.table": (5, WIDTH)}, ["my_pe.table"]),
        ({"POSITION.weight": (5, WIDTH)}, ["POSITION.weight"]),
        ({"pos_scale": (1,)}, []),
        (
            {"tgt_pos.weight": (5, WIDTH), "src_pos.weight": (5, WIDTH)},
            ["src_pos.weight", "tgt_pos.weight"],
        ),
        (
            {"src_pos.weight": (5, WIDTH), "dec_pos.weight": (5, WIDTH)},
            ["src_pos.weight", "dec_pos.weight"],
        ),
        (
            {"b_pos.weight": (5, WIDTH), "enc_pos.weight": (5, WIDTH)},
            ["enc_pos.weight", "b_pos.weight"],
        ),
        (
            {"dec_pos.weight": (5, WIDTH), "pos.weight": (5, WIDTH)},
            ["pos.weight", "dec_pos.weight"],
        ),
    ],
)
def test_tables_of_positions_are_those_of_source_and_target(
    tables: dict[str, tuple], expected: list[str]
) -> None:
    names = {"src_emb.weight": MATRIX, "tgt_emb.weight": MATRIX, "fc.weight": MATRIX}
    found = around(names | tables)
    assert found.positions == expected
    assert found[:3] == tuple(names)


@pytest.mark.parametrize(
    ("names", "given", "message"),
    [
        (
            ["src_emb", "tgt_emb"],
            {},
            "output_layer is missing: give the name of that module, because 0 tensors of 2",
        ),
        (
            ["src_emb", "tgt_emb", "a", "b"],
            {},
            "output_layer is missing: give the name of that module, because 2",
        ),
        (["src_emb", "src_tok", "tgt_emb", "a"], {}, "source_embedding is missing"),
        (["src_emb", "tgt_emb", "tgt_tok", "a"], {}, "target_embedding is missing"),
        (
            ["emb", "tok", "a"],
            {},
            "source_embedding is missing: give the name of that module, because 0 tensors of 3",
        ),
        (["src_emb", "tgt_emb", "a", "b"], {"output": "b"}, None),
        (["emb", "tok", "a"], {"source": "emb", "target": "tok"}, None),
        (["x", "y", "a"], {"source": "x", "target": "y"}, None),
        (["src_emb", "tgt_emb", "tok_out"], {"output": "tok_out"}, None),
    ],
)
def test_role_that_several_matrices_or_none_could_have_is_asked_for(
    names: list[str], given: dict[str, str], message: str | None
) -> None:
    shapes = dict.fromkeys(names, MATRIX)
    if message is None:
        found = around(shapes, **given)
        assert {role: getattr(found, role) for role in given} == given
        assert len(set(found[:3])) == 3
    else:
        assert error_of(around, shapes, **given).startswith(message)


def test_tensors_of_another_shape_are_no_matrices_around_the_stacks() -> None:
    names = {"src_emb.weight": MATRIX, "tgt_emb.weight": MATRIX, "fc.weight": MATRIX}
    more = {
        "fc.bias": (9,),
        "wide.weight": (9, WIDTH + 1),
        "cube.weight": (9, WIDTH, 1),
        "t.encoder.norm.x": MATRIX,
    }
    assert around(names | more)[:3] == tuple(names)
