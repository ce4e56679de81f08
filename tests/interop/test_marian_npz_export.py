"""Marian's files, written from converted models: the arrays and vocabularies that were read, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.data import load_tokenizers
from hf_vanilla_transformer.interop.converting import convert
from hf_vanilla_transformer.interop.exporting import export
from hf_vanilla_transformer.utils.errors import UserError
from tests.interop.checkpoints.marian_npz import restated, save, weights
from tests.interop.foreign import SOURCES, TARGETS, train_sentencepiece
from tests.interop.restatement import assert_restated
from tests.interop.two_vocabularies import MODELS

_SPM = {"eos_id": 0, "unk_id": 1, "bos_id": -1}


def written(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "model.npz") as file:
        return {name: array for name, array in file.items() if not name.startswith("special:")}


@pytest.mark.parametrize("tying", ["all", "src", "none"])
def test_marian_files_that_were_read_are_written_again(tying: str, tmp_path: Path) -> None:
    lines = [SOURCES, TARGETS] if tying == "none" else [SOURCES + TARGETS] * 2
    names = ["a.spm", "b.spm"] if tying == "none" else ["a.spm"] * 2
    sides = [train_sentencepiece(tmp_path / name, text, 70, **_SPM) for name, text in zip(names, lines, strict=True)]
    arrays = weights((len(sides[0]), len(sides[1])), tying)
    save(tmp_path / "model.npz", arrays, vocabs=names)
    convert("marian-npz", tmp_path / "model.npz", tmp_path / "ours")
    line = export("marian-npz", tmp_path / "ours", tmp_path / "out")
    assert "; checked with" in line and "tokens with spaces" not in line
    found = written(tmp_path / "out")
    if tying == "src":  # an old name, for the matrix transposed
        arrays["decoder_ff_logit_out_Wt"] = arrays.pop("decoder_ff_logit_out_W").T
    assert found.keys() == arrays.keys()
    assert all(np.array_equal(found[name], array) for name, array in arrays.items())
    decoder = yaml.safe_load((tmp_path / "out" / "decoder.yml").read_text())
    assert (decoder["beam-size"], decoder["normalize"], decoder["allow-unk"]) == (12, 0.0, False)
    for name, original in zip(decoder["vocabs"], names, strict=True):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / original).read_bytes()


@torch.no_grad()
def test_marian_files_of_a_fine_tuned_model_give_its_logits(tmp_path: Path) -> None:
    model = VanillaTransformerForConditionalGeneration.from_pretrained(MODELS["marian-npz"](tmp_path)).eval()
    for name, parameter in model.named_parameters():
        if "embed" not in name:
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.1)
    model.generation_config.update(suppress_tokens=[1, 5], num_beams=3, length_penalty=0.7)
    model.save_pretrained(tmp_path / "ours")
    export("marian-npz", tmp_path / "ours", tmp_path / "out")
    arrays = written(tmp_path / "out")
    assert arrays["decoder_ff_logit_out_b"][0, 5] < -1e3 < arrays["decoder_ff_logit_out_b"][0, 1]
    back = tmp_path / "back"
    convert("marian-npz", tmp_path / "out", back)
    again = VanillaTransformerForConditionalGeneration.from_pretrained(back).eval()
    source, _ = load_tokenizers(back)
    theirs = restated(arrays)
    plain, start = theirs.embed, again.config.decoder_start_token_id
    theirs.embed = lambda side, ids: plain(side, [0 if token == start else token for token in ids])  # type: ignore
    assert_restated(again, theirs)
    batch = source(SOURCES, return_tensors="pt", padding=True)
    settings: dict[str, Any] = {"num_beams": 3, "length_penalty": 0.7, "max_new_tokens": 9}
    assert again.generate(**batch, **settings).equal(model.generate(**batch, **settings))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *(("own", "layer_norm_eps"), ("marian", "layer_norm_eps"), ("joeynmt", "position_encoding_type")),
        *(("m2m100", "languages"), ("opennmt", "layer_norm_position"), ("fairseq", "layer_norm_eps")),
    ],
)
def test_marian_export_names_what_marian_lacks(name: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=reason):
        export("marian-npz", MODELS[name](tmp_path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("settings", [{"min_new_tokens": 1}, {"no_repeat_ngram_size": 2}], ids=str)
def test_marian_export_refuses_a_search_that_marian_does_not_have(settings: dict, tmp_path: Path) -> None:
    folder = MODELS["marian-npz"](tmp_path)
    model = VanillaTransformerForConditionalGeneration.from_pretrained(folder)
    model.generation_config.update(**settings)
    model.save_pretrained(folder)
    with pytest.raises(UserError, match=next(iter(settings))):
        export("marian-npz", folder, tmp_path / "out")
