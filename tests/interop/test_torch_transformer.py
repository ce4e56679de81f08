"""State dictionaries of `torch.nn.Transformer` give its logits, under the names of tutorials."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn

from hf_vanilla_transformer.interop import torch_transformer
from hf_vanilla_transformer.interop.converted import Converted
from hf_vanilla_transformer.interop.vocabularies import given_tokenizer
from hf_vanilla_transformer.text.tokenizer_training import fast_tokenizer
from hf_vanilla_transformer.utils.errors import UserError
from tests.interop.checkpoints.torch_transformer import PEER, PYTORCH_TUTORIAL, TUTORIAL_OPTIONS, AroundTorch
from tests.interop.foreign import SOURCES, TARGETS, Record, assert_same_logits, converted
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
    **{"source_embedding": "embed_in", "target_embedding": "embed_out", "output_layer": "head"},
    **{"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "scale_embedding": True},
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
    ids=["PyTorch's tutorial", "gelu", "learned positions", "own names", "shared", "no biases", "pre-norm"],
)
def test_torch_transformer_gives_its_logits(names, settings, options, model_file, compared):
    theirs = saved(AroundTorch(names, **settings), model_file)
    options = {**TUTORIAL_OPTIONS, **options}
    ours, tokenizer, _ = compared(PEER, "torch", model_file, theirs, heads=4, **options)
    assert tokenizer is None and ours.config.final_layer_norm
    assert ours.config.share_encoder_decoder_embeddings is settings.get("shared", False)


def test_torch_transformer_without_final_norm(model_file: Path, compared: Compare) -> None:
    common = {"d_model": 32, "nhead": 4, "dim_feedforward": 40, "dropout": 0.0, "batch_first": True}
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**common), 2, enable_nested_tensor=False)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**common), 3)
    settings = {"custom_encoder": encoder, "custom_decoder": decoder, "batch_first": True}
    theirs = saved(AroundTorch(PYTORCH_TUTORIAL, **settings), model_file)
    ours, _, _ = compared(PEER, "torch", model_file, theirs, heads=4, **TUTORIAL_OPTIONS)
    assert not ours.config.final_layer_norm
    weights = theirs.state_dict() | {f"transformer.encoder.norm.{part}": torch.ones(32) for part in ("weight", "bias")}
    assert "norm" in error_of(from_torch, weights, 4)


def with_prefix(prefix: str, weights: dict[str, Tensor], **others: Any) -> OrderedDict:
    return OrderedDict({f"{prefix}{name}": weight for name, weight in weights.items()} | others)


class Whole(nn.Module):
    """What a trainer wraps around a model."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net, self.criterion = net, nn.CrossEntropyLoss(weight=torch.ones(3))


WRAPPERS: dict[str, Callable[[dict], Any]] = {
    **{
        key: lambda weights, key=key: {key: weights, "epoch": 3}
        for key in ("state_dict", "model_state_dict", "module")
    },
    **{key: lambda weights, key=key: {"optimizer": {"state": {}}, key: weights} for key in ("net", "ema_state_dict")},
    **{
        p: lambda weights, p=p: with_prefix(p, weights)
        for p in ("module.", "_orig_mod.", "module._orig_mod.", "my.net.")
    },
    "tuple": lambda weights: (weights, {"lr": 0.1}),
    "list of dictionaries": lambda weights: [{"model": weights}, {"model": {"name": "x"}}, {"model": 3}],
    "nested": lambda weights: {"trainer": {"checkpoint": {"params": weights}}},
    "model before ema": lambda weights: {"ema": {name: w + 1 for name, w in weights.items()}, "model": weights},
    "Lightning": lambda weights: {
        "state_dict": with_prefix(
            "net.", weights, **{"criterion.weight": torch.ones(3), "val_bleu.total": torch.ones(1)}
        ),
        "hyper_parameters": {"lr": np.float64(0.1)},
    },
    "buffers": lambda weights: {**weights, "src_mask": None, "tgt_mask": torch.full((2, 2), -torch.inf)},
    "loss at the root": lambda weights: {**weights, "loss_fn.weight": torch.ones(3), "_extra_state": torch.ones(1)},
    "torch's average": lambda weights: with_prefix("module.", weights, n_averaged=torch.tensor(3)),
    "average next to it": lambda weights: {
        **with_prefix("ema_model.module.", {name: w + 1 for name, w in weights.items()}),
        **with_prefix("model.", weights, step=torch.tensor([7])),
    },
    "average at the root": lambda weights: {
        **weights,
        **with_prefix("ema.", {name: w + 1 for name, w in weights.items()}),
        "causal": torch.ones(5, 5, dtype=torch.bool),
    },
    "checkpointed": lambda weights: {
        name.replace("layers.0", "layers.0._checkpoint_wrapped_module"): weight for name, weight in weights.items()
    },
}


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_torch_wrappers_of_trainers_are_removed(wrap: str, model_file: Path) -> None:
    weights = randomise(AroundTorch(PYTORCH_TUTORIAL)).state_dict()
    plain = from_torch(weights, 4).model
    torch.save(WRAPPERS[wrap](weights), model_file)
    other = from_torch(model_file, 4).model
    assert all(a.equal(b) for a, b in zip(plain.parameters(), other.parameters(), strict=True))


