"""Options of a toolkit's files: each kind of value at its bound, and the messages about others."""

import math

import pytest

from hf_vanilla_transformer.interop.options import Options
from tests.model_helpers import error_of


@pytest.mark.parametrize(
    ("read", "value", "found"),
    [
        ("integer", 7, 7),
        ("integer", 2**63 - 1, 2**63 - 1),
        ("integer", -(2**63) + 1, -(2**63) + 1),
        ("integer", None, None),
        ("number", 7, 7.0),
        ("number", -0.5, -0.5),
        ("number", None, 0.0),
        ("flag", True, True),
        ("flag", 0, False),
        ("flag", 1, True),
        ("flag", None, False),
        ("text", "a", "a"),
        ("text", None, ""),
        ("texts", ("a", "b"), ["a", "b"]),
        ("texts", [], []),
        ("texts", None, []),
    ],
)
def test_option_has_its_value_or_the_default(read, value, found):
    value = getattr(Options({"x": value}), read)("x")
    assert value == found
    assert type(value) is type(found)


@pytest.mark.parametrize(
    ("read", "default"),
    [("integer", 3), ("number", 0.5), ("flag", True), ("text", "b")],
)
def test_missing_option_has_the_default_that_is_asked_for(read, default):
    for values in ({}, {"x": None}, None, 7):
        assert getattr(Options(values), read)("x", default) == default


@pytest.mark.parametrize(
    ("read", "value", "reason"),
    [
        ("integer", 1.5, "a whole number is needed"),
        ("integer", True, "a whole number is needed"),
        ("integer", "1", "a whole number is needed"),
        ("integer", 2**63, "more than 63 bits"),
        ("number", 2**63, "more than 63 bits"),
        ("number", True, "a number is needed"),
        ("number", math.nan, "a number is needed"),
        ("number", -math.inf, "a number is needed"),
        ("flag", "yes", "true or false is needed"),
        ("flag", 1.0, "true or false is needed"),
        ("text", 1, "text is needed"),
        ("texts", "ab", "a list is needed"),
        ("texts", ["a", 1], "a list of texts is needed"),
    ],
)
def test_value_of_another_kind_is_refused(read, value, reason):
    message = error_of(getattr(Options({"x": value}, "file: "), read), "x")
    assert message.startswith("file: x=")
    assert message.endswith(f": {reason}")


@pytest.mark.parametrize(
    ("read", "least", "reason"),
    [("integer", 2, "2 is the least"), ("number", 2.5, "a number is needed, at least 2.5")],
)
def test_value_below_the_least_is_refused(read, least, reason):
    def value_of(value):
        return getattr(Options({"x": value}), read)("x", 0, least)

    assert value_of(least) == least
    assert value_of(least + 1) == least + 1
    assert error_of(value_of, least - 1) == f"x={least - 1}: {reason}"


def test_option_is_there_unless_it_is_none():
    options = Options({"a": 0, "b": None})
    assert "a" in options
    assert "b" not in options
    assert "c" not in options


def test_section_has_its_name_in_messages():
    options = Options({"model": {"size": "x"}, "none": None, "one": 7}, "file: ")
    assert (
        error_of(options.section("model").integer, "size")
        == "file: model.size=x: a whole number is needed"
    )
    assert options.section("none").values == options.section("missing").values == {}
    assert "options are needed" in error_of(options.section, "one")


UNSUPPORTED = {
    "act_fn": (("relu", "gelu"), "has another activation"),
    "gated": ((False,), "has gates"),
}


@pytest.mark.parametrize(
    "values",
    [{}, {"act_fn": "gelu"}, {"act_fn": None, "gated": ""}, {"gated": False}, {"other": 7}],
)
def test_supported_and_neutral_options_are_not_refused(values):
    Options(values).refuse(UNSUPPORTED)


def test_option_of_another_architecture_is_refused_as_it_is_spelt():
    assert error_of(Options({"act_fn": "silu"}, "a.pt: --").refuse, UNSUPPORTED) == (
        "a.pt: --act-fn=silu: such a model has another activation"
    )
    assert error_of(Options({"act_fn": "silu"}, "a.pt: ").refuse, UNSUPPORTED).startswith(
        "a.pt: act_fn="
    )
    assert "has gates" in error_of(Options({"gated": ""}).refuse, UNSUPPORTED, (None,))


def test_note_names_the_options_that_are_not_neutral():
    options = Options({"top_k": 5, "ratio": 0, "mode": None, "word_penalty": 0.5}, "a.pt: --")
    neutral = {"top_k": 0, "ratio": 0, "mode": "x", "word_penalty": 0, "missing": 1}
    assert options.dropped(neutral) == [
        "`generate` has no --top-k, --word-penalty, so it is dropped"
    ]
    assert options.dropped({"ratio": 0}) == []
