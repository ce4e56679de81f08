"""Peers: the same network in code that no one here wrote, with our weights, and how far the numbers are apart."""

import math
import random
import re
from collections.abc import Sequence
from itertools import chain
from types import EllipsisType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    FSMTConfig,
    FSMTForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
)

from hf_vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from hf_vanilla_transformer.loss_vanilla_transformer import shift_right
from tests.model_helpers import EOS, START, TYING_MODES, gradients, padded, sentences, tiny_model
from tests.paper import ACTIVATIONS, paper_positions, paper_translation

TOLERANCE = 1e-5
BACKENDS = ["eager", "sdpa"]

Batch = dict[str, Tensor]
# The name of a tensor, and the part of it that is one of our parameters: rows of a fused matrix, or all.
Location = tuple[str, slice | int | EllipsisType]


# The peers


class Peer(nn.Module):
    """Another implementation, `network`, with a copy of every one of our weights.

    Its `forward` takes a batch, and returns the encoder's output (B, S, D), logits (B, T, V) and the mean
    cross-entropy of the target's tokens.
    """

    # Parts of our names, and the peer's names for them.
    names: dict[str, str] = {}

    def __init__(
        self,
        network: nn.Module,
        ours: VanillaTransformerForConditionalGeneration,
    ):
        super().__init__()
        self.network = network
        self.config = ours.config
        self.locations = {name: self.location(name) for name, _ in ours.named_parameters()}
        theirs = self.weights()
        written = {name: torch.zeros_like(weight) for name, weight in theirs.items()}
        with torch.no_grad():
            for name, weight in ours.named_parameters():
                other, part = self.locations[name]
                assert theirs[other][part].shape == weight.shape, f"{name} is no {other}[{part}]"
                theirs[other][part] = weight
                written[other][part] += 1
        unequal = [name for name, times in written.items() if not times.eq(1).all()]
        assert not unequal, f"not written exactly once: {unequal}"

    def location(self, name: str) -> Location:
        """Where the peer keeps our parameter `name`."""
        return ".".join(self.names.get(part, part) for part in name.split(".")), ...

    def weights(self) -> dict[str, Tensor]:
        """Everything that the peer learns, and an output bias that it only keeps."""
        tensors = chain(self.network.named_parameters(), self.network.named_buffers())
        return {name: tensor for name, tensor in tensors if tensor.requires_grad}

    def gradients(self) -> dict[str, Tensor]:
        """By our names."""
        theirs = self.weights()
        return {name: theirs[other].grad[part] for name, (other, part) in self.locations.items()}


