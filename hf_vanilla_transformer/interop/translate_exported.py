"""Translate with an exported model, greedily: python translate.py < input > output

This file travels with every exported folder, as translate.py, and is an example to copy from. It needs what stands
beside it, NumPy, transformers for the tokenizer, and onnxruntime for ONNX or torch for the programs of torch.export;
nothing of the package that wrote them.

Shapes: B batch, S source length, P words written before, V target vocabulary.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer
from transformers.utils import logging

# Of generation_config.json: what changes the likeliest word, and is not done here. The values change nothing.
_NOT_DONE = {
    **{"min_length": 0, "min_new_tokens": 0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0},
    **{"repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "forced_bos_token_id": None},
    **{"begin_suppress_tokens": None, "sequence_bias": None, "exponential_decay_length_penalty": None},
}


class OnnxGraphs:
    """`encoder.onnx` and `decoder.onnx` in onnxruntime. Arrays are NumPy's."""

    def __init__(self, folder: Path):
        import onnxruntime

        self.encoder, self.decoder = (
            onnxruntime.InferenceSession(str(folder / f"{name}.onnx"), providers=["CPUExecutionProvider"])
            for name in ("encoder", "decoder")
        )

    def encode(self, ids: np.ndarray, mask: np.ndarray) -> list[np.ndarray]:
        """Keys and values of the source for each layer of the decoder."""
        return self.encoder.run(None, {"input_ids": ids, "attention_mask": mask})[1:]

    def decode(self, words: np.ndarray, mask: np.ndarray, source: list, past: list) -> tuple[np.ndarray, list]:
        """Logits (B, 1, V) after the words (B, 1), and the past with them."""
        names = [given.name for given in self.decoder.get_inputs()]
        logits, *past = self.decoder.run(None, dict(zip(names, [words, mask, *source, *past], strict=True)))
        return logits, past


class TorchPrograms:
    """`encoder.pt2` and `decoder.pt2` in torch, with the methods of `OnnxGraphs`."""

    def __init__(self, folder: Path):
        import torch

        self.torch = torch
        self.encoder, self.decoder = (
            torch.export.load(folder / f"{name}.pt2").module() for name in ("encoder", "decoder")
        )

    def encode(self, ids: np.ndarray, mask: np.ndarray) -> list[np.ndarray]:
        with self.torch.inference_mode():
            _, source = self.encoder(self.torch.from_numpy(ids), self.torch.from_numpy(mask))
        return [part.numpy() for part in source]

    def decode(self, words: np.ndarray, mask: np.ndarray, source: list, past: list) -> tuple[np.ndarray, list]:
        tensors = [[self.torch.from_numpy(part) for part in parts] for parts in ((words, mask), source, past)]
        with self.torch.inference_mode():
            logits, past = self.decoder(*tensors[0], *tensors[1:])
        return logits.numpy(), [part.numpy() for part in past]


