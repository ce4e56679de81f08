"""The options in a toolkit's files: what each reader of a value accepts, and the one line about what it refuses."""

import math
from typing import Any

import pytest

from hf_vanilla_transformer.interop.options import Options, Unsupported
from tests.model_helpers import error_of

MOST = 2**63 - 1  # of 64 bits


def of(value: object, where: str = "m: ") -> Options:
    return Options({"x": value}, where)


@pytest.mark.parametrize("values", [None, 7, [("x", 1)], "x"])
def test_options_of_anything_but_a_mapping_are_none(values: object) -> None:
    options = Options(values)
    assert options.values == {}
    assert options.where == ""
    assert "x" not in options
    assert options.section("x").values == {}


@pytest.mark.parametrize(
    ("value", "is_there"),
    [
        (None, False),
        (0, True),
        (False, True),
        ("", True),
    ],
)
def test_option_without_a_value_is_missing(value: object, is_there: bool) -> None:
    assert ("x" in of(value)) is is_there


@pytest.mark.parametrize(
    ("method", "value", "expected"),
    [
        ("integer", 0, 0),
        ("integer", MOST, MOST),
        ("integer", -MOST, -MOST),
        ("number", 0, 0.0),
        ("number", -2.5, -2.5),
        ("number", 1e300, 1e300),
        ("flag", True, True),
        ("flag", False, False),
        ("flag", 1, True),
        ("flag", 0, False),
        ("text", "", ""),
        ("text", "a", "a"),
        ("texts", [], []),
        ("texts", ["a", ""], ["a", ""]),
        ("texts", ("a",), ["a"]),
    ],
)
def test_option_of_the_right_type_is_read(method: str, value: object, expected: object) -> None:
    found = getattr(of(value), method)("x")
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("method", "arguments", "expected"),
    [
        ("integer", (), None),
        ("integer", (3,), 3),
        ("number", (), 0.0),
        ("number", (1.5,), 1.5),
        ("flag", (), False),
        ("flag", (True,), True),
        ("text", (), ""),
        ("text", ("a",), "a"),
        ("texts", (), []),
    ],
)
def test_option_that_is_missing_has_its_default(method: str, arguments: tuple, expected: object) -> None:
    for options in (of(None), Options({})):
        found = getattr(options, method)("x", *arguments)
        assert found == expected
        assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("integer", True, "x=True: a whole number is needed"),
        ("integer", 1.0, "x=1.0: a whole number is needed"),
        ("integer", "1", "x=1: a whole number is needed"),
        ("integer", MOST + 1, f"x={MOST + 1}: more than 63 bits"),
        ("integer", -MOST - 1, f"x={-MOST - 1}: more than 63 bits"),
        ("number", False, "x=False: a number is needed"),
        ("number", "1", "x=1: a number is needed"),
        ("number", math.inf, "x=inf: a number is needed"),
        ("number", -math.inf, "x=-inf: a number is needed"),
        ("number", math.nan, "x=nan: a number is needed"),
        ("number", MOST + 1, f"x={MOST + 1}: more than 63 bits"),
        ("flag", "true", "x=true: true or false is needed"),
        ("flag", 1.0, "x=1.0: true or false is needed"),
        ("text", 1, "x=1: text is needed"),
        ("text", ["a"], "x=[a]: text is needed"),
        ("texts", "a", "x=a: a list is needed"),
        ("texts", {"a": 1}, ": a list is needed"),
        ("texts", ["a", 1], "x=[a, 1]: a list of texts is needed"),
        ("section", 1, "x=1: options are needed, not one value"),
        ("section", False, "x=False: options are needed, not one value"),
        ("section", [], "x=[]: options are needed, not one value"),
    ],
)
def test_option_of_another_type_is_refused_by_its_name(method: str, value: object, message: str) -> None:
    error = error_of(getattr(of(value), method), "x")
    assert error.startswith("m: x=")
    assert error.endswith(message)


@pytest.mark.parametrize(
    ("method", "value", "least", "refused"),
    [
        ("integer", 1, 1, None),
        ("integer", 0, 1, "1 is the least"),
        ("integer", 0, 0, None),
        ("integer", -1, 0, "0 is the least"),
        ("number", 0.0, 0.0, None),
        ("number", -0.1, 0.0, "a number is needed, at least 0.0"),
        ("number", math.inf, 2.0, "a number is needed, at least 2.0"),
    ],
)
def test_option_has_a_least_value(method: str, value: float, least: float, refused: str | None) -> None:
    read = getattr(of(value), method)
    if refused is None:
        assert read("x", None, least) == value
    else:
        assert error_of(read, "x", None, least) == f"m: x={value}: {refused}"


def test_section_of_options_is_named_after_its_parent() -> None:
    options = Options({"a": {"b": {"c": 7}}}, "f: ")
    inner = options.section("a").section("b")
    assert inner.integer("c") == 7
    assert error_of(inner.text, "c") == "f: a.b.c=7: text is needed"
    assert error_of(options.section("none").integer, "c", -1, 0) == "f: none.c=None: 0 is the least"


@pytest.mark.parametrize(
    ("where", "spelt"),
    [
        ("m: --", "m: --a-b"),
        ("m: -", "m: -a_b"),
        ("m: ", "m: a_b"),
        ("", "a_b"),
    ],
)
def test_option_of_a_command_line_is_spelt_with_hyphens(where: str, spelt: str) -> None:
    assert str(Options({"a_b": 1}, where).error("a_b", "why")) == f"{spelt}=1: why"
    (note,) = Options({"a_b": 1, "c": 2}, where).dropped({"a_b": 0, "c": 3})
    flag = spelt.rpartition(" ")[2]
    assert note == f"`generate` has no {flag}, {flag.replace('a-b', 'c').replace('a_b', 'c')}, so it is dropped"


UNSUPPORTED: Unsupported = {
    "kind": (("a", "b"), "is of another kind"),
    "depth": ((0,), "is deeper"),
}


@pytest.mark.parametrize(
    ("values", "refused"),
    [
        ({}, None),
        ({"kind": "a"}, None),
        ({"kind": "b", "depth": 0}, None),
        ({"kind": None, "depth": ""}, None),
        ({"other": "c"}, None),
        ({"kind": "c"}, "m: kind=c: such a model is of another kind"),
        ({"kind": "b", "depth": 1}, "m: depth=1: such a model is deeper"),
    ],
)
def test_option_of_another_architecture_is_refused(values: dict[str, Any], refused: str | None) -> None:
    options = Options(values, "m: ")
    if refused is None:
        options.refuse(UNSUPPORTED)
    else:
        assert error_of(options.refuse, UNSUPPORTED) == refused


@pytest.mark.parametrize("value", [None, ""])
def test_value_that_is_not_neutral_is_refused(value: object) -> None:
    assert f"m: depth={value or ''}" in error_of(Options({"depth": value}, "m: ").refuse, UNSUPPORTED, ())


def test_options_that_do_nothing_are_not_dropped() -> None:
    neutral = {"a": 0, "b": False, "c": []}
    for values in ({}, {"a": 0, "b": False, "c": []}, {"a": None}, {"other": 5}):
        assert Options(values).dropped(neutral) == []
    assert Options({"a": 0, "b": True}).dropped(neutral) == ["`generate` has no b, so it is dropped"]
