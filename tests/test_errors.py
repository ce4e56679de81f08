"""Errors of users: the exit status, the line, and what of them a value or a missing library shows."""

import errno
import signal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hf_vanilla_transformer.utils import errors, untrusted
from hf_vanilla_transformer.utils.errors import EXTRAS, Interrupted, UserError
from hf_vanilla_transformer.utils.number_ranges import check_ranges
from tests.model_helpers import error_of

PANIC = type("PanicException", (BaseException,), {})("a\n b")
# Error -> the exit status, and a part of the line. None: it is a bug, and raised.
ENDS: list[tuple[BaseException, int | None, str]] = [
    (UserError("a: 3"), 2, "a: 3"),
    (Interrupted("saved"), 130, "saved"),
    (Interrupted("saved", signal.SIGTERM), 143, "saved"),
    (KeyboardInterrupt(), 130, "interrupted"),
    (ImportError("No module named 'peft'", name="peft"), 2, 'pip install ".[lora]"'),
    (ImportError("cannot import x"), None, ""),
    (OSError(errno.EINVAL, "Invalid", "a:b"), 2, "Invalid: 'a:b'"),
    (OSError(errno.EINVAL, "Invalid"), None, ""),
    (OSError(errno.EIO, "Broken", "disk"), None, ""),
    (OSError("no number"), None, ""),
    (RuntimeError("Symlink loop from x"), 2, "Symlink loop from x"),
    (RuntimeError("x"), None, ""),
    (PANIC, 2, "a library gave up on this text: a b"),
]
FILES = (
    "ENOENT EACCES EPERM EISDIR ENOTDIR EEXIST ENAMETOOLONG ELOOP ENXIO EROFS ENOSPC EDQUOT EFBIG"
)
ENDS += [(OSError(getattr(errno, name), "why", "file"), 2, "why: 'file'") for name in FILES.split()]


