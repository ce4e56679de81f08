"""The same weights give the same numbers in `torch.nn.Transformer`: logits, loss and every gradient."""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.loss_vanilla_transformer import shift_right
from tests.model_helpers import PAD, assert_near, assert_same_gradients, gradients, tiny_model, translation_batch


def torch_names(layer: nn.Module, prefix: str, is_decoder: bool) -> dict[str, str]:
    """Our parameters' names, without those of the input projections, and torch's."""
    norms = ["self_attn_layer_norm", *(["cross_attn_layer_norm"] if is_decoder else []), "final_layer_norm"]
    modules = {norm: f"norm{i + 1}" for i, norm in enumerate(norms)}
    modules |= {"fc1": "linear1", "fc2": "linear2", "self_attn.out_proj": "self_attn.out_proj"}
    if is_decoder:
        modules["cross_attn.out_proj"] = "multihead_attn.out_proj"
    return {
        f"{prefix}.{ours}.{kind}": f"{theirs}.{kind}"
        for ours, theirs in modules.items()
        for kind in ("weight", "bias")
    }


class TorchTranslator(nn.Module):
    """`torch.nn.Transformer` between one embedding matrix and itself, with weights copied from ours."""

    def __init__(self, ours: VanillaTransformerForConditionalGeneration):
        super().__init__()
        config = ours.config
        self.start = config.decoder_start_token_id
        activation = config.activation_function
        heads, ffn = config.encoder_attention_heads, config.encoder_ffn_dim
        self.transformer = nn.Transformer(
            config.d_model,
            heads,
            config.encoder_layers,
            config.decoder_layers,
            ffn,
            dropout=0.0,
            activation=activation,
            batch_first=True,
        )
        self.embedding = nn.Parameter(ours.lm_head.weight.detach().clone())
        self.pairs: dict[str, tuple[str, slice]] = {}
        self.translate_names(ours)
        theirs, weights = dict(self.named_parameters()), dict(ours.named_parameters())
        with torch.no_grad():
            for name, (other, rows) in self.pairs.items():
                theirs[other][rows] = weights[name]

    def translate_names(self, ours: VanillaTransformerForConditionalGeneration) -> None:
        """Our names → theirs, and the rows of a fused projection."""
        d_model, everything = ours.config.d_model, slice(None)
        for stack in ("encoder", "decoder"):
            for i, layer in enumerate(getattr(ours.model, stack).layers):
                prefix, other = f"model.{stack}.layers.{i}", f"transformer.{stack}.layers.{i}"
                for name, theirs in torch_names(layer, prefix, stack == "decoder").items():
                    self.pairs[name] = (f"{other}.{theirs}", everything)
                attentions = {"self_attn": "self_attn", "cross_attn": "multihead_attn"}
                for attention, torch_attention in list(attentions.items())[: 1 + (stack == "decoder")]:
                    for part, projection in enumerate(("q_proj", "k_proj", "v_proj")):
                        for kind in ("weight", "bias"):
                            name = f"{prefix}.{attention}.{projection}.{kind}"
                            rows = slice(part * d_model, (part + 1) * d_model)
                            self.pairs[name] = (f"{other}.{torch_attention}.in_proj_{kind}", rows)
            for kind in ("weight", "bias"):
                self.pairs[f"model.{stack}.layer_norm.{kind}"] = (f"transformer.{stack}.norm.{kind}", everything)
        self.pairs["model.encoder.embed_tokens.weight"] = ("embedding", everything)

    def embed(self, ids: Tensor) -> Tensor:
        d_model = self.embedding.shape[1]
        i = torch.arange(0, d_model, 2).double()
        angles = torch.arange(ids.shape[1])[:, None] / 10000 ** (i / d_model)
        positions = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
        return F.embedding(ids, self.embedding) * math.sqrt(d_model) + positions.to(self.embedding.dtype)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Encoder output, logits, and the sum of cross-entropies."""
        padding = input_ids.eq(PAD)
        source, target = self.embed(input_ids), self.embed(shift_right(labels, self.start, PAD))
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        memory = self.transformer.encoder(source, src_key_padding_mask=padding)
        output = self.transformer.decoder(target, memory, tgt_mask=causal, memory_key_padding_mask=padding)
        logits = output @ self.embedding.T
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
        return memory, logits, loss

    def gradients_by_our_names(self) -> dict[str, Tensor]:
        parameters = dict(self.named_parameters())
        return {name: parameters[other].grad[rows] for name, (other, rows) in self.pairs.items()}


def random_fields(seed: int) -> dict[str, Any]:
    """A random shape; torch has one number of heads and one feed-forward width for both stacks."""
    dice = random.Random(seed)
    heads, ffn = dice.choice([1, 2, 3, 8]), dice.randint(5, 70)
    return {
        "vocab_size": dice.randint(10, 60),
        "d_model": heads * 2 * dice.randint(2, 6),
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": ffn,
        "decoder_ffn_dim": ffn,
        "encoder_layers": dice.randint(1, 4),
        "decoder_layers": dice.randint(1, 4),
        "activation_function": dice.choice(["relu", "gelu"]),
    }


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("fields", [{}, {"encoder_layers": 3, "decoder_layers": 1}, *map(random_fields, range(3))])
def test_parity_with_torch_transformer(backend: str, fields: dict[str, Any]) -> None:
    ours = tiny_model(attn_implementation=backend, final_layer_norm=True, **fields)
    theirs = TorchTranslator(ours).train()  # torch's fast path, in evaluation, has no gradients
    missing = {name for name, _ in ours.named_parameters()} - theirs.pairs.keys()
    assert missing == set()
    batch = translation_batch([7, 2, 5, 1], [3, 8, 1, 6], ours.config.vocab_size)

    # the sum over words, so that gradients are not small
    output = ours(**batch, num_items_in_batch=1)
    memory, logits, loss = theirs(batch["input_ids"], batch["labels"])
    words = batch["attention_mask"].bool()
    assert_near(output.encoder_last_hidden_state[words], memory[words], what="encoder")
    real = batch["labels"].ne(-100)
    assert_near(output.logits[real], logits[real], what="logits")
    assert_near(output.loss, loss, what="loss")

    loss.backward()
    expected = theirs.gradients_by_our_names()
    for training in (False, True):
        _, actual = gradients(ours.train(training), **batch, num_items_in_batch=1)
        assert_same_gradients(actual, expected)
