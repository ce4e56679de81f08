"""The files of toolkits besides their weights: which are found, how they are read, and what is said if not."""

import io
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from hf_vanilla_transformer.interop import eole, fairseq, joeynmt, marian_npz, opennmt
from hf_vanilla_transformer.interop.vocabularies import PRETOKENIZED, SEQUENCES, SPLIT_AT_SPACES
from tests.interop.checkpoints import D
from tests.interop.checkpoints import eole as eole_files
from tests.interop.checkpoints import fairseq as fairseq_files
from tests.interop.checkpoints import joeynmt as joeynmt_files
from tests.interop.checkpoints import marian_npz as marian_files
from tests.interop.checkpoints import opennmt as opennmt_files
from tests.interop.foreign import SOURCES, TARGETS, assert_fields, train_sentencepiece
from tests.model_helpers import error_of


@pytest.fixture
def fairseq_file(model_file: Path) -> Path:
    """A checkpoint of fairseq without its dictionaries."""
    fairseq_files.save(model_file, fairseq_files.weights(9, 8))
    return model_file


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([1], "no checkpoint of fairseq: it has no 'model'"),
        ({"args": None}, "no checkpoint of fairseq: it has no 'model'"),
        ({"model": {}}, "it has neither 'args' nor 'cfg'"),
        ({"model": {}, "cfg": {}}, "it has neither 'args' nor 'cfg'"),
        ({"model": {}, "cfg": "model"}, "it has neither 'args' nor 'cfg'"),
    ],
)
def test_fairseq_checkpoint_has_a_model_and_options(
    state: Any, message: str, model_file: Path
) -> None:
    torch.save(state, model_file)
    assert message in error_of(fairseq.from_fairseq, model_file)


@pytest.mark.parametrize("name", ["encoder.layers.0.fc1", "encoder.layers.1.self_attn.q_proj"])
def test_fairseq_weights_that_no_position_and_no_kernel_has_are_not_left_out(
    name: str, model_file: Path
) -> None:
    """The copies for inference have an underscore: encoder.layers.0.fc1_weight."""
    surplus = {f"{name}_scale": torch.ones(3)}
    fairseq_files.save(model_file, fairseq_files.weights(9, 8) | surplus)
    assert f"{name}_scale" in error_of(fairseq.from_fairseq, model_file)


@pytest.mark.parametrize(
    ("encoder", "decoder", "positions"), [(14, 14, 12), (14, 12, 10), (5, 9, 3)]
)
def test_fairseq_positions_start_after_the_padding(
    encoder: int, decoder: int, positions: int, model_file: Path
) -> None:
    """Row 0 and the padding's, row 1, belong to no position. Both stacks have as many as the shorter table."""
    tables = {"encoder": torch.randn(encoder, D), "decoder": torch.randn(decoder, D)}
    named = {f"{stack}.embed_positions.weight": table for stack, table in tables.items()}
    fairseq_files.save(model_file, fairseq_files.weights(9, 8) | named)
    model = fairseq.from_fairseq(model_file).model
    assert_fields(model.config, position_encoding_type="learned", max_position_embeddings=positions)
    for stack, table in tables.items():
        found = getattr(model.model, stack).embed_positions.weight
        torch.testing.assert_close(found.detach(), table[2 : 2 + positions])


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_fairseq_learns_the_positions_of_both_stacks_or_of_none(
    stack: str, model_file: Path
) -> None:
    name = f"{stack}.embed_positions.weight"
    fairseq_files.save(model_file, fairseq_files.weights(9, 8) | {name: torch.randn(9, D)})
    assert error_of(fairseq.from_fairseq, model_file).startswith(
        f"{name}: the other stack has sinusoids"
    )


def test_fairseq_names_the_languages_that_were_given(fairseq_file: Path, tmp_path: Path) -> None:
    fairseq_files.write_dictionaries(
        tmp_path,
        {
            "en": [*"abcde"],
            "de": [*"wxyz"],
            "fr": [*"ABCD"],
        },
    )
    found = fairseq.from_fairseq(fairseq_file)
    assert found.notes == [PRETOKENIZED]
    assert found.target_tokenizer.convert_tokens_to_ids("w") == 4
    other = fairseq.from_fairseq(fairseq_file, target_language="fr")
    assert other.target_tokenizer.convert_tokens_to_ids("A") == 4
    assert other.tokenizer.convert_tokens_to_ids("a") == 4
    for languages, named in (
        ({}, [None, None]),
        ({"target_language": "fr"}, [None, None]),
        ({"source_language": "en"}, [None, None]),
        ({"source_language": "en", "target_language": "fr"}, ["en", "fr"]),
    ):
        found = fairseq.from_fairseq(fairseq_file, **languages)
        for tokenizer in (found.tokenizer, found.target_tokenizer):
            assert [
                tokenizer.init_kwargs.get(f"{side}_lang") for side in ("source", "target")
            ] == named


