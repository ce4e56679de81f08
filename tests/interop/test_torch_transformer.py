"""State dictionaries of `torch.nn.Transformer` give its logits, under the names of tutorials."""

import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
from hf_vanilla_transformer.utils.errors import UserError
from tests.interop.checkpoints import attention_names, random_weights, restatement
from tests.interop.checkpoints.torch_transformer import PEER, PYTORCH_TUTORIAL, SIZES, TUTORIAL_OPTIONS, AroundTorch
from tests.interop.foreign import SOURCES, TARGETS, Record, assert_same_logits, converted
from tests.interop.restatement import assert_restated
from tests.model_helpers import error_of, randomise

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
def test_torch_transformer_gives_its_logits(names, settings, options, tmp_path, record_property):
    theirs = saved(AroundTorch(names, **settings), tmp_path / "model.pt")
    options = {**TUTORIAL_OPTIONS, **options}
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
    ours, _, _ = converted("torch", tmp_path / "model.pt", tmp_path / "ours", heads=4, **TUTORIAL_OPTIONS)
    record_property("logits", (PEER, assert_same_logits(ours, theirs)))
    assert not ours.config.final_layer_norm
    weights = theirs.state_dict() | {f"transformer.encoder.norm.{part}": torch.ones(32) for part in ("weight", "bias")}
    assert "stack" in error_of(from_torch, weights, 4)


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
def test_torch_wrappers_of_trainers_are_removed(wrap: str, tmp_path: Path) -> None:
    weights = randomise(AroundTorch(PYTORCH_TUTORIAL)).state_dict()
    plain = from_torch(weights, 4).model
    torch.save(WRAPPERS[wrap](weights), tmp_path / "model.pt")
    other = from_torch(tmp_path / "model.pt", 4).model
    assert all(a.equal(b) for a, b in zip(plain.parameters(), other.parameters(), strict=True))


def test_torch_module_that_was_saved_whole_is_read_without_its_code(tmp_path: Path) -> None:
    theirs = randomise(Whole(AroundTorch(PYTORCH_TUTORIAL)))
    torch.save(theirs, tmp_path / "model.pt")
    ours, plain = from_torch(tmp_path / "model.pt", 4), from_torch(theirs.net.state_dict(), 4)
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
def test_torch_files_without_a_model_give_one_line(saved: Any, tmp_path: Path) -> None:
    torch.save(saved, tmp_path / "model.pt")
    error = error_of(from_torch, tmp_path / "model.pt", 4)
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


# pytorch-seq2seq, tutorial 6. Its positions are learned.
TREVETT_NAMES = {
    **{stack: f"{stack}.layers" for stack in ("encoder", "decoder")},
    **attention_names(
        {"self": "self_attention.", "cross": "encoder_attention."}, {part: f"fc_{part}" for part in "qkvo"}
    ),
    **{"self.norm": "self_attn_layer_norm", "cross.norm": "enc_attn_layer_norm", "ffn.norm": "ff_layer_norm"},
    **{"ffn.1": "positionwise_feedforward.fc_1", "ffn.2": "positionwise_feedforward.fc_2", "output": "decoder.fc_out"},
}


def test_torch_trevett_tutorial_gives_its_logits(tmp_path: Path, record_property: Record) -> None:
    others: dict[str, tuple[int, ...]] = {"decoder.fc_out.weight": (29, 12), "decoder.fc_out.bias": (29,)}
    for stack, size in (("encoder", 23), ("decoder", 29)):
        others |= {f"{stack}.tok_embedding.weight": (size, 12), f"{stack}.pos_embedding.weight": (15, 12)}
    weights = random_weights(TREVETT_NAMES, others, layers=(2, 2))
    stacks = {"source": "encoder", "target": "decoder"}

    def position(index: int, side: str) -> np.ndarray:
        return weights[f"{stacks[side]}.pos_embedding.weight"][index].double().numpy()

    embeddings = {side: f"{stack}.tok_embedding" for side, stack in stacks.items()}
    theirs = restatement(TREVETT_NAMES, weights, embeddings, position, layers=(2, 2))
    torch.save(weights, tmp_path / "tut6-model.pt")
    ours, _, _ = converted("torch", tmp_path / "tut6-model.pt", tmp_path / "ours", heads=3, **TUTORIAL_OPTIONS)
    record_property("logits", (TREVETT, assert_restated(ours, theirs)))


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


