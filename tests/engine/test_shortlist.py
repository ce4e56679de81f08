"""Vocabulary selection, against searches whose output bias forbids the other tokens."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_vanilla_transformer.engine import shortlist
from hf_vanilla_transformer.engine.linear import int8_error
from hf_vanilla_transformer.engine.shortlist import Shortlist
from hf_vanilla_transformer.inference import Translator, optimize_for_inference, shortlist_files
from hf_vanilla_transformer.inference.shortlist_files import write_shortlist
from hf_vanilla_transformer.serving.engine import Engine
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import error_of, slow
from tests.serving_helpers import echo_translator

SENTENCES = [
    "two hundred and one",
    "seven",
    "one million three hundred",
    "a house",
    "the big red house",
    "one two",
] * 2
SPECIAL = ("<s>", "</s>", "<unk>")
PAIRS = [("two hundred", "hundred two"), ("seven", "seven"), ("two seven", "red two")]


def translator(path: Path | None = None, kind: str = "float32") -> Translator:
    echo = echo_translator()
    model = echo.model.eval()
    if kind == "modules":
        model.set_attn_implementation("eager")
    elif kind == "int8":
        if reason := int8_error(torch.device("cpu"), torch.float32):
            pytest.skip(reason)
        optimize_for_inference(model, "int8")
    return Translator(model, echo.source_tokenizer, shortlist=path)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each source token has some random candidates, the last ones have none."""
    tokenizer = translator().source_tokenizer
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    generator = torch.Generator().manual_seed(0)
    lines = ["\t" + " ".join(names[10:14])]
    for name in names[5:-10]:
        ids = torch.randint(5, len(names), (20,), generator=generator).tolist()
        lines.append(f"{name}\t{' '.join(names[i] for i in ids)}")
    path = tmp_path_factory.mktemp("shortlist") / "lex.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def table_of(path: Path) -> dict[str, list[str]]:
    """Source token -> its candidates."""
    rows = (line.split("\t") for line in path.read_text(encoding="utf-8").splitlines())
    return {token: names.split(" ") for token, names in rows}


def expected(
    path: Path,
    kind: str,
    settings: dict[str, Any],
) -> list[str]:
    """Each sentence alone, by a model whose output bias forbids all but its candidates."""
    whole = translator(kind=kind)
    tokenizer = whole.source_tokenizer
    table = table_of(path)
    texts = []
    for sentence in SENTENCES:
        allowed = [*SPECIAL]
        for token in ("", *tokenizer.tokenize(sentence)):
            allowed += table.get(token, [])
        keep = tokenizer.convert_tokens_to_ids(allowed)
        one = copy.deepcopy(whole)
        with torch.no_grad():
            bias = torch.full_like(one.model.lm_head.bias, -1e9)
            bias[keep] = one.model.lm_head.bias[keep]
            one.model.lm_head.bias.copy_(bias)
        if kind == "int8":
            optimize_for_inference(one.model, "int8")
        texts += one.translate([sentence], **settings)
    return texts


@pytest.mark.covering(1)
@pytest.mark.parametrize("least", [0, *slow(shortlist._LEAST_SELECTED)], ids=["selected", "whole"])
@pytest.mark.parametrize("kind", ["float32", "int8", "modules"])
@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 1},
        {"num_beams": 4},
        {"num_beams": 2, "suppress_tokens": [12]},
        {"forced_eos_token_id": 2},
    ],
)
def test_only_candidates_of_each_sentence_are_searched(
    path: Path,
    kind: str,
    settings: dict[str, Any],
    least: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shortlist, "_LEAST_SELECTED", least)
    right = expected(path, kind, settings)
    assert len(set(right)) > 1
    assert right != list(translator(kind=kind).translate(SENTENCES, **settings))
    short = translator(path, kind)
    for size in (1, 5, 64):  # with refilled rows
        assert list(short.translate(SENTENCES, batch_size=size, **settings)) == right
    engine = Engine(short, **settings)
    futures = engine.submit([short.encode(sentence, 1) for sentence in SENTENCES])
    tokens = [future.result()[0].tokens for future in futures]
    engine.close()
    assert short.target_tokenizer.batch_decode(tokens, skip_special_tokens=True) == right


@pytest.mark.parametrize("tokens", [3, 4])
def test_padding_has_no_candidates_of_its_own(tokens: int) -> None:
    table = torch.tensor([[3 + token] for token in range(tokens)] + [[0]])
    candidates = Shortlist(always=torch.tensor([0]), table=table, size=9)
    ids = torch.tensor([[0, 1], [2, 1]])
    mask = torch.tensor([[1, 1], [1, 0]])
    first, second = (row.nonzero().flatten().tolist() for row in candidates.allowed(ids, mask))
    assert first == [0, 3, 4]
    assert second == [0, 5]


def test_prefix_may_have_any_tokens(path: Path) -> None:
    prefix = "the big red house"
    for text in translator(path).translate(SENTENCES, prefixes=[prefix] * len(SENTENCES)):
        assert text.startswith(prefix)


def test_shortlist_without_a_token_is_refused(tmp_path: Path) -> None:
    for pairs in ([], [("", "")]):
        assert error_of(write_shortlist, translator(), pairs, tmp_path / "s").startswith(
            "shortlist: no token"
        )
    assert not (tmp_path / "s").exists()


def test_aligned_tokens_become_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = translator()
    path = tmp_path / "lex.txt"
    links = [[(0, 1), (1, 0)], [(0, 0)], [(1, 0)]]
    monkeypatch.setattr(shortlist_files, "align", lambda *_, **__: links)
    monkeypatch.setattr(shortlist_files, "FREQUENT", 2)
    count = write_shortlist(whole, PAIRS, path)
    table = table_of(path)
    assert len(table) == count + 1
    assert len(table[""]) <= 2
    tokenize = whole.source_tokenizer.tokenize
    for word, targets in (("two", "two"), ("hundred", "hundred"), ("seven", "seven red")):
        for name in tokenize(word):
            assert {*table[name]} == {
                piece for target in targets.split() for piece in tokenize(target)
            }
    monkeypatch.undo()
    write_shortlist(whole, PAIRS, path)
    assert list(translator(path).translate(["two seven"]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("one\n", "line 1: 'one'"),
        ("\tĠseven nothing\n", "line 1: 'nothing'"),
        ("nothing\tĠ\n", "'nothing'"),
    ],
)
def test_files_of_another_model_are_refused(
    text: str,
    message: str,
    tmp_path: Path,
) -> None:
    (tmp_path / "lex.txt").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        translator(tmp_path / "lex.txt")


def test_ensembles_and_searches_of_transformers_are_refused(path: Path) -> None:
    one = translator(path)
    wrong: list[dict[str, Any]] = [{"do_sample": True}, {"num_beam_groups": 2, "num_beams": 2}]
    for settings in wrong:
        with pytest.raises(UserError, match="shortlist"):
            list(one.translate(SENTENCES, **settings))
    assert "shortlist" in error_of(
        Translator,
        one.model,
        one.source_tokenizer,
        ensemble=[one.model],
        shortlist=path,
    )
