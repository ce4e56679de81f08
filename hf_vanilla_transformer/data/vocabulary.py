"""Vocabulary extension: new tokens for a trained model, such as the words of a new language.

Shapes: W tokens of the extended vocabulary, D d_model.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise

import torch
from tokenizers import AddedToken, Tokenizer, models
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..utils.errors import UserError, check_at_least_one
from .language_tokens import add_language_tokens, language_tokens
from .tokenizer_training import without_long_words


def extend_tokenizer(
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str] = (),
    more: int = 0,
    min_frequency: int = 2,
    tags: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """Append merges learned from new text, and tags such as `<2de>`, to a byte-pair encoding.

    Old tokens keep their ids, and the old merges are applied first. The new merges may also apply to text of the old
    languages: it can take fewer tokens, and still decodes to itself.

    Args:
        tokenizer: a byte-pair encoding, not modified.
        texts: sentences of the new language.
        more: number of tokens to add. Fewer are added if too few pairs of tokens occur `min_frequency` times.
        min_frequency: how often a pair must occur to be merged.
        tags: tokens that are recognised in a text as a whole. `add_special_tokens` would add special tokens, and this
            package's tokenizers read those in a text as ordinary text.

    Returns:
        The extended tokenizer.

    Raises:
        UserError: `more` is below 1 without tags, or the tokenizer is no byte-pair encoding.
    """
    if not tags:
        check_at_least_one(more=more)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not isinstance(backend.model, models.BPE):
        raise UserError(
            f"only a byte-pair encoding can learn more merges; this is a {type(tokenizer).__name__}"
        )
    state = json.loads(backend.to_str())
    vocabulary = state["model"]["vocab"]
    merges = state["model"]["merges"]
    next_id = len(tokenizer)
    for left, right in _learn_merges(_count_words(backend, texts), min_frequency):
        if next_id == len(tokenizer) + more:
            break
        merges.append([left, right])
        if left + right not in vocabulary:
            vocabulary[left + right] = next_id
            next_id += 1
    # same settings, new model
    settings = tokenizer.init_kwargs | {"tokenizer_object": Tokenizer.from_str(json.dumps(state))}
    extended = type(tokenizer)(**settings)
    extended.add_tokens([AddedToken(tag, rstrip=True, normalized=False) for tag in tags])
    return extended


def _count_words(backend: Tokenizer, texts: Iterable[str]) -> Counter[tuple[str, ...]]:
    """Frequencies of the words of the texts, each word as its tokens."""
    words: Counter[str] = Counter()
    for text in without_long_words(texts):
        text = backend.normalizer.normalize_str(text) if backend.normalizer else text
        words.update(word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text))
    frequencies: Counter[tuple[str, ...]] = Counter()
    for word, count in words.items():
        frequencies[tuple(token.value for token in backend.model.tokenize(word))] += count
    return frequencies


def _learn_merges(
    frequencies: Counter[tuple[str, ...]], min_frequency: int
) -> Iterator[tuple[str, str]]:
    """Byte-pair encoding (Sennrich et al. 2016, Algorithm 1) that starts from tokens instead of characters.

    `tokenizers` can only start from characters, and many of those merges would never apply after the old ones.
    """
    words = [list(tokens) for tokens in frequencies]
    counts = list(frequencies.values())
    pairs: Counter[tuple[str, str]] = Counter()
    words_with: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for index, word in enumerate(words):
        for pair in pairwise(word):
            pairs[pair] += counts[index]
            words_with[pair].add(index)
    queue = [(-count, pair) for pair, count in pairs.items()]
    heapify(queue)
    while queue:
        count, pair = heappop(queue)
        if -count != pairs[pair]:  # the queued count is outdated
            if pairs[pair] > 0:
                heappush(queue, (-pairs[pair], pair))
            continue
        if pairs[pair] < min_frequency:
            return
        yield pair
        touched = set()
        for index in sorted(words_with.pop(pair)):
            for each in pairwise(words[index]):
                pairs[each] -= counts[index]
            words[index] = _merged(words[index], pair)
            for each in pairwise(words[index]):
                pairs[each] += counts[index]
                words_with[each].add(index)
                touched.add(each)
        for each in sorted(touched):
            heappush(queue, (-pairs[each], each))


def _merged(word: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for token in word:
        if merged and (merged[-1], token) == pair:
            merged[-1] += token
        else:
            merged.append(token)
    return merged


@torch.no_grad()
def extend_embeddings(
    model: PreTrainedModel,
    old: PreTrainedTokenizerBase,
    new: PreTrainedTokenizerBase,
    side: str = "source",
) -> None:
    """Resize a model's embeddings to an extended tokenizer. Old tokens keep their rows and their logits.

    A new token is initialised to the mean of the old tokens that it replaces, in each matrix and in the output bias.

    Args:
        model: modified in place. With shared embeddings, all matrices grow.
        old: the tokenizer that the model was trained with.
        new: from `extend_tokenizer`.
        side: "source" or "target", for separate vocabularies.

    Raises:
        UserError: an unknown side, old tokens with different ids in `new`, or an `old` that does not fit the model.
    """
    if side not in ("source", "target"):
        raise UserError(f"side={side!r} is none of source, target")
    shared = model.config.share_encoder_decoder_embeddings
    target = side == "target" and not shared
    rows = model.config.target_vocab_size if target else model.config.vocab_size
    moved = [
        token for token, index in old.get_vocab().items() if new.get_vocab().get(token) != index
    ]
    if moved or len(old) != rows:
        reason = (
            f"token {moved[0]!r} has moved"
            if moved
            else f"the old one has {len(old)} tokens, the model {rows}"
        )
        raise UserError(f"the tokenizers do not fit: {reason}")
    resize = model.resize_decoder_token_embeddings if target else model.resize_token_embeddings
    resize(len(new), mean_resizing=False)
    old_ids = _old_ids(old, new)
    for matrix in _token_matrices(model, side):
        for index, parts in old_ids.items():
            matrix[index] = matrix[parts].mean(dim=0)


@torch.no_grad()
def extend_languages(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directions: Sequence[tuple[str, str]],
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


def _token_matrices(model: PreTrainedModel, side: str | None = None) -> list[Tensor]:
    """The matrices (W, D) and the bias (W,) with a row per token of a side, or of both. Shared ones occur once."""
    shared = model.config.share_encoder_decoder_embeddings
    matrices = []
    if shared or side != "target":
        matrices.append(model.get_input_embeddings().weight)
    if shared or side != "source":
        output = model.get_output_embeddings()
        matrices += [model.get_decoder().embed_tokens.weight, output.weight]
        if output.bias is not None:
            matrices.append(output.bias)
    return list({id(matrix): matrix for matrix in matrices}.values())


def _old_ids(old: PreTrainedTokenizerBase, new: PreTrainedTokenizerBase) -> dict[int, list[int]]:
    """Id of a new token -> the ids of the old tokens that it is merged from."""
    vocabulary = new.get_vocab()
    halves = dict[str, tuple[str, str]]()
    for left, right in json.loads(new.backend_tokenizer.to_str())["model"]["merges"]:
        halves.setdefault(left + right, (left, right))

    def parts(token: str) -> list[int]:
        if vocabulary[token] < len(old):
            return [vocabulary[token]]
        if token not in halves:  # a tag
            return old(token, add_special_tokens=False)["input_ids"]
        return [index for half in halves[token] for index in parts(half)]

    return {index: parts(token) for token, index in vocabulary.items() if index >= len(old)}
