"""Shared by the tests of exports: models with every option, and the comparison with the model itself."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.data import save_tokenizers, train_tokenizer
from hf_vanilla_transformer.interop.exporting import export
from hf_vanilla_transformer.interop.translate_exported import OnnxBackend, TorchBackend, Translator
from tests.model_helpers import EOS, PAD, assert_near, padded, sentences, tiny_model

CORPUS = ["two hundred and thirty-four", "zweihundertvierunddreißig", "a dog runs , a cat sleeps ."] * 9
LINES = ["two hundred", "a dog sleeps .", "thirty-four cats and a dog run , two hundred sleep"]

# Together they cover every kind of position, tying mode and switch. The first is the paper's.
CASES: dict[str, dict[str, Any]] = {
    "paper": {"decoder_layers": 1},
    "split": {"position_encoding_type": "sinusoidal_split", "activation_function": "swish", "scale_embedding": False},
    "fairseq": {
        **{"position_encoding_type": "sinusoidal_fairseq", "activation_function": "gelu", "final_layer_norm": True},
        **{"tie_word_embeddings": False, "lm_head_bias": True},
    },
    "learned": {
        **{"position_encoding_type": "learned", "attention_bias": False, "layer_norm_eps": 1e-3},
        **{"max_position_embeddings": 64, "activation_function": "tanh"},
    },
    "pre-norm": {"layer_norm_position": "pre"},
    "widths": {
        **{"head_dim": 3, "value_head_dim": 5, "decoder_attention_heads": 2, "d_model": 21},
        **{"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 330, "vocab_size": 333},
    },
    "untied": {
        **{"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False, "lm_head_bias": True},
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


def assert_exported(folder: Path, target_format: str, case: str) -> VanillaTransformerForConditionalGeneration:
    """Export a model of a case, and compare its logits and tokens. Returns the model."""
    model = write_model(folder / "model", **CASES[case])
    export(target_format, folder / "model", folder / "out")
    translator = Translator(folder / "out")
    assert_same_logits(translator, model)
    assert_same_tokens(translator, model)
    assert_finite_logits(translator)
    return model


def decoded(translator: Translator, ids: Tensor, mask: Tensor, target: Tensor, at_once: int | list[int]) -> Tensor:
    """Logits (B, T, V) for decoder inputs (B, T), `at_once` of them in each call, with a KV cache."""
    backend: OnnxBackend | TorchBackend = translator.backend
    source, past = backend.encode(ids.numpy(), mask.numpy()), translator.empty_cache(len(ids))
    found = []
    for tokens in target.split(at_once, dim=1):
        logits, past = backend.decode(tokens.numpy(), mask.numpy(), source, past)
        found.append(torch.from_numpy(logits))
    return torch.cat(found, dim=1)


@torch.no_grad()
def assert_same_logits(translator: Translator, model: VanillaTransformerForConditionalGeneration) -> None:
    """Within 1e-5: one or several tokens a step, batches of other sizes and lengths, padding on either side."""
    for lengths, left in (([7, 3, 5], False), ([2, 9], True), ([1], False)):
        ids, target = padded(sentences(lengths, 320), left=left), padded(sentences([6] * len(lengths), 320, seed=1))
        mask = ids.ne(PAD).long()
        expected = model(input_ids=ids, attention_mask=mask, decoder_input_ids=target).logits
        assert_near(decoded(translator, ids, mask, target, [1, 1, 3, 1]), expected, 1e-5, f"{lengths}")


def assert_same_tokens(translator: Translator, model: VanillaTransformerForConditionalGeneration) -> None:
    """The greedy loop gives the tokens of `generate`."""
    ids = padded(sentences([7, 3, 5], 320))
    mask = ids.ne(PAD).long()
    expected = model.generate(ids, attention_mask=mask, num_beams=1)[:, 1:].tolist()
    found = translator.greedy(ids.numpy(), mask.numpy())
    assert [len(row) for row in found] != [0, 0, 0]
    for row, theirs in zip(found, expected, strict=True):
        assert row == (theirs[: theirs.index(EOS) + 1] if EOS in theirs else theirs[: len(row)])
        assert set(theirs[len(row) :]) <= {PAD}
        assert row[-1] == EOS or len(row) in (57, 53, 55)


def assert_finite_logits(translator: Translator) -> None:
    """Also in a batch with a fully padded source."""
    ids = np.full((2, 4), 5)
    mask = np.array([[0, 0, 0, 0], [1, 1, 1, 0]])
    source = translator.backend.encode(ids, mask)
    logits, _ = translator.backend.decode(ids[:, :1], mask, source, translator.empty_cache(2))
    assert np.isfinite(logits).all()