class Translator:
    """An exported folder that translates lines of text.

    Args:
        folder: with the graphs, the configurations and the tokenizer.

    Raises:
        ValueError: the folder's generation settings ask for what greedy search here does not do.
    """

    def __init__(self, folder: str | Path):
        folder = Path(folder)
        self.config, self.settings = (
            json.loads((folder / name).read_text(encoding="utf-8"))
            for name in ("config.json", "generation_config.json")
        )
        for name in ("decoder_start_token_id", "eos_token_id"):
            if self.settings.get(name) is None:
                self.settings[name] = self.config.get(name)
        for name, silent in _NOT_DONE.items():
            if self.settings.get(name, silent) not in (silent, None):
                raise ValueError(f"generation_config.json: {name}={self.settings[name]} is not done here")
        bad = self.settings.get("bad_words_ids") or []
        if any(len(words) > 1 for words in bad):
            raise ValueError(f"generation_config.json: bad_words_ids={bad} of several words are not done here")
        self.never = [words[0] for words in bad] + (self.settings.get("suppress_tokens") or [])
        self.graphs = OnnxGraphs(folder) if (folder / "encoder.onnx").is_file() else TorchPrograms(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(str(folder))
        target = folder / "target_tokenizer"
        self.target_tokenizer = AutoTokenizer.from_pretrained(str(target)) if target.is_dir() else self.tokenizer

    def translate(self, sentences: list[str]) -> list[str]:
        """One batch of lines to lines."""
        batch = self.tokenizer(sentences, padding=True, return_tensors="np")
        ids, mask = (batch[name].astype(np.int64) for name in ("input_ids", "attention_mask"))
        return [self.target_tokenizer.decode(row, skip_special_tokens=True) for row in self.greedy(ids, mask)]

    def greedy(self, ids: np.ndarray, mask: np.ndarray) -> list[list[int]]:
        """The likeliest word, again and again.

        Args:
            ids: (B, S). mask: (B, S), 1 for words and 0 for padding.

        Returns:
            The words of each sentence, its end word included where it was reached.

        Raises:
            ValueError: a source longer than the table of learned positions.
        """
        longest = self.config["max_position_embeddings"]
        if self.config["position_encoding_type"] == "learned" and ids.shape[1] > longest:
            raise ValueError(f"a source of {ids.shape[1]} tokens is longer than max_position_embeddings={longest}")
        ends = self.settings.get("eos_token_id")
        ends = ends if isinstance(ends, list) else [ends]
        limits = self.limits(mask)  # (B,)
        source, past = self.graphs.encode(ids, mask), self.empty_past(len(ids))
        words = np.full((len(ids), 1), self.settings["decoder_start_token_id"])
        found: list[list[int]] = [[] for _ in ids]
        open_rows = set(range(len(ids)))
        while open_rows:
            logits, past = self.graphs.decode(words, mask, source, past)
            logits[..., self.never] = -np.inf
            words = logits[:, -1:].argmax(axis=-1)  # (B, 1)
            for row in list(open_rows):
                forced = self.settings.get("forced_eos_token_id")
                if forced is not None and len(found[row]) + 1 == limits[row]:
                    words[row] = forced
                found[row].append(int(words[row, 0]))
                if found[row][-1] in ends or len(found[row]) == limits[row]:
                    open_rows.remove(row)
        return found

    def limits(self, mask: np.ndarray) -> np.ndarray:
        """How many words (B,) each sentence may have: 50 more than its source, unless the settings say otherwise."""
        settings, batch = self.settings, len(mask)
        if settings.get("max_new_tokens") is not None:
            return np.full(batch, settings["max_new_tokens"])
        if settings.get("max_length") not in (None, 20):  # 20: what transformers' trainer fills in
            return np.full(batch, settings["max_length"] - 1)  # the start word counts there
        limits = mask.sum(axis=1) + settings.get("max_length_over_source", 50)
        learned = self.config["position_encoding_type"] == "learned"
        return np.minimum(limits, self.config["max_position_embeddings"]) if learned else limits

    def empty_past(self, batch: int) -> list[np.ndarray]:
        """Keys and values (B, H, 0, ·) of no words, for each layer."""
        config = self.config
        heads = config["decoder_attention_heads"]
        widths = [config[name] or config["d_model"] // heads for name in ("head_dim", "value_head_dim")]
        return [np.zeros((batch, heads, 0, width), np.float32) for width in widths * config["decoder_layers"]]


def batches(lines: list[str], size: int) -> Iterator[list[str]]:
    for start in range(0, len(lines), size):
        yield lines[start : start + size]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=Path(__file__).parent, help="the exported folder, if it is another one")
    parser.add_argument("--batch_size", type=int, default=32)
    arguments = parser.parse_args()
    logging.set_verbosity_error()  # it warns of a model type that it need not know for a tokenizer
    translator = Translator(arguments.model)
    lines = [line.rstrip("\n") for line in sys.stdin]
    for batch in batches(lines, arguments.batch_size):
        print(*translator.translate(batch), sep="\n")


if __name__ == "__main__":
    main()
