"""JoeyNMT's model folders. JoeyNMT cannot be installed with the tests. The reference is the NumPy restatement."""

import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch

from hf_vanilla_transformer.interop.joeynmt import from_joeynmt
from tests.interop.checkpoints import D
from tests.interop.checkpoints.fairseq import with_final_norms
from tests.interop.checkpoints.joeynmt import PEER, SPECIAL, named, options, restated, save, weights
from tests.interop.conftest import Compare
from tests.interop.foreign import (
    SOURCES,
    TARGETS,
    Record,
    assert_fields,
    converted,
    installed,
    train_sentencepiece,
)
from tests.model_helpers import error_of


@pytest.mark.parametrize("tied", [False, True])
def test_joeynmt_folder_gives_its_logits(tied: bool, tmp_path: Path, compared: Compare) -> None:
    model = weights((23, 23 if tied else 29), tied)
    tokens = (named(19, "a"), named(19, "a")) if tied else None
    save(tmp_path / "joey", model, tokens)
    ours, _, _ = compared(PEER, "joeynmt", tmp_path / "joey", restated(model))
    assert_fields(ours.config, share_encoder_decoder_embeddings=tied, tie_word_embeddings=tied)
    # ((5 + length) / 6)^alpha is the paper's, and has no length_penalty
    assert_fields(
        ours.generation_config,
        num_beams=5,
        paper_length_penalty=1.0,
        length_penalty=None,
        max_new_tokens=40,
        beam_search_rule="joeynmt",
        decoder_start_token_id=2,
    )


def test_joeynmt_pre_norm_folder_gives_its_logits(tmp_path: Path, compared: Compare) -> None:
    given = options()
    model = with_final_norms(weights((23, 29)))
    for stack in ("encoder", "decoder"):
        given["model"][stack]["layer_norm"] = "pre"
    save(tmp_path / "joey", model, given=given)
    ours, _, _ = compared(
        PEER,
        "joeynmt",
        tmp_path / "joey",
        restated(model, pre_norm=True),
    )
    assert_fields(ours.config, layer_norm_position="pre")


def options_of_version_1(**data: Any) -> dict[str, Any]:
    """As in Masakhane's models: languages as text, one section for both sides, and no order of normalisations."""
    stack = options()["model"]["encoder"]
    del stack["layer_norm"]
    vocabulary = "/content/drive/My Drive/data/vocab.txt"
    files = {
        "train": "data/af/train.bpe",
        "src_vocab": vocabulary,
        "trg_vocab": vocabulary,
    }
    return {
        "name": "afen_reverse_transformer",
        "data": {
            "src": "af",
            "trg": "en",
            "level": "bpe",
            "lowercase": False,
            **files,
            **data,
        },
        "testing": {"beam_size": 5, "alpha": 1.0},
        "training": {"scheduling": "plateau", "adam_betas": [0.9, 0.999], "max_output_length": 30},
        "model": {
            "initializer": "xavier",
            "tied_embeddings": True,
            "tied_softmax": True,
            "encoder": stack,
            "decoder": dict(stack),
        },
    }


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"trg": False},
        {"level": "word", "lowercase": True},
        {"src_vocab": None, "trg_vocab": None},
    ],
)
def test_joeynmt_version_1_folder_gives_its_logits(data, tmp_path, compared):
    """Also if Norwegian is `no`, false in YAML."""
    model = with_final_norms(weights((23, 23), tied=True))
    save(
        tmp_path / "joey",
        model,
        (named(19, "a"),) * 2,
        options_of_version_1(**data),
    )
    if not data:  # only the vocabulary that the options name
        (tmp_path / "joey" / "src_vocab.txt").rename(tmp_path / "joey" / "vocab.txt")
        (tmp_path / "joey" / "trg_vocab.txt").unlink()
    ours, tokenizer, _ = compared(
        PEER,
        "joeynmt",
        tmp_path / "joey",
        restated(model, pre_norm=True),
    )
    search = ours.generation_config
    assert_fields(
        search,
        num_beams=5,
        paper_length_penalty=1.0,
        max_new_tokens=30,
    )
    assert not search.suppress_tokens
    assert not search.min_new_tokens
    assert not hasattr(search, "beam_search_rule")
    notes = "; ".join(from_joeynmt(tmp_path / "joey").notes)
    assert "JoeyNMT 1 ends" in notes
    assert ("tokenized already" in notes) is (data.get("level") != "word")
    assert tokenizer("a3 A4 x")["input_ids"] == [7, 8 if data.get("lowercase") else 0, 0, 3]