class TorchPeer(Peer):
    """`torch.nn.Transformer`. It has no embeddings: they are computed around it.

    It cannot leave out the biases of its attentions alone, nor free d_k and d_v of d_model.
    """

    names = {
        "model": "transformer",
        "fc1": "linear1",
        "fc2": "linear2",
        "cross_attn": "multihead_attn",
    }
    names |= {
        "self_attn_layer_norm": "norm1",
        "cross_attn_layer_norm": "norm2",
        "layer_norm": "norm",
    }

    def __init__(self, ours: VanillaTransformerForConditionalGeneration):
        config = ours.config
        network = nn.Module()
        network.transformer = torch_transformer(config)
        network.source = nn.Embedding(config.vocab_size, config.d_model)
        network.target = network.source
        if not config.share_encoder_decoder_embeddings:
            network.target = nn.Embedding(config.target_vocab_size, config.d_model)
        network.lm_head = nn.Linear(
            config.d_model,
            config.target_vocab_size,
            bias=config.lm_head_bias,
        )
        if config.tie_word_embeddings:
            network.lm_head.weight = network.target.weight
        super().__init__(network, ours)

    def location(self, name: str) -> Location:
        if "embed_tokens" in name:
            return ("source.weight" if "encoder" in name else "target.weight"), ...
        last_norm = "norm2" if "encoder" in name else "norm3"
        theirs, part = super().location(name.replace("final_layer_norm", last_norm))
        fused = re.fullmatch(r"(.*)\.([qkv])_proj\.(weight|bias)", theirs)
        if fused:
            width, third = self.config.d_model, "qkv".index(fused[2])
            return f"{fused[1]}.in_proj_{fused[3]}", slice(third * width, (third + 1) * width)
        return theirs, part

    def embed(
        self,
        embedding: nn.Embedding,
        ids: Tensor,
        position_ids: Tensor,
    ) -> Tensor:
        scale = math.sqrt(self.config.d_model) if self.config.scale_embedding else 1.0
        positions = torch.from_numpy(paper_positions(ids.shape[1], self.config))
        return embedding(ids) * scale + positions.to(embedding.weight.dtype)[position_ids]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        network, config = self.network, self.config
        written = shift_right(
            labels,
            config.decoder_start_token_id,
            config.pad_token_id,
        )
        length = written.shape[1]
        padding = attention_mask.eq(0)
        source = self.embed(
            network.source,
            input_ids,
            (attention_mask.cumsum(1) - 1).clamp(min=0),
        )
        target = self.embed(network.target, written, torch.arange(length))
        causal = torch.ones(length, length, dtype=torch.bool).triu(1)
        memory = network.transformer.encoder(source, src_key_padding_mask=padding)
        states = network.transformer.decoder(
            target,
            memory,
            tgt_mask=causal,
            memory_key_padding_mask=padding,
        )
        logits = network.lm_head(states)
        return memory, logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def torch_transformer(config: VanillaTransformerConfig) -> nn.Transformer:
    """`nn.Transformer` with stacks of its own layers, so that heads and widths can differ between them."""
    common = {
        "dropout": 0.0,
        "activation": getattr(F, config.activation_function),
        "layer_norm_eps": config.layer_norm_eps,
        "norm_first": config.layer_norm_position == "pre",
        "batch_first": True,
    }
    width, heads = config.d_model, (config.encoder_attention_heads, config.decoder_attention_heads)
    encoder_layer = nn.TransformerEncoderLayer(
        width,
        heads[0],
        config.encoder_ffn_dim,
        **common,
    )
    decoder_layer = nn.TransformerDecoderLayer(
        width,
        heads[1],
        config.decoder_ffn_dim,
        **common,
    )
    norms = [
        nn.LayerNorm(width, config.layer_norm_eps) if config.final_layer_norm else None
        for _ in heads
    ]
    # nested tensors are for evaluation alone
    encoder = nn.TransformerEncoder(
        encoder_layer,
        config.encoder_layers,
        norms[0],
        enable_nested_tensor=False,
    )
    decoder = nn.TransformerDecoder(decoder_layer, config.decoder_layers, norms[1])
    return nn.Transformer(
        width,
        heads[0],
        custom_encoder=encoder,
        custom_decoder=decoder,
        batch_first=True,
    )


