"""Settings in a toolkit's files that change translations are carried over, or named in a note."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import M2M100ForConditionalGeneration, MarianMTModel

from hf_vanilla_transformer.interop.eole import from_eole
from hf_vanilla_transformer.interop.fairseq import from_fairseq
from hf_vanilla_transformer.interop.joeynmt import from_joeynmt
from hf_vanilla_transformer.interop.marian_npz import from_marian_npz
from hf_vanilla_transformer.interop.opennmt import from_opennmt
from tests.interop.checkpoints import eole, fairseq, joeynmt, marian_npz, opennmt
from tests.interop.foreign import (
    converted,
    random_ids,
    write_m2m100_folder,
    write_opus_folder,
)
from tests.model_helpers import error_of


@pytest.mark.parametrize(
    ("name", "write", "peer"),
    [
        ("marian", write_opus_folder, MarianMTModel),
        ("m2m100", write_m2m100_folder, M2M100ForConditionalGeneration),
    ],
)
def test_search_in_the_config_of_an_older_folder_is_kept(name, write, peer, tmp_path):
    """transformers before 4.26 wrote no generation_config.json."""
    pad = write(tmp_path / "in").config.pad_token_id
    (tmp_path / "in" / "generation_config.json").unlink()
    file = tmp_path / "in" / "config.json"
    search = {
        "num_beams": 3,
        "length_penalty": 0.7,
        "max_length": 9,
        "bad_words_ids": [[pad], [5]],
    }
    search |= {
        "no_repeat_ngram_size": 2,
        "forced_eos_token_id": 0,
        "early_stopping": True,
        "num_return_sequences": 2,
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | search))
    ours, _, _ = converted(name, tmp_path / "in", tmp_path / "ours")
    assert {field: getattr(ours.generation_config, field) for field in search} == search
    theirs = peer.from_pretrained(tmp_path / "in").eval()
    ids = random_ids([6, 3], theirs.config.vocab_size, pad)
    batch = {"input_ids": ids, "attention_mask": ids.ne(pad).long()}
    with torch.no_grad():
        assert ours.generate(**batch).tolist() == theirs.generate(**batch).tolist()


NLLB = ["<s>", "<blank>", "</s>", "<unk>"]


@pytest.mark.parametrize(
    ("special", "start", "expected"),
    [
        (opennmt.SPECIAL, "</s>", 3),
        (NLLB, "</s>", 2),
        (NLLB, "", 3),
        (opennmt.SPECIAL, None, 2),
    ],
)
def test_opennmt_start_token_is_kept(
    special: list[str], start: str | None, expected: int, tmp_path: Path
) -> None:
    vocab = {
        "src": [*special, "a", "b"],
        "tgt": [*special, "c", "d", "e"],
        "data_task": "seq2seq",
    }
    vocab |= {} if start is None else {"decoder_start_token": start}
    opennmt.save(tmp_path / "model.pt", *opennmt.weights((6, 7)), vocab)
    ours, _, _ = converted("opennmt", tmp_path / "model.pt", tmp_path / "ours")
    assert (
        ours.config.decoder_start_token_id
        == ours.generation_config.decoder_start_token_id
        == expected
    )
    assert ours.generate(torch.tensor([[4, 5]]))[0, 0] == expected
    opennmt.save(
        tmp_path / "model.pt",
        *opennmt.weights((6, 7)),
        vocab | {"decoder_start_token": "<de>"},
    )
    assert "decoder_start_token" in error_of(from_opennmt, tmp_path / "model.pt")


def test_eole_bans_and_blocks_as_its_section_inference(tmp_path: Path) -> None:
    eole.save(
        tmp_path,
        eole.weights(),
        inference={"block_ngram_repeat": 2, "ban_unk_token": True, "beam_size": 2},
    )
    ours = from_eole(tmp_path).model
    written = ours.generate(torch.tensor([[4, 5, 6]]), max_new_tokens=9, min_new_tokens=6)[
        0, 1:
    ].tolist()
    pairs = list(zip(written, written[1:], strict=False))
    assert len(pairs) == len(set(pairs))
    assert 0 not in written


@pytest.mark.parametrize("source_format", ["opennmt", "eole"])
def test_transforms_that_change_text_are_named(source_format: str, tmp_path: Path) -> None:
    transforms = ["filtertoolong", "prefix", "sentencepiece"]
    if source_format == "opennmt":
        vocab = {
            "src": [*opennmt.SPECIAL, "a", "b"],
            "tgt": [*opennmt.SPECIAL, "c", "d", "e"],
        }
        opennmt.save(tmp_path / "model.pt", *opennmt.weights((6, 7)), vocab, transforms=transforms)
        notes = "; ".join(from_opennmt(tmp_path / "model.pt").notes)
    else:
        eole.save(tmp_path, eole.weights(), transforms=transforms)
        notes = "; ".join(from_eole(tmp_path).notes)
    assert "prefix, sentencepiece" in notes
    assert "filtertoolong" not in notes


def notes_of_marian(folder: Path, **options: Any) -> list[str]:
    marian_npz.save(folder / "model.npz", marian_npz.weights((9, 9)))
    (folder / "decoder.yml").write_text(
        json.dumps({name.replace("_", "-"): v for name, v in options.items()})
    )
    return from_marian_npz(folder).notes


def notes_of_eole(folder: Path, **options: Any) -> list[str]:
    eole.save(folder, eole.weights(), inference=options)
    return from_eole(folder).notes


def notes_of_fairseq(folder: Path, **options: Any) -> list[str]:
    fairseq.save_with_sections(folder / "model.pt", fairseq.weights(9, 8), **options)
    return from_fairseq(folder / "model.pt").notes


@pytest.mark.parametrize(
    ("read", "changed", "neutral"),
    [
        (
            notes_of_marian,
            {"max_length_factor": 2, "output_sampling": ["full"]},
            {"beam_size": 4},
        ),
        (
            notes_of_marian,
            {"no_spm_encode": True, "word_penalty": 0.1},
            {"word_penalty": 0, "shortlist": []},
        ),
        (
            notes_of_eole,
            {"top_k": 5, "coverage_penalty": "wu", "optional_eos": ["x"]},
            {"top_k": 0, "ratio": -0.0},
        ),
        (
            notes_of_fairseq,
            {"unkpen": 1.0, "constraints": "ordered"},
            {"unkpen": 0, "constraints": None},
        ),
    ],
)
def test_search_that_generate_lacks_is_named(read, changed, neutral, tmp_path):
    assert not any("dropped" in note for note in read(tmp_path, **neutral))
    (note,) = (note for note in read(tmp_path, **changed) if "dropped" in note)
    assert all(name in note.replace("-", "_") for name in changed)


def test_dropouts_of_the_training_are_kept(tmp_path: Path) -> None:
    """As the table of options in the README says: for fine-tuning."""
    marian = {
        "transformer_dropout": 0.1,
        "transformer_dropout_attention": 0.2,
        "transformer_dropout_ffn": 0.3,
    }
    marian_npz.save(tmp_path / "model.npz", marian_npz.weights((9, 9)), **marian)
    opennmt.save(
        tmp_path / "model.pt",
        *opennmt.weights((9, 8)),
        dropout=[0.1],
        attention_dropout=[0.2],
    )
    fairseq.save(tmp_path / "fairseq.pt", fairseq.weights(23, 29), dropout=0.1, relu_dropout=0.3)
    words = [*"abcde"], [*"vwxy"]
    joeynmt.save(tmp_path / "joeynmt", joeynmt.weights((9, 8)), words)
    found = {
        "marian": from_marian_npz(tmp_path / "model.npz"),
        "opennmt": from_opennmt(tmp_path / "model.pt"),
        "joeynmt": from_joeynmt(tmp_path / "joeynmt"),
        "fairseq": from_fairseq(tmp_path / "fairseq.pt"),
    }
    expected = {
        "marian": (0.1, 0.2, 0.3),
        "opennmt": (0.1, 0.2, 0.1),
        "joeynmt": (0.1, 0.1, 0.1),
        "fairseq": (0.1, 0.0, 0.3),  # by the old name of the option
    }
    for name, converted_model in found.items():
        config = converted_model.model.config
        assert (
            config.dropout,
            config.attention_dropout,
            config.activation_dropout,
        ) == expected[name], name
