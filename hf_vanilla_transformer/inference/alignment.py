"""Which source word a translated word comes from, read off the decoder's attention over the source."""

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import UserError

#: (source word, target word), both counted from 0
Link = tuple[int, int]


@torch.inference_mode()
def align(
    model: PreTrainedModel,
    source_tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[list[int]],
    targets: Sequence[list[int]],
    layer: int | None = None,
) -> list[list[Link]]:
    """Align the words of a batch of sentences with those of their translations.

    Each target token is linked to the source token that the mean of the heads of one decoder layer looks at most
    while the token is predicted; two words are linked if any of their tokens are (Garg et al. 2019, arXiv
    1909.02074). Words are what white space separates.

    Args:
        model: a translator of this package; its mode and attention implementation are as before afterwards.
        source_tokenizer, target_tokenizer: which made the ids.
        sources, targets: ids of each sentence, with their ends; the decoder's start token is not among them.
        layer: of the decoder, counted from 1; None is the last but one, as in the paper cited.

    Returns:
        The links of each pair, sorted.

    Raises:
        UserError: a layer that is not there.
    """
    weights = _mean_attention(model, source_tokenizer, sources, targets, chosen_layer(model, layer))  # (B, T, S)
    return [
        _links(rows, word_numbers(source_tokenizer, source), word_numbers(target_tokenizer, target))
        for rows, source, target in zip(weights, sources, targets, strict=True)
    ]


def chosen_layer(model: PreTrainedModel, layer: int | None) -> int:
    """The decoder layer to look at, counted from 1.

    Raises:
        UserError: the model has no such layer, or is no translator of this package.
    """
    layers = getattr(model.get_decoder(), "layers", [])
    if not layers or not hasattr(layers[0], "cross_attn"):
        raise UserError(f"alignment: {type(model).__name__} is none of this package's models, which it needs")
    if layer is None:
        return max(1, len(layers) - 1)
    if not 1 <= layer <= len(layers):
        raise UserError(f"alignment_layer: the model has decoder layers 1 to {len(layers)}, not {layer}")
    return layer


def word_numbers(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[int | None]:
    """For each token the word that it is part of, counted from 0; None for special tokens and mere space."""
    special = set(tokenizer.all_special_ids)
    numbers: list[int | None] = []
    word, begun, held = -1, [], 0  # the present word, the tokens from its first one on, how many words they hold
    for token in ids:
        alone = tokenizer.decode([token], clean_up_tokenization_spaces=False)
        if token in special or not alone.strip():
            begun += [] if token in special else [token]
            numbers.append(None)
            continue
        # together, because a token alone does not say whether a space stands before it
        words = len(tokenizer.decode([*begun, token], clean_up_tokenization_spaces=False).split())
        if words > held:
            word, begun, held = word + words - held, [token], len(alone.split())
        else:
            begun.append(token)
        numbers.append(word)
    return numbers


@contextmanager
def eager_attention(model: PreTrainedModel):
    """The model in evaluation mode and with the attention that gives its weights, for a while."""
    was_training, implementation = model.training, model.config._attn_implementation
    try:
        model.eval()
        model.set_attn_implementation("eager")
        yield
    finally:
        model.set_attn_implementation(implementation)
        model.train(was_training)


def _mean_attention(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[list[int]],
    targets: Sequence[list[int]],
    layer: int,
) -> Tensor:
    """(B, T, S): the mean of the heads of a decoder layer, on the CPU."""
    source = tokenizer.pad({"input_ids": list(sources)}, return_tensors="pt").to(model.device)
    seen: list[Tensor] = []

    def keep(module: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        seen.append(output[1].float().mean(dim=1).cpu())  # (B, H, T, S) -> (B, T, S)

    # `output_attentions` would hold the weights of every layer, which is much for long sentences
    hook = model.get_decoder().layers[layer - 1].cross_attn.register_forward_hook(keep)
    try:
        with eager_attention(model):
            # without the logits, which nobody asks for
            model.base_model(**source, decoder_input_ids=decoder_inputs(model, targets), use_cache=False)
    finally:
        hook.remove()
    return seen[0]


def decoder_inputs(model: PreTrainedModel, targets: Sequence[list[int]]) -> Tensor:
    """(B, T): what the decoder reads to predict these words, each one place later than it is written (§3.1)."""
    longest = max(map(len, targets))
    start, pad = model.config.decoder_start_token_id, model.config.pad_token_id
    rows = [[start, *target[:-1]] + [pad] * (longest - len(target)) for target in targets]
    return torch.tensor(rows, device=model.device)


def _links(weights: Tensor, source_words: list[int | None], target_words: list[int | None]) -> list[Link]:
    """Links of one pair, from (T, S) weights with padding at their ends."""
    columns = [column for column, word in enumerate(source_words) if word is not None]
    if not columns:
        return []
    best = weights[:, columns].argmax(dim=1).tolist()
    links = {
        (source_words[columns[place]], word)
        for place, word in zip(best, target_words, strict=False)  # padding of other sentences follows
        if word is not None
    }
    return sorted(links)