@pytest.mark.parametrize(("error", "status", "line"), ENDS, ids=repr)
def test_command_ends_with_a_line_and_a_status(error, status, line, monkeypatch, capsys):
    def command() -> None:
        raise error

    monkeypatch.setattr(errors, "_is_installed", lambda name: name != "peft")
    with pytest.raises(type(error) if status is None else SystemExit) as ended:
        errors.run_command(command)
    if status is not None:
        assert ended.value.code == status
        assert capsys.readouterr().err.rstrip("\n").endswith(line)


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (lambda: None, 0),
        (lambda: 3, 3),
        (interrupt, 130),
    ],
)
def test_command_ends_with_its_own_status(command, status, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")  # the first rank tells it
    with pytest.raises(SystemExit) as ended:
        errors.run_command(command)
    assert ended.value.code == status
    assert not capsys.readouterr().err


@pytest.mark.parametrize("library", EXTRAS)
def test_library_that_is_missing_is_named_with_its_extra(library, monkeypatch):
    monkeypatch.setattr(errors, "_is_installed", lambda name: name != library)
    no_module = ModuleNotFoundError(f"no module named {library!r}", name=library)
    required = ValueError(f"requires {library.replace('_', '-')}")
    for error in (no_module, required):
        line = str(errors.missing_extra(error))
        assert line.startswith(f"{library} is not installed: ")
        assert line.endswith(f'run pip install ".[{EXTRAS[library]}]"')
        with (
            pytest.raises(UserError, match=f"^{library} is not installed: "),
            errors.naming_extras(),
        ):
            raise ImportError(str(error))
    other = ImportError(f"no module {library}x")
    assert errors.missing_extra(other) is None
    assert errors.missing_extra(ValueError(f"{library} is damaged")) is None
    with pytest.raises(ImportError), errors.naming_extras():
        raise other
    monkeypatch.setattr(errors, "_is_installed", lambda name: True)
    assert errors.missing_extra(required) is None


def test_library_is_looked_for_by_the_name_that_is_imported(monkeypatch):
    assert errors._is_installed("torch")
    assert not errors._is_installed("no_such.module")
    specs = {"google.protobuf": 1, "peft": None}
    monkeypatch.setattr(errors, "find_spec", specs.__getitem__)
    assert errors._is_installed("protobuf")
    assert not errors._is_installed("peft")


CUT = "a" * 80 + " …"
SHOWN: list[tuple[Any, str]] = [
    (None, "None"),
    (True, "True"),
    (1.5, "1.5"),
    (-3, "-3"),
    (2**320 - 1, str(2**320 - 1)),
    ("a" * 80, "a" * 80),
    ([], "[]"),
    ([1] * 9, str([1] * 9)),
    ("a\nb", r"a\nb"),
    ("a" * 81, CUT),
    (2**320, "a number of 321 bits"),
    (("x", 1), "[x, 1]"),
    ([1] * 10, "a list"),
    ([[1]], "a list"),
    ({}, "a dict"),
    (["a" * 90] * 3, f"[{CUT}, {CUT}, {CUT}"[:160]),
]


@pytest.mark.parametrize(("value", "text"), SHOWN)
def test_value_is_shown_in_one_short_line(value, text):
    assert errors.shown(value) == text


def test_text_of_others_becomes_one_line():
    assert untrusted.one_line(" c\n d") == "c d"
    assert untrusted.one_line(KeyError()) == "KeyError"
    assert untrusted.one_line("c" * 300) == "c" * 300
    assert untrusted.one_line("c" * 301) == "c" * 300 + " …"


DEEP = "it is nested more than 50 levels deep"
ALIASES = "its aliases repeat other aliases, or are too many"
LIMITS = [
    ("[" * 48 + "]" * 48, "[" * 49 + "]" * 49, DEEP),
    ("&x 1" + ", *x" * 100, "&x 1" + ", *x" * 101, ALIASES),
    ("[&x [1], &y [2, 3], *x]", "[&x [1], &y [2, [*x]]]", ALIASES),
    ("1" * 2000, "1" * 2001, "a scalar of 2001 characters has no quotes"),
    (f"'{'1' * (2**20 - 10)}'", f"'{'1' * (2**20 - 9)}'", "1048577 bytes are too many"),
]


@pytest.mark.parametrize(("most", "too_much", "reason"), LIMITS, ids=range(len(LIMITS)))
def test_yaml_of_options_has_limits(most, too_much, reason):
    right, wrong = (f"a: [0, {value}]".encode() for value in (most, too_much))
    assert untrusted.parse_yaml_mapping(right, "x")["a"][0] == 0
    assert error_of(untrusted.parse_yaml_mapping, wrong, "x") == f"x ({reason})"
    if "scalar" in reason or "bytes" in reason:  # words of a vocabulary
        assert untrusted.parse_yaml_mapping(wrong, "x", as_text=True)["a"][0] == "0"


def test_most_similar_name_is_proposed():
    assert errors.did_you_mean("tranform", ["tram", "transform"]) == "did you mean transform?"
    assert errors.did_you_mean("abcde", iter(["abcxy"])) == "did you mean abcxy?"  # 6 of 10 letters
    assert errors.did_you_mean("abcde", ["abxyz"]) is None
    assert errors.did_you_mean("abcde", ["abcxy"], cutoff=0.61) is None


INF = float("inf")
NAN = float("nan")


@pytest.mark.parametrize(
    ("kind", "right", "wrong", "needed"),
    [
        ("at_least_1", [1, 2.5], [0, 0.9, -1, INF], "must be at least 1"),
        ("at_least_0", [0, 1], [-1, -0.1, NAN], "must be at least 0"),
        ("above_0", [0.1, 2], [0, -1], "must be above 0"),
        ("shares", [0, 0.99], [1, -0.1], "must be at least 0 and below 1"),
        ("finite", [-5, 0, 5.5], [INF, -INF, NAN], "must be a finite number"),
        ("at_most", [2000, 0, -1], [2001], "must be at most 2,000"),
    ],
)
def test_number_out_of_its_range_is_named(kind, right, wrong, needed):
    names: Any = ["a"]
    ignored = [None, "text"]
    if kind == "at_most":
        names = {"a": 2000}
        ignored = [None]

    def check(value: Any) -> None:
        check_ranges(SimpleNamespace(a=value), **{kind: names})

    for value in ignored + right:
        check(value)
    for value in wrong:
        assert error_of(check, value) == f"a: {needed}, not {value:,}"
    check_ranges(object(), at_least_1=["a"])


def test_whole_numbers_from_1_are_accepted():
    errors.check_at_least_one(a=None, b=1, c=np.int64(7))
    for value in (0, -1, np.int64(0)):
        line = error_of(errors.check_at_least_one, b=1, a=value)
        assert line == f"a: must be at least 1, not {value}"
    for value in (1.5, "2"):
        line = error_of(errors.check_at_least_one, a=value)
        assert line == f"a: must be a whole number, not {value!r}"