def test_fairseq_asks_for_languages_only_if_there_are_dictionaries(
    fairseq_file: Path, tmp_path: Path
) -> None:
    assert fairseq.from_fairseq(fairseq_file).notes == []
    fairseq_files.write_dictionaries(tmp_path, {"en": [*"abcde"]})
    (note,) = fairseq.from_fairseq(fairseq_file).notes
    assert note == "its dictionaries were not chosen: give source_language and target_language"
    fairseq_files.write_dictionaries(tmp_path / "data", {"en": [*"abcde"], "de": [*"wxyz"]})
    assert fairseq.from_fairseq(fairseq_file, data=tmp_path / "data").tokenizer is not None


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("a 1\nb 22\nc 0\nd 4\ne 5\n", "a b c d e"),
        ("a 1\n\nb 2\n  \nc 3\nd 4\ne 5", "a b c d e"),
        ("a 1 \nb 2\t\nc 3\nd 4\ne 5\n", "a b c d e"),
        ("a 1\na 2 #fairseq:overwrite\nc 3\nd 4\ne 5\n", "a#overwritten-2 a c d e"),
        ("a 1\nb 1 #fairseq:overwrite\nc 3\nd 4\ne 5\n", "a b c d e"),
    ],
)
def test_fairseq_dictionary_is_read(
    text: str, tokens: str, fairseq_file: Path, tmp_path: Path
) -> None:
    fairseq_files.write_dictionaries(tmp_path, {"de": [*"wxyz"]})
    (tmp_path / "dict.en.txt").write_text(text)
    found = fairseq.from_fairseq(fairseq_file).tokenizer
    assert found.convert_ids_to_tokens([*range(9)]) == [
        "<s>",
        "<pad>",
        "</s>",
        "<unk>",
        *tokens.split(),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a 1\n\nb\n", "line 3 is 'b'"),
        ("a b\n", "line 1 is 'a b'"),
        ("a -1\n", "line 1 is 'a -1'"),
        ("a #fairseq:overwrite\n", "line 1 is 'a #fairseq:overwrite'"),
    ],
)
def test_fairseq_dictionary_names_a_bad_line(
    text: str, message: str, fairseq_file: Path, tmp_path: Path
) -> None:
    fairseq_files.write_dictionaries(tmp_path, {"de": [*"wxyz"]})
    (tmp_path / "dict.en.txt").write_text(text)
    assert f"dict.en.txt: {message}" in error_of(fairseq.from_fairseq, fairseq_file)


def test_fairseq_tokenizer_for_raw_text_needs_the_special_tokens(
    fairseq_file: Path, tmp_path: Path
) -> None:
    fairseq_files.write_dictionaries(
        tmp_path, {"en": [*"abcde"], "de": [*"xyz", "<s> 1 #fairseq:overwrite"]}
    )
    (tmp_path / "dict.de.txt").write_text("x 1\ny 1\nz 1\n<s> 1 #fairseq:overwrite\n")
    (tmp_path / "codes").write_text("#version: 0.2\na b\n")
    assert fairseq.from_fairseq(fairseq_file).tokenizer is not None
    message = error_of(fairseq.from_fairseq, fairseq_file, codes=tmp_path / "codes")
    assert "a dictionary overwrites a special token" in message


@pytest.mark.parametrize(
    ("task", "added", "flags"),
    [
        (
            {"langs": "en,de", "decoder_langtok": True},
            ["__en__", "__de__"],
            "--langs, --decoder-langtok",
        ),
        ({"langs": ["en", "de"], "lang_tok_style": "mbart"}, ["[en]", "[de]", "<mask>"], "--langs"),
        (
            {"langs": "en", "task": None, "_name": "translation_from_pretrained_bart"},
            ["[en]", "<mask>"],
            "--langs",
        ),
        ({"langs": None}, [], ""),
        ({"langs": []}, [], ""),
    ],
)
def test_fairseq_task_of_many_languages_adds_tokens(
    task: dict, added: list[str], flags: str, model_file: Path, tmp_path: Path
) -> None:
    fairseq_files.write_dictionaries(tmp_path, {"en": ["a", *added[:1]], "de": ["b"]})
    shared = len(added[:1])  # which the dictionary has already, so that it is not added again
    sizes = (5 + len(added), 5 + len(added))
    fairseq_files.save(model_file, fairseq_files.weights(*sizes), **task)
    found = fairseq.from_fairseq(model_file)
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    assert found.tokenizer.convert_ids_to_tokens([*range(sizes[0])]) == [*special, "a", *added]
    assert found.target_tokenizer.convert_ids_to_tokens([*range(sizes[0])]) == [
        *special,
        "b",
        *added,
    ]
    notes = [note for note in found.notes if note != PRETOKENIZED]
    assert notes == (
        [f"its task adds tokens of languages to the text ({flags}), the tokenizer does not"]
        if shared
        else []
    )


