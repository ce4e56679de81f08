"""Word alignment between a source and its translation, from the decoder's cross-attention."""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from ..engine.shared_copy import shared_copy
from ..text.side_tokens import DecodeIds, Side, side_decoder
from ..text.words import UNIT, WordSplitter, white_space_words
from ..utils.errors import UserError
from .batching import MAX_TOKENS, length_batches

#: (source word, target word), both counted from 0
Link = tuple[int, int]

_PAIRS = 64  # in a batch


@torch.inference_mode()
def align(
    model: PreTrainedModel,
    source_tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[list[int]],
    targets: Sequence[list[int]],
    layer: int | None = None,
    words: WordSplitter = white_space_words,
    marks: Collection[int] = (),
) -> list[list[Link]]:
    """Align the words of sentences with the words of their translations, in batches of similar length.

    Each target token is linked to the source token with the highest attention weight, averaged over the heads of one
    decoder layer, when the token is predicted. Two words are linked if any of their tokens are (Garg et al. 2019,
    arXiv 1909.02074).

    Args:
        model: a translation model of this package. It is not changed, so that other threads may use it meanwhile.
        sources, targets: token ids of each sentence, with its end-of-sentence token but without a start token.
        layer: of the decoder, counted from 1. None is the last but one, as in the paper cited.
        words: `text.words.white_space_words`, or `words` for the words of scripts without spaces.
        marks: ids of a source that are not in its text, such as language marks.

    Returns:
        The links of each pair, sorted.

    Raises:
        UserError: a layer that does not exist.
    """
    weights: list[Tensor] = []
    links: dict[int, list[Link]] = {}

    def keep(module: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        weights.append(output[1].float().mean(dim=1).cpu())  # (B, H, T, S) -> (B, T, S)

    # A hook, because `output_attentions` would keep the weights of every layer. The copy is this call's alone.
    copied = shared_copy(model, attention="eager")
    chosen = copied.get_decoder().layers[chosen_layer(model, layer) - 1]
    chosen.cross_attn.register_forward_hook(keep)
    lengths = {i: max(map(len, pair)) for i, pair in enumerate(zip(sources, targets, strict=True))}
    for batch in length_batches(lengths, _PAIRS, MAX_TOKENS):
        source = source_inputs(model, source_tokenizer, [sources[i] for i in batch])
        # The base model computes no logits.
        inputs = decoder_inputs(model, [targets[i] for i in batch])
        copied.base_model(**source, decoder_input_ids=inputs, use_cache=False)
        for i, rows in zip(batch, weights.pop(), strict=True):
            source_words = word_ranges(source_tokenizer, sources[i], "source", words, marks)
            target_words = word_ranges(target_tokenizer, targets[i], "target", words, marks)
            links[i] = _links(rows, source_words, target_words)
    return [links[i] for i in lengths]


def chosen_layer(model: PreTrainedModel, layer: int | None) -> int:
    """The decoder layer that aligns, counted from 1."""
    layers = getattr(model.get_decoder(), "layers", [])
    if not layers or not hasattr(layers[0], "cross_attn"):
        raise UserError(
            f"alignment: {type(model).__name__} is none of this package's models, which it needs"
        )
    if layer is None:
        return max(1, len(layers) - 1)
    if not 1 <= layer <= len(layers):
        raise UserError(
            f"alignment_layer: the model has decoder layers 1 to {len(layers)}, not {layer}"
        )
    return layer


def word_ranges(
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    side: Side = "target",
    words: WordSplitter = white_space_words,
    marks: Collection[int] = (),
) -> list[range]:
    """The words of each token of a side, counted from 0. Empty for special tokens, `marks` and white space."""
    special = {*tokenizer.all_special_ids, *marks}
    decode = side_decoder(tokenizer, side)
    text = decode([token for token in ids if token not in special])
    starts = [start for start, _ in words(text)]
    word_of = [bisect_right(starts, unit.start()) - 1 for unit in UNIT.finditer(text)]
    ranges = []
    seen = -1
    for unit in _last_units(ids, special, decode):
        if unit is None or not word_of:
            ranges.append(range(0))
            continue
        last = min(unit, len(word_of) - 1)
        ranges.append(range(word_of[min(seen + 1, last)], word_of[last] + 1))
        seen = last
    return ranges


def _last_units(ids: Sequence[int], special: set[int], decode: DecodeIds) -> list[int | None]:
    """The last `UNIT` of each token, counted from 0. None for special tokens and white space."""
    numbers: list[int | None] = [None] * len(ids)
    span: list[int] = []  # the tokens since the first one of the current unit
    unit = -1
    held = 0  # the current unit, the number of units in `span`
    incomplete: list[int] = []  # positions of tokens since the last whole character
    for position, token in enumerate(ids):
        if token in special:
            continue
        # decoded together, because some tokenizers strip the leading space of a token decoded alone
        text = decode([*span, token])
        span.append(token)
        if not decode([token]).strip():
            continue
        incomplete.append(position)
        if text.endswith("\ufffd"):
            continue
        if (count := len(UNIT.findall(text))) > held:
            span = [ids[i] for i in incomplete]
            unit = unit + count - held
            held = len(UNIT.findall(decode(span)))
        for i in incomplete:
            numbers[i] = unit
        incomplete = []
    for i in incomplete:  # the last character is not whole
        numbers[i] = unit + 1
    return numbers


def source_inputs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[list[int]],
) -> BatchEncoding:
    """`input_ids` and `attention_mask` (B, S) of sources, on the model's device."""
    return tokenizer.pad({"input_ids": list(sources)}, return_tensors="pt").to(model.device)


def decoder_inputs(model: PreTrainedModel, targets: Sequence[list[int]]) -> Tensor:
    """Decoder inputs (B, T) for teacher forcing: the targets shifted right by one position (§3.1)."""
    longest = max(map(len, targets))
    start = model.config.decoder_start_token_id
    # The latter in other models.
    pad = getattr(model.config, "target_pad_token_id", model.config.pad_token_id)
    rows = [[start, *target[:-1]] + [pad] * (longest - len(target)) for target in targets]
    return torch.tensor(rows, device=model.device)


def _links(weights: Tensor, sources: list[range], targets: list[range]) -> list[Link]:
    """Links of one pair, from its weights (T, S), padded at the end, and the words of its tokens."""
    columns = [column for column, words in enumerate(sources) if words]
    if not columns:
        return []
    best = weights[:, columns].argmax(dim=1).tolist()
    links = {
        (source, target)
        for column, of_token in zip(best, targets, strict=False)  # `best` goes on with padding
        for target in of_token
        for source in sources[columns[column]]
    }
    return sorted(links)
