"""Language models as teachers of `distil`."""

import os
import re
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..utils.cpu_time import on_fitting_threads
from ..utils.errors import UserError
from ..utils.untrusted import shown
from .languages import NAMES
from .text_io import read_lines
from .translator import Hypothesis, Translator

PROMPT = "Translate from {source_lang} into {target_lang}. Give only the translation.\n\n{text}"
MAX_NEW_TOKENS = 512  # of a causal model whose generation_config.json names no limit

_THOUGHTS = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)  # of DeepSeek-R1 and Qwen3
_QUOTES = {'"': '"', "'": "'", "“": "”", "„": "“", "«": "»", "»": "«", "‘": "’", "‚": "‘", "「": "」"}


def read_prompt(template: str, source_lang: str | None, target_lang: str | None) -> str:
    """Return a prompt with the English names of the languages. `{text}` is the place of a sentence.

    Args:
        template: text with `{text}`, `{source_lang}` and `{target_lang}`, or a file of such text.
        source_lang, target_lang: codes, or names.

    Raises:
        UserError: there is no `{text}`, or a language in the template is None.
    """
    if "{text}" not in template and os.path.isfile(template):
        template = "\n".join(read_lines(template))
    if "{text}" not in template:
        raise UserError(f"prompt: {shown(template)} is no file and has no {{text}}; write where the sentence stands")
    for name, code in (("source_lang", source_lang), ("target_lang", target_lang)):
        if code is None and f"{{{name}}}" in template:
            raise UserError(f"{name}: the prompt names it; give a code such as en, or a prompt without {{{name}}}")
        template = template.replace(f"{{{name}}}", NAMES.get(code or "", code or ""))
    return template


def translation_in(answer: str, source: str) -> str:
    """Return the translation in an answer, on one line. Quotes around it are removed if the source has no quotes."""
    text = " ".join(filter(None, map(str.strip, _THOUGHTS.sub("", answer).splitlines())))
    quotes = {*_QUOTES, *_QUOTES.values()} & {*re.sub(r"\w['’]\w", "", source)}
    if len(text) > 1 and _QUOTES.get(text[0]) == text[-1] and not quotes and not {text[0], text[-1]} & {*text[1:-1]}:
        text = text[1:-1].strip()
    return text


class CausalTeacher(Translator):
    """A causal language model. The prompt is a chat if the tokenizer has a template. An answer must end.

    Args:
        model, tokenizer: as loaded.
        prompt: from `read_prompt`.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str):
        super().__init__(model, tokenizer)
        self.prompt, tokenizer = prompt, self.source_tokenizer
        tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.pad_token or tokenizer.eos_token
        model.generation_config.do_sample = False

    def encode(self, line: str, line_number: int = 1, direction: Any = None) -> list[int]:
        """Token ids of the prompt with a sentence."""
        text, tokenizer = self.prompt.replace("{text}", line), self.source_tokenizer
        if chat := bool(tokenizer.chat_template):
            messages, settings = [{"role": "user", "content": text}], {"tokenize": False, "enable_thinking": False}
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **settings)
        ids = tokenizer(text, add_special_tokens=not chat)["input_ids"]
        if len(ids) >= (self.position_limit() or len(ids) + 1):
            raise UserError(f"line {line_number}: the model has no positions after a prompt of {len(ids)} tokens")
        return ids

    def _translate_window(self, window: Any, places: Any, request: Any) -> list[list[Hypothesis]]:
        results = zip(window, super()._translate_window(window, places, request), strict=True)
        return [
            [replace(one, text=translation_in(one.text, line) if one.ended else "") for one in hypotheses]
            for (line, _), hypotheses in results
        ]

    @torch.inference_mode()
    def _search(self, models: Any, sentences: Any, batch_size: int, request: Any, stop: Any) -> list[list[Hypothesis]]:
        tokenizer, sources = self.source_tokenizer, [sentence.source for sentence in sentences]
        inputs = tokenizer.pad({"input_ids": sources}, return_tensors="pt").to(self.model.device)  # (B, S)
        width = inputs["input_ids"].shape[1]
        limit = request.settings.get("max_new_tokens") or self.model.generation_config.max_new_tokens or MAX_NEW_TOKENS
        limit = min(limit, (self.position_limit() or limit + width) - width)
        settings = request.settings | {"max_new_tokens": limit, "pad_token_id": tokenizer.pad_token_id}
        with on_fitting_threads():
            output = models[0].generate(**inputs, **settings)
        output.sequences = output.sequences[:, width - 1 :]  # one token before the answer, as of a decoder
        return self._hypotheses(models, sources, output, 1, request)