def test_joeynmt_gelu_and_unscaled_embeddings(tmp_path: Path, compared: Compare) -> None:
    given = options()
    model = weights((23, 29))
    for stack in ("encoder", "decoder"):
        given["model"][stack] |= {"activation": "gelu", "embeddings": {"embedding_dim": D}}
    save(tmp_path, model, given=given)
    (tmp_path / "best.ckpt").rename(tmp_path / "500.ckpt")
    compared(
        PEER, "joeynmt", tmp_path / "500.ckpt", restated(model, activation="gelu", scale=False)
    )


def test_joeynmt_search_options(tmp_path: Path) -> None:
    given = options()
    given["testing"] = {
        "beam_size": 3,
        "min_output_length": 2,
        "generate_unk": False,
        "no_repeat_ngram_size": 2,
        "repetition_penalty": 1.5,
        "max_output_length": 9,
    }
    save(tmp_path, weights((23, 29)), given=given)
    found = from_joeynmt(tmp_path)
    written = found.model.generate(torch.tensor([[7, 8, 9, 3]]))[0, 1:].tolist()
    pairs = [*zip(written, written[1:], strict=False)]
    assert len(pairs) == len(set(pairs))
    assert not {0, 1, 2} & set(written)


PAD, START, END = map(SPECIAL.index, ("<pad>", "<s>", "</s>"))


def joeynmt_search(
    log_probs: Callable[[list[int]], np.ndarray],
    beams: int,
    longest: int,
    alpha: float,
) -> list[tuple[float, list[int]]]:
    """`beam_search` of JoeyNMT 2.3, restated: scores and tokens. `log_probs` are those after these tokens, (V,).

    A hypothesis that has ended goes on with further tokens. The search ends when one has ended in each place.
    """
    running: list[tuple[float, list[int]]] = [(0.0, []), *[(-math.inf, [])] * (beams - 1)]
    finished: list[tuple[float, list[int]]] = []
    has_ended = [False] * beams
    for length in range(1, longest + 1):
        candidates = [
            (total + float(log_p), [*tokens, token])
            for total, tokens in running
            for token, log_p in enumerate(log_probs(tokens))
        ]
        running = sorted(candidates, key=lambda pair: -pair[0])[:beams]
        for place, (total, tokens) in enumerate(running):
            is_end = tokens[-1] == END
            has_ended[place] = has_ended[place] or is_end or total == -math.inf
            is_first = tokens.count(END) == int(is_end)
            if total > -math.inf and is_first and (is_end or length == longest):
                finished.append((total / ((5 + length) / 6) ** max(alpha, 0.0), tokens))
        if all(has_ended):
            break
    return sorted(finished, key=lambda pair: -pair[0])[:beams]


@pytest.mark.parametrize(("beams", "longest"), [(12, 7), (30, 5)])
@pytest.mark.parametrize("alpha", [-1.0, 0.6, 2.0])
def test_joeynmt_gives_the_hypotheses_of_its_search(
    alpha: float, beams: int, longest: int, tmp_path: Path
) -> None:
    model = weights((23, 29))
    # hypotheses of many lengths: a bias of the last normalisation makes the end probable
    bias = model["decoder.layers.0.feed_forward.layer_norm.bias"]
    model["decoder.output_layer.weight"] *= 0.5
    model["decoder.output_layer.weight"][END] += bias / bias.dot(bias)
    given = options()
    given["testing"] = {"beam_size": beams, "beam_alpha": alpha, "max_output_length": longest}
    save(tmp_path / "joey", model, given=given)
    ours, _, _ = converted("joeynmt", tmp_path / "joey", tmp_path / "ours")
    theirs = restated(model)
    of_paper = 0
    for ids in ([7, 8, 9, END], [11, 4, END], [20, 5, 16, 12, 6, END]):

        def log_probs(tokens: list[int], ids: list[int] = ids) -> np.ndarray:
            logits = theirs.logits(ids, [START, *tokens])[-1]
            scores = logits - np.log(np.exp(logits).sum())
            scores[[START, PAD]] = -np.inf
            if not tokens:
                scores[END] = -np.inf  # min_output_length
            return scores

        expected = joeynmt_search(log_probs, beams, longest, alpha)
        generate = partial(
            ours.generate,
            torch.tensor([ids]),
            return_dict_in_generate=True,
            num_return_sequences=len(expected),
        )
        found = generate()
        rows = [[token for token in row[1:].tolist() if token != PAD] for row in found.sequences]
        assert rows == [tokens for _, tokens in expected]
        assert found.sequences_scores.tolist() == pytest.approx(
            [score for score, _ in expected], abs=1e-4
        )
        ours.generation_config.beam_search_rule = None
        of_paper += generate().sequences.tolist() == found.sequences.tolist()
        ours.generation_config.beam_search_rule = "joeynmt"
    assert of_paper < 3, "the test does not tell this search from the paper's"


