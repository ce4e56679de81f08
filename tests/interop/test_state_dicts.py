"""State dictionaries of other toolkits: what is kept of them, where they are found, and what a model takes of them."""

import math
import re
import sys
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hf_vanilla_transformer.interop import state_dicts
from hf_vanilla_transformer.interop.state_dicts import Ignored, TensorRef
from tests.interop.foreign import assert_fields
from tests.model_helpers import error_of, tiny_model
from tests.paper import paper_position

ONES = torch.ones(2)
KEPT = [
    "masks",
    "mask.weight",
    "a.masked",
    "loss",
    "model.loss.weight",
    "lossy.weight",
    "position_ids.weight",
    "accent.weight",
    "weight",
]
DROPPED = [
    "mask",
    "tgt_mask",
    "a.b.src_mask",
    "_extra_state",
    "a._extra_state",
    "num_batches_tracked",
    "norm.num_batches_tracked",
    "position_ids",
    "a.position_ids",
    "criterion.weight",
    "loss.weight",
    "loss_fn.a.b",
    "my_loss.x",
    "metric.total",
    "metrics.total",
    "val_bleu.total",
    "acc.x",
    "accuracy.x",
    "train_perplexity.x",
]


def test_masks_counters_and_losses_are_no_weights() -> None:
    state = dict.fromkeys([*KEPT, *DROPPED], ONES) | {"none": None}
    assert sorted(state_dicts.require_tensors(state, "f")) == sorted(KEPT)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("module.w", "w"),
        ("_orig_mod.w", "w"),
        ("module._orig_mod.w", "w"),
        ("_fsdp_wrapped_module.w", "w"),
        ("a.module.w", "a.w"),
        ("a._checkpoint_wrapped_module.b.w", "a.b.w"),
        ("submodule.w", "submodule.w"),
        ("modules.w", "modules.w"),
        ("module", "module"),
    ],
)
def test_traces_of_wrappers_are_removed_from_names(name: str, expected: str) -> None:
    assert list(state_dicts.require_tensors({name: ONES}, "f")) == [expected]


def test_names_that_wrappers_keep_apart_stay() -> None:
    state = {"module.w": ONES, "w": 2 * ONES}
    assert state_dicts.require_tensors(state, "f").keys() == state.keys()


@pytest.mark.parametrize(
    "state",
    [
        None,
        [],
        {},
        3,
        {1: ONES},
        {"a": ONES, None: ONES},
        ONES,
    ],
)
def test_state_dictionary_has_names_and_tensors(state: Any) -> None:
    message = error_of(state_dicts.require_tensors, state, "f: part")
    assert message == f"f: part: a state dictionary is needed there, not {type(state).__name__}"