@pytest.fixture
def joey(tmp_path: Path) -> Path:
    joeynmt_files.save(tmp_path / "joey", joeynmt_files.weights((7, 6)))
    return tmp_path / "joey"


def write_joeynmt(folder: Path, **changes: Any) -> None:
    """`changes` of sections by their path, with two underscores between its parts."""
    given = joeynmt_files.options()
    for path, value in changes.items():
        *sections, name = path.split("__")
        section = given
        for each in sections:
            section = section.setdefault(each, {})
        section[name] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(given))


def test_joeynmt_checkpoint_is_the_best_or_the_only_one(joey: Path) -> None:
    best = joey / "best.ckpt"
    (joey / "500.ckpt").write_bytes(b"")
    other = joey / "600.ckpt"
    other.write_bytes(best.read_bytes())
    assert_fields(joeynmt.from_joeynmt(best).model.config, vocab_size=7)
    assert_fields(joeynmt.from_joeynmt(other).model.config, vocab_size=7)
    assert joeynmt.from_joeynmt(joey).tokenizer is not None
    best.unlink()
    assert "no best.ckpt and 2 other checkpoints; name the file" in error_of(
        joeynmt.from_joeynmt, joey
    )
    (joey / "500.ckpt").unlink()
    assert joeynmt.from_joeynmt(joey).tokenizer is not None
    other.unlink()
    assert "no best.ckpt and 0 other checkpoints" in error_of(joeynmt.from_joeynmt, joey)


@pytest.mark.parametrize("state", [{"model": {}}, [1], {"model_state": 3}])
def test_joeynmt_checkpoint_has_the_weights(state: Any, joey: Path) -> None:
    torch.save(state, joey / "best.ckpt")
    assert "best.ckpt: model_state" in error_of(joeynmt.from_joeynmt, joey)


@pytest.mark.parametrize(("name", "number"), [("unk", 0), ("pad", 1), ("bos", 2), ("eos", 3)])
def test_joeynmt_special_tokens_have_the_usual_ids(name: str, number: int, joey: Path) -> None:
    write_joeynmt(joey, **{f"data__special_symbols__{name}_id": number})
    assert joeynmt.from_joeynmt(joey).tokenizer is not None
    write_joeynmt(joey, **{f"data__special_symbols__{name}_id": number + 1})
    message = f"{name}_id={number + 1}: only {number} is supported"
    assert message in error_of(joeynmt.from_joeynmt, joey)


def test_joeynmt_vocabulary_starts_with_the_special_symbols_each_once(tmp_path: Path) -> None:
    joeynmt_files.save(
        tmp_path,
        joeynmt_files.weights((9, 9)),
        (["a", "<2de>"], ["b", "<sep>"]),
    )
    write_joeynmt(
        tmp_path,
        data__special_symbols={
            "unk_token": "UNK",
            "sep_token": "<sep>",
            "lang_tags": ["<2de>", "<2en>"],
        },
    )
    for side, word in (("src", "a"), ("trg", "b")):
        (tmp_path / f"{side}_vocab.txt").write_text(f"UNK\n<pad>\n{word}\n<2de>\n<sep>\n")
    found = joeynmt.from_joeynmt
    message = error_of(found, tmp_path)
    assert "src_vocab.txt: 8 tokens with the special ones, but the model has 9" in message
    for side, word in (("src", "a"), ("trg", "b")):
        (tmp_path / f"{side}_vocab.txt").write_text(f"UNK\n<pad>\n{word}\n<2de>\n<sep>\nmore\n")
    tokens = ["UNK", "<pad>", "<s>", "</s>", "<sep>", "<2de>", "<2en>"]
    converted = found(tmp_path)
    assert converted.tokenizer.convert_ids_to_tokens([*range(9)]) == [*tokens, "a", "more"]
    assert converted.target_tokenizer.convert_ids_to_tokens([*range(9)]) == [*tokens, "b", "more"]
    assert_fields(converted.model.generation_config, suppress_tokens=[2, 1, 4, 5, 6])


