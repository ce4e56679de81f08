"""State dictionaries of `torch.nn.Transformer` give its logits, under the names of tutorials."""

import re
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn

from hf_vanilla_transformer.interop import torch_transformer
from hf_vanilla_transformer.interop.converted import Converted
from hf_vanilla_transformer.text.tokenizer_training import fast_tokenizer
from tests.interop.checkpoints.torch_transformer import (
    PEER,
    PYTORCH_TUTORIAL,
    TUTORIAL_OPTIONS,
    AroundTorch,
)
from tests.interop.conftest import Compare
from tests.interop.foreign import SOURCES, TARGETS, assert_fields, converted
from tests.model_helpers import error_of, randomise

PERSSON = {
    "source": "src_word_embedding",
    "target": "trg_word_embedding",
    "output": "fc_out",
    "source_positions": "src_position_embedding",
    "target_positions": "trg_position_embedding",
}
OWN = {"source": "embed_in", "target": "embed_out", "output": "head"}
OWN_OPTIONS = {
    "source_embedding": "embed_in",
    "target_embedding": "embed_out",
    "output_layer": "head",
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "scale_embedding": True,
}


def from_torch(source: Any, heads: int | None = None, **options: Any) -> Converted:
    return torch_transformer.from_torch(source, heads, **{**TUTORIAL_OPTIONS, **options})


def saved(model: nn.Module, path: Path) -> nn.Module:
    model = randomise(model).eval()
    torch.save(model.state_dict(), path)
    return model


@pytest.mark.filterwarnings("ignore:.*nested.tensor")
@pytest.mark.parametrize(
    ("names", "settings", "options"),
    [
        (PYTORCH_TUTORIAL | {"table": "positional_encoding.pos_embedding"}, {}, {}),
        (PYTORCH_TUTORIAL, {"activation": "gelu", "batch_first": True}, {"activation": "gelu"}),
        (PERSSON, {"scale": False}, {"scale_embedding": False}),
        (OWN, {"layer_norm_eps": 1e-3}, OWN_OPTIONS | {"layer_norm_eps": 1e-3}),
        (OWN, {"shared": True}, OWN_OPTIONS),
        (OWN, {"bias": False}, OWN_OPTIONS),
        (OWN, {"norm_first": True}, OWN_OPTIONS | {"norm_first": True}),
    ],
    ids=[
        "PyTorch's tutorial",
        "gelu",
        "learned positions",
        "own names",
        "shared",
        "no biases",
        "pre-norm",
    ],
)
def test_torch_transformer_gives_its_logits(names, settings, options, model_file, compared):
    theirs = saved(AroundTorch(names, **settings), model_file)
    options = {**TUTORIAL_OPTIONS, **options}
    ours, tokenizer, _ = compared(PEER, "torch", model_file, theirs, heads=4, **options)
    assert tokenizer is None
    assert_fields(
        ours.config,
        final_layer_norm=True,
        share_encoder_decoder_embeddings=settings.get("shared", False),
    )


def test_torch_transformer_without_final_norm(model_file: Path, compared: Compare) -> None:
    common = {
        "d_model": 32,
        "nhead": 4,
        "dim_feedforward": 40,
        "dropout": 0.0,
        "batch_first": True,
    }
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(**common), 2, enable_nested_tensor=False
    )
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**common), 3)
    around = AroundTorch(
        PYTORCH_TUTORIAL,
        custom_encoder=encoder,
        custom_decoder=decoder,
        batch_first=True,
    )
    theirs = saved(around, model_file)
    ours, _, _ = compared(PEER, "torch", model_file, theirs, heads=4, **TUTORIAL_OPTIONS)
    assert not ours.config.final_layer_norm
    norm = {f"transformer.encoder.norm.{part}": torch.ones(32) for part in ("weight", "bias")}
    assert "norm" in error_of(from_torch, theirs.state_dict() | norm, 4)


Weights = dict[str, Tensor]


@pytest.fixture
def state() -> Weights:
    """The state dictionary of PyTorch's tutorial."""
    return AroundTorch(PYTORCH_TUTORIAL).state_dict()


def with_prefix(prefix: str, weights: Weights, **others: Any) -> OrderedDict:
    return OrderedDict({f"{prefix}{name}": weight for name, weight in weights.items()} | others)


