"""Attention, probabilities and alternatives to each token, which a search does not return.

They come from a copy of the modules with shared weights, whose attention returns its scores. The copy runs in one
thread with separate tokenizers, because tokenizers are not thread-safe.

Shapes: S source tokens, T target tokens, L layers, H heads, V target vocabulary.
"""

import asyncio
import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..inference.alignment import Link, align, decoder_inputs
from ..inference.inside_view import INSIDE, copy_with_scores, norms_and_positions
from ..inference.translator import Translator
from ..search_vanilla_transformer import is_hypothesis
from ..text.side_tokens import AS_TEXT, Side, side_decoder
from ..text.words import words
from ..utils.errors import UserError
from .engine import QueueFull
from .schemas import PageRequest

#: The attention of all layers and heads is a megabyte for 60 tokens of the paper's base model.
MAX_TOKENS = 128
_MAX_INSIDE = 64  # 4 MB

_MAX_ALTERNATIVES = 50

_CONTEXT = 4  # tokens, since a character has at most 4 bytes

Result = TypeVar("Result")


class Inspector:
    """Inspects the model of a translator, whose weights are shared, in one thread. At most `max_queue` calls wait."""

    def __init__(self, translator: Translator, max_queue: int = 32):
        self.model = translator.model
        self.copy = copy_with_scores(self.model)
        tokenizers = translator.source_tokenizer, translator.target_tokenizer
        self.source_tokenizer, self.target_tokenizer = copy.deepcopy(tokenizers)
        self.marks = translator.directions.marks(None, None)
        self._source_texts = _TokenTexts(self.source_tokenizer, "source")
        self._target_texts = _TokenTexts(self.target_tokenizer, "target")
        self.max_queue = max_queue
        self.pending = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="inspect")

    async def run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a method of this object in its thread.

        Raises:
            QueueFull: too many calls wait.
        """
        if self.pending >= self.max_queue:
            raise QueueFull
        self.pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._pool, function, *arguments
            )
        finally:
            self.pending -= 1

    def close(self) -> None:
        """Finish the waiting calls, then end the thread."""
        self._pool.shutdown()

    def align(self, sources: Sequence[list[int]], targets: Sequence[list[int]]) -> list[list[Link]]:
        """`inference.alignment.align` of `text.words`, for token ids with their end tokens."""
        tokenizers = self.source_tokenizer, self.target_tokenizer
        return align(self.model, *tokenizers, sources, targets, words=words, marks=self.marks)

    @torch.inference_mode()
    def picture(
        self, translator: Translator, sentence: str, num_beams: int, request: PageRequest
    ) -> dict[str, Any]:
        """A `Translation` of the page for one sentence, as web/README.md defines it. It is empty if that is too long.

        `prefix` has the token ids that the translation starts with. After an end token nothing follows. `inside` adds
        scores, residual streams and positions, if neither side has more than 64 tokens.
        """
        names = ("source", "tokens", "probabilities", "attention", "alternatives", "hypotheses")
        empty = {"text": "", **{name: [] for name in names}}
        if not sentence:
            return empty
        source = self.source_tokenizer(translator.source_line(sentence))["input_ids"]
        directions = translator.directions
        source = directions.mark(source, directions.default, 1)
        size = self.model.config.target_vocab_size
        prefix = request.prefix
        if not all(0 <= token < size for token in prefix) or len(prefix) > MAX_TOKENS:
            raise UserError(f"prefix: must be at most {MAX_TOKENS} token ids from 0 to {size - 1}")
        if len(source) > MAX_TOKENS:
            note = f"This source has {len(source)} tokens. Only sources of up to {MAX_TOKENS} are shown in detail."
            return empty | {"note": note}
        mark = directions.prefix(directions.default)
        if not self.marks.intersection(prefix[:1]):
            prefix = [*mark, *prefix]
        found = self._search(translator, source, num_beams, prefix)
        hypotheses = [self._hypothesis(*pair, skipped=len(mark)) for pair in found]
        best = hypotheses[0]["tokens"]
        ids = torch.tensor([source], device=self.copy.device)
        target = decoder_inputs(self.copy, [best])
        output = self.copy(ids, decoder_input_ids=target, use_cache=False, **INSIDE)
        probabilities = output.logits[0].float().softmax(dim=-1).cpu()  # (T, V)
        is_short = max(len(source), len(best)) <= _MAX_INSIDE
        shown = {"inside": self._inside(output)} if request.inside and is_short else {}
        chosen = probabilities.gather(1, torch.tensor(best)[:, None])[:, 0]  # (T,)
        top = probabilities.topk(min(request.alternatives, _MAX_ALTERNATIVES, size))
        choices = zip(top.indices.tolist(), _rounded(top.values, 4), strict=True)
        return {
            "source": self._source_texts.of(source),
            "text": hypotheses[0]["text"],
            "tokens": self._target_texts.of(best),
            "probabilities": _rounded(chosen, 4),
            "attention": _rounded(torch.cat(output.cross_attentions).float().softmax(dim=-1), 3),
            "alternatives": [
                [
                    self._target_texts.after(best[:t], token) | {"probability": probability}
                    for token, probability in zip(tokens, values, strict=True)
                ]
                for t, (tokens, values) in enumerate(choices)
            ],
            "hypotheses": hypotheses,
            **shown,
        }

    def _search(
        self, translator: Translator, source: list[int], beams: int, prefix: list[int]
    ) -> list[tuple[list[int], float | None]]:
        """Tokens and scores of the hypotheses of one sentence by `generate`, the best first."""
        if prefix and prefix[-1] in translator.end_tokens:
            return [(prefix, None)]
        start = self.model.generation_config.decoder_start_token_id
        device = self.model.device
        output = self.model.generate(
            torch.tensor([source], device=device),
            decoder_input_ids=torch.tensor([[start, *prefix]], device=device),
            num_beams=beams,
            num_return_sequences=beams,
            return_dict_in_generate=True,
        )
        scores = output.sequences_scores.tolist() if beams > 1 else [None]
        targets = translator.targets(output.sequences.tolist(), 1 + len(prefix))
        pairs = zip(targets, scores, strict=True)
        return [(tokens, score) for tokens, score in pairs if is_hypothesis(score)]

    def _hypothesis(self, tokens: list[int], score: float | None, skipped: int) -> dict[str, Any]:
        """A hypothesis of the page. The text has none of the first `skipped` tokens."""
        return {
            "text": self.target_tokenizer.decode(tokens[skipped:], **AS_TEXT),
            "score": score,
            "tokens": tokens,
            "token_texts": [token["text"] for token in self._target_texts.of(tokens)],
        }

    def _inside(self, output: Any) -> dict[str, Any]:
        def stack(name: str) -> dict[str, list]:
            norms, positions = norms_and_positions(
                getattr(self.copy.model, name), output[f"{name}_hidden_states"]
            )
            scores = torch.cat(output[f"{name}_attentions"])  # (L, H, T, T)
            numbers = {"scores": scores, "norms": norms[0], "positions": positions}
            return {key: _rounded(value, 6) for key, value in numbers.items()}

        cross = _rounded(torch.cat(output.cross_attentions), 6)  # (L, H, T, S)
        return {"cross": cross, "encoder": stack("encoder"), "decoder": stack("decoder")}


def _rounded(numbers: Tensor, decimals: int) -> list:
    return numbers.cpu().double().round(decimals=decimals).tolist()


class _TokenTexts:
    """Tokens of one side with the texts that they add to those before them, white space included.

    A special token has its name. The text is empty for a token that is a part of a character only.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, side: Side):
        self._tokenizer = tokenizer
        self._decode = side_decoder(tokenizer, side)

    def of(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        """The ids and texts of the tokens of a sentence."""
        return [self.after(ids[:position], token) for position, token in enumerate(ids)]

    def after(self, before: Sequence[int], token: int) -> dict[str, Any]:
        """The id and the text of a token after the tokens `before`."""
        name = self._tokenizer.convert_ids_to_tokens(token)
        special = self._tokenizer.all_special_ids
        if token in special:
            return {"id": token, "text": name}
        context = [other for other in before[-_CONTEXT:] if other not in special]
        text = self._text(context)
        added = self._text([*context, token]).removeprefix(text)
        if not added and not name.strip("Ġ▁"):
            added = " "  # decoding strips it
        return {"id": token, "text": added}

    def _text(self, ids: list[int]) -> str:
        return self._decode(ids).rstrip("\ufffd") if ids else ""