@pytest.mark.parametrize(
    ("changes", "is_tokenized"),
    [
        ({}, False),
        ({"data__src__level": "bpe"}, True),
        ({"data__trg__level": "char"}, True),
        ({"data__src__normalize": True}, True),
        ({"data__src__normalize": False}, False),
        ({"data__trg__tokenizer_cfg": {"pretokenizer": "moses"}}, True),
        ({"data__trg__tokenizer_cfg": {"pretokenizer": "none"}}, False),
    ],
)
def test_joeynmt_text_is_raw_if_it_is_split_at_white_space_only(
    changes: dict, is_tokenized: bool, joey: Path
) -> None:
    write_joeynmt(joey, **changes)
    assert (PRETOKENIZED in joeynmt.from_joeynmt(joey).notes) is is_tokenized


@pytest.mark.parametrize(
    ("side", "is_raw"),
    [
        ({}, True),
        ({"bpe_type": "sentencepiece", "tokenizer_type": None}, True),
        ({"tokenizer_type": None}, True),
        ({"level": "word"}, False),
        ({"level": "char"}, False),
        ({"tokenizer_type": "subword-nmt"}, False),
        ({"tokenizer_type": None, "bpe_type": "subword-nmt"}, False),
        ({"tokenizer_type": "a-subword"}, False),
        ({"lowercase": True}, False),
        ({"normalize": True}, False),
        ({"tokenizer_cfg": {"pretokenizer": "none"}}, False),
        ({"tokenizer_cfg": {"model_file": "/x/sp.model", "pretokenizer": "moses"}}, False),
    ],
)
def test_joeynmt_sentencepiece_takes_raw_text_if_nothing_else_changes_it(
    side: dict, is_raw: bool, tmp_path: Path
) -> None:
    pieces = train_sentencepiece(tmp_path / "sp.model", SOURCES + TARGETS)
    tokens = [piece for piece in pieces if piece not in joeynmt_files.SPECIAL]
    size = len(tokens) + 4
    spm = {
        "level": "bpe",
        "tokenizer_type": "sentencepiece",
        "tokenizer_cfg": {"model_file": "/x/sp.model"},
    }
    joeynmt_files.save(tmp_path, joeynmt_files.weights((size, size)), (tokens, tokens))
    for changed in ("src", "trg"):  # a tokenizer of both sides is raw only if both are
        sections = {"data__src": spm, "data__trg": spm}
        sections[f"data__{changed}"] = spm | side
        write_joeynmt(tmp_path, **sections)
        tokenizer = joeynmt.from_joeynmt(tmp_path).tokenizer
        assert (type(tokenizer).__name__ == "MarianTokenizer") is is_raw


@pytest.mark.parametrize(("lacks", "is_raw"), [("d", True), ("longest", False)])
def test_joeynmt_vocabulary_may_lack_single_characters(
    lacks: str, is_raw: bool, tmp_path: Path
) -> None:
    """JoeyNMT never splits text into a longer piece that its vocabulary lacks."""
    pieces = train_sentencepiece(tmp_path / "sp.model", SOURCES + TARGETS)
    tokens = [piece for piece in pieces if piece not in joeynmt_files.SPECIAL]
    tokens.remove(max(tokens, key=len) if lacks == "longest" else lacks)
    size = len(tokens) + 4
    joeynmt_files.save(tmp_path, joeynmt_files.weights((size, size)), (tokens, tokens))
    spm = {"level": "bpe", "tokenizer_cfg": {"model_file": "/x/sp.model"}}
    write_joeynmt(tmp_path, data__src=spm, data__trg=spm)
    tokenizer = joeynmt.from_joeynmt(tmp_path).tokenizer
    assert (type(tokenizer).__name__ == "MarianTokenizer") is is_raw


def test_joeynmt_section_that_is_missing_is_named(joey: Path) -> None:
    for text, section in (
        ("{}", "data.src"),
        ("data: {src: {}}", "data.trg"),
        ("data: {src: {}, trg: {}}", "model.encoder"),
        ("data: {src: {}, trg: {}}\nmodel: {encoder: {}}", "model.decoder"),
    ):
        (joey / "config.yaml").write_text(text)
        assert f"the section {section} is missing" in error_of(joeynmt.from_joeynmt, joey)
    (joey / "config.yaml").unlink()
    assert "name the model_dir of JoeyNMT, or a .ckpt in it" in error_of(joeynmt.from_joeynmt, joey)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model__encoder__hidden_size": 16},
            r"model.hidden_size: encoder and decoder have 16 and 12; here both",
        ),
        ({"model__encoder__alpha": 0.9}, r"encoder.alpha=0.9: §3.1"),
        (
            {"model__encoder__layer_norm": "mid", "model__decoder__layer_norm": "mid"},
            "layer_norm=mid",
        ),
        ({"model__encoder__type": None}, r"encoder.type=None"),
    ],
)
def test_joeynmt_stacks_that_differ_are_refused(changes: dict, message: str, joey: Path) -> None:
    write_joeynmt(joey, **changes)
    assert re.search(message, error_of(joeynmt.from_joeynmt, joey))