class AnnotatedNorm(nn.Module):
    """The Annotated Transformer's LayerNorm: the unbiased standard deviation, and epsilon added to it."""

    def __init__(self, width: int):
        super().__init__()
        self.a_2, self.b_2 = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.a_2 * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + self.b_2


@dataclass
class Style:
    """The names that code gives to the parts of an `nn.Transformer`.

    Attributes:
        around: the embeddings and the output layer.
        layer: replacements in `nn.Transformer`'s names of the parts of a layer.
        projections: of queries, keys, values and output. norm: of a normalisation's gain and bias.
        settings: of the `nn.Transformer`. ends: whether a normalisation follows each stack.
        options: of the conversion.
    """

    around: tuple[str, str, str]
    layer: dict[str, str]
    projections: tuple[str, ...] = ("w_q", "w_k", "w_v", "w_o")
    norm: tuple[str, str] = ("weight", "bias")
    settings: dict[str, Any] = field(default_factory=dict)
    ends: bool = True
    own_norm: bool = False
    attention_bias: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def names(self) -> dict[str, str]:
        return dict(zip(("source", "target", "output"), self.around, strict=True))

    def rename(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        renamed = {}
        for name, tensor in weights.items():
            kind = name.rpartition("_" if "in_proj" in name else ".")[2]
            for torchs, theirs in self.layer.items():
                name = re.sub(torchs, theirs, name)
            if "in_proj" in name or "out_proj" in name:
                stem, parts, chosen = (
                    name.rpartition(".")[0].removesuffix(".out_proj"),
                    [tensor],
                    self.projections[-1:],
                )
                if "in_proj" in name:
                    q, k, v = tensor.chunk(3)
                    chosen = self.projections[:-1]
                    parts = {1: [tensor], 2: [q, torch.cat([k, v])], 3: [q, k, v]}[len(chosen)]
                named = {f"{stem}.{part}.{kind}": each for part, each in zip(chosen, parts, strict=True)}
                renamed |= named if self.attention_bias or kind == "weight" else {}
            elif "norm" in name:
                renamed[name.removesuffix(kind) + self.norm[kind == "bias"]] = tensor
            else:
                renamed[name] = tensor
        return renamed


ANNOTATED = Style(
    ("src_embed.0.lut", "tgt_embed.0.lut", "generator.proj"),
    {
        **{r"transformer\.": "", "multihead_attn": "src_attn", "linear": "feed_forward.w_"},
        **{r"(layers\.\d+\.)norm1": r"\1sublayer.0.norm", r"(layers\.\d+\.)norm2": r"\1sublayer.1.norm"},
        r"(layers\.\d+\.)norm3": r"\1sublayer.2.norm",
    },
    ("linears.0", "linears.1", "linears.2", "linears.3"),
    ("a_2", "b_2"),
    {"norm_first": True},
    own_norm=True,
)
JAMIL = Style(
    ("src_embed.embedding", "tgt_embed.embedding", "projection_layer.proj"),
    {
        **{r"transformer\.": "", "self_attn": "self_attention_block", "multihead_attn": "source_attention_block"},
        **{"linear": "feed_forward_block.linear_", r"(layers\.\d+\.)norm1": r"\1residual_connections.0.norm"},
        r"(layers\.\d+\.)norm2": r"\1residual_connections.1.norm",
        r"(layers\.\d+\.)norm3": r"\1residual_connections.2.norm",
    },
    norm=("alpha", "bias"),
    settings={"norm_first": True},
    own_norm=True,
    attention_bias=False,
)
KO = Style(
    ("encoder.emb.tok_emb", "decoder.emb.tok_emb", "decoder.linear"),
    {
        **{r"transformer\.": "", r"(encoder\..*)self_attn": r"\1attention", "self_attn": "self_attention"},
        **{"multihead_attn": "enc_dec_attention", r"(layers\.\d+\.)linear": r"\1ffn.linear"},
    },
    ("w_q", "w_k", "w_v", "w_concat"),
    ("gamma", "beta"),
    {"layer_norm_eps": 1e-12, "scale": False},
    ends=False,
    options={"layer_norm_eps": 1e-12, "scale_embedding": False},
)
FUSED = Style(
    ("input_embedding", "output_embedding", "lm_head"),
    {
        **{r"transformer\.encoder": "enc", r"transformer\.decoder": "dec", r"\.layers\.": ".blocks."},
        **{"self_attn": "attn", "multihead_attn": "cross_attn", "linear1": "mlp.0", "linear2": "mlp.3"},
        **{r"(enc.*blocks.*)norm2": r"\1norm_ff", "norm3": "norm_ff", r"(dec.*blocks.*)norm2": r"\1norm_cross"},
    },
    ("qkv", "proj"),
    settings={"norm_first": True},
)
NAMED = Style(
    ("embeddings.source", "embeddings.target", "to_logits"),
    {
        **{r"transformer\.encoder\.layers": "encoder_layers", r"transformer\.decoder\.layers": "decoder_layers"},
        **{"self_attn": "mha1", "multihead_attn": "mha2", "linear1": "ff.inner", "linear2": "ff.outer"},
    },
    ("query", "key", "value", "output"),
    ends=False,
)
STYLES = {"Annotated": ANNOTATED, "Umar Jamil": JAMIL, "Hyunwoong Ko": KO, "fused": FUSED, "other names": NAMED}
STYLES["fused in two"] = replace(FUSED, projections=("to_q", "to_kv", "to_out"))


@pytest.mark.covering(1)
@pytest.mark.filterwarnings("ignore:.*nested.tensor", "ignore:.*norm_first")
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("name", STYLES)
def test_torch_code_with_other_names_gives_its_logits(name, wrapped, tmp_path, record_property):
    style = STYLES[name]
    theirs: Any = AroundTorch(style.names(), **style.settings)
    if not style.ends:
        theirs.transformer.encoder.norm = theirs.transformer.decoder.norm = None
    for path, module in list(theirs.named_modules()):
        if isinstance(module, nn.LayerNorm) and style.own_norm:
            theirs.get_submodule(path.rpartition(".")[0]).add_module(
                path.rpartition(".")[2], AnnotatedNorm(SIZES["d_model"])
            )
    theirs = randomise(theirs).eval()
    weights = theirs.state_dict()
    weights = {key: 0 * weight if "attn" in key and "bias" in key else weight for key, weight in weights.items()}
    weights = theirs.state_dict() if style.attention_bias else weights
    theirs.load_state_dict(weights)
    named = style.rename({re.sub(r"\.a_2$", ".weight", re.sub(r"\.b_2$", ".bias", k)): w for k, w in weights.items()})
    if style.own_norm:
        named |= {f"{side}_embed.1.pe": theirs.sines[None] for side in ("src", "tgt")}  # (1, P, D)
    torch.save({"state_dict": with_prefix("net.", named)} if wrapped else named, tmp_path / "model.pt")
    for layer in [*theirs.transformer.encoder.layers, *theirs.transformer.decoder.layers]:
        layer.train()  # its fast path reads the weights of a LayerNorm; there is no dropout
    options = {**TUTORIAL_OPTIONS, **style.options}
    ours, _, _ = converted("torch", tmp_path / "model.pt", tmp_path / "ours", heads=4, **options)
    record_property("logits", (f"{PEER}, {name}", assert_same_logits(ours, theirs)))
    assert ours.config.layer_norm_position == ("pre" if "norm_first" in style.settings else "post")
    assert ours.config.attention_bias is style.attention_bias
    notes = "".join(from_torch(tmp_path / "model.pt", 4, **style.options).notes)
    assert ("fused" in notes) is ("fused" in name)
    assert "-norm" in notes and "activation=relu" in notes and "RMSNorm" not in notes
    gains = {key: w for key, w in named.items() if "norm" not in key or not key.endswith(("bias", "b_2", "beta"))}
    assert "RMSNorm" in "".join(from_torch(gains, 4, **style.options).notes)


@pytest.mark.filterwarnings("ignore:.*nested.tensor")
def test_what_a_state_dictionary_of_unknown_code_lacks_is_named() -> None:
    state = AroundTorch(OWN).state_dict()
    notes = "; ".join(from_torch(state, 4, **OWN_OPTIONS).notes)
    assert all(name in notes for name in ("activation=relu", "post-norm", "norm_first", "sinusoidal positions"))
    given = {"activation": "relu", "norm_first": False, "positions": "sinusoidal"}
    assert not from_torch(state, 4, **OWN_OPTIONS, **given).notes


def test_average_next_to_the_model_is_named(tmp_path: Path) -> None:
    theirs = AroundTorch(PYTORCH_TUTORIAL)
    average = torch.optim.swa_utils.AveragedModel(theirs)
    torch.save({"model": theirs.state_dict(), "ema": average.state_dict()}, tmp_path / "model.pt")
    assert "left out: ema" in "; ".join(from_torch(tmp_path / "model.pt", 4).notes)


def test_learned_gates_with_the_name_of_a_mask_are_not_lost() -> None:
    state = AroundTorch(PYTORCH_TUTORIAL).state_dict()
    causal = torch.full((9, 9), float("-inf")).triu(1)
    assert "mask" not in "; ".join(from_torch(state | {"transformer.tgt_mask": causal}, 4).notes)
    gates = {"transformer.encoder.layers.0.self_attn.head_mask": torch.tensor([0.9, 1.1, 0.4, 0.7])}
    assert "head_mask" in error_of(from_torch, state | gates, 4)


def test_order_that_no_name_tells_is_named() -> None:
    state = AroundTorch(OWN).state_dict()
    given = {"activation": "relu", "norm_first": False, "positions": "sinusoidal"}
    letters = {
        re.sub(r"\.norm([123])\.", lambda match: f".norm_{'abc'[int(match[1]) - 1]}.", name): weight
        for name, weight in state.items()
    }
    (note,) = from_torch(letters, 4, **OWN_OPTIONS, **given).notes
    assert note.endswith("norm_a, norm_b, norm_c")
    assert not from_torch(state, 4, **OWN_OPTIONS, **given).notes


def test_torch_projections_without_known_names_are_named() -> None:
    style = replace(NAMED, projections=("qkv_nets.0", "qkv_nets.1", "qkv_nets.2", "out_projection_net"))
    weights = style.rename(randomise(AroundTorch(style.names())).state_dict())
    with pytest.raises(UserError, match=r"mha1\.qkv_nets\.0.*q_proj") as raised:
        from_torch(weights, 4)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["encoder.layer_stack.0.slf_attn.w_qs.weight"])
