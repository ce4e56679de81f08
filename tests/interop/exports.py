"""Shared by the tests of exports: models with every option, and ONNX folders in onnxruntime."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.interop.search_settings import (
    banned_tokens,
    ends,
    flat,
    shortest,
)
from hf_vanilla_transformer.interop.transformers_js import DTYPES, GRAPHS
from hf_vanilla_transformer.text import save_tokenizers, train_tokenizer
from tests.model_helpers import tiny_model

CORPUS = [
    "two hundred and thirty-four",
    "zweihundertvierunddreißig",
    "a dog runs , a cat sleeps .",
] * 9
LINES = [
    "two hundred",
    "a dog sleeps .",
    "thirty-four cats and a dog run , two hundred sleep",
]

# Together they cover every kind of position, tying mode and switch. The first is the paper's.
CASES: dict[str, dict[str, Any]] = {
    "paper": {"decoder_layers": 1},
    "split": {
        "position_encoding_type": "sinusoidal_split",
        "activation_function": "swish",
        "scale_embedding": False,
    },
    "fairseq": {
        **{
            "position_encoding_type": "sinusoidal_fairseq",
            "activation_function": "gelu",
            "final_layer_norm": True,
        },
        **{"tie_word_embeddings": False, "lm_head_bias": True},
    },
    "learned": {
        **{
            "position_encoding_type": "learned",
            "attention_bias": False,
            "layer_norm_eps": 1e-3,
        },
        **{"max_position_embeddings": 64, "activation_function": "tanh"},
    },
    "pre-norm": {"layer_norm_position": "pre"},
    "widths": {
        **{"head_dim": 3, "value_head_dim": 5, "decoder_attention_heads": 2, "d_model": 21},
        **{
            "share_encoder_decoder_embeddings": False,
            "decoder_vocab_size": 330,
            "vocab_size": 333,
        },
    },
    "untied": {
        **{
            "share_encoder_decoder_embeddings": False,
            "tie_word_embeddings": False,
            "lm_head_bias": True,
        },
        "activation_function": "gelu_new",
    },
}


def require_onnx() -> None:
    """Skip a test, or a file of them, if a library is missing that the export needs."""
    for library in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(library, reason="the extra `onnx` is not installed")


def write_model(folder: Path, **fields: Any) -> VanillaTransformerForConditionalGeneration:
    """A tiny model with a tokenizer in `folder`. It has two decoder layers by default, so that their order matters."""
    model = tiny_model(**{"vocab_size": 320, "encoder_layers": 1, "decoder_layers": 2, **fields})
    model.generation_config.num_beams = 1
    model.save_pretrained(folder)
    save_tokenizers(folder, train_tokenizer(CORPUS, vocab_size=320))
    return model


class Graphs:
    """Both graphs of an ONNX folder in onnxruntime, called as transformers.js calls them.

    Shapes: B batch, S source length, T target length, V target vocabulary.
    """

    def __init__(self, folder: Path, dtype: str = "fp32"):
        import onnxruntime

        paths = [str(folder / "onnx" / f"{name}{DTYPES[dtype]}.onnx") for name in GRAPHS]
        self.encoder, self.decoder = (onnxruntime.InferenceSession(path) for path in paths)
        self.outputs = [each.name for each in self.decoder.get_outputs()]

    def encode(self, ids: Tensor, mask: Tensor) -> np.ndarray:
        feeds = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
        return self.encoder.run(["last_hidden_state"], feeds)[0]

    def decode(
        self, tokens: Tensor, mask: Tensor, states: np.ndarray, past: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """All outputs after the tokens (B, T). `past` is empty at the first step."""
        feeds = {
            "input_ids": tokens.numpy(),
            "encoder_attention_mask": mask.numpy(),
            "encoder_hidden_states": states,
        }
        feeds["use_cache_branch"] = np.array([bool(past)])
        for given in self.decoder.get_inputs():
            if given.name.startswith("past_key_values"):
                # transformers.js: "batch_size" is known, other names are 0
                sizes = [len(tokens) if size == "batch_size" else size for size in given.shape]
                empty = np.zeros(
                    [size if isinstance(size, int) else 0 for size in sizes], np.float32
                )
                feeds[given.name] = past.get(given.name, empty)
        return dict(zip(self.outputs, self.decoder.run(self.outputs, feeds), strict=True))

    def all_logits(
        self, ids: Tensor, mask: Tensor, target: Tensor, at_once: int | list[int]
    ) -> Tensor:
        """(B, T, V), so many tokens in each call, with the KV caches."""
        states = self.encode(ids, mask)
        past = {}
        found = []
        for tokens in target.split(at_once, dim=1):
            outputs = self.decode(tokens, mask, states, past)
            past |= {
                name.replace("present", "past_key_values"): value for name, value in outputs.items()
            }
            found.append(torch.from_numpy(outputs["logits"]))
        return torch.cat(found, dim=1)


class OnnxTranslator:
    """Greedy translation with the files of an ONNX folder alone."""

    def __init__(self, folder: Path):
        self.graphs = Graphs(folder)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.settings = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))

    def translate(self, lines: list[str], limit: int | None = None) -> list[str]:
        return [self.tokenizer.decode(self.tokens(line, limit)).strip() for line in lines]

    def tokens(self, line: str, limit: int | None = None) -> list[int]:
        ids = torch.tensor([self.tokenizer.encode(line).ids])
        mask = torch.ones_like(ids)
        limit = limit or ids.shape[1] + 50
        states = self.graphs.encode(ids, mask)
        past = {}
        tokens = list[int]()
        while len(tokens) < limit and not set(ends(self.settings)) & set(tokens):
            last = tokens[-1] if tokens else self.settings["decoder_start_token_id"]
            outputs = self.graphs.decode(torch.tensor([[last]]), mask, states, past)
            past |= {
                name.replace("present", "past_key_values"): value for name, value in outputs.items()
            }
            tokens.append(best_token(outputs["logits"][0, -1], tokens, limit, self.settings))
        return tokens


def best_token(scores: np.ndarray, tokens: list[int], limit: int, settings: dict[str, Any]) -> int:
    """The best next token, as transformers.js chooses it with the settings of generation_config.json.

    `scores` (V) are changed, `tokens` are those of the translation until now, at most `limit`.
    """
    first = settings.get("forced_bos_token_id")
    last = settings.get("forced_eos_token_id")
    if len(tokens) + 1 == limit and last is not None:
        return flat(last)[0]
    if not tokens and first is not None:
        return first
    banned = banned_tokens(settings)
    if len(tokens) == int(first is not None):
        banned += settings.get("begin_suppress_tokens") or []
    if len(tokens) < shortest(settings):
        banned += ends(settings)
    scores[banned] = -np.inf
    return int(scores.argmax())
