"""New languages for a trained model: their tokens, and the rows of its embeddings."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..utils.errors import UserError
from .language_codes import CodePair
from .language_tokens import add_language_tokens, language_tokens


@torch.no_grad()
def extend_languages(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directions: Sequence[CodePair],
    related: Mapping[str, str],
    on_source: bool = True,
) -> list[str]:
    """Add the languages that a model lacks to its joint tokenizer and its embeddings. Other logits do not change.

    Args:
        model, tokenizer: modified in place.
        directions, on_source: as in `add_language_tokens`.
        related: the known language that a new one starts with. Others start with the mean of all languages, or of all
            tokens if there are none yet.

    Returns:
        The new languages.

    Raises:
        UserError: `related` has other languages, or a tokenizer whose class has a fixed list of languages.
    """
    before = language_tokens(tokenizer)
    known = dict(before.ids) if before else {}
    rows = len(tokenizer)
    new = add_language_tokens(tokenizer, directions, on_source)
    for code, like in related.items():
        if code not in new or like not in known:
            raise UserError(
                f"add_languages: {code}={like}: NEW=KNOWN is needed, a new language and one of the model"
            )
    after = language_tokens(tokenizer)
    ids = dict(after.ids) if after else {}
    if len(set(ids.values())) < len(ids):
        raise UserError(
            f"directions: a {type(tokenizer).__name__} cannot take a new language, {new[0]}"
        )
    if max(ids.values()) >= model.config.vocab_size:
        model.resize_token_embeddings(max(ids.values()) + 1, mean_resizing=False)
    for matrix in _token_matrices(model):
        mean = matrix[[*known.values()] or slice(rows)].mean(dim=0)
        for code in new:
            matrix[ids[code]] = matrix[known[related[code]]] if code in related else mean
    return new


def _token_matrices(model: PreTrainedModel) -> list[Tensor]:
    """The matrices (V, D) and the bias (V,) with a row per token. Shared ones occur once."""
    output = model.get_output_embeddings()
    matrices = [
        model.get_input_embeddings().weight,
        model.get_decoder().embed_tokens.weight,
        output.weight,
    ]
    if output.bias is not None:
        matrices.append(output.bias)
    return list({id(matrix): matrix for matrix in matrices}.values())
