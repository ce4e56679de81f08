"""The fingerprint of a run: values, digests and messages of what a resumed run changes."""

import json
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace as Fake
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_vanilla_transformer.training.state.fingerprint import (
    DATA_REMEDY,
    PACKING,
    REMEDY,
    RunState,
    adapter_facts,
    class_name,
    code_digest,
    compare,
    content_of,
    plain_values,
    print_changes,
    read_run_state,
    require_same,
    source_digest,
)
from tests.model_helpers import error_of

CHECKPOINT = Path("checkpoint-2")


class Colour(Enum):
    RED = "red"


@dataclass
class Pair:
    first: int
    second: Any


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Colour.RED, "red"),
        (float("inf"), "inf"),
        (0.5, 0.5),
        (True, True),
        (None, None),
        ({1: Colour.RED}, {"1": "red"}),
        ({3, 20, 1}, ["1", "20", "3"]),
        (frozenset({"a"}), ["a"]),
        ((1, [Colour.RED]), [1, ["red"]]),
        (Pair(1, Colour.RED), {"first": 1, "second": "red"}),
        (Pair, "type"),
        (Fake(to_dict=lambda: {"a": {2}}), {"a": ["2"]}),
        (object(), "object"),
    ],
)
def test_value_is_kept_as_json(value: Any, plain: Any) -> None:
    assert plain_values(Fake(name=value), ("name", "absent")) == {"name": plain, "absent": None}


def state(**groups: Any) -> RunState:
    return RunState(**{"fixed": {}, "data": {}, "position": {}} | groups)


@pytest.mark.parametrize(
    ("saved", "now", "new_epoch", "message"),
    [
        (
            {"fixed": {"learning_rate": 1}},
            {"fixed": {"learning_rate": 2}},
            True,
            "model_name_or_path=",
        ),
        ({"fixed": {"precision": "a"}}, {"fixed": {"precision": "b"}}, True, "model_name_or_path="),
        ({"fixed": {"d_model": 1}}, {"fixed": {"d_model": 2}}, True, REMEDY),
        ({"fixed": {"old": 1}}, {}, True, "version of the code that trained it, or start a run"),
        ({"data": {"seed": 1}}, {"data": {"seed": 2}}, False, DATA_REMEDY),
        ({"data": {"old": 1}}, {}, False, "version of the code that trained it, or restart"),
        ({}, {"data": {PACKING: 2}}, False, f"{PACKING}: 2, but checkpoint-2 was trained with 1"),
        ({"data": {PACKING: 3}}, {"data": {PACKING: 2}}, False, "was trained with 3"),
    ],
)
def test_change_of_the_run_is_refused(
    saved: dict[str, Any], now: dict[str, Any], new_epoch: bool, message: str
) -> None:
    given = CHECKPOINT, state(**saved), state(**now)
    assert message in error_of(compare, *given, new_epoch=new_epoch)


@pytest.mark.parametrize(
    ("saved", "now", "new_epoch", "lines"),
    [
        ({"data": {"seed": 1}}, {"data": {"seed": 1}}, False, []),
        (
            {"data": {"seed": 1}},
            {"data": {"seed": 2}},
            True,
            ["resuming at the start of the epoch"],
        ),
        ({"data": {PACKING: 3}}, {"data": {PACKING[:1] + PACKING[1:]: None}}, False, []),
        ({"data": {"old": 0}, "fixed": {"old": None, "bf16": True}}, {}, False, []),
        (
            {"data": {"a": 1}, "objective": {"b": 2}, "settings": {"c": 3, "d": False}},
            {},
            True,
            ["resuming at the start of the epoch", "resuming without b=2, c=3, a=1: this run"],
        ),
        (
            {"objective": {"ema_decay": 0.5}, "settings": {"x": 1, "y": 2}},
            {"objective": {"ema_decay": 0.9}, "settings": {"x": 1, "y": 3, "new": 4}},
            False,
            [
                "resuming with another objective: ema_decay was 0.5, is now 0.9",
                "resuming with another setting: y was 2, is now 3",
            ],
        ),
    ],
)
def test_change_that_a_run_may_make_is_printed(
    saved: dict[str, Any],
    now: dict[str, Any],
    new_epoch: bool,
    lines: list[str],
    capsys: pytest.CaptureFixture,
) -> None:
    compare(CHECKPOINT, state(**saved), state(**now), new_epoch=new_epoch)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(lines)
    for line, start in zip(printed, lines, strict=True):
        assert line.startswith(start)


