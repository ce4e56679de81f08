"""State dictionaries of `torch.nn.Transformer` give its logits, under the names of well-known tutorials."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.interop.torch_transformer import from_torch
from tests.interop.checkpoints.torch_transformer import PEER, PYTORCH_TUTORIAL, SIZES, AroundTorch
from tests.interop.foreign import Record, assert_same_logits, converted
from tests.interop.restatement import Restatement, assert_restated
from tests.model_helpers import randomise

TREVETT = "NumPy restatement of pytorch-seq2seq, tutorial 6"


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
        (PERSSON, {"scale": False}, {}),
        (OWN, {"layer_norm_eps": 1e-3}, OWN_OPTIONS | {"layer_norm_eps": 1e-3}),
        (OWN, {"shared": True}, OWN_OPTIONS),
        (OWN, {"bias": False}, OWN_OPTIONS),
        (OWN, {"norm_first": True}, OWN_OPTIONS | {"norm_first": True}),
    ],
    ids=["PyTorch's tutorial", "gelu", "learned positions", "own names", "shared", "no biases", "pre-norm"],
)
def test_torch_transformer_gives_its_logits(
    names: dict, settings: dict, options: dict, tmp_path: Path, record_property: Record
) -> None:
    theirs = saved(AroundTorch(names, **settings), tmp_path / "model.pt")
    ours, tokenizer, _ = converted("torch", tmp_path / "model.pt", tmp_path / "ours", heads=4, **options)
    record_property("logits", (PEER, assert_same_logits(ours, theirs)))
    assert tokenizer is None and ours.config.final_layer_norm
    assert ours.config.share_encoder_decoder_embeddings is settings.get("shared", False)


def test_torch_transformer_without_final_norm(tmp_path: Path, record_property: Record) -> None:
    common = {"d_model": 32, "nhead": 4, "dim_feedforward": 40, "dropout": 0.0, "batch_first": True}
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**common), 2, enable_nested_tensor=False)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**common), 3)
    settings = {"custom_encoder": encoder, "custom_decoder": decoder, "batch_first": True}
    theirs = saved(AroundTorch(PYTORCH_TUTORIAL, **settings), tmp_path / "model.pt")
    ours, _, _ = converted("torch", tmp_path / "model.pt", tmp_path / "ours", heads=4)
    record_property("logits", (PEER, assert_same_logits(ours, theirs)))
    assert not ours.config.final_layer_norm
    weights = theirs.state_dict() | {f"transformer.encoder.norm.{part}": torch.ones(32) for part in ("weight", "bias")}
    with pytest.raises(UserError, match="stack"):
        from_torch(weights, 4)


@pytest.mark.parametrize("wrap", ["state_dict", "model_state_dict", "module.", "_orig_mod."])
def test_torch_state_dict_wrappers_are_removed(wrap: str, tmp_path: Path) -> None:
    weights = randomise(AroundTorch(PYTORCH_TUTORIAL)).state_dict()
    plain = from_torch(weights, 4).model
    wrapped: Any = {wrap: weights, "epoch": 3}
    if wrap.endswith("."):
        wrapped = OrderedDict((wrap + name, weight) for name, weight in weights.items())
    torch.save(wrapped, tmp_path / "model.pt")
    other = from_torch(tmp_path / "model.pt", 4).model
    assert all(a.equal(b) for a, b in zip(plain.parameters(), other.parameters(), strict=True))


def trevett_weights() -> dict[str, np.ndarray]:
    """pytorch-seq2seq, tutorial 6: its modules' names; positions are learned."""
    shapes: dict[str, tuple[int, ...]] = {}
    for stack, size in (("encoder", 23), ("decoder", 29)):
        shapes[f"{stack}.tok_embedding.weight"], shapes[f"{stack}.pos_embedding.weight"] = (size, 12), (15, 12)
        attentions = ["self_attention"] + ["encoder_attention"] * (stack == "decoder")
        norms = ["self_attn_layer_norm", "ff_layer_norm"] + ["enc_attn_layer_norm"] * (stack == "decoder")
        for i in range(2):
            layer = f"{stack}.layers.{i}"
            linear = {f"{layer}.{a}.fc_{part}": (12, 12) for a in attentions for part in "qkvo"}
            linear[f"{layer}.positionwise_feedforward.fc_1"] = (20, 12)
            linear[f"{layer}.positionwise_feedforward.fc_2"] = (12, 20)
            shapes |= with_biases(linear) | {
                f"{layer}.{n}.{part}": (12,) for n in norms for part in ("weight", "bias")
            }
    return drawn(shapes | with_biases({"decoder.fc_out": (29, 12)}))


def with_biases(linear: dict[str, tuple[int, int]]) -> dict[str, tuple[int, ...]]:
    weights = {f"{name}.weight": shape for name, shape in linear.items()}
    return weights | {f"{name}.bias": shape[:1] for name, shape in linear.items()}


