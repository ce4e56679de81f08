"""Tables of a comparison as text and a page, written out by hand."""

import pytest

from hf_vanilla_transformer.evaluation.score_tables import (
    comparison_page,
    comparison_table,
    group_signatures,
    group_table,
    render,
)

COMPARISON = {
    "signatures": {"bleu": "BLEU|a", "comet": "comet"},
    "systems": {
        "one": {
            "bleu": {"score": 30.126, "mean": 30.0, "interval": 1.234},
            "comet": {"score": 0.5},
        },
        "two": {
            "bleu": {
                "score": 31.0,
                "mean": 31.0,
                "interval": 1.5,
                "p_bootstrap": 0.04321,
                "p_randomization": 0.00019,
            },
            "comet": {"score": 0.25},
        },
    },
}


def test_comparison_has_interval_and_p_values_where_they_exist():
    head, rows = comparison_table(COMPARISON)
    assert head == ["system", "BLEU", "comet"]
    assert rows == [
        ["one", "30.13 ± 1.23", "0.50"],
        ["two", "31.00 ± 1.50 (p = 0.0432, 0.0002)", "0.25"],
    ]


def groups_of(*systems):
    """Two groups, in which the scores of the systems are 1, 2 … more than a base."""
    return {
        label: {
            "sentences": sentences,
            "signatures": {},
            "systems": {
                name: {"bleu": base + place, "chrf": 2 * base}
                for place, name in enumerate(systems, start=1)
            },
        }
        for label, sentences, base in (("short", 1234, 10), ("long", 5, 20.126))
    }


@pytest.mark.parametrize(
    ("systems", "head", "rows"),
    [
        (
            ["a"],
            ["BLEU", "chrF"],
            [["short", "1,234", "11.00", "20.00"], ["long", "5", "21.13", "40.25"]],
        ),
        (  # a file may have the name of a key
            ["sentences", "signatures"],
            ["BLEU, sentences", "BLEU, signatures", "chrF, sentences", "chrF, signatures"],
            [
                ["short", "1,234", "11.00", "12.00", "20.00", "20.00"],
                ["long", "5", "21.13", "22.13", "40.25", "40.25"],
            ],
        ),
    ],
)
def test_groups_have_a_column_for_each_score_and_system(systems, head, rows):
    groups = groups_of(*systems)
    assert group_table("length", groups) == (["length", "sentences", *head], rows)
    assert group_table("kind", groups, "words")[0][:2] == ["kind", "words"]


def test_signature_names_its_groups_unless_all_have_it():
    groups = {
        "de": {"signatures": {"bleu": "BLEU|13a", "chrf": "chrF2"}},
        "zh": {"signatures": {"bleu": "BLEU|zh", "chrf": "chrF2"}},
        "ja": {"signatures": {"bleu": "BLEU|13a", "chrf": "chrF2"}},
    }
    assert group_signatures(groups) == ["de, ja: BLEU|13a", "chrF2", "zh: BLEU|zh"]
    assert group_signatures({"de": {}}) == []


def test_text_has_columns_of_one_width():
    table = ["system", "BLEU"], [["a", "1"], ["a longer name", "22.22 ± 1"]]
    assert render(table).split("\n") == [
        "system         BLEU",
        "a              1",
        "a longer name  22.22 ± 1",
    ]


TABLE = ["system", "BLEU"], [["<one>", "30.00"]]
DIFFERENCE = {
    "system": "<two>",
    "line": 1234,
    "source": "ein <Hund>",
    "reference": "a dog",
    "baseline": "one dog",
    "hypothesis": "dogs",
    "difference": -12.345,
}


def test_page_has_tables_signatures_and_differences():
    results = {
        "comparison": COMPARISON,
        "differences": [DIFFERENCE, {**DIFFERENCE, "line": 7, "difference": 3.0}],
        "bleu_signature": "BLEU|of one system",
    }
    page = comparison_page("a <title>", [TABLE, TABLE], results)
    assert page.count("<table>") == 2
    assert "<h1>a &lt;title&gt;</h1>" in page
    assert '<td dir="auto">&lt;one&gt;' in page
    assert "1,000 bootstrap resamples" in page
    assert "10,000 trials" in page
    assert [
        page.count(f"<code>{name}</code>") for name in ("BLEU|a", "comet", "BLEU|of one system")
    ] == [1, 1, 0]
    assert "<h2>Largest differences, by chrF</h2>" in page
    assert "<h3>&lt;two&gt;, line 1234: -12.3</h3>" in page
    assert "<h3>&lt;two&gt;, line 7: +3.0</h3>" in page
    terms = ["source", "reference", "baseline", "hypothesis"]
    places = [page.index(f'<dt>{name}<dd dir="auto">') for name in terms]
    assert places == sorted(places)
    assert "ein &lt;Hund&gt;" in page


def test_page_of_sequences_names_their_measure_and_leaves_out_missing_texts():
    without_source = {name: value for name, value in DIFFERENCE.items() if name != "source"}
    page = comparison_page("title", [], {"task": "sequence", "differences": [without_source]})
    assert "<h2>Largest differences, by character error rate</h2>" in page
    assert "<dt>source" not in page
    assert "<dt>reference" in page


def test_page_of_one_system_has_its_signatures_and_no_differences():
    scores = {
        "bleu": 1.0,
        "bleu_signature": "BLEU|<x>",
        "chrf_signature": "chrF2|y",
        "task": "language",
    }
    page = comparison_page("title", [TABLE], scores)
    assert "<code>BLEU|&lt;x&gt;</code>" in page
    assert "<code>chrF2|y</code>" in page
    assert page.count("<code>") == 2
    assert "Largest differences" not in page
