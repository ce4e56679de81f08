"""Checkpoints of released versions load, and give the numbers that they gave when they were saved.

Frozen numbers prove little elsewhere. Here they are the requirement: a trained model must keep its outputs.
"""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedModel

from hf_vanilla_transformer.text import save_tokenizers, train_tokenizer
from tests.model_helpers import padded, sentences, tiny_model

FOLDER = Path(__file__).parent / "old_checkpoints"
CHECKPOINTS = sorted(path.parent for path in FOLDER.glob("*/*/config.json"))
TEXT = "two hundred and thirty-four, naïve 😀"

# Every weight that a checkpoint can hold is in one of the two.
LAYOUTS = {
    "shared": {},
    "separate": {
        "share_encoder_decoder_embeddings": False,
        "tie_word_embeddings": False,
        "decoder_vocab_size": 270,
        "lm_head_bias": True,
        "final_layer_norm": True,
        "position_encoding_type": "learned",
        "max_position_embeddings": 16,
        "head_dim": 3,
        "value_head_dim": 5,
    },
}


@torch.no_grad()
def computed(model: PreTrainedModel) -> dict[str, Tensor]:
    """Encoder output, logits and a beam search's tokens for two fixed sentences."""
    source = padded(sentences([7, 4]))
    target = padded(sentences([3, 6], seed=1))
    output = model(input_ids=source, decoder_input_ids=target)
    return {
        "encoder": output.encoder_last_hidden_state,
        "logits": output.logits,
        "written": model.generate(source, num_beams=2, max_new_tokens=5),
    }


def record(version: str) -> None:
    """Save a tiny checkpoint of each layout with the present code, and its outputs."""
    tokenizer = train_tokenizer(["two hundred and thirty-four"] * 3, vocab_size=270)
    for layout, fields in LAYOUTS.items():
        folder = FOLDER / version / layout
        small = {
            "d_model": 8,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
        }
        small |= {
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 6,
            "decoder_ffn_dim": 6,
            "vocab_size": 270,
        }
        model = tiny_model(**small, **fields)
        model.save_pretrained(folder)
        save_tokenizers(folder, tokenizer)
        tokens = {"words": torch.tensor(tokenizer(TEXT)["input_ids"])}
        save_file(
            {name: tensor.contiguous() for name, tensor in (computed(model) | tokens).items()},
            folder / "recorded.safetensors",
        )
        for code in folder.glob("*.py"):
            code.unlink()


def test_old_checkpoints_exist() -> None:
    assert {path.name for path in CHECKPOINTS} == set(LAYOUTS)


@pytest.mark.parametrize("folder", CHECKPOINTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_old_checkpoint_gives_recorded_numbers(folder: Path) -> None:
    model, info = AutoModelForSeq2SeqLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    recorded = load_file(folder / "recorded.safetensors")
    ids = recorded.pop("words")
    actual = computed(model.eval())
    assert actual.keys() == recorded.keys()
    for name, expected in recorded.items():
        assert torch.allclose(actual[name], expected, rtol=0, atol=1e-5), name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer(TEXT)["input_ids"] == ids.tolist()
    assert tokenizer.decode(ids, skip_special_tokens=True) == TEXT


if __name__ == "__main__":
    record(sys.argv[1])
