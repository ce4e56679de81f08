"""Tiny models, batches and comparisons that the tests of the model share."""

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import MarianConfig, MarianMTModel, PreTrainedTokenizerFast

from hf_vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from hf_vanilla_transformer import generation_vanilla_transformer as generation
from hf_vanilla_transformer.text import save_tokenizers, train_tokenizer
from hf_vanilla_transformer.text.language_tokens import add_language_tokens
from hf_vanilla_transformer.utils.errors import UserError

PAD, EOS, START = 1, 2, 0
SPECIAL_TOKENS = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>"}
FIRST_WORD = 4

# share_encoder_decoder_embeddings, tie_word_embeddings
TYING_MODES = [(True, True), (True, False), (False, True), (False, False)]

# sizes of a model that a test trains or saves without looking at its translations
SMALL_SIZES = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}

Module = TypeVar("Module", bound=nn.Module)


def slow(*values: Any) -> list[Any]:
    """Values of a parameter that only the slow tests try."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def first_of_each(
    rows: list[tuple],
    column: int,
    known: Iterable[Any] = (),
) -> list[Any]:
    """Rows of a table of parameters. Only the slow tests try one whose value in this column an earlier row has.

    `known` are values that fast tests try elsewhere.
    """
    known = set(known)
    params = []
    for row in rows:
        marks = [pytest.mark.slow] if row[column] in known else []
        params.append(pytest.param(*row, marks=marks))
        known.add(row[column])
    return params


def error_of(call: Callable[..., Any], *arguments: Any, **settings: Any) -> str:
    """The one line of the `UserError` that a call must raise."""
    with pytest.raises(UserError) as raised:
        call(*arguments, **settings)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def with_paths(arguments: Iterable[str], **paths: Path) -> list[str]:
    """Arguments of a command in which the names of these paths are replaced by them."""
    for name, path in paths.items():
        arguments = [argument.replace(name, str(path)) for argument in arguments]
    return list(arguments)


# First lines of a script that can load this package's code from checkpoints only.
WITHOUT_THE_PACKAGE = """
import sys


class HidePackage:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_vanilla_transformer":
            raise ModuleNotFoundError("not installed here", name=name)


sys.meta_path.insert(0, HidePackage())
"""


def tiny_config(**fields: Any) -> VanillaTransformerConfig:
    """A configuration with which a forward pass takes a millisecond. No dropout."""
    small = {
        "vocab_size": 40,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "dropout": 0.0,
    }
    return VanillaTransformerConfig(**small | fields)


_MADE: dict[Any, tuple[VanillaTransformerForConditionalGeneration, Tensor]] = {}


def tiny_model(seed: int = 0, **fields: Any) -> VanillaTransformerForConditionalGeneration:
    """A translator in evaluation mode, whose weights are all different from each other and none is 0 or 1.

    A small one is made once for each random state. Its copies take less time, and leave the same state.
    """
    made_from = (
        seed,
        repr(fields),
        generation.MAX_LENGTH_OVER_SOURCE,
        torch.get_default_dtype(),
        torch.get_rng_state().numpy().tobytes(),
    )
    if made_from not in _MADE:
        attention = fields.pop("attn_implementation", "sdpa")
        config = tiny_config(**fields)
        config._attn_implementation = attention
        model = randomise(VanillaTransformerForConditionalGeneration(config), seed).eval()
        if model.num_parameters() > 100_000:
            return model
        if len(_MADE) == 300:  # a test that draws configurations
            _MADE.clear()
        _MADE[made_from] = model, torch.get_rng_state()
    model, random_state = _MADE[made_from]
    torch.set_rng_state(random_state)
    return copy.deepcopy(model)


def six_layers(vocab_size: int = 500) -> VanillaTransformerForConditionalGeneration:
    """The base model with narrow layers, because widths launch nothing on a GPU."""
    torch.manual_seed(0)
    config = VanillaTransformerConfig.from_preset(
        "base",
        vocab_size=vocab_size,
        d_model=64,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
    )
    return VanillaTransformerForConditionalGeneration(config)


def echo_model(tokenizer: Any, **fields: Any) -> VanillaTransformerForConditionalGeneration:
    """A random model whose translations depend on the sentence and have ASCII letters only.

    Incomplete UTF-8 would look the same in every translation.
    """
    torch.manual_seed(1)
    usual = {
        **SMALL_SIZES,
        "vocab_size": len(tokenizer),
        "tie_word_embeddings": False,
        "lm_head_bias": True,
    }
    config = VanillaTransformerConfig(**usual | fields)
    model = VanillaTransformerForConditionalGeneration(config)
    with torch.no_grad():
        model.model.decoder.layers[0].cross_attn.out_proj.weight.normal_(std=4)
        model.lm_head.weight.normal_()
        for index in range(model.config.target_vocab_size):
            text = tokenizer.decode([index])
            model.lm_head.bias[index] = 0 if text.isascii() and text.isalpha() else -1e4
        model.lm_head.bias[tokenizer.eos_token_id] = 0
    return model.eval()


def save_model(
    folder: Path,
    source: list[str],
    target: list[str] | None = None,
    vocab_size: int = 320,
    seed: int = 0,
    **fields: Any,
) -> Path:
    """Save a tiny translator in evaluation mode with a tokenizer of these texts, or one for each language."""
    tokenizers = [
        train_tokenizer(texts, vocab_size) for texts in (source, target) if texts is not None
    ]
    fields["vocab_size"] = len(tokenizers[0])
    if target is not None:
        fields |= {
            "decoder_vocab_size": len(tokenizers[1]),
            "share_encoder_decoder_embeddings": False,
        }
    tiny_model(seed, **fields).save_pretrained(folder)
    save_tokenizers(folder, *tokenizers)
    return folder


DIRECTIONS = [("en", "de"), ("en", "fr"), ("de", "en")]


def save_model_of_languages(
    folder: Path,
    on_source: bool = True,
    seed: int = 0,
    **fields: Any,
) -> Path:
    """Save a tiny translator of `DIRECTIONS` in evaluation mode, with a joint tokenizer and its language tokens."""
    tokenizer = train_tokenizer(
        ["seven hundred and eight", "siebenhundertacht", "sept cent huit"] * 9, 300
    )
    add_language_tokens(tokenizer, DIRECTIONS, on_source)
    tiny_model(seed, vocab_size=len(tokenizer), **fields).save_pretrained(folder)
    save_tokenizers(folder, tokenizer)
    return folder


def tiny_marian(vocab_size: int) -> MarianMTModel:
    """transformers' own translator with one layer, for code that must also work with other models."""
    config = MarianConfig(
        vocab_size=vocab_size,
        pad_token_id=PAD,
        eos_token_id=EOS,
        decoder_start_token_id=PAD,
        forced_eos_token_id=None,
        **SMALL_SIZES,
    )
    return MarianMTModel(config).eval()