class Whole(nn.Module):
    """What a trainer wraps around a model."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net
        self.criterion = nn.CrossEntropyLoss(weight=torch.ones(3))


def of_another_model(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight + 1 for name, weight in weights.items()}


KEYS = ("state_dict", "model_state_dict", "module", "net", "ema_state_dict")
PREFIXES = ("module.", "_orig_mod.", "module._orig_mod.", "my.net.")
WRAPPERS: dict[str, Callable[[dict], Any]] = {
    **{
        key: lambda weights, key=key: {
            "optimizer": {"state": {}},
            key: weights,
            "epoch": 3,
        }
        for key in KEYS
    },
    **{prefix: partial(with_prefix, prefix) for prefix in PREFIXES},
    "tuple": lambda weights: (weights, {"lr": 0.1}),
    "Lightning": lambda weights: {
        "state_dict": {
            **with_prefix("net.", weights),
            "criterion.weight": torch.ones(3),
            "val_bleu.total": torch.ones(1),
        },
        "hyper_parameters": {"lr": np.float64(0.1)},
    },
    "buffers": lambda weights: {
        **weights,
        "src_mask": None,
        "tgt_mask": torch.full((2, 2), -torch.inf),
    },
    "loss at the root": lambda weights: {
        **weights,
        "loss_fn.weight": torch.ones(3),
        "_extra_state": torch.ones(1),
    },
    "torch's average": lambda weights: with_prefix("module.", weights, n_averaged=torch.tensor(3)),
    "average next to it": lambda weights: {
        **with_prefix("ema_model.module.", of_another_model(weights)),
        **with_prefix("model.", weights, step=torch.tensor([7])),
    },
    "average at the root": lambda weights: {
        **weights,
        **with_prefix("ema.", of_another_model(weights)),
        "causal": torch.ones(5, 5, dtype=torch.bool),
    },
    "checkpointed": lambda weights: {
        name.replace("layers.0", "layers.0._checkpoint_wrapped_module"): weight
        for name, weight in weights.items()
    },
}


def assert_same_weights(saved: Path, weights: dict[str, Tensor]) -> None:
    """Convert both."""
    pairs = zip(
        from_torch(saved, 4).model.parameters(),
        from_torch(weights, 4).model.parameters(),
        strict=True,
    )
    assert all(found.equal(expected) for found, expected in pairs)


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_torch_wrappers_of_trainers_are_removed(wrap: str, model_file: Path) -> None:
    weights = randomise(AroundTorch(PYTORCH_TUTORIAL)).state_dict()
    torch.save(WRAPPERS[wrap](weights), model_file)
    assert_same_weights(model_file, weights)


def test_torch_module_that_was_saved_whole_is_read_without_its_code(model_file: Path) -> None:
    theirs = randomise(Whole(AroundTorch(PYTORCH_TUTORIAL)))
    torch.save(theirs, model_file)
    assert_same_weights(model_file, theirs.net.state_dict())


def nested(depth: int) -> Any:
    inner: Any = {"x": 1}
    for _ in range(depth):
        inner = [inner] * 50
    return inner


@pytest.mark.parametrize(
    "saved",
    [
        pytest.param(nested(30), id="nested"),
        pytest.param({10**5000: 1}, id="number"),
        pytest.param({("a",): torch.ones(1)}, id="tuple"),
        7,
        pytest.param([], id="empty"),
        pytest.param({"state_dict": 3}, id="no dictionary"),
        pytest.param(torch.ones(3), id="tensor"),
        pytest.param({"a": {"b": None}}, id="nothing"),
    ],
)
def test_torch_files_without_a_model_give_one_line(saved: Any, model_file: Path) -> None:
    torch.save(saved, model_file)
    error = error_of(from_torch, model_file, 4)
    assert "model.pt" in error
    assert len(error) < 500


def test_torch_surplus_weights_are_refused_or_named(state: Weights) -> None:
    for given, message in (
        (state | {"transformer.encoder.layers.0.adapter.scale": torch.ones(3)}, "adapter"),
        (state | {"highway.weight": torch.ones(3, 3)}, "highway"),
        ({"teacher": state, "student": dict(state)}, "student.*teacher"),
        (with_prefix("teacher.", state) | with_prefix("student.", state), "student.*teacher"),
    ):
        assert re.search(message, error_of(from_torch, given, 4))
    found = from_torch(with_prefix("net.", state) | {"highway.g": torch.ones(3)}, 4)
    assert "highway" in "".join(found.notes)


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (PYTORCH_TUTORIAL, {}, "heads"),
        (PYTORCH_TUTORIAL, {"heads": 5}, "d_model=32"),
        (OWN, {"heads": 4, **OWN_OPTIONS, "scale_embedding": None}, "scale_embedding"),
        (OWN, {"heads": 4, **OWN_OPTIONS, "output_layer": "neck"}, "neck"),
        ({"source": "a", "target": "b", "output": "c"}, {"heads": 4}, "source_embedding"),
        (OWN, {"heads": 4, **OWN_OPTIONS, "pad_token_id": None}, "pad_token_id"),
        (PYTORCH_TUTORIAL, {"heads": 4, "activation": "swiglu"}, "activation_function"),
        (PYTORCH_TUTORIAL, {"heads": 4, "positions": "rotary"}, "positions=rotary"),
        (PYTORCH_TUTORIAL, {"heads": 4, "positions": "learned"}, "positions=learned"),
        (
            PYTORCH_TUTORIAL | {"table": "positional_encoding.pos_embedding"},
            {"heads": 4, "positions": "sinusoidal_split"},
            "positions=sinusoidal_split: positional_encoding.pos_embedding is a table of sinusoidal positions",
        ),
    ],
)
def test_torch_options_that_are_missing_or_unknown_are_named(
    names: dict, options: dict, message: str
) -> None:
    assert message in error_of(from_torch, AroundTorch(names).state_dict(), **options)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("eos_token_id", 99),
        ("pad_token_id", 99),
        ("bos_token_id", -1),
        ("bos_token_id", 99),
        ("layer_norm_eps", -1.0),
    ],
)
def test_torch_values_that_no_model_can_have_are_refused(name: str, value: float) -> None:
    weights = AroundTorch(OWN).state_dict()
    options: dict[str, Any] = OWN_OPTIONS | {name: value}
    assert f"={value}: " in error_of(from_torch, weights, 4, **options)


@pytest.mark.filterwarnings("ignore:.*nested.tensor")
def test_what_a_state_dictionary_of_unknown_code_lacks_is_named() -> None:
    state = AroundTorch(OWN).state_dict()
    notes = "; ".join(from_torch(state, 4, **OWN_OPTIONS).notes)
    for name in ("activation=relu", "post-norm", "norm_first", "sinusoidal positions"):
        assert name in notes
    given = {"activation": "relu", "norm_first": False, "positions": "sinusoidal"}
    assert not from_torch(state, 4, **OWN_OPTIONS, **given).notes


def test_tables_of_positions_are_as_long_as_the_shorter_one_and_may_be_named() -> None:
    state = AroundTorch(PERSSON).state_dict()
    short = state["trg_position_embedding.weight"][:15]
    config = from_torch(state | {"trg_position_embedding.weight": short}, 4).model.config
    assert_fields(config, position_encoding_type="learned", max_position_embeddings=15)
    table = torch.randn(7, 1, 32)
    named = {name: tensor for name, tensor in state.items() if "position" not in name} | {
        "x.rows": table
    }
    model = from_torch(named, 4, positions="x.rows").model
    for stack in (model.model.encoder, model.model.decoder):
        assert stack.embed_positions.weight.equal(table[:, 0])


def test_average_next_to_the_model_is_named(model_file: Path) -> None:
    theirs = AroundTorch(PYTORCH_TUTORIAL)
    average = torch.optim.swa_utils.AveragedModel(theirs)
    torch.save({"model": theirs.state_dict(), "ema": average.state_dict()}, model_file)
    assert "left out: ema" in "; ".join(from_torch(model_file, 4).notes)
    torch.save(WRAPPERS["average next to it"](theirs.state_dict()), model_file)
    assert "an average" in "; ".join(from_torch(model_file, 4).notes)


def test_learned_gates_with_the_name_of_a_mask_are_not_lost(state: Weights) -> None:
    causal = torch.full((9, 9), float("-inf")).triu(1)
    assert "mask" not in "; ".join(from_torch(state | {"transformer.tgt_mask": causal}, 4).notes)
    gates = {"transformer.encoder.layers.0.self_attn.head_mask": torch.tensor([0.9, 1.1, 0.4, 0.7])}
    assert "head_mask" in error_of(from_torch, state | gates, 4)


def test_layers_of_other_code_are_refused_with_the_remedy(state: Weights) -> None:
    other = {name.replace("in_proj_weight", "w_qkv"): weight for name, weight in state.items()}
    assert re.search("rename.*self_attn.in_proj_weight", error_of(from_torch, other, 4))


@pytest.mark.parametrize("kind", ["tokenizer.json", "folder"])
def test_torch_tokenizer_is_given(kind: str, model_file: Path, tmp_path: Path) -> None:
    """As Umar Jamil's tutorial trains and saves one."""
    sides = []
    for name, lines in (("en", SOURCES), ("de", TARGETS)):
        backend = Tokenizer(models.WordLevel(unk_token="[UNK]"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        special = ["[UNK]", "[PAD]", "[SOS]", "[EOS]"]
        backend.train_from_iterator(
            lines, trainers.WordLevelTrainer(special_tokens=special, vocab_size=30)
        )
        sides.append(backend)
        file = tmp_path / f"{name}.json"
        backend.save(str(file))
        copy = Tokenizer.from_file(str(file))
        fast_tokenizer(copy, eos_token="[EOS]").save_pretrained(file.with_suffix(""))
    saved(AroundTorch(PYTORCH_TUTORIAL), model_file)
    suffix = {"tokenizer.json": ".json", "folder": ""}[kind]
    files = {
        "tokenizer": tmp_path / f"en{suffix}",
        "target_tokenizer": tmp_path / f"de{suffix}",
    }
    ours, source, target = converted(
        "torch",
        model_file,
        tmp_path / "ours",
        heads=4,
        **TUTORIAL_OPTIONS,
        **files,
    )
    text = "a cat runs in the snow ."
    ids = sides[0].encode(text).ids
    assert source(text)["input_ids"] == ([*ids, 3] if kind == "folder" else [2, *ids, 3])
    ids = sides[1].encode(TARGETS[0]).ids
    assert target(TARGETS[0])["input_ids"] == [*ids, 3]
    assert target.decode([*ids, 3], skip_special_tokens=True) == sides[1].decode(ids)
    assert_fields(ours.config, bos_token_id=2)
    assert "<pad>" not in "; ".join(from_torch(model_file, 4, **files).notes)


def write_tokens(path: Path, *tokens: str) -> None:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    Tokenizer(models.WordLevel(vocabulary, unk_token=tokens[0])).save(str(path))


def test_torch_tokenizer_with_other_ids_or_more_tokens_than_the_model_is_named(
    state: Weights, tmp_path: Path
) -> None:
    file = tmp_path / "t.json"
    write_tokens(file, "<pad>", "<unk>", "<bos>", "<eos>", "a")
    notes = "; ".join(from_torch(state, 4, tokenizer=file).notes)
    assert "pad_token_id=1" in notes
    assert "unk_token_id=0" in notes
    assert not re.search("[be]os_token_id", notes)
    found = from_torch(state, 4, tokenizer=file, pad_token_id=0, unk_token_id=1)
    assert "token_id" not in "; ".join(found.notes)
    assert found.tokenizer is not None
    assert found.tokenizer.get_vocab()["<pad>"] == 0
    write_tokens(file, *map(str, range(99)))
    assert "99 tokens" in error_of(from_torch, state, 4, tokenizer=file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", ""),
        ("{", ""),
        ('{"version": "1.0", "model": {"type": "Evil"}}', ": no tokenizer.json"),
        ("a\nb\n", ""),
    ],
)
def test_torch_bad_tokenizer_gives_one_line(
    content: str, message: str, state: Weights, tmp_path: Path
) -> None:
    file = tmp_path / "t.json"
    file.write_text(content)
    assert f"{file}{message}" in error_of(from_torch, state, 4, tokenizer=file)