@pytest.mark.parametrize(
    "changes",
    [
        {"model__decoder__type": None},
        {"model__encoder__alpha": 1, "model__decoder__alpha": 1.0},
        {"model__decoder__layer_norm": None},
        {"model__tied_embeddings": True, "model__decoder__embeddings": {"scale": False}},
        {"model__decoder__activation": None},
    ],
)
def test_joeynmt_options_that_say_the_same_are_accepted(changes: dict, joey: Path) -> None:
    write_joeynmt(joey, **changes)
    assert_fields(
        joeynmt.from_joeynmt(joey).model.config, layer_norm_position="post", scale_embedding=True
    )


@pytest.fixture
def marian_file(tmp_path: Path) -> Path:
    """Marian's .npz for vocabularies of 9 tokens."""
    marian_files.save(tmp_path / "model.npz", marian_files.weights((9, 9)))
    return tmp_path / "model.npz"


MARIAN_TOKENS = ["</s>", "<unk>", *"abcdefg"]


def write_marian_vocabulary(file: Path, tokens: list[str] = MARIAN_TOKENS) -> Path:
    file.write_text("".join(f"{token}: {number}\n" for number, token in enumerate(tokens)))
    return file


def test_marian_folder_has_one_model_or_names_one(marian_file: Path, tmp_path: Path) -> None:
    def beams(source: Path = tmp_path) -> int:
        return marian_npz.from_marian_npz(source).model.generation_config.num_beams

    assert beams() == 12
    for name in ("model.npz.optimizer.npz", "model.npz.orig.npz"):
        (tmp_path / name).write_bytes(b"")
    assert beams() == 12
    (tmp_path / "decoder.yml").write_text("beam-size: 5\n")
    assert beams() == 5
    assert beams(marian_file) == 5
    # the options of a model's own file come first
    (tmp_path / "model.npz.decoder.yml").write_text("beam-size: 7\nmodels: [/x/model.npz]\n")
    assert beams() == 7
    assert beams(marian_file) == 7
    other = tmp_path / "other.npz"
    other.write_bytes(marian_file.read_bytes())
    assert beams() == 7
    assert beams(other) == 5
    (tmp_path / "decoder.yml").write_text("beam-size: 4\nmodels: [other.npz]\n")
    assert beams() == 4
    (tmp_path / "decoder.yml").write_text("models: []\n")
    assert "names 0 models" in error_of(beams)
    (tmp_path / "decoder.yml").write_text("models: [missing.npz]\n")
    assert "names 1 models; name the .npz file to convert" in error_of(beams)
    (tmp_path / "decoder.yml").unlink()
    (tmp_path / "model.npz.decoder.yml").unlink()
    assert ": 2 models there; name the .npz file" in error_of(beams)
    other.unlink()
    marian_file.unlink()
    assert ": 0 models there" in error_of(beams)


@pytest.mark.parametrize(
    ("preprocess", "postprocess", "top", "position"),
    [
        ("", "dan", "", "post"),
        ("d", "an", "d", "post"),
        ("n", "da", "n", "pre"),
        ("dn", "dad", "nd", "pre"),
        ("n", "dan", "n", None),
        ("n", "da", "", None),
        ("", "da", "n", None),
        ("", "", "", None),
    ],
)
def test_marian_places_its_normalisations(
    preprocess: str, postprocess: str, top: str, position: str | None, tmp_path: Path
) -> None:
    arrays = marian_files.weights((9, 9))
    if position == "pre":
        arrays = {
            f"{name}_pre" if "_ln_" in name else name: array for name, array in arrays.items()
        }
        for stack in ("encoder", "decoder"):
            for part in ("scale", "bias"):
                arrays[f"{stack}_top_ln_{part}"] = np.ones((1, D), dtype=np.float32)
    file = tmp_path / "model.npz"
    marian_files.save(
        file,
        arrays,
        transformer_preprocess=preprocess,
        transformer_postprocess=postprocess,
        transformer_postprocess_top=top,
    )
    if position is None:
        spelt = f"--transformer-preprocess={preprocess}, --transformer-postprocess={postprocess}"
        message = error_of(marian_npz.from_marian_npz, file)
        assert (
            f"model.npz: {spelt}, --transformer-postprocess-top={top}: such a model is neither"
            in message
        )
    else:
        found = marian_npz.from_marian_npz(file)
        assert_fields(found.model.config, layer_norm_position=position)
        assert (marian_npz.PRE_NORM_NOTE in found.notes) is (position == "pre")


