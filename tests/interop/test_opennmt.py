"""OpenNMT-py's checkpoints. The reference is the NumPy restatement."""

import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.interop.opennmt import from_opennmt
from tests.interop.foreign import Record, converted
from tests.interop.restatement import Restatement, assert_restated
from tests.paper import paper_position

PEER = "NumPy restatement of OpenNMT-py 3.5"
D, FFN, LAYERS, HEADS = 12, 20, (2, 1), 3
SPECIAL = ["<unk>", "<blank>", "<s>", "</s>"]
OPTIONS = {
    **{"encoder_type": "transformer", "decoder_type": "transformer", "heads": HEADS, "layer_norm": "standard"},
    **{"position_encoding": True, "max_relative_positions": 0, "self_attn_type": "scaled-dot", "dropout": [0.1]},
    **{"attention_dropout": [0.1], "pos_ffn_activation_fn": "relu", "add_qkvbias": False, "norm_eps": 1e-6},
}


def weights(sizes: tuple[int, int], qkv_bias: bool = True) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Random weights of model and generator, under the names of versions 1 to 3."""
    shapes: dict[str, tuple[int, ...]] = {}
    stacks = {"encoder": ("transformer", ["self_attn"], ["layer_norm"])}
    stacks["decoder"] = ("transformer_layers", ["self_attn", "context_attn"], ["layer_norm_1", "layer_norm_2"])
    for (stack, (layers, attentions, norms)), depth, size in zip(stacks.items(), LAYERS, sizes, strict=True):
        shapes[f"{stack}.embeddings.make_embedding.emb_luts.0.weight"] = (size, D)
        for layer in (f"{stack}.{layers}.{i}" for i in range(depth)):
            for name in (f"{layer}.{a}.{part}" for a in attentions for part in PARTS.values()):
                shapes |= {f"{name}.weight": (D, D)} | ({f"{name}.bias": (D,)} if qkv_bias else {})
            shapes |= {f"{layer}.feed_forward.w_1.weight": (FFN, D), f"{layer}.feed_forward.w_1.bias": (FFN,)}
            shapes |= {f"{layer}.feed_forward.w_2.weight": (D, FFN), f"{layer}.feed_forward.w_2.bias": (D,)}
            for norm in [*norms, "feed_forward.layer_norm"]:
                shapes |= {f"{layer}.{norm}.{part}": (D,) for part in ("weight", "bias")}
        shapes |= {f"{stack}.layer_norm.{part}": (D,) for part in ("weight", "bias")}
    generator = torch.Generator().manual_seed(6)
    model = {name: torch.randn(shape, generator=generator) * 0.4 for name, shape in shapes.items()}
    table = torch.tensor(np.stack([paper_position(i, D) for i in range(50)])).float()[:, None]  # (P, 1, D)
    model |= {f"{stack}.embeddings.make_embedding.pe.pe": table for stack in stacks}
    head = {
        "weight": torch.randn(sizes[1], D, generator=generator),
        "bias": torch.randn(sizes[1], generator=generator),
    }
    return model, head


PARTS = {"q": "linear_query", "k": "linear_keys", "v": "linear_values", "o": "final_linear"}


def save(path: Path, model: dict[str, Tensor], head: dict[str, Tensor], vocab: Any = None, **options: Any) -> None:
    content = {"model": model, "generator": head, "opt": Namespace(**{**OPTIONS, **options}), "optim": {"step": 7}}
    torch.save(content | ({} if vocab is None else {"vocab": vocab}), path)


def restated(model: dict[str, Tensor], head: dict[str, Tensor], **settings: Any) -> Restatement:
    arrays = {name: tensor.double().numpy() for name, tensor in (model | head).items()}
    layers = {"encoder": "transformer", "decoder": "transformer_layers"}

    def pair(name: str) -> tuple[np.ndarray, np.ndarray]:
        if name == "output":
            return arrays["weight"].T, arrays["bias"]
        if name.endswith("coder.norm"):
            name = name.replace("norm", "layer_norm")
            return arrays[f"{name}.weight"], arrays[f"{name}.bias"]
        stack, layer, kind, part = name.split(".")
        theirs = f"{stack}.{layers[stack]}.{layer}."
        if part == "norm":
            number = {"self": "_1", "cross": "_2"}.get(kind, "") if stack == "decoder" else ""
            theirs += "feed_forward.layer_norm" if kind == "ffn" else f"layer_norm{number}"
            return arrays[f"{theirs}.weight"], arrays[f"{theirs}.bias"]
        if kind == "ffn":
            theirs += f"feed_forward.w_{part}"
        else:
            theirs += {"self": "self_attn.", "cross": "context_attn."}[kind] + PARTS[part]
        return arrays[f"{theirs}.weight"].T, arrays.get(f"{theirs}.bias", np.zeros(1))

    stacks = {"source": "encoder", "target": "decoder"}
    return Restatement(
        pair,
        embedding=lambda side: arrays[f"{stacks[side]}.embeddings.make_embedding.emb_luts.0.weight"],
        position=lambda index, _: paper_position(index, D),
        layers=LAYERS,
        heads=HEADS,
        eps=1e-6,
        pre_norm=True,
        **settings,
    )


@pytest.mark.parametrize("version", [1, 3])
def test_opennmt_checkpoint_gives_its_logits(version: int, tmp_path: Path, record_property: Record) -> None:
    model, head = weights((23, 29), qkv_bias=version == 1)
    # version 1 and 2 have a Sequential of the output layer and a softmax
    saved = {f"0.{name}": tensor for name, tensor in head.items()} if version == 1 else head
    save(tmp_path / "model.pt", model, saved)
    ours, tokenizer, _ = converted("opennmt", tmp_path / "model.pt", tmp_path / "ours")
    record_property("logits", (PEER, assert_restated(ours, restated(model, head))))
    assert tokenizer is None and ours.config.attention_bias is (version == 1)
    search = ours.generation_config
    assert (search.num_beams, search.length_penalty, search.max_new_tokens) == (5, 0.0, 100)


def test_opennmt_gelu(tmp_path: Path, record_property: Record) -> None:
    model, head = weights((23, 29))
    save(tmp_path / "model.pt", model, head, pos_ffn_activation_fn="gelu")
    ours, _, _ = converted("opennmt", tmp_path / "model.pt", tmp_path / "ours")
    record_property("logits", (PEER, assert_restated(ours, restated(model, head, activation="gelu"))))


def test_opennmt_without_biases_of_the_feed_forward_network(tmp_path: Path, record_property: Record) -> None:
    """As version 3.5 saves it by default."""
    model, head = weights((23, 29), qkv_bias=False)
    biases = {name: tensor for name, tensor in model.items() if "feed_forward.w_" in name and name.endswith("bias")}
    save(tmp_path / "model.pt", {name: tensor for name, tensor in model.items() if name not in biases}, head)
    ours, _, _ = converted("opennmt", tmp_path / "model.pt", tmp_path / "ours")
    zeros = {name: torch.zeros_like(tensor) for name, tensor in biases.items()}
    record_property("logits", (PEER, assert_restated(ours, restated(model | zeros, head))))


def test_opennmt_vocabulary_of_version_3(tmp_path: Path) -> None:
    sides = {"src": [*SPECIAL, "a", "dog"], "tgt": [*SPECIAL, "ein", "Hund", "läuft"]}
    model, head = weights((6, 7))
    vocab = {**sides, "data_task": "seq2seq", "decoder_start_token": "<s>"}
    save(tmp_path / "model.pt", model, head, vocab)
    ours, tokenizer, target = converted("opennmt", tmp_path / "model.pt", tmp_path / "ours")
    # its sources do not end with </s>
    assert tokenizer("a dog sleeps")["input_ids"] == [4, 5, 0]
    assert target("ein Hund")["input_ids"] == [4, 5, 3]
    assert ours.config.decoder_start_token_id == 2
    assert (ours.generation_config.length_penalty, ours.generation_config.max_new_tokens) == (1.0, 250)
    save(tmp_path / "model.pt", model, head, {**vocab, "tgt": sides["tgt"][:-1]})
    with pytest.raises(UserError, match="6 .* 7"):
        from_opennmt(tmp_path / "model.pt")
    save(tmp_path / "model.pt", model, head, {**vocab, "src": ["a", "b"]})
    with pytest.raises(UserError, match="<unk>"):
        from_opennmt(tmp_path / "model.pt")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("encoder_type", "brnn"),
        ("layer_norm", "rms"),
        ("position_encoding", False),
        ("max_relative_positions", 20),
        ("self_attn_type", "average"),
        ("parallel_residual", True),
        ("multiquery", True),
        ("copy_attn", True),
        ("generator_function", "sparsemax"),
        ("heads", "four"),
    ],
)
def test_opennmt_refuses_other_architectures(option: str, value: Any, tmp_path: Path, record_property: Record) -> None:
    save(tmp_path / "model.pt", *weights((9, 8)), **{option: value})
    with pytest.raises(UserError, match=f"-{option}={value}"):
        from_opennmt(tmp_path / "model.pt")
    record_property("refused", f"-{option} {value}")


def test_opennmt_refuses_other_positions(tmp_path: Path, record_property: Record) -> None:
    """SinusoidalConcat has fairseq's wavelengths."""
    model, head = weights((9, 8))
    angles = np.arange(50)[:, None] * np.exp(np.arange(D // 2) * -math.log(10000) / (D // 2 - 1))
    table = torch.tensor(np.concatenate([np.sin(angles), np.cos(angles)], axis=1)).float()[:, None]
    save(tmp_path / "model.pt", model | {name: table for name in model if name.endswith("pe.pe")}, head)
    with pytest.raises(UserError, match="-position_encoding_type"):
        from_opennmt(tmp_path / "model.pt")
    record_property("refused", "-position_encoding_type SinusoidalConcat")


def test_opennmt_refuses_other_files(tmp_path: Path) -> None:
    torch.save({"model": {}}, tmp_path / "model.pt")
    with pytest.raises(UserError, match="OpenNMT-py"):
        from_opennmt(tmp_path / "model.pt")