@pytest.mark.parametrize(
    ("mask", "is_learned"),
    [
        (torch.tensor([0.0, 1.0, 0.0]), False),
        (torch.tensor([-math.inf, 0.0]), False),
        (torch.tensor([0.5, 0.5]), False),
        (torch.tensor([]), False),
        (torch.tensor([1, 2, 3]), False),
        (3, False),
        (torch.tensor([0.0, 0.5, 1.0]), True),
        (torch.tensor([[0.9, 1.1], [1.0, 0.9]]).half(), True),
    ],
)
def test_mask_with_more_than_two_values_is_no_mask(mask: Any, is_learned: bool) -> None:
    state = {"a.head_mask": mask, "w": ONES}
    if is_learned:
        message = error_of(state_dicts.require_tensors, state, "f")
        assert message.startswith("f: a.head_mask has more than two values")
    else:
        assert list(state_dicts.require_tensors(state, "f")) == ["w"]
    assert "a.position_ids" not in state_dicts.require_tensors(
        {"a.position_ids": torch.rand(3), "w": ONES}, "f"
    )


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (3, "f: w is int, not a tensor"),
        ([1.0], "f: w is list, not a tensor"),
        (torch.zeros(1).expand(5), "f: w [5] is larger than its data in the file"),
        (torch.eye(2).to_sparse(), "f: w [2, 2] is larger than its data in the file"),
        (torch.tensor([1.0, math.nan]), "w"),
        (torch.tensor([math.inf]), "w"),
        (torch.rand(9)[2:4], None),
        (torch.rand(4), None),
        (torch.tensor(2.0), None),
    ],
)
def test_tensor_is_a_number_of_the_file(tensor: Any, message: str | None) -> None:
    if message is None:
        assert state_dicts.require_tensors({"w": tensor}, "f")["w"] is tensor
    else:
        error = error_of(state_dicts.require_tensors, {"w": tensor}, "f")
        assert message in error
        if message == "w":
            assert "convert an earlier checkpoint" in error


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["w", "b"], ["w", "b"]),
        (["net.w", "net.b"], ["w", "b"]),
        (["my.net.w", "other"], ["w", "other"]),
        (["net.aw"], ["net.aw"]),
        (["model.w", "model.b", "ema.w", "ema.b"], ["w", "b"]),
        (["w", "b", "ema.w"], ["w", "b"]),
        (["net.w", "state_dict.w"], ["net.w", "state_dict.w"]),
        (["a.module.w", "b.c.w", "b.c.b"], ["w"]),
        (["teacher.w", "student.w"], ["teacher.w", "student.w"]),
        (["model.w", "ema.w", "steps"], ["w", "steps"]),
        (["b"], ["b"]),
    ],
)
def test_prefix_of_known_names_is_removed(names: list[str], expected: list[str]) -> None:
    tensors = {name: ONES for name in names}
    assert list(state_dicts.without_prefix(tensors, ["w"])) == expected


def test_second_known_name_has_a_prefix_too() -> None:
    assert list(state_dicts.without_prefix({"a.v": ONES, "a.u": ONES}, ["w", "v"])) == ["v", "u"]


def test_missing_biases_are_zeros_of_the_outputs() -> None:
    tensors = {
        "a.weight": torch.ones(3, 2).half(),
        "b.weight": torch.ones(4, 2),
        "b.bias": torch.ones(4),
        "c.weight": torch.ones(5),
    }
    filled = state_dicts.with_zero_biases(tensors, re.compile(r"[ab]\.weight"))
    assert filled.keys() == tensors.keys() | {"a.bias"}
    assert filled["a.bias"].tolist() == [0, 0, 0]
    assert filled["a.bias"].dtype == torch.float16
    assert filled["b.bias"].all()


def test_options_are_a_mapping_a_namespace_or_the_state_of_an_object() -> None:
    ignored = Ignored(1, a=2)
    assert state_dicts.plain_options(ignored) == {}
    ignored.__setstate__({"a": 1})
    for options in ({"a": 1}, Namespace(a=1), ignored):
        assert state_dicts.plain_options(options) == {"a": 1}
    for options in (None, 3, [("a", 1)]):
        assert state_dicts.plain_options(options) == {}


def has_w(names: Iterable[str]) -> bool:
    return "w" in list(names)


W = {"w": ONES}


@pytest.mark.parametrize(
    ("saved", "left_out"),
    [
        (W, []),
        ({"a": W}, []),
        ({"a": {"b": {"c": W}}}, []),
        ((1, [2, {"x": W}]), []),
        ([*[0] * 99, W], []),
        ({"ema": {"w": 2 * ONES}, "model": W}, ["ema"]),
        (
            {
                "model": {"w": 2 * ONES},
                "state_dict": W,
                "x": {"w": 3 * ONES},
            },
            ["model", "x"],
        ),
        ({"a": {"model_state": W, "ema": {"w": 2 * ONES}}}, ["a/ema"]),
        ({"a": {"net": {"w": 2 * ONES}}, "module": W}, []),
        ({3: W, "optimizer": {"state": {0: ONES}}}, []),
    ],
)
def test_weights_are_found_in_what_a_trainer_saved(saved: Any, left_out: list[str]) -> None:
    names: list[str] = []
    found = state_dicts.find_weights(saved, has_w, "f", names)
    assert found["w"].tolist() == [1, 1]
    assert names == left_out
    assert state_dicts.find_weights(saved, has_w, "f").keys() == found.keys()


