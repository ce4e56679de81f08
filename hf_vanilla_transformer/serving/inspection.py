"""What a search does not return: attention, probabilities, and alternatives to each token.

Computed by a second copy of the modules, which shares the weights and attends eagerly, because only that returns the
attention weights; in one thread, with tokenizers of its own, because tokenizers are not safe to share.

Shapes: S source tokens, T target tokens, L decoder layers, H heads, V target vocabulary.
"""

import asyncio
import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from ..inference.alignment import Link, align, decoder_inputs
from ..inference.batching import length_batches
from ..inference.shared_copy import shared_copy
from ..inference.translator import Translator
from .engine import QueueFull

#: The attention of all layers and heads is much to send: a megabyte for 60 tokens of the paper's base model.
MAX_TOKENS = 128

_MAX_ALTERNATIVES = 50

_ALIGNED_SENTENCES, _ALIGNED_TOKENS = 64, 4096  # a batch, padding included

Result = TypeVar("Result")


class Inspector:
    """Looks into the model of a translator, in one thread.

    Args:
        translator: whose weights are shared, not copied.
        max_queue: requests that may wait.
    """

    def __init__(self, translator: Translator, max_queue: int = 32):
        self.model = translator.model
        self.eager = shared_copy(self.model, attention="eager")
        self.source_tokenizer = copy.deepcopy(translator.source_tokenizer)
        self.target_tokenizer = self.source_tokenizer
        if translator.target_tokenizer is not translator.source_tokenizer:
            self.target_tokenizer = copy.deepcopy(translator.target_tokenizer)
        self.max_queue, self.pending = max_queue, 0
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
            return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)
        finally:
            self.pending -= 1

    def close(self) -> None:
        """Finish what is waiting, and end the thread."""
        self._pool.shutdown()

    def align(self, sources: Sequence[list[int]], targets: Sequence[list[int]]) -> list[list[Link]]:
        """`inference.alignment.align`, for sentences and translations as token ids with their end tokens."""
        links: dict[int, list[Link]] = {}
        lengths = {i: max(len(source), len(targets[i])) for i, source in enumerate(sources)}
        for batch in length_batches(lengths, _ALIGNED_SENTENCES, _ALIGNED_TOKENS):
            pairs = [sources[i] for i in batch], [targets[i] for i in batch]
            found = align(self.model, self.source_tokenizer, self.target_tokenizer, *pairs)
            links |= zip(batch, found, strict=True)
        return [links[i] for i in range(len(sources))]

    @torch.inference_mode()
    def page_translation(self, text: str, num_beams: int | None, alternatives: int, prefix: list[int]) -> dict:
        """A `Translation` of the page, as web/README.md defines it.

        Args:
            text: one sentence. num_beams: None is the checkpoint's.
            alternatives: to each token. prefix: token ids that the translation begins with.

        Raises:
            UserError: a text that is too long, an id outside the vocabulary.
        """
        if not text.strip():
            names = ("source", "tokens", "probabilities", "attention", "alternatives", "hypotheses")
            return {"text": "", **{name: [] for name in names}}
        source = self.source_tokenizer(text)["input_ids"]
        size = self.model.config.target_vocab_size
        if max(len(source), len(prefix)) > MAX_TOKENS:
            raise UserError(f"This text has {len(source)} tokens; the page shows at most {MAX_TOKENS}.")
        if not all(0 <= token < size for token in prefix):
            raise UserError(f"prefix: token ids lie between 0 and {size - 1}.")
        hypotheses = self._search(source, num_beams, prefix)
        best = hypotheses[0]["tokens"]
        logits, attention = self._look(source, best)
        probabilities = logits.softmax(dim=-1)  # (T, V)
        top = probabilities.topk(min(alternatives, _MAX_ALTERNATIVES, size), dim=-1)
        chosen = probabilities.gather(1, torch.tensor(best)[:, None])[:, 0]  # (T,)
        return {
            "source": _all_shown(self.source_tokenizer, source),
            "text": hypotheses[0]["text"],
            "tokens": _all_shown(self.target_tokenizer, best),
            "probabilities": [round(each, 4) for each in chosen.tolist()],
            "attention": [[[[round(w, 3) for w in row] for row in head] for head in layer] for layer in attention],
            "alternatives": [
                [
                    {**_shown(self.target_tokenizer, before, token), "probability": round(probability, 4)}
                    for token, probability in zip(tokens, values, strict=True)
                ]
                for before, tokens, values in zip(
                    [None, *best], top.indices.tolist(), top.values.tolist(), strict=False
                )
            ],
            "hypotheses": hypotheses,
        }

    def _search(self, source: list[int], num_beams: int | None, prefix: list[int]) -> list[dict[str, Any]]:
        """The hypotheses of one sentence, the best first, by the model's own `generate`."""
        beams = num_beams or self.model.generation_config.num_beams or 1
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
        found = []
        for row, score in zip(output.sequences.tolist(), scores, strict=True):
            tokens = row[1 : self._end(row, 1 + len(prefix))]
            text = self.target_tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            if score is None or score > -1e8:  # below: a beam without a hypothesis
                shown = [token["text"] for token in _all_shown(self.target_tokenizer, tokens)]
                found.append({"text": text, "score": score, "tokens": tokens, "token_texts": shown})
        return found

    def _end(self, row: list[int], first: int) -> int:
        """The length of a hypothesis with its end token, without padding."""
        eos = self.model.generation_config.eos_token_id
        ends = {eos} if isinstance(eos, int) else set(eos or ())
        return next((i + 1 for i in range(first, len(row)) if row[i] in ends), len(row))

    def _look(self, source: list[int], target: list[int]) -> tuple[Tensor, list]:
        """Logits (T, V) and cross-attention (L, H, T, S) of one pair."""
        ids = torch.tensor([source], device=self.eager.device)
        inputs = decoder_inputs(self.eager, [target])
        output = self.eager(ids, decoder_input_ids=inputs, output_attentions=True, use_cache=False)
        attention = [layer[0].float().cpu().tolist() for layer in output.cross_attentions]
        return output.logits[0].float().cpu(), attention


def _all_shown(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[dict[str, Any]]:
    return [_shown(tokenizer, before, token) for before, token in zip([None, *ids], ids, strict=False)]


def _shown(tokenizer: PreTrainedTokenizerBase, before: int | None, token: int) -> dict[str, Any]:
    """A token with its text, white space included; a special token with its name.

    Args:
        before: the token before it, None for the first; some tokenizers strip the leading space of a token alone.
    """
    if token in tokenizer.all_special_ids:
        return {"id": token, "text": tokenizer.convert_ids_to_tokens(token)}
    context = [] if before is None or before in tokenizer.all_special_ids else [before]
    known = len(tokenizer.decode(context, clean_up_tokenization_spaces=False)) if context else 0
    return {"id": token, "text": tokenizer.decode([*context, token], clean_up_tokenization_spaces=False)[known:]}