def test_marian_vocabularies_are_in_the_folder_of_the_model(
    marian_file: Path, tmp_path: Path
) -> None:
    def notes_and_tokens(names: list[str]) -> tuple[list[str], list[str] | None]:
        marian_files.save(marian_file, marian_files.weights((9, 9)), vocabs=names)
        found = marian_npz.from_marian_npz(marian_file)
        tokenizer = found.target_tokenizer
        return found.notes, None if tokenizer is None else tokenizer.convert_ids_to_tokens(
            [*range(10)]
        )

    write_marian_vocabulary(tmp_path / "a.yml")
    write_marian_vocabulary(tmp_path / "b.yml", ["</s>", "<unk>", *"tuvwxyz"])
    assert notes_and_tokens(["/x/a.yml"]) == ([PRETOKENIZED], [*MARIAN_TOKENS, "<pad>"])
    assert notes_and_tokens(["a.yml", "b.yml"])[1] == ["</s>", "<unk>", *"tuvwxyz", "<pad>"]
    for names in (["a.yml", "c.yml"], ["c.yml", "a.yml"]):
        note = f"its vocabularies {' and '.join(names)} are not in its folder"
        assert notes_and_tokens(names) == ([note], None)


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (["<unk>", "</s>", *"abcdefg"], ["<unk>", "</s>", *"tuvwxyz"], None),
        (
            MARIAN_TOKENS,
            ["<unk>", "</s>", *"abcdefg"],
            "</s> has to be in both vocabularies, with one id",
        ),
        (MARIAN_TOKENS, ["</s>", *"abcdefgh"], "<unk> has to be in both vocabularies"),
        (
            ["<pad>" if token == "c" else token for token in MARIAN_TOKENS],
            MARIAN_TOKENS,
            "<pad> is a token",
        ),
    ],
)
def test_marian_special_tokens_have_one_id(
    source: list[str], target: list[str], message: str | None, marian_file: Path, tmp_path: Path
) -> None:
    files = {
        "source_vocabulary": write_marian_vocabulary(tmp_path / "a.yml", source),
        "target_vocabulary": write_marian_vocabulary(tmp_path / "b.yml", target),
    }
    if message is not None:
        assert message in error_of(marian_npz.from_marian_npz, marian_file, **files)
        return
    found = marian_npz.from_marian_npz(marian_file, **files)
    assert_fields(found.model.config, unk_token_id=0, eos_token_id=1, pad_token_id=9)
    assert_fields(found.model.generation_config, eos_token_id=1, decoder_start_token_id=9)


def test_marian_rows_without_a_token_are_named(tmp_path: Path) -> None:
    file = tmp_path / "model.npz"
    marian_files.save(file, marian_files.weights((9, 12), "none"))
    vocabularies = {
        "source_vocabulary": write_marian_vocabulary(tmp_path / "a.yml"),
        "target_vocabulary": write_marian_vocabulary(
            tmp_path / "b.yml", [*MARIAN_TOKENS, "h", "i"]
        ),
    }
    found = marian_npz.from_marian_npz(file, **vocabularies)
    unused = [f"<unused_{number}>" for number in (9, 10, 11)]
    assert found.tokenizer.convert_ids_to_tokens([*range(13)]) == [*MARIAN_TOKENS, *unused, "<pad>"]
    tokens = found.target_tokenizer.convert_ids_to_tokens([*range(9, 13)])
    assert tokens == ["h", "i", "<unused_11>", "<pad>"]
    weight = found.model.get_input_embeddings().weight
    assert weight.shape == (13, D)
    assert not weight[9:].any()
    assert weight[:9].all()


