"""Tables of a comparison as text and a page."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ..utils.html_page import html_page, html_table, html_texts
from .comparison import SAMPLES, TRIALS, Comparison
from .metric_names import title_of

Table = tuple[list[str], list[list[str]]]


def comparison_table(comparison: Comparison) -> Table:
    """Head and rows of `compare_systems`: score ± half of the 95 % interval, and the p-values of the two tests."""
    names = list(comparison["signatures"])
    rows = []
    for system, results in comparison["systems"].items():
        rows.append([system])
        for result in (results[name] for name in names):
            cell = f"{result['score']:.2f}"
            if "interval" in result:
                cell += f" ± {result['interval']:.2f}"
            if "p_bootstrap" in result:
                cell += f" (p = {result['p_bootstrap']:.4f}, {result['p_randomization']:.4f})"
            rows[-1].append(cell)
    return ["system", *map(title_of, names)], rows


def group_table(
    title: str, groups: Mapping[str, Mapping[str, Any]], items: str = "sentences"
) -> Table:
    """Head and rows of `scores_by_group`. `items` names what is counted."""
    first = next(iter(groups.values()))
    systems = list(first["systems"])
    metrics = list(first["systems"][systems[0]])
    several = len(systems) > 1
    columns = [(system, metric) for metric in metrics for system in systems]
    head = [title_of(metric) + (f", {system}" if several else "") for system, metric in columns]
    rows = [
        [
            label,
            f"{group['sentences']:,}",
            *(f"{group['systems'][system][metric]:.2f}" for system, metric in columns),
        ]
        for label, group in groups.items()
    ]
    return [title, items, *head], rows


def group_signatures(groups: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The signatures of `scores_by_group`, each once, after the labels that have it if they are not all."""
    labels: dict[str, list[str]] = {}
    for label, group in groups.items():
        for signature in group.get("signatures", {}).values():
            labels.setdefault(signature, []).append(label)
    return [
        signature if len(names) == len(groups) else f"{', '.join(names)}: {signature}"
        for signature, names in labels.items()
    ]


def render(table: Table) -> str:
    """Render a table as text."""
    head, rows = table
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    padded = (map(str.ljust, row, widths) for row in (head, *rows))
    return "\n".join("  ".join(row).rstrip() for row in padded)


def comparison_page(title: str, tables: Sequence[Table], results: Mapping[str, Any]) -> str:
    """A page in one file: tables, signatures and the sentences of `largest_differences`.

    `results` are `score_translations` with the `task`, and `comparison` and `differences`, if several systems are
    compared.
    """
    signatures = [value for name, value in results.items() if name.endswith("_signature")]
    signatures = (
        list(results["comparison"]["signatures"].values())
        if "comparison" in results
        else signatures
    )
    differences = results.get("differences", [])
    parts = [html_table(head, rows) for head, rows in tables]
    parts.append(
        f"<p>± is half of the 95 % interval of {SAMPLES:,} bootstrap resamples. p compares with the first system: "
        f"paired bootstrap, and approximate randomization with {TRIALS:,} trials.</p>"
    )
    parts += [f"<p><code>{escape(signature)}</code></p>" for signature in signatures]
    measure = "character error rate" if results.get("task") == "sequence" else "chrF"
    parts += [f"<h2>Largest differences, by {measure}</h2>"] if differences else []
    for each in differences:
        texts = {
            name: each[name]
            for name in ("source", "reference", "baseline", "hypothesis")
            if name in each
        }
        title_of_sentence = f"{each['system']}, line {each['line']}: {each['difference']:+.1f}"
        parts += [f"<h3>{escape(title_of_sentence)}</h3>", html_texts(texts)]
    return html_page(title, parts)