def test_torch_tutorials_with_another_architecture_are_refused(name: str, record_property: Record) -> None:
    with pytest.raises(UserError, match=name.replace(".", r"\.") + ".*normalises") as raised:
        from_torch({name: torch.ones(2)}, 4)
    record_property("refused", str(raised.value).removeprefix(f"{name}: ").partition(" normalises")[0])


@pytest.mark.parametrize("kind", ["tokenizer.json", "folder"])
def test_torch_tokenizer_is_given(kind: str, tmp_path: Path) -> None:
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
    theirs = saved(AroundTorch(PYTORCH_TUTORIAL), tmp_path / "model.pt")
    suffix = {"tokenizer.json": ".json", "folder": ""}[kind]
    files = {name: tmp_path / f"{side}{suffix}" for name, side in (("tokenizer", "en"), ("target_tokenizer", "de"))}
    ours, source, target = converted(
        "torch", tmp_path / "model.pt", tmp_path / "ours", heads=4, **TUTORIAL_OPTIONS, **files
    )
    text = "a cat runs in the snow ."
    ids = sides[0].encode(text).ids
    assert source(text)["input_ids"] == ([*ids, 3] if kind == "folder" else [2, *ids, 3])
    assert target(TARGETS[0])["input_ids"] == [*sides[1].encode(TARGETS[0]).ids, 3]
    assert target.decode(target(TARGETS[0])["input_ids"], skip_special_tokens=True) == sides[1].decode(
        sides[1].encode(TARGETS[0]).ids
    )
    assert theirs is not None and ours.config.bos_token_id == 2
    assert "<pad>" not in "; ".join(from_torch(tmp_path / "model.pt", 4, **files).notes)


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