@pytest.mark.parametrize("suffix", [".yml", ".yaml", ".json", ".txt", ".vocab"])
def test_marian_vocabulary_is_yaml_or_a_token_a_line(
    suffix: str, marian_file: Path, tmp_path: Path
) -> None:
    file = tmp_path / f"v{suffix}"
    write_marian_vocabulary(file)
    if suffix in (".txt", ".vocab"):
        file.write_text("\n".join(MARIAN_TOKENS) + "\n")
    elif suffix == ".json":
        file.write_text(
            str({token: number for number, token in enumerate(MARIAN_TOKENS)}).replace("'", '"')
        )
    found = marian_npz.from_marian_npz(marian_file, source_vocabulary=file).tokenizer
    assert found.convert_ids_to_tokens([*range(9)]) == MARIAN_TOKENS


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("integers", "Wemb is int32: quantised weights cannot be converted"),
        ("no embedding", "there is no matrix encoder_Wemb or Wemb"),
        ("a vector", "there is no matrix encoder_Wemb or Wemb"),
        ("no options", "it lacks special:model.yml, and its folder model.npz.yml"),
        ("no positions", "Wpos is missing, the table of --transformer-train-positions"),
        ("objects", "it holds Python objects; nothing of it was run"),
    ],
)
def test_marian_arrays_that_are_missing_or_of_another_kind_are_named(
    kind: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "model.npz"
    arrays = marian_files.weights((9, 9))
    if kind == "integers":
        arrays["Wemb"] = arrays["Wemb"].astype(np.int32)
    elif kind == "a vector":
        arrays["Wemb"] = arrays["Wemb"].flatten()
    elif kind == "no embedding":
        del arrays["Wemb"]
    elif kind == "objects":
        arrays["x"] = np.array([{}], dtype=object)
    marian_files.save(
        file,
        arrays,
        separate=kind == "no options",
        transformer_train_positions=kind == "no positions",
    )
    if kind == "no options":
        file.with_name("model.npz.yml").unlink()
    assert message in error_of(marian_npz.from_marian_npz, file)


@pytest.mark.parametrize(
    ("factor", "message"),
    [
        (9.5, "tensors that this architecture does not have (1): x"),
        (10.5, "its arrays are far larger than the file"),
    ],
)
def test_marian_arrays_are_up_to_ten_times_as_large_as_the_file(
    factor: float, message: str, marian_file: Path
) -> None:
    """Zeros shrink to a thousandth."""
    size = int((factor - 1) * marian_file.stat().st_size / 4)
    with (
        io.BytesIO() as zeros,
        zipfile.ZipFile(
            marian_file,
            "a",
            zipfile.ZIP_DEFLATED,
        ) as archive,
    ):
        np.save(zeros, np.zeros(size, dtype=np.float32))
        archive.writestr("x.npy", zeros.getvalue())
    with zipfile.ZipFile(marian_file) as archive:
        expanded = sum(member.file_size for member in archive.infolist())
    assert abs(expanded / marian_file.stat().st_size - factor) < 0.45
    assert message in error_of(marian_npz.from_marian_npz, marian_file)


def test_opennmt_and_eole_name_the_transforms_that_are_not_applied(
    model_file: Path, tmp_path: Path
) -> None:
    tokens = [*opennmt_files.SPECIAL, *"abcd"]
    vocab = {"src": tokens, "tgt": tokens}
    transforms = ["filtertoolong", "suffix", "bpe", "prefix"]
    opennmt_files.save(
        model_file,
        *opennmt_files.weights((8, 8)),
        vocab,
        transforms=transforms,
    )
    note = "the toolkit applies {} to its text, the tokenizer does not"
    assert opennmt.from_opennmt(model_file).notes == [
        PRETOKENIZED,
        note.format("bpe, prefix, suffix"),
        opennmt.SEARCH_NOTE,
    ]
    (tmp_path / "codes").write_text("#version: 0.2\na b\n")
    assert opennmt.from_opennmt(model_file, codes=tmp_path / "codes").notes == [
        SPLIT_AT_SPACES,
        note.format("prefix, suffix"),
        opennmt.SEARCH_NOTE,
    ]
    eole_files.save(tmp_path / "eole", eole_files.weights(), transforms=["onmt_tokenize"])
    found = eole.from_eole(tmp_path / "eole")
    assert found.notes == [PRETOKENIZED, note.format("onmt_tokenize"), eole.SEARCH_NOTE]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"src": ["<unk>", "<blank>", *"abcdef"]}, None),
        ({"src": ["<unk>", "<s>", *"abcdef"]}, "vocab: <blank> is missing there"),
        ({"src": ["<blank>", "<s>", *"abcdef"]}, "vocab: <unk> is missing there"),
        ({"tgt": ["<unk>", "<blank>", "<s>", *"vwxyz"]}, "vocab: </s> is missing there"),
        ({"tgt": ["<unk>", "<blank>", "</s>", *"vwxyz"]}, "vocab: <s> is missing there"),
        ({"decoder_start_token": "q"}, "vocab.decoder_start_token=q: it is no token of tgt"),
        ({"decoder_start_token": ""}, None),
        ({"decoder_start_token": "</s>"}, None),
    ],
)
def test_opennmt_vocabularies_have_the_special_tokens(
    changes: dict, message: str | None, model_file: Path
) -> None:
    special = opennmt_files.SPECIAL
    vocab = {
        "src": [*special, *"abcd"],
        "tgt": [*special, *"wxyz"],
        **changes,
    }
    opennmt_files.save(model_file, *opennmt_files.weights((8, 8)), vocab)
    if message is not None:
        assert message in error_of(opennmt.from_opennmt, model_file)
        return
    start = {"": 0, "</s>": 3}.get(changes.get("decoder_start_token"), 2)
    found = opennmt.from_opennmt(model_file)
    assert_fields(
        found.model.generation_config, decoder_start_token_id=start, eos_token_id=3, pad_token_id=1
    )
    assert found.tokenizer.pad_token_id == 1
    assert SEQUENCES not in found.notes


