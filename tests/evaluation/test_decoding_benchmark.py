"""The benchmark counts what it says it counts; nobody here looks at a time."""

from pathlib import Path

import pytest
import torch

from hf_vanilla_transformer.data import save_tokenizers, train_tokenizer
from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.evaluation.decoding_benchmark import compare
from tests.model_helpers import tiny_model

SENTENCES = ["two hundred", "a dog sleeps .", "thirty-four cats and a dog run , two hundred sleep"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model = tiny_model(vocab_size=300, tie_word_embeddings=False, lm_head_bias=True)
    with torch.no_grad():
        model.lm_head.bias[2] += 4
    model.save_pretrained(folder)
    save_tokenizers(folder, train_tokenizer(SENTENCES * 3, vocab_size=300))
    return folder


@pytest.mark.slow
def test_engines_with_the_same_weights_write_the_same(folder: Path) -> None:
    found = compare(folder, SENTENCES, ["ours_fp32", "marian_fp32"], [1, 2], [1, 3], rounds=2)
    assert [(one.engine, one.batch_size, one.num_beams) for one in found] == [
        (engine, size, beams) for size in (1, 2) for beams in (1, 3) for engine in ("ours_fp32", "marian_fp32")
    ]
    for one in found:
        assert one.sentences == 3
        assert len(one.seconds) == 2
        assert one.same_output == 1.0
        assert one.target_tokens >= 3
        assert one.peak_mib > 50
    assert found[0].target_tokens == found[1].target_tokens


def test_unknown_engine_is_named(folder: Path) -> None:
    with pytest.raises(UserError, match="fairseq"):
        compare(folder, SENTENCES, ["ours_fp32", "fairseq"])
