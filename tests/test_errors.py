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
FILES = "ENOENT EACCES EPERM EISDIR ENOTDIR EEXIST ENAMETOOLONG ELOOP ENXIO EROFS ENOSPC EDQUOT EFBIG"
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


def test_command_ends_with_its_own_status(monkeypatch, capsys):
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("RANK", "1")  # the first rank tells it
    for result, command in ((0, lambda: None), (3, lambda: 3), (130, interrupt)):
        with pytest.raises(SystemExit) as ended:
            errors.run_command(command)
        assert ended.value.code == result and not capsys.readouterr().err


@pytest.mark.parametrize("library", EXTRAS)
def test_library_that_is_missing_is_named_with_its_extra(library, monkeypatch):
    monkeypatch.setattr(errors, "_is_installed", lambda name: name != library)
    line = f'{library} is not installed: .* run pip install ".[{EXTRAS[library]}]"'.replace("[", r"\[")
    name = library.replace("_", "-")
    for error in (ModuleNotFoundError(f"no module named {library!r}", name=library), ValueError(f"requires {name}")):
        assert pytest.raises(UserError, _raise, errors.missing_extra(error)).match(line)
        with pytest.raises(UserError, match=line), errors.naming_extras():
            raise ImportError(str(error))
    others = [ImportError(f"no module {library}x"), ValueError(f"{library} is damaged")]
    for other in others:
        assert errors.missing_extra(other) is None
    with pytest.raises(ImportError), errors.naming_extras():
        raise others[0]
    monkeypatch.setattr(errors, "_is_installed", lambda name: True)
    assert errors.missing_extra(error) is None


def _raise(error: Any) -> None:
    raise error


def test_library_is_looked_for_by_the_name_that_is_imported(monkeypatch):
    assert errors._is_installed("torch") and not errors._is_installed("no_such.module")
    monkeypatch.setattr(errors, "find_spec", {"google.protobuf": 1, "peft": None}.__getitem__)
    assert errors._is_installed("protobuf") and not errors._is_installed("peft")


def test_value_is_shown_in_one_short_line():
    plain = [None, True, 1.5, -3, 2**320 - 1, "a" * 80]
    rows = {"a\nb": r"a\nb", "a" * 81: "a" * 80 + " …", 2**320: "a number of 321 bits", ("x", 1): "[x, 1]"}
    for value, text in [*((value, str(value)) for value in plain), *rows.items()]:
        assert errors.shown(value) == text
    for value, text in [([], "[]"), ([1] * 9, str([1] * 9)), ([1] * 10, "a list"), ([[1]], "a list"), ({}, "a dict")]:
        assert errors.shown(value) == text
    assert errors.shown(["a" * 90] * 3) == f"[{', '.join(['a' * 80 + ' …'] * 3)}"[:160]
    assert untrusted.one_line(" c\n d") == "c d" and untrusted.one_line(KeyError()) == "KeyError"
    assert untrusted.one_line("c" * 300) == "c" * 300
    assert untrusted.one_line("c" * 301) == "c" * 300 + " …"


LIMITS = [
    (("[" * 48 + "]" * 48, "[" * 49 + "]" * 49), "it is nested more than 50 levels deep"),
    (("&x 1" + ", *x" * 100, "&x 1" + ", *x" * 101), "its aliases repeat other aliases, or are too many"),
    (("[&x [1], &y [2, 3], *x]", "[&x [1], &y [2, [*x]]]"), "its aliases repeat other aliases, or are too many"),
    (("1" * 2000, "1" * 2001), "a scalar of 2001 characters has no quotes"),
    (("'" + "1" * (2**20 - 10) + "'", "'" + "1" * (2**20 - 9) + "'"), "1048577 bytes are too many"),
]


@pytest.mark.parametrize(("values", "reason"), LIMITS)
def test_yaml_of_options_has_limits(values, reason):
    right, wrong = (f"a: [0, {value}]".encode() for value in values)
    assert untrusted.parse_yaml_mapping(right, "x")["a"][0] == 0
    assert error_of(untrusted.parse_yaml_mapping, wrong, "x") == f"x ({reason})"
    if "scalar" in reason or "bytes" in reason:  # words of a vocabulary
        assert untrusted.parse_yaml_mapping(wrong, "x", as_text=True)["a"][0] == "0"


def test_most_similar_name_is_proposed():
    assert errors.did_you_mean("tranform", ["tram", "transform"]) == "did you mean transform?"
    assert errors.did_you_mean("abcde", iter(["abcxy"])) == "did you mean abcxy?"  # 6 of 10 letters
    assert errors.did_you_mean("abcde", ["abxyz"]) is None
    assert errors.did_you_mean("abcde", ["abcxy"], cutoff=0.61) is None


INF, NAN = float("inf"), float("nan")


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
    def check(value: Any) -> None:
        names = {"a": 2000} if kind == "at_most" else ["a"]
        check_ranges(SimpleNamespace(a=value), **{kind: names})

    for value in [None, *right, *([] if kind == "at_most" else ["text"])]:
        check(value)
    for value in wrong:
        assert error_of(check, value) == f"a: {needed}, not {value:,}"
    check_ranges(object(), at_least_1=["a"])


def test_whole_numbers_from_1_are_accepted():
    errors.check_at_least_one(a=None, b=1, c=np.int64(7))
    for value in (0, -1, np.int64(0)):
        assert error_of(errors.check_at_least_one, b=1, a=value) == f"a: must be at least 1, not {value}"
    for value in (1.5, "2"):
        assert error_of(errors.check_at_least_one, a=value) == f"a: must be a whole number, not {value!r}"