def endless() -> dict[str, Any]:
    saved: dict[str, Any] = {}
    saved["again"] = [saved]
    return saved


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"a": {"b": {"c": {"d": W}}}}, "f: a is dict, not a tensor"),
        ([*[0] * 100, W], "f: a state dictionary is needed there, not list"),
        ({"a": W, "b": dict(W)}, "f: a, b: each contains a model; save the state_dict() of one"),
        (endless(), "f: again is list, not a tensor"),
        ({"model": 3}, "f: model is int, not a tensor"),
    ],
)
def test_files_without_one_model_are_refused(saved: Any, message: str) -> None:
    assert error_of(state_dicts.find_weights, saved, has_w, "f") == message


def test_same_weights_under_two_keys_are_one_model() -> None:
    left_out: list[str] = []
    assert state_dicts.find_weights({"a": W, "b": W}, has_w, "f", left_out) == W
    assert left_out == []


@pytest.mark.parametrize(
    ("models", "named"),
    [("abcd", "a, b, c, d:"), ("edcba", "a, b, c, d …:")],
)
def test_message_names_the_first_four(models: str, named: str) -> None:
    saved = {name: dict(W) for name in models}
    assert error_of(state_dicts.find_weights, saved, has_w, "f").startswith(f"f: {named}")


def module(**state: Any) -> Ignored:
    ignored = Ignored()
    ignored.__setstate__(state)
    return ignored


def test_module_that_was_saved_whole_has_the_weights_of_its_parts() -> None:
    shared = module(_parameters={"b": 2 * ONES})
    root = module(
        _parameters={"w": ONES, "none": None},
        _buffers={"u": 3 * ONES},
        _modules={
            "x": module(_modules={"y": shared}),
            "again": shared,
            "none": None,
        },
    )
    shared.__setstate__({**vars(shared)["state"], "_modules": {"root": root}})
    found = state_dicts.find_weights({"net": root}, has_w, "f")
    assert {name: tensor[0].item() for name, tensor in found.items()} == {
        "w": 1,
        "u": 3,
        "again.b": 2,
    }


def test_deep_modules_end_after_500_characters() -> None:
    def nested(depth: int) -> Ignored:
        part = module(_parameters={"v": ONES})
        for _ in range(depth):
            part = module(_modules={"a" * 49: part})
        return module(_parameters={"w": ONES}, _modules={"m" * 49: part})

    for depth, count in ((8, 2), (9, 2), (10, 1), (11, 1)):  # a name and its dot have 50 characters
        assert len(state_dicts.find_weights(nested(depth), has_w, "f")) == count


PAPER = torch.stack([torch.from_numpy(paper_position(index, 8)) for index in range(9)])
SPLIT = torch.cat([PAPER[:, 0::2], PAPER[:, 1::2]], dim=1)


@pytest.mark.parametrize(
    ("tables", "layout"),
    [
        ([], "sinusoidal"),
        ([PAPER], "sinusoidal"),
        ([PAPER.half(), PAPER[:4]], "sinusoidal"),
        ([SPLIT], "sinusoidal_split"),
        ([SPLIT, SPLIT.bfloat16().float() * 0 + SPLIT], "sinusoidal_split"),
        ([SPLIT, PAPER], "learned"),
        ([PAPER + 1.9e-3], "sinusoidal"),
        ([PAPER - 2.1e-3], "learned"),
        ([PAPER, PAPER + 0.1], "learned"),
        ([PAPER[1:]], "learned"),
    ],
)
def test_layout_of_positions_is_that_of_all_tables(tables: list[Tensor], layout: str) -> None:
    assert state_dicts.position_layout(tables) == layout