def test_torch_module_that_was_saved_whole_is_read_without_its_code(model_file: Path) -> None:
    theirs = randomise(Whole(AroundTorch(PYTORCH_TUTORIAL)))
    torch.save(theirs, model_file)
    ours, plain = from_torch(model_file, 4), from_torch(theirs.net.state_dict(), 4)
    assert all(a.equal(b) for a, b in zip(plain.model.parameters(), ours.model.parameters(), strict=True))


def nested(depth: int) -> Any:
    inner: Any = {"x": 1}
    for _ in range(depth):
        inner = [inner] * 50
    return inner


@pytest.mark.parametrize(
    "saved",
    [nested(30), {10**5000: 1}, {("a",): torch.ones(1)}, 7, [], {"state_dict": 3}, torch.ones(3), {"a": {"b": None}}],
    ids=["nested", "number", "tuple", "integer", "empty", "no dictionary", "tensor", "nothing"],
)
def test_torch_files_without_a_model_give_one_line(saved: Any, model_file: Path) -> None:
    torch.save(saved, model_file)
    error = error_of(from_torch, model_file, 4)
    assert "model.pt" in error and len(error) < 500


def test_torch_surplus_weights_are_refused_or_named() -> None:
    weights = randomise(AroundTorch(PYTORCH_TUTORIAL)).state_dict()
    with pytest.raises(UserError, match="adapter"):
        from_torch({**weights, "transformer.encoder.layers.0.adapter.scale": torch.ones(3)}, 4)
    assert "highway" in error_of(lambda: from_torch({**weights, "highway.weight": torch.ones(3, 3)}, 4))
    assert "highway" in "".join(from_torch(with_prefix("net.", weights, **{"highway.g": torch.ones(3)}), 4).notes)
    with pytest.raises(UserError, match="student.*teacher"):
        from_torch({"teacher": weights, "student": dict(weights)}, 4)
    with pytest.raises(UserError, match="student.*teacher"):
        from_torch(with_prefix("teacher.", weights) | with_prefix("student.", weights), 4)


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
    ],
)
def test_torch_options_that_are_missing_or_unknown_are_named(names: dict, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_torch(AroundTorch(names).state_dict(), **options)


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
    assert all(name in notes for name in ("activation=relu", "post-norm", "norm_first", "sinusoidal positions"))
    given = {"activation": "relu", "norm_first": False, "positions": "sinusoidal"}
    assert not from_torch(state, 4, **OWN_OPTIONS, **given).notes


def test_average_next_to_the_model_is_named(model_file: Path) -> None:
    theirs = AroundTorch(PYTORCH_TUTORIAL)
    average = torch.optim.swa_utils.AveragedModel(theirs)
    torch.save({"model": theirs.state_dict(), "ema": average.state_dict()}, model_file)
    assert "left out: ema" in "; ".join(from_torch(model_file, 4).notes)
    torch.save(WRAPPERS["average next to it"](theirs.state_dict()), model_file)
    assert "an average" in "; ".join(from_torch(model_file, 4).notes)


def test_learned_gates_with_the_name_of_a_mask_are_not_lost() -> None:
    state = AroundTorch(PYTORCH_TUTORIAL).state_dict()
    causal = torch.full((9, 9), float("-inf")).triu(1)
    assert "mask" not in "; ".join(from_torch(state | {"transformer.tgt_mask": causal}, 4).notes)
    gates = {"transformer.encoder.layers.0.self_attn.head_mask": torch.tensor([0.9, 1.1, 0.4, 0.7])}
    assert "head_mask" in error_of(from_torch, state | gates, 4)


def test_layers_of_other_code_are_refused_with_the_remedy() -> None:
    state = AroundTorch(PYTORCH_TUTORIAL).state_dict()
    other = {name.replace("in_proj_weight", "w_qkv"): weight for name, weight in state.items()}
    with pytest.raises(UserError, match="rename.*self_attn.in_proj_weight") as raised:
        from_torch(other, 4)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", ["tokenizer.json", "folder"])
def test_torch_tokenizer_is_given(kind: str, model_file: Path, tmp_path: Path) -> None:
    """As Umar Jamil's tutorial trains and saves one."""
    sides = []
    for name, lines in (("en", SOURCES), ("de", TARGETS)):
        backend = Tokenizer(models.WordLevel(unk_token="[UNK]"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        special = ["[UNK]", "[PAD]", "[SOS]", "[EOS]"]
        backend.train_from_iterator(lines, trainers.WordLevelTrainer(special_tokens=special, vocab_size=30))
        sides.append(backend)
        backend.save(str(tmp_path / f"{name}.json"))
        fast_tokenizer(Tokenizer.from_file(str(tmp_path / f"{name}.json")), eos_token="[EOS]").save_pretrained(
            tmp_path / name
        )
    theirs = saved(AroundTorch(PYTORCH_TUTORIAL), model_file)
    suffix = {"tokenizer.json": ".json", "folder": ""}[kind]
    files = {name: tmp_path / f"{side}{suffix}" for name, side in (("tokenizer", "en"), ("target_tokenizer", "de"))}
    ours, source, target = converted("torch", model_file, tmp_path / "ours", heads=4, **TUTORIAL_OPTIONS, **files)
    text = "a cat runs in the snow ."
    ids = sides[0].encode(text).ids
    assert source(text)["input_ids"] == ([*ids, 3] if kind == "folder" else [2, *ids, 3])
    assert target(TARGETS[0])["input_ids"] == [*sides[1].encode(TARGETS[0]).ids, 3]
    assert target.decode(target(TARGETS[0])["input_ids"], skip_special_tokens=True) == sides[1].decode(
        sides[1].encode(TARGETS[0]).ids
    )
    assert theirs is not None and ours.config.bos_token_id == 2
    assert "<pad>" not in "; ".join(from_torch(model_file, 4, **files).notes)


def write_tokens(path: Path, *tokens: str) -> None:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    Tokenizer(models.WordLevel(vocabulary, unk_token=tokens[0])).save(str(path))


def test_torch_tokenizer_with_other_ids_or_more_tokens_than_the_model_is_named(tmp_path: Path) -> None:
    state = AroundTorch(PYTORCH_TUTORIAL).state_dict()
    file = tmp_path / "t.json"
    write_tokens(file, "<pad>", "<unk>", "<bos>", "<eos>", "a")
    notes = from_torch(state, 4, tokenizer=file).notes
    assert [f"{name}_token_id={number}" in "; ".join(notes) for name, number in (("pad", 1), ("unk", 0))] == [True] * 2
    assert not any("bos_token_id" in note or "eos_token_id" in note for note in notes)
    found = from_torch(state, 4, tokenizer=file, pad_token_id=0, unk_token_id=1)
    assert not any("token_id" in note for note in found.notes)
    assert found.tokenizer is not None and found.tokenizer.get_vocab()["<pad>"] == 0
    write_tokens(file, *map(str, range(99)))
    assert "99 tokens" in error_of(from_torch, state, 4, tokenizer=file)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.json", "[1]"),
        ("t.json", "{"),
        ("t.json", '{"model": {"type": "Evil"}}'),
        ("t.txt", "a\nb\n"),
    ],
)
def test_torch_bad_tokenizer_gives_one_line(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    state = AroundTorch(PYTORCH_TUTORIAL).state_dict()
    assert name in error_of(from_torch, state, 4, tokenizer=tmp_path / name)


def test_tokenizer_json_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text('{"version": "1.0", "model": {"type": "Other"}}', encoding="utf-8")
    assert f"{file}: no tokenizer.json" in error_of(given_tokenizer, file, {}, starts=False)