def ids_of(pieces: list[str], tokens: list[str]) -> list[int]:
    ids = {token: number for number, token in enumerate([*SPECIAL, *tokens])}
    return [ids.get(piece, 0) for piece in pieces] + [3]


def test_joeynmt_tokenizer_splits_at_white_space(tmp_path: Path) -> None:
    tokens = (["a", "dog", "runs"], ["ein", "Hund"])
    given = options()
    given["data"]["src"]["lowercase"] = True
    save(tmp_path / "joey", weights((7, 6)), tokens, given)
    _, tokenizer, target = converted("joeynmt", tmp_path / "joey", tmp_path / "ours")
    assert tokenizer("A Dog sleeps")["input_ids"] == [4, 5, 0, 3]
    assert target("ein Hund")["input_ids"] == [4, 5, 3]
    assert target("Ein Hund")["input_ids"] == [0, 5, 3]
    assert target.decode([2, 4, 5, 3], skip_special_tokens=True) == "ein Hund"


def test_joeynmt_tokenizer_for_sentencepiece(tmp_path: Path, record_property: Record) -> None:
    folder = tmp_path / "joey"
    folder.mkdir()
    pieces = train_sentencepiece(folder / "sp.model", SOURCES + TARGETS)
    tokens = [piece for piece in pieces if piece not in SPECIAL]
    given = options()
    for side in ("src", "trg"):
        given["data"][side] |= {
            "level": "bpe",
            "tokenizer_type": "sentencepiece",
            "tokenizer_cfg": {"model_file": "/home/me/sp.model", "pretokenizer": "none"},
        }
    size = len(tokens) + 4
    save(
        folder,
        weights((size, size), tied=True),
        (tokens, tokens),
        given,
    )
    _, tokenizer, target = converted("joeynmt", folder, tmp_path / "ours")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "sp.model"))
    for text in [*SOURCES, *TARGETS, "Žluťoučký dog"]:
        ids = ids_of(processor.encode(text, out_type=str), tokens)
        assert tokenizer(text)["input_ids"] == ids
    for text in TARGETS:
        ids = target(text_target=text)["input_ids"]
        assert target.decode([2, *ids], skip_special_tokens=True) == text
    # JoeyNMT excludes a piece that its vocabulary lacks, here it would be unknown: text has to be tokenized
    longest = max(tokens, key=len)
    fewer = [token for token in tokens if token != longest]
    save(
        folder,
        weights((size - 1, size - 1), tied=True),
        (fewer, fewer),
        given,
    )
    _, tokenizer, _ = converted("joeynmt", folder, tmp_path / "pieces")
    assert tokenizer(" ".join(fewer[:5]))["input_ids"] == ids_of(fewer[:5], fewer)
    record_property("tokens", installed("sentencepiece"))


@pytest.mark.parametrize(
    ("stack", "change", "message"),
    [
        ("encoder", {"layer_norm": "pre"}, "model.encoder.layer_norm=pre"),
        ("encoder", {"layer_norm": None}, "model.encoder.layer_norm=missing"),
        ("decoder", {"layer_norm": "pre"}, "decoder.layer_norm=pre"),
        ("decoder", {"alpha": 0.8}, "model.decoder.alpha=0.8"),
        ("encoder", {"type": "recurrent"}, "model.encoder.type=recurrent"),
        ("decoder", {"activation": "gelu"}, "activation.*relu and gelu"),
        ("decoder", {"embeddings": {"scale": False}}, "embeddings.scale"),
    ],
)
def test_joeynmt_refuses_other_architectures(stack, change, message, tmp_path, record_property):
    given = options()
    section = given["model"][stack] | change
    given["model"][stack] = {name: value for name, value in section.items() if value is not None}
    save(tmp_path, weights((7, 6)), given=given)
    assert re.search(message, error_of(from_joeynmt, tmp_path))
    record_property("refused", message.removeprefix("model."))


def test_joeynmt_refuses_inconsistent_files(tmp_path: Path) -> None:
    save(
        tmp_path,
        weights((7, 6)),
        (named(3, "a"), named(9, "b")),
    )
    assert re.search("trg_vocab.txt: 13 .* 6", error_of(from_joeynmt, tmp_path))
    for text, message in (
        ("data: {src: af, trg: en, level: bpe}", "model.encoder"),
        ("!!python/object/apply:os.system ['true']", "JoeyNMT"),
    ):
        (tmp_path / "config.yaml").write_text(text)
        assert message in error_of(from_joeynmt, tmp_path)
