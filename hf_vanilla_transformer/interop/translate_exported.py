"""Translate with an exported model, greedily: python translate.py < input > output

An example, copied into every exported folder as translate.py. It needs the other files of the folder, NumPy,
transformers for the tokenizer, and onnxruntime for ONNX or torch for torch.export. It does not need the package that
wrote the folder. The exported tokenizer normalises sources. Placeholders and addresses reach the model.

Shapes: B batch, S source length, P target tokens in the KV cache, V target vocabulary.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer
from transformers.utils import logging

#: Settings of generation_config.json that choose between tokens, and that the search here applies.
APPLIED = {
    "min_length",
    "min_new_tokens",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
}
#: Settings that do not change which token is best: of lengths, of a beam search, of sampling, of speed and of outputs.
HARMLESS = {
    "max_length",
    "max_new_tokens",
    "max_length_over_source",
    "decoder_start_token_id",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "num_beams",
    "length_penalty",
    "paper_length_penalty",
    "early_stopping",
    "num_return_sequences",
    "renormalize_logits",
    "remove_invalid_values",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "top_h",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "use_cache",
    "cache_implementation",
    "cache_config",
    "max_cache_len",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "output_logits",
    "return_dict_in_generate",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_lookbehind",
    "assistant_confidence_threshold",
    "target_lookbehind",
    "max_matching_ngram_size",
    "compile_config",
    "disable_compile",
    "low_memory",
    "prefill_chunk_size",
    "transformers_version",
    "_from_model_config",
}
_TOKENS = {name for name in APPLIED if name.endswith(("_ids", "_id", "s_tokens"))}
_NEUTRAL = {
    "repetition_penalty": 1,
    "encoder_repetition_penalty": 1,
    "num_beam_groups": 1,
    "guidance_scale": 1,
}


def check_settings(settings: dict, vocab_size: int, applied: set[str] = APPLIED) -> None:
    """Raise a ValueError for a setting that is neither harmless nor applied, or a token that does not exist."""
    for name, value in settings.items():
        neutral: tuple = (
            (None, []) if name in _TOKENS else (None, False, 0, [], {}, _NEUTRAL.get(name))
        )
        if value in neutral or name in HARMLESS:
            continue
        if name not in applied:
            raise ValueError(f"{name}={value}")
        if name in _TOKENS:
            parts = value if isinstance(value, list) else [value]
            tokens = [
                token for part in parts for token in (part if isinstance(part, list) else [part])
            ]
            if not all(isinstance(token, int) and 0 <= token < vocab_size for token in tokens):
                raise ValueError(f"{name}={value} (the vocabulary has {vocab_size} tokens)")


def ends(settings: dict) -> list[int]:
    """The end-of-sentence tokens."""
    tokens = settings.get("eos_token_id")
    return tokens if isinstance(tokens, list) else [] if tokens is None else [tokens]


def best_token(scores: np.ndarray, tokens: list[int], limit: int, settings: dict) -> int:
    """The best next token, as `generate` of transformers chooses it.

    Args:
        scores: logits (V), which are changed. tokens: of the translation until now. limit: its maximum length.
        settings: of generation_config.json.
    """
    first = not tokens
    forced = settings.get("forced_bos_token_id") if first else None
    if len(tokens) + 1 == limit and settings.get("forced_eos_token_id") is not None:
        forced = settings["forced_eos_token_id"]
    if forced is not None:
        return forced[0] if isinstance(forced, list) else forced
    written = [settings["decoder_start_token_id"], *tokens]
    penalty = settings.get("repetition_penalty") or 1
    seen = np.unique(written)
    scores[seen] = np.where(scores[seen] < 0, scores[seen] * penalty, scores[seen] / penalty)
    banned = list(settings.get("suppress_tokens") or [])
    if first or (len(tokens) == 1 and settings.get("forced_bos_token_id") is not None):
        banned += settings.get("begin_suppress_tokens") or []
    if len(tokens) < max(
        settings.get("min_new_tokens") or 0, (settings.get("min_length") or 0) - 1
    ):
        banned += ends(settings)
    for words in settings.get("bad_words_ids") or []:
        if len(words) <= len(written) and words[:-1] == written[len(written) + 1 - len(words) :]:
            banned += words[-1:] if words not in [[end] for end in ends(settings)] else []
    size = settings.get("no_repeat_ngram_size") or 0
    for start in range(len(written) + 1 - size if size else 0):
        if written[start : start + size - 1] == written[len(written) + 1 - size :]:
            banned.append(written[start + size - 1])
    scores[banned] = -np.inf
    return int(scores.argmax())


class OnnxBackend:
    """`encoder.onnx` and `decoder.onnx` in onnxruntime. Arrays are NumPy's."""

    def __init__(self, folder: Path):
        from onnxruntime import InferenceSession

        files = (str(folder / f"{name}.onnx") for name in ("encoder", "decoder"))
        self.encoder, self.decoder = (
            InferenceSession(file, providers=["CPUExecutionProvider"]) for file in files
        )

    def encode(self, ids: np.ndarray, mask: np.ndarray) -> list[np.ndarray]:
        """Cross-attention keys and values of each decoder layer."""
        return self.encoder.run(None, {"input_ids": ids, "attention_mask": mask})[1:]

    def decode(
        self, tokens: np.ndarray, mask: np.ndarray, source: list, past: list
    ) -> tuple[np.ndarray, list]:
        """Logits (B, 1, V) after the tokens (B, 1), and the KV cache with them."""
        names = [value.name for value in self.decoder.get_inputs()]
        logits, *past = self.decoder.run(
            None, dict(zip(names, [tokens, mask, *source, *past], strict=True))
        )
        return logits, past


