"""Word alignment between a source and its translation, from the decoder's cross-attention."""

import re
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.side_tokens import Side, side_decoder
from ..errors import UserError
from .shared_copy import shared_copy

#: (source word, target word), both counted from 0
Link = tuple[int, int]

#: Characters of scripts without spaces: Thai, Lao, Burmese, Khmer, Japanese and Chinese.
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)

#: A word that ends at white space or, in a script without spaces, one character.
WHITE_SPACE_WORD, WORD = re.compile(r"\S+"), re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")


@torch.inference_mode()
def align(
    model: PreTrainedModel,
    source_tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[list[int]],
    targets: Sequence[list[int]],
    layer: int | None = None,
    words: "re.Pattern[str]" = WHITE_SPACE_WORD,
    marks: Collection[int] = (),
) -> list[list[Link]]:
    """Align the words of a batch of sentences with the words of their translations.

    Each target token is linked to the source token with the highest attention weight, averaged over the heads of one
    decoder layer, when the token is predicted. Two words are linked if any of their tokens are (Garg et al. 2019,
    arXiv 1909.02074).

    Args:
        model: a translation model of this package. It is not changed, so that other threads may use it meanwhile.
        sources, targets: token ids of each sentence, with its end-of-sentence token but without a start token.
        layer: of the decoder, counted from 1. None is the last but one, as in the paper cited.
        words: matches a word, by default between white space.
        marks: ids of a source that are not in its text, as those of languages.

    Returns:
        The links of each pair, sorted.

    Raises:
        UserError: a layer that does not exist.
    """
    weights = _mean_attention(model, source_tokenizer, sources, targets, chosen_layer(model, layer))  # (B, T, S)
    return [
        _links(
            rows,
            word_numbers(source_tokenizer, source, "source", words, marks),
            word_numbers(target_tokenizer, target, "target", words, marks),
        )
        for rows, source, target in zip(weights, sources, targets, strict=True)
    ]


def chosen_layer(model: PreTrainedModel, layer: int | None) -> int:
    """The decoder layer that aligns, counted from 1."""
    layers = getattr(model.get_decoder(), "layers", [])
    if not layers or not hasattr(layers[0], "cross_attn"):
        raise UserError(f"alignment: {type(model).__name__} is none of this package's models, which it needs")
    if layer is None:
        return max(1, len(layers) - 1)
    if not 1 <= layer <= len(layers):
        raise UserError(f"alignment_layer: the model has decoder layers 1 to {len(layers)}, not {layer}")
    return layer


def word_numbers(
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    side: Side = "target",
    words: "re.Pattern[str]" = WHITE_SPACE_WORD,
    marks: Collection[int] = (),
) -> list[int | None]:
    """The last word of each token of a side, counted from 0. None for special tokens, `marks` and white space."""
    special, decode = {*tokenizer.all_special_ids, *marks}, side_decoder(tokenizer, side)
    numbers: list[int | None] = []
    word, span, held = -1, [], 0  # the current word, the tokens since its first one, the number of words in these
    for token in ids:
        alone = decode([token])
        if token in special or not alone.strip():
            span += [] if token in special else [token]
            numbers.append(None)
            continue
        # decoded together, because some tokenizers strip the leading space of a token decoded alone
        count = len(words.findall(decode([*span, token])))
        if count > held:
            word, span, held = word + count - held, [token], len(words.findall(alone))
        else:
            span.append(token)
        numbers.append(word)
    return numbers


def _mean_attention(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[list[int]],
    targets: Sequence[list[int]],
    layer: int,
) -> Tensor:
    """Cross-attention weights (B, T, S) of a decoder layer, averaged over its heads, on the CPU."""
    source = tokenizer.pad({"input_ids": list(sources)}, return_tensors="pt").to(model.device)
    weights: list[Tensor] = []

    def keep(module: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        weights.append(output[1].float().mean(dim=1).cpu())  # (B, H, T, S) -> (B, T, S)

    # A hook, because `output_attentions` would keep the weights of every layer. The copy is this call's alone.
    copied = shared_copy(model, attention="eager")
    copied.get_decoder().layers[layer - 1].cross_attn.register_forward_hook(keep)
    # The base model computes no logits.
    copied.base_model(**source, decoder_input_ids=decoder_inputs(model, targets), use_cache=False)
    return weights[0]


def decoder_inputs(model: PreTrainedModel, targets: Sequence[list[int]]) -> Tensor:
    """Decoder inputs (B, T) for teacher forcing: the targets shifted right by one position (§3.1)."""
    longest = max(map(len, targets))
    start = model.config.decoder_start_token_id
    pad = getattr(model.config, "target_pad_token_id", model.config.pad_token_id)  # the latter in other models
    rows = [[start, *target[:-1]] + [pad] * (longest - len(target)) for target in targets]
    return torch.tensor(rows, device=model.device)


def _links(weights: Tensor, source_words: list[int | None], target_words: list[int | None]) -> list[Link]:
    """Links of one pair, from its weights (T, S), padded at the end."""
    columns = [column for column, word in enumerate(source_words) if word is not None]
    if not columns:
        return []
    best = weights[:, columns].argmax(dim=1).tolist()
    sources, targets = _all_words(source_words), _all_words(target_words)
    links = {
        (source, target)
        for column, of_token in zip(best, targets, strict=False)  # `best` goes on with padding
        for target in of_token
        for source in sources[columns[column]]
    }
    return sorted(links)


def _all_words(last_words: list[int | None]) -> list[range]:
    """All words of each token, from its last word. A token of a script without spaces can have several."""
    words, seen = [], -1
    for last in last_words:
        words.append(range(0) if last is None else range(min(seen + 1, last), last + 1))
        seen = seen if last is None else last
    return words