def word_tokenizer(
    words: list[str],
    split: Any = None,
    ends: bool = False,
    **special: str,
) -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each word, numbered in their order. `<unk>` must be one of them.

    `ends` adds `</s>` to each text.
    """
    backend = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = split or pre_tokenizers.Whitespace()
    if ends:
        end = ("</s>", words.index("</s>"))
        backend.post_processor = processors.TemplateProcessing(
            single="$A </s>", special_tokens=[end]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        **special,
    )


def tying(share: bool, tie: bool, **fields: Any) -> dict[str, Any]:
    """A tying mode. Where nothing forbids it, the target vocabulary is smaller than the source's."""
    mode: dict[str, Any] = {"share_encoder_decoder_embeddings": share, "tie_word_embeddings": tie}
    if not share:
        mode["decoder_vocab_size"] = 31
    return mode | fields


def randomise(model: Module, seed: int = 0) -> Module:
    """Random numbers in every parameter, so that a transposed, swapped or forgotten one cannot go unnoticed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.2 * noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    return model


def sentences(
    lengths: list[int],
    vocab_size: int = 40,
    seed: int = 0,
) -> list[list[int]]:
    """Random tokens. Each sentence ends with EOS, counted by its length."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [
        torch.randint(FIRST_WORD, vocab_size, (length - 1,), generator=generator)
        for length in lengths
    ]
    return [sentence.tolist() + [EOS] for sentence in tokens]


def padded(rows: list[list[int]], value: int = PAD, left: bool = False) -> Tensor:
    """One tensor (B, S) of rows of different length."""
    longest = max(map(len, rows))
    filled = []
    for row in rows:
        fill = [value] * (longest - len(row))
        filled.append(fill + row if left else row + fill)
    return torch.tensor(filled)


def translation_batch(
    source_lengths: list[int], target_lengths: list[int], vocab_size: int = 40, seed: int = 0
) -> dict[str, Tensor]:
    """A batch of a data collator: `input_ids`, `attention_mask` and `labels`, padded on the right."""
    source = padded(sentences(source_lengths, vocab_size, seed))
    labels = padded(sentences(target_lengths, vocab_size, seed + 1000), value=-100)
    return {
        "input_ids": source,
        "attention_mask": source.ne(PAD).long(),
        "labels": labels,
    }


def gradients(model: nn.Module, **inputs: Any) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradient of every parameter."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.item(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def assert_near(
    actual: Tensor,
    expected: Tensor,
    tolerance: float = 1e-5,
    what: str = "",
) -> None:
    """The largest error is at most `tolerance`, times the largest number where that is above 1."""
    assert actual.shape == expected.shape, (
        f"{what}: {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    )
    assert torch.isfinite(actual).all(), f"{what}: not finite"
    error = (actual.double() - expected.double()).abs().max().item()
    assert error <= tolerance * max(1.0, expected.abs().max().item()), f"{what}: off by {error:.2e}"


def assert_same_gradients(
    actual: dict[str, Tensor],
    expected: dict[str, Tensor],
    tolerance: float = 1e-5,
) -> None:
    """`assert_near` for every parameter, and the same parameters."""
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_near(actual[name], gradient, tolerance, name)