def test_opennmt_state_without_its_parts_is_refused(model_file: Path) -> None:
    model, head = opennmt_files.weights((8, 8))
    opennmt_files.save(model_file, model, head)
    whole = torch.load(model_file, weights_only=False)
    for state in (
        {name: part for name, part in whole.items() if name != "generator"},
        {name: part for name, part in whole.items() if name != "opt"},
        whole | {"opt": {}},
        [whole],
    ):
        torch.save(state, model_file)
        assert "'model', 'generator' and 'opt' are needed" in error_of(
            opennmt.from_opennmt, model_file
        )


@pytest.mark.parametrize(
    "vocab",
    [
        [],
        {},
        7,
        [("src", ["a"])],
        {"src": ["a"]},
        {"src": [], "tgt": []},
        [1, 2],
    ],
)
def test_opennmt_checkpoint_without_vocabularies_has_no_tokenizer(
    vocab: Any, model_file: Path
) -> None:
    opennmt_files.save(model_file, *opennmt_files.weights((8, 8)), vocab)
    found = opennmt.from_opennmt(model_file)
    assert found.tokenizer is None
    assert found.notes == ["the checkpoint contains no vocabularies"]


@pytest.mark.parametrize(
    ("wrap", "is_found"),
    [
        (lambda vocabulary: nested(vocabulary, 7), True),
        (lambda vocabulary: nested(vocabulary, 8), False),
        (lambda vocabulary: (*[0] * 999, vocabulary), True),
        (lambda vocabulary: (*[0] * 1000, vocabulary), False),
    ],
)
def test_opennmt_vocabulary_is_near_the_root_of_its_field(
    wrap: Any, is_found: bool, model_file: Path
) -> None:
    tokens = [*opennmt_files.SPECIAL, *"abcd"]
    vocab = {"src": wrap({"itos": tokens}), "tgt": tokens}
    opennmt_files.save(model_file, *opennmt_files.weights((8, 8)), vocab)
    tokenizer = opennmt.from_opennmt(model_file).tokenizer
    assert (tokenizer is not None) is is_found


def nested(value: object, depth: int) -> object:
    for _ in range(depth):
        value = {"inner": value}
    return value


def test_eole_folder_without_its_parts_is_refused(tmp_path: Path) -> None:
    eole_files.save(tmp_path, eole_files.weights())
    for name in (
        "vocab.json",
        "model.00.safetensors",
        "config.json",
    ):  # the first that is missing is named
        (tmp_path / name).unlink()
        assert f"{tmp_path / name}: no such file" in error_of(eole.from_eole, tmp_path)
    (tmp_path / "config.json").write_text('{"training": {}}')
    assert "no configuration of eole: model is missing" in error_of(eole.from_eole, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder.norm_eps": 1e-6}, "norm_eps"),
        ({"decoder.mlp_activation_fn": "gelu"}, "mlp_activation_fn"),
        ({"encoder.head_dim": 2}, "head_dim"),
        (
            {
                "encoder.norm_eps": 1e-5,
                "decoder.mlp_activation_fn": "relu",
                "decoder.head_dim": None,
            },
            None,
        ),
    ],
)
def test_eole_stacks_that_differ_are_refused(
    changes: dict, message: str | None, tmp_path: Path
) -> None:
    eole_files.save(tmp_path, eole_files.weights(), changes)
    if message is None:
        eole.from_eole(tmp_path)
    else:
        error = error_of(eole.from_eole, tmp_path)
        assert re.search(
            f"encoder.{message}=.*decoder.{message}=.*both stacks have the same", error
        )