class TorchBackend:
    """`encoder.pt2` and `decoder.pt2` in torch, with the methods of `OnnxBackend`."""

    def __init__(self, folder: Path):
        import torch

        self.torch = torch
        files = (folder / f"{name}.pt2" for name in ("encoder", "decoder"))
        self.encoder, self.decoder = (torch.export.load(file).module() for file in files)

    def encode(self, ids: np.ndarray, mask: np.ndarray) -> list[np.ndarray]:
        with self.torch.inference_mode():
            _, source = self.encoder(self.torch.from_numpy(ids), self.torch.from_numpy(mask))
        return [part.numpy() for part in source]

    def decode(
        self, tokens: np.ndarray, mask: np.ndarray, source: list, past: list
    ) -> tuple[np.ndarray, list]:
        tensors = [
            [self.torch.from_numpy(part) for part in parts]
            for parts in ((tokens, mask), source, past)
        ]
        with self.torch.inference_mode():
            logits, past = self.decoder(*tensors[0], *tensors[1:])
        return logits.numpy(), [part.numpy() for part in past]


class Translator:
    """Translates lines of text with an exported folder. A ValueError if its settings need more than this search."""

    def __init__(
        self, folder: str | Path, source_lang: str | None = None, target_lang: str | None = None
    ):
        folder = Path(folder)
        files = (folder / name for name in ("config.json", "generation_config.json"))
        self.config, self.settings = (
            json.loads(file.read_text(encoding="utf-8")) for file in files
        )
        for name in ("decoder_start_token_id", "eos_token_id"):
            if self.settings.get(name) is None:
                self.settings[name] = self.config.get(name)
        check_settings(
            self.settings, self.config.get("decoder_vocab_size") or self.config["vocab_size"]
        )
        self.backend = (
            OnnxBackend(folder) if (folder / "encoder.onnx").is_file() else TorchBackend(folder)
        )
        self.tokenizer = AutoTokenizer.from_pretrained(str(folder))
        target = folder / "target_tokenizer"
        self.target_tokenizer = (
            AutoTokenizer.from_pretrained(str(target)) if target.is_dir() else self.tokenizer
        )
        self.mark = ""  # before each source
        if source_lang is not None and hasattr(self.tokenizer, "src_lang"):
            self.tokenizer.src_lang = source_lang
        if target_lang is not None:
            names = f">>{target_lang}<<", f"__{target_lang}__", target_lang
            tokens = {name: self.target_tokenizer.convert_tokens_to_ids(name) for name in names}
            known = [
                name
                for name, token in tokens.items()
                if token not in (None, self.target_tokenizer.unk_token_id)
            ]
            if not known:
                raise ValueError(f"target_lang={target_lang}: the tokenizer has no such language")
            if known[0].startswith(">>"):
                self.mark = f"{known[0]} "
            else:
                self.settings["forced_bos_token_id"] = tokens[known[0]]

    def translate(self, sentences: list[str]) -> list[str]:
        """Translate one batch of lines."""
        decode = partial(
            self.target_tokenizer.decode,
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        # some tokenizers, such as M2M-100's, decode the token of a language as text
        marks = self.target_tokenizer.init_kwargs.get("language_marks") or (
            None,
            hasattr(self.tokenizer, "src_lang"),
        )
        start = int(marks[1] and self.settings.get("forced_bos_token_id") is not None)
        return [decode(tokens[start:]) for tokens in self.greedy(*self.encode(sentences))]

    def encode(self, sentences: list[str]) -> list[np.ndarray]:
        """Ids and mask (B, S)."""
        batch = self.tokenizer(
            [self.mark + sentence for sentence in sentences], padding=True, return_tensors="np"
        )
        return [batch[name].astype(np.int64) for name in ("input_ids", "attention_mask")]

    def greedy(self, ids: np.ndarray, mask: np.ndarray) -> list[list[int]]:
        """The tokens of each translation, with the end-of-sentence token if it was reached, by greedy search.

        `ids` and `mask` are (B, S). The mask is 0 for padding.
        """
        longest = self.config["max_position_embeddings"]
        if self.config["position_encoding_type"] == "learned" and ids.shape[1] > longest:
            raise ValueError(
                f"a source of {ids.shape[1]} tokens is longer than max_position_embeddings={longest}"
            )
        limits = self.max_lengths(mask)  # (B,)
        source = self.backend.encode(ids, mask)
        past = self.empty_cache(len(ids))
        tokens = np.full((len(ids), 1), self.settings["decoder_start_token_id"])
        translations: list[list[int]] = [[] for _ in ids]
        unfinished = set(range(len(ids)))
        while unfinished:
            logits, past = self.backend.decode(tokens, mask, source, past)
            for row in list(unfinished):
                tokens[row] = best_token(
                    logits[row, -1].copy(), translations[row], limits[row], self.settings
                )
                translations[row].append(int(tokens[row, 0]))
                if (
                    translations[row][-1] in ends(self.settings)
                    or len(translations[row]) == limits[row]
                ):
                    unfinished.remove(row)
        return translations

    def max_lengths(self, mask: np.ndarray) -> np.ndarray:
        """The maximum length (B,) of each translation: its source's plus 50, unless the settings limit it."""
        settings = self.settings
        batch = len(mask)
        if settings.get("max_new_tokens") is not None:
            return np.full(batch, settings["max_new_tokens"])
        if settings.get("max_length") not in (
            None,
            20,
        ):  # transformers' trainer saves its default, 20
            return np.full(batch, settings["max_length"] - 1)  # includes the start token
        limits = mask.sum(axis=1) + settings.get("max_length_over_source", 50)
        learned = self.config["position_encoding_type"] == "learned"
        return np.minimum(limits, self.config["max_position_embeddings"]) if learned else limits

    def empty_cache(self, batch: int) -> list[np.ndarray]:
        """Keys and values (B, H, 0, ·) of each layer."""
        config = self.config
        heads = config["decoder_attention_heads"]
        widths = [
            config[name] or config["d_model"] // heads for name in ("head_dim", "value_head_dim")
        ]
        return [
            np.zeros((batch, heads, 0, width), np.float32)
            for width in widths * config["decoder_layers"]
        ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default=Path(__file__).parent, help="the exported folder, if it is another one"
    )
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--source_lang", help="of a model of many languages, such as eng_Latn")
    parser.add_argument("--target_lang", help="such as deu_Latn")
    arguments = parser.parse_args()
    logging.set_verbosity_error()  # transformers warns of the unknown model type, but a tokenizer does not need it
    translator = Translator(arguments.model, arguments.source_lang, arguments.target_lang)
    # Only a line feed ends a line.
    lines = [line.decode("utf-8").rstrip("\n") for line in sys.stdin.buffer]
    for start in range(0, len(lines), arguments.batch_size):
        translations = translator.translate(lines[start : start + arguments.batch_size])
        # a model can generate any character
        sys.stdout.buffer.write(
            "".join(text.replace("\n", " ") + "\n" for text in translations).encode("utf-8")
        )


if __name__ == "__main__":
    main()