def test_same_matrices_have_one_shape_and_the_same_numbers() -> None:
    assert state_dicts.same(ONES, ONES)
    assert state_dicts.same(ONES, ONES.clone())
    for one in (None, 2 * ONES, torch.ones(3), torch.ones(1, 2), torch.tensor([1.0, 2.0])):
        assert not state_dicts.same(one, ONES)


def test_part_of_a_tensor_is_transposed_after_its_rows() -> None:
    tensor = torch.arange(12.0).reshape(4, 3)
    rows = slice(1, 3)
    for reference, expected in (
        (TensorRef("a"), tensor),
        (TensorRef("a", rows), tensor[1:3]),
        (TensorRef("a", 2), tensor[2]),
        (TensorRef("a", transposed=True), tensor.T),
        (TensorRef("a", rows, True), tensor[1:3].T),
    ):
        assert state_dicts.referred(tensor, reference).equal(expected)


def own(**fields: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The fields that weights do not decide, and the weights of a model of this package under its own names."""
    model = tiny_model(**fields)
    kept = ("encoder_attention_heads", "decoder_attention_heads", "final_layer_norm")
    return {name: getattr(model.config, name) for name in kept}, model.state_dict()


@pytest.mark.parametrize(
    ("fields", "decided"),
    [
        ({}, {"vocab_size": 40}),
        (
            {
                "encoder_layers": 1,
                "decoder_layers": 3,
                "encoder_ffn_dim": 20,
                "attention_bias": False,
            },
            {
                "encoder_layers": 1,
                "decoder_layers": 3,
                "encoder_ffn_dim": 20,
                "attention_bias": False,
            },
        ),
        ({"d_model": 16, "decoder_ffn_dim": 24}, {"d_model": 16, "decoder_ffn_dim": 24}),
        ({"lm_head_bias": True}, {"lm_head_bias": True}),
        (
            {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 30},
            {"share_encoder_decoder_embeddings": False, "vocab_size": 40, "decoder_vocab_size": 30},
        ),
        ({"tie_word_embeddings": False}, {"tie_word_embeddings": False}),
        (
            {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
            {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
        ),
    ],
)
def test_weights_decide_sizes_depths_and_tying(
    fields: dict[str, Any], decided: dict[str, Any]
) -> None:
    expected = {
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "share_encoder_decoder_embeddings": True,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "lm_head_bias": False,
    }
    given, tensors = own(**fields)
    found = state_dicts.weights_decide(tensors, str)
    assert (expected | decided).items() <= found.items()
    model = state_dicts.build_model(given, tensors, str)
    assert not model.training
    assert_fields(model.config, **expected | decided)
    for name, tensor in model.state_dict().items():
        assert tensor.equal(tensors[name])


SECOND = "model.encoder.layers.1.fc1.weight"
OUTPUT = "lm_head.weight"


def test_model_of_missing_and_surplus_tensors_names_them() -> None:
    given, tensors = own()
    for count, end in ((1, ""), (4, ""), (5, " …")):
        missing = [
            f"model.decoder.layers.0.self_attn.{part}.bias"
            for part in ("k_proj", "out_proj", "q_proj")
        ]
        missing = [
            *missing,
            "model.decoder.layers.0.self_attn.v_proj.bias",
            "model.encoder.layers.0.fc1.bias",
        ][:count]
        some = {name: tensor for name, tensor in tensors.items() if name not in missing}
        message = error_of(state_dicts.build_model, given, some, str)
        assert message == f"tensors are missing ({count}): {', '.join(missing[:4])}{end}"
    more = tensors | {"b.x": ONES, "a.x": ONES}
    message = error_of(state_dicts.build_model, given, more, str)
    assert message == "tensors that this architecture does not have (2): a.x, b.x"
    assert "(1): b.x" in error_of(state_dicts.build_model, given, more, str, ["a.x"])
    state_dicts.build_model(given, more, str, ["a.x", "b.x"])


def test_copies_of_tied_matrices_may_be_left_out() -> None:
    given, tensors = own()
    assert OUTPUT in tensors
    only = {name: tensor for name, tensor in tensors.items() if name != OUTPUT}
    del only["model.decoder.embed_tokens.weight"]
    model = state_dicts.build_model(given, only, str)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize(
    "field", ["d_model", "encoder_layers", "decoder_layers", "encoder_ffn_dim", "decoder_ffn_dim"]
)
def test_size_that_the_weights_contradict_is_refused(field: str) -> None:
    given, tensors = own()
    decided = state_dicts.weights_decide(tensors, str)[field]
    state_dicts.build_model(given | {field: decided}, tensors, str)
    message = error_of(state_dicts.build_model, given | {field: decided + 1}, tensors, str)
    assert message == f"{field}={decided + 1}, but the weights have {decided}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"encoder_attention_heads": 5}, "the settings do not fit together: "),
        ({"activation_function": "none"}, "the settings do not fit together: "),
        ({"pad_token_id": 40}, "pad_token_id=40: the vocabulary has 40 tokens, from 0 to 39"),
        ({"eos_token_id": -1}, "eos_token_id=-1: the vocabulary has 40 tokens, from 0 to 39"),
        ({"eos_token_id": [2, 40]}, "eos_token_id=40: the vocabulary has 40 tokens"),
        ({"bos_token_id": 40}, "bos_token_id=40: the vocabulary has 40 tokens"),
        ({"unk_token_id": 40}, "unk_token_id=40: the vocabulary has 40 tokens"),
        ({"decoder_start_token_id": 40}, "decoder_start_token_id=40: the vocabulary has 40 tokens"),
        ({"layer_norm_eps": -1e-9}, "layer_norm_eps=-1e-09: a number of at least 0 is needed"),
        (
            {
                "pad_token_id": 39,
                "eos_token_id": 0,
                "bos_token_id": None,
                "unk_token_id": 39,
                "decoder_start_token_id": 0,
                "layer_norm_eps": 0.0,
            },
            None,
        ),
    ],
)
def test_settings_that_no_model_can_have_are_refused(
    fields: dict[str, Any], message: str | None
) -> None:
    given, tensors = own()
    if message is None:
        assert_fields(state_dicts.build_model(given | fields, tensors, str).config, **fields)
    else:
        assert error_of(state_dicts.build_model, given | fields, tensors, str).startswith(message)


@pytest.mark.parametrize(
    ("name", "value", "size"),
    [
        ("pad_token_id", 40, 40),
        ("eos_token_id", 40, 40),
        ("decoder_pad_token_id", 30, 30),
        ("decoder_eos_token_id", 30, 30),
        ("decoder_start_token_id", 30, 30),
        ("unk_token_id", 40, 40),
    ],
)
def test_ids_of_two_vocabularies_have_their_own_bounds(name: str, value: int, size: int) -> None:
    given, tensors = own(share_encoder_decoder_embeddings=False, decoder_vocab_size=30)
    given |= {"decoder_pad_token_id": 1, "decoder_eos_token_id": 2}
    assert_fields(
        state_dicts.build_model(
            given | {name: value - 1},
            tensors,
            str,
        ).config,
        **{name: value - 1},
    )
    known = name.replace("decoder_pad", "pad").replace("decoder_eos", "eos")
    message = f"{known}={value}: the vocabulary has {size} tokens, from 0 to {size - 1}"
    assert error_of(state_dicts.build_model, given | {name: value}, tensors, str) == message


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda name, tensor: tensor.half(), torch.float16),
        (lambda name, tensor: tensor.half() if name == SECOND else tensor, torch.float32),
        (lambda name, tensor: tensor.double(), torch.float64),
    ],
)
def test_model_has_the_dtype_of_its_weights_or_float32(change: Any, expected: torch.dtype) -> None:
    given, tensors = own()
    tensors = {name: change(name, tensor) for name, tensor in tensors.items()}
    model = state_dicts.build_model(given, tensors, str)
    assert {parameter.dtype for parameter in model.parameters()} == {expected}


def test_weights_of_the_model_are_copies() -> None:
    given, tensors = own()
    before = tensors[SECOND].clone()
    with torch.no_grad():
        state_dicts.build_model(given, tensors, str).model.encoder.layers[1].fc1.weight.zero_()
    assert tensors[SECOND].equal(before)


def test_each_tensor_is_used_once_and_has_its_shape() -> None:
    given, tensors = own()
    message = error_of(
        state_dicts.build_model,
        given,
        tensors | {SECOND: tensors[SECOND][:-1]},
        str,
    )
    assert message == f"{SECOND} gives (47, 32) for {SECOND}, which is (48, 32)"
    quantised = tensors | {SECOND: tensors[SECOND].to(torch.int8)}
    assert error_of(state_dicts.build_model, given, quantised, str).startswith(
        f"{SECOND} is int8: quantised"
    )
    first = SECOND.replace("1", "0", 1)
    del tensors[SECOND]

    def locate(name: str) -> str:
        return first if name == SECOND else name

    assert (
        error_of(state_dicts.build_model, given, tensors, locate)
        == f"not used exactly once: {first}"
    )


def test_matrices_are_located_by_rows_and_transposed() -> None:
    given, tensors = own()
    joined = torch.cat([tensors[SECOND], tensors[SECOND.replace("1", "0", 1)]]).T.contiguous()
    names = {SECOND: slice(0, 48), SECOND.replace("1", "0", 1): slice(48, 96)}
    rest = {name: tensor for name, tensor in tensors.items() if name not in names}

    def locate(name: str) -> str | TensorRef:
        return TensorRef("joined", names[name]) if name in names else name

    model = state_dicts.build_model(given, rest | {"joined": joined.T}, locate)
    assert model.state_dict()[SECOND].equal(tensors[SECOND])
    transposed = tensors | {SECOND: tensors[SECOND].T}
    found = state_dicts.build_model(
        given, transposed, lambda name: TensorRef(name, transposed=True) if name == SECOND else name
    )
    assert found.state_dict()[SECOND].equal(tensors[SECOND])
    assert found.state_dict()[SECOND].is_contiguous()


@pytest.mark.parametrize(
    "name", ["model.encoder.embed_tokens.weight", "model.encoder.layers.0.fc1.weight"]
)
@pytest.mark.parametrize("is_flat", [True, False])
def test_state_dictionary_without_a_matrix_is_no_transformer(name: str, is_flat: bool) -> None:
    _, tensors = own()
    matrix = tensors.pop(name)
    if is_flat:
        tensors[name] = matrix.flatten()
    message = error_of(state_dicts.weights_decide, tensors, str)
    assert message.startswith(f"there is no matrix {name} among {len(tensors)} tensors, such as ")
    assert message.count(",") >= 3


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".bin"])
def test_file_of_weights_is_read_by_its_suffix(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"w{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)({"w": ONES}, file)
    assert state_dicts.read_torch_file(file)["w"].equal(ONES)
    assert state_dicts.read_torch_file(str(file))["w"].equal(ONES)
    assert "no such file" in error_of(state_dicts.read_torch_file, tmp_path / f"x{suffix}")
    assert "folder" in error_of(state_dicts.read_torch_file, tmp_path)


@pytest.mark.parametrize(("count", "is_read"), [(201, True), (202, False)])
def test_file_has_objects_of_two_hundred_classes_at_most(
    count: int, is_read: bool, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library: Any = ModuleType("some_library")
    for number in range(count):
        name = f"Class{number}"
        setattr(library, name, type(name, (), {"__module__": "some_library"}))
    monkeypatch.setitem(sys.modules, "some_library", library)
    objects = [getattr(library, f"Class{number}")() for number in range(count)]
    torch.save({"w": ONES, "objects": objects}, model_file)
    monkeypatch.undo()
    if is_read:
        assert state_dicts.read_torch_file(model_file)["w"].equal(ONES)
    else:
        assert "some_library" in error_of(state_dicts.read_torch_file, model_file)