class MarianPeer(Peer):
    """`MarianMTModel`.

    It counts positions from the left, padding included, so that only right padding can be compared. It cannot share
    the embeddings without the output layer, nor change the epsilon of its normalisations.
    """

    names = {"cross_attn": "encoder_attn", "cross_attn_layer_norm": "encoder_attn_layer_norm"}

    def __init__(self, ours: VanillaTransformerForConditionalGeneration):
        config = MarianConfig(
            **common_fields(ours.config),
            vocab_size=ours.config.vocab_size,
            decoder_vocab_size=ours.config.target_vocab_size,
            share_encoder_decoder_embeddings=ours.config.share_encoder_decoder_embeddings,
            forced_eos_token_id=None,
        )
        config._attn_implementation = ours.config._attn_implementation
        network = MarianMTModel(config)
        # Marian keeps this bias without learning it. Asked to, it has a gradient like any other weight.
        network.final_logits_bias.requires_grad_(ours.config.lm_head_bias)
        super().__init__(network, ours)

    def location(self, name: str) -> Location:
        if name == "lm_head.bias":
            return "final_logits_bias", 0
        if (
            name == "model.encoder.embed_tokens.weight"
            and self.config.share_encoder_decoder_embeddings
        ):
            return "model.shared.weight", ...
        return super().location(name)

    def forward(self, **batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        output = self.network(**batch)
        return output.encoder_last_hidden_state, output.logits, output.loss


class FSMTPeer(Peer):
    """`FSMTForConditionalGeneration`, fairseq's Transformer.

    It has one attention implementation. It ties all three embedding matrices or none, has no output bias and no
    other epsilon, and its positions need a d_model of at least 4.
    """

    names = MarianPeer.names

    def __init__(self, ours: VanillaTransformerForConditionalGeneration):
        fields = common_fields(ours.config)
        vocabularies = {
            "src_vocab_size": ours.config.vocab_size,
            "tgt_vocab_size": ours.config.target_vocab_size,
        }
        network = FSMTForConditionalGeneration(FSMTConfig(**fields, **vocabularies))
        for stack in (network.model.encoder, network.model.decoder):
            # A formula. FSMT does not mark it as not learned.
            stack.embed_positions.weight.requires_grad_(False)
        super().__init__(network, ours)

    def location(self, name: str) -> Location:
        return super().location(name.replace("lm_head", "model.decoder.output_projection"))

    def forward(
        self,
        labels: Tensor,
        **batch: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Left to itself it would start with each sentence's last token, and write pads into the labels.
        tokens = shift_right(
            labels,
            self.config.decoder_start_token_id,
            self.config.pad_token_id,
        )
        output = self.network(**batch, labels=labels, decoder_input_ids=tokens)
        return output.encoder_last_hidden_state, output.logits, output.loss


class M2M100Peer(Peer):
    """`M2M100ForConditionalGeneration`, also the class of NLLB: pre-norm, with fairseq's sinusoids.

    It ties all three embedding matrices, and has no output bias and no other epsilon.
    """

    names = MarianPeer.names

    def __init__(self, ours: VanillaTransformerForConditionalGeneration):
        always = {
            "encoder_layerdrop": 0.0,
            "decoder_layerdrop": 0.0,
        }  # or training would skip layers
        config = M2M100Config(
            **common_fields(ours.config),
            **always,
            vocab_size=ours.config.vocab_size,
        )
        config._attn_implementation = ours.config._attn_implementation
        super().__init__(M2M100ForConditionalGeneration(config), ours)

    def location(self, name: str) -> Location:
        return super().location(name.replace("model.encoder.embed_tokens", "model.shared"))

    def forward(
        self,
        labels: Tensor,
        **batch: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        output = self.network(**batch, labels=labels)
        return output.encoder_last_hidden_state, output.logits, output.loss


def common_fields(config: VanillaTransformerConfig) -> dict[str, Any]:
    """Fields that Marian, FSMT and M2M-100 have under the same names."""
    stacks = ("layers", "ffn_dim", "attention_heads")
    names = [f"{stack}_{name}" for stack in ("encoder", "decoder") for name in stacks]
    names += ["d_model", "activation_function", "scale_embedding", "tie_word_embeddings"]
    names += ["bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id"]
    no_dropout = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
    return (
        {name: getattr(config, name) for name in names}
        | no_dropout
        | {"max_position_embeddings": 32}
    )


# Random shapes and batches


def random_fields(
    seed: int,
    tying: Sequence[tuple[bool, bool]] = TYING_MODES,
    **choices: list,
) -> dict[str, Any]:
    """A random configuration, of odd sizes as often as of even ones.

    Args:
        seed: of the dice.
        tying: which `share_encoder_decoder_embeddings` and `tie_word_embeddings` the peer can have together.
        **choices: values of further fields that the peer knows.
    """
    dice = random.Random(seed)
    d_model = dice.choice([[12, 20, 24, 28, 36, 40], [9, 13, 15, 21, 33, 35]][seed % 2])
    heads = [h for h in range(1, 14) if d_model % h == 0]
    share, tie = dice.choice(tying)
    fields = {
        "vocab_size": dice.randint(10, 60),
        "decoder_vocab_size": None if share else dice.randint(10, 60),
        "share_encoder_decoder_embeddings": share,
        "tie_word_embeddings": tie,
        "d_model": d_model,
        "encoder_attention_heads": dice.choice(heads),
        "decoder_attention_heads": dice.choice(heads),
        "encoder_ffn_dim": dice.randint(5, 70),
        "decoder_ffn_dim": dice.randint(5, 70),
        "encoder_layers": dice.randint(1, 4),
        "decoder_layers": dice.randint(1, 4),
        "activation_function": list(ACTIVATIONS)[seed // 2 % len(ACTIVATIONS)],
        "scale_embedding": dice.random() < 0.5,
        "pad_token_id": dice.choice([1, 3]),
        "decoder_start_token_id": dice.choice([START, EOS]),
    }
    return fields | {name: dice.choice(values) for name, values in choices.items()}


def random_batch(
    config: VanillaTransformerConfig,
    seed: int,
    left: bool = False,
) -> Batch:
    """A few sentences of random lengths. The shortest source is its end alone. Sources are padded left if asked to."""
    dice = random.Random(seed)
    lengths = [dice.randint(2, 9) for _ in range(dice.randint(1, 4))]
    source = padded(
        sentences([1, *lengths], config.vocab_size, seed),
        config.pad_token_id,
        left,
    )
    lengths = [dice.randint(1, 9) for _ in range(len(source))]
    labels = padded(sentences(lengths, config.target_vocab_size, seed + 1000), value=-100)
    return {
        "input_ids": source,
        "attention_mask": source.ne(config.pad_token_id).long(),
        "labels": labels,
    }


# The comparison


class Numbers(NamedTuple):
    """A model's outputs for a batch without padding; loss and gradients, summed over all tokens."""

    encoder: Tensor  # (source tokens, D)
    logits: Tensor  # (target tokens, V)
    loss: Tensor
    gradients: dict[str, Tensor] = {}


def our_numbers(ours: VanillaTransformerForConditionalGeneration, batch: Batch) -> Numbers:
    tokens, written = batch["attention_mask"].bool(), batch["labels"].ne(-100)
    with torch.no_grad():
        output = ours(**batch, skip_logits=False)
    loss, derivatives = gradients(ours, **batch)
    n = written.sum()
    total = {name: derivative * n for name, derivative in derivatives.items()}
    return Numbers(
        output.encoder_last_hidden_state[tokens],
        output.logits[written],
        loss * n,
        total,
    )


def peer_numbers(peer: Peer, batch: Batch) -> Numbers:
    tokens, written = batch["attention_mask"].bool(), batch["labels"].ne(-100)
    memory, logits, loss = peer(**batch)
    n = written.sum()
    (loss * n).backward()
    return Numbers(
        memory[tokens].detach(),
        logits[written].detach(),
        loss.detach() * n,
        peer.gradients(),
    )


def paper_numbers(ours: VanillaTransformerForConditionalGeneration, batch: Batch) -> Numbers:
    """The judge's, in float64. It has no gradients."""
    tokens, written = batch["attention_mask"].bool(), batch["labels"].ne(-100)
    pairs = zip(batch["input_ids"], tokens, batch["labels"], written, strict=True)
    outputs = [
        paper_translation(ours, s[real].tolist(), t[said].tolist()) for s, real, t, said in pairs
    ]
    memory, logits = (
        torch.cat([torch.from_numpy(output[i]) for output in outputs]) for i in range(2)
    )
    return Numbers(
        memory,
        logits,
        torch.tensor(sum(output.loss for output in outputs)),
    )


def differences(actual: Numbers, expected: Numbers) -> dict[str, float]:
    """The largest difference in each tensor, divided by its largest number where that is above 1."""
    pairs = {
        name: (getattr(actual, name), getattr(expected, name))
        for name in ("encoder", "logits", "loss")
    }
    if expected.gradients:
        assert actual.gradients.keys() == expected.gradients.keys()
        pairs |= {
            f"gradient of {name}": (actual.gradients[name], g)
            for name, g in expected.gradients.items()
        }
    found = {}
    for name, (ours, theirs) in pairs.items():
        assert ours.shape == theirs.shape, f"{name}: {tuple(ours.shape)} and {tuple(theirs.shape)}"
        largest = max(1.0, theirs.abs().max().item())
        found[name] = (ours.double() - theirs.double()).abs().max().item() / largest
    return found


def parity(
    kind: type[Peer], backend: str, seed: int, left: bool = False, **fields: Any
) -> dict[str, dict[str, float]]:
    """`differences` between a model of ours, a peer with its weights, and the paper's equations.

    Args:
        kind: of the peer. backend: of the attention. seed: of weights and batch.
        left: pad the sources on the left. **fields: the configuration.

    Returns:
        For each pair that was compared, what was compared and how far it is apart.
    """
    ours = tiny_model(seed, attn_implementation=backend, **fields)
    batch = random_batch(ours.config, seed, left)
    theirs, judge = peer_numbers(kind(ours), batch), paper_numbers(ours, batch)
    evaluating = our_numbers(ours, batch)
    return {
        "ours and the peer": differences(evaluating, theirs),
        "ours in training and the peer": differences(our_numbers(ours.train(), batch), theirs),
        "ours and the paper": differences(evaluating, judge),
        "the peer and the paper": differences(theirs, judge),
    }


def assert_parity(found: dict[str, dict[str, float]]) -> None:
    """Nothing is further apart than `TOLERANCE`."""
    far = {
        f"{pair}: {what}": d
        for pair, each in found.items()
        for what, d in each.items()
        if not d <= TOLERANCE
    }
    assert not far