def drawn(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {name: generator.normal(0, 0.4, shape).astype(np.float32) for name, shape in shapes.items()}


def test_torch_trevett_tutorial_gives_its_logits(tmp_path: Path, record_property: Record) -> None:
    weights = trevett_weights()
    attention = {"self": "self_attention", "cross": "encoder_attention"}
    norm = {"self": "self_attn_layer_norm", "cross": "enc_attn_layer_norm", "ffn": "ff_layer_norm"}

    def pair(name: str) -> tuple[np.ndarray, np.ndarray]:
        if name == "output":
            theirs = "decoder.fc_out"
        else:
            stack, layer, kind, part = name.split(".")
            if part == "norm":
                theirs = f"{stack}.layers.{layer}.{norm[kind]}"
                return weights[f"{theirs}.weight"], weights[f"{theirs}.bias"]
            module = "positionwise_feedforward" if kind == "ffn" else attention[kind]
            theirs = f"{stack}.layers.{layer}.{module}.fc_{part}"
        return weights[f"{theirs}.weight"].T.astype(float), weights[f"{theirs}.bias"]

    stacks = {"source": "encoder", "target": "decoder"}
    theirs = Restatement(
        pair,
        embedding=lambda side: weights[f"{stacks[side]}.tok_embedding.weight"].astype(float),
        position=lambda index, side: weights[f"{stacks[side]}.pos_embedding.weight"][index],
        layers=(2, 2),
        heads=3,
    )
    torch.save({name: torch.from_numpy(weight) for name, weight in weights.items()}, tmp_path / "tut6-model.pt")
    ours, _, _ = converted("torch", tmp_path / "tut6-model.pt", tmp_path / "ours", heads=3)
    record_property("logits", (TREVETT, assert_restated(ours, theirs)))


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (PYTORCH_TUTORIAL, {}, "heads"),
        (PYTORCH_TUTORIAL, {"heads": 5}, "d_model=32"),
        (OWN, {"heads": 4}, "source_embedding"),
        (OWN, {"heads": 4, **OWN_OPTIONS, "pad_token_id": None}, "pad_token_id"),
        (PYTORCH_TUTORIAL, {"heads": 4, "activation": "swiglu"}, "activation_function"),
        (PYTORCH_TUTORIAL, {"heads": 4, "positions": "rotary"}, "position_encoding_type"),
    ],
)
def test_torch_options_that_are_missing_or_unknown_are_named(names: dict, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_torch(AroundTorch(names).state_dict(), **options)


class AnnotatedNorm(nn.Module):
    """The Annotated Transformer's LayerNorm: the unbiased standard deviation, and epsilon added to it."""

    def __init__(self, width: int):
        super().__init__()
        self.a_2, self.b_2 = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.a_2 * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + self.b_2


def annotated(model: AroundTorch) -> dict[str, Tensor]:
    """The weights of a pre-norm `nn.Transformer` under the names of The Annotated Transformer."""
    names = {"norm1": "sublayer.0.norm", "linear1": "feed_forward.w_1", "linear2": "feed_forward.w_2"}
    found = {}
    for name, tensor in model.state_dict().items():
        name = name.replace("transformer.", "").replace("multihead_attn", "src_attn")
        name = name.replace("norm2", "sublayer.1.norm").replace("norm3", "sublayer.2.norm")
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        if "in_proj" in name:
            kind = name.rpartition("_")[2]
            stem = name.partition("in_proj")[0]
            found |= {f"{stem}linears.{i}.{kind}": part for i, part in enumerate(tensor.chunk(3))}
        else:
            found[name.replace("out_proj", "linears.3")] = tensor
    return found | {f"{side}_embed.1.pe": model.sines[None] for side in ("src", "tgt")}  # (1, P, D)


@pytest.mark.filterwarnings("ignore:.*nested.tensor", "ignore:.*norm_first")
def test_torch_annotated_transformer_gives_its_logits(tmp_path: Path, record_property: Record) -> None:
    names = {"source": "src_embed.0.lut", "target": "tgt_embed.0.lut", "output": "generator.proj"}
    theirs: Any = AroundTorch(names, norm_first=True)
    for name, module in list(theirs.named_modules()):
        if isinstance(module, nn.LayerNorm):
            theirs.get_submodule(name.rpartition(".")[0]).add_module(
                name.rpartition(".")[2], AnnotatedNorm(SIZES["d_model"])
            )
    theirs = randomise(theirs).eval()
    torch.save(annotated(theirs), tmp_path / "model.pt")
    for layer in [*theirs.transformer.encoder.layers, *theirs.transformer.decoder.layers]:
        layer.train()  # its fast path reads the weights of a LayerNorm; there is no dropout
    ours, _, _ = converted("torch", tmp_path / "model.pt", tmp_path / "ours", heads=4)
    record_property("logits", (f"{PEER}, with the tutorial's LayerNorm", assert_same_logits(ours, theirs)))
    assert ours.config.layer_norm_position == "pre" and ours.config.bos_token_id == 0


@pytest.mark.parametrize("name", ["encoder.layer_stack.0.slf_attn.w_qs.weight"])
def test_torch_tutorials_with_another_architecture_are_refused(name: str, record_property: Record) -> None:
    with pytest.raises(UserError, match=name.replace(".", r"\.") + ".*normalises") as raised:
        from_torch({name: torch.ones(2)}, 4)
    record_property("refused", str(raised.value).removeprefix(f"{name}: ").partition(" normalises")[0])