def content(name: str, digest: str | None) -> dict[str, str | None]:
    """As read from a file, without the strings that Python has already."""
    return json.loads(json.dumps({"name": name, "digest": digest}))


@pytest.mark.parametrize(
    ("saved", "now", "line"),
    [
        (content("aa", "11"), content("bb", "11"), None),
        (content("aa", "11"), content("aa", "22"), "aa with digest 11, is now aa with digest 22"),
        (content("aa", "11"), content("bb", "22"), "aa, is now bb"),
        (content("aa", None), content("aa", "22"), None),
        (content("aa", "11"), content("aa", None), None),
        (content("aa", None), content("bb", None), "aa, is now bb"),
        (content("aa", "11"), None, "aa, is now None"),
        ([], content("aa", "11"), "[], is now aa"),
    ],
)
def test_contents_are_compared_by_their_digests(
    saved: Any, now: Any, line: str | None, capsys: pytest.CaptureFixture
) -> None:
    print_changes("setting", {"base": saved}, {"base": now, "new": 1})
    start = "resuming with another setting: base was "
    assert capsys.readouterr().out == ("" if line is None else f"{start}{line}\n")


def test_digest_of_a_folder_is_that_of_its_weights_settings_and_code(tmp_path: Path) -> None:
    def digest() -> Any:
        return content_of(tmp_path)["digest"]

    (tmp_path / "target_tokenizer").mkdir()
    (tmp_path / "folder.bin").mkdir()
    before = digest()
    for name in ("README.md", "notes.json", "target_tokenizer/notes"):
        (tmp_path / name).write_text("a")
    assert digest() == before
    seen = {before}
    for name in ("model.safetensors", "a.py", "config.json", "target_tokenizer/vocab.json"):
        for text in ("a", "b"):
            (tmp_path / name).write_text(text)
            seen.add(digest())
    assert len(seen) == 9
    absent = tmp_path / "absent"
    assert content_of(tmp_path, absent) == content(f"{tmp_path} {absent}", None)


def test_class_has_the_name_of_its_own_module() -> None:
    class Own(nn.Linear):
        pass

    class Sharded(FSDPModule, Own):
        pass

    name = f"{__name__}:{Own.__qualname__}"
    assert class_name(Own(1, 1)) == class_name(object.__new__(Sharded)) == name
    Own.__module__ = "transformers_modules.cache.model"
    assert class_name(Own(1, 1)).startswith("model:")


def test_code_of_libraries_has_no_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = source_digest([__name__])
    assert own is not None
    assert code_digest(error_of) not in (own, None)
    assert code_digest(Pair(1, 2)) == own
    assert code_digest(nn.Linear(1, 1)) is None
    file = tmp_path / "part.so"
    file.write_text("a")
    for module in (Fake(__file__=str(file)), Fake(__file__=None), Fake(), Fake(__file__="gone.py")):
        monkeypatch.setitem(sys.modules, "part", module)
        assert source_digest(["part"]) is None


def test_facts_of_an_adapter_are_those_of_its_function() -> None:
    config = Fake(to_dict=lambda: {"r": 2, "revision": "main", "targets": {"b", "a"}})
    facts = adapter_facts(Fake(peft_config={"default": config}))
    assert facts == {"r of adapter default": 2, "targets of adapter default": ["a", "b"]}
    assert adapter_facts(nn.Linear(1, 1)) == {}


def test_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    for name in ("b.json", "a.safetensors", "c.txt"):
        (tmp_path / name).touch()
    written = state(fixed={"precision": "bf16"}, settings={"ä": 1})
    written.write(tmp_path)
    read = read_run_state(tmp_path)
    assert read.files == ["a.safetensors", "b.json"]
    assert (read.fixed, read.settings) == (written.fixed, written.settings)
    file = tmp_path / "run_state.json"
    for damaged in ('{"fixed": {}', "{}", None):
        file.unlink()
        if damaged is not None:
            file.write_text(damaged)
        assert error_of(read_run_state, tmp_path).endswith(
            f": delete {tmp_path.name} to resume from the checkpoint before it"
        )


def test_facts_of_one_run_alone_are_not_compared() -> None:
    require_same(CHECKPOINT, {"a": 1, "b": 2}, {"b": 2, "c": 3}, "remedy")
