"""The report of `cleaning` as text and as a page."""

from html import escape

from ..utils.html_page import html_page, html_table, html_texts
from .judging import CleaningReport
from .rules import RULES


def report_text(report: CleaningReport) -> str:
    """The counts, and ten examples of each rule."""
    lines = [report.summary()]
    for rule, count in report.dropped.most_common():
        lines.append(f"\n{rule}: {RULES[rule][0]} ({count:,})")
        lines += [
            f"  line {line}: {source} ||| {target}"
            for line, source, target in report.examples[rule]
        ]
    return "\n".join(lines)


def report_page(report: CleaningReport, loaded: str) -> str:
    """The same in HTML. `loaded` says what was read."""
    counts = report.dropped.most_common()
    rows = [
        [rule, RULES[rule][0], f"{count:,}", f"{count / report.seen:.2%}"] for rule, count in counts
    ]
    parts = [f"<p>{escape(loaded)}</p><p>{escape(report.summary())}</p>"]
    parts.append(html_table(["rule", "", "pairs", "share"], rows))
    for rule, _ in counts:
        parts.append(f"<h2>{rule}: {escape(RULES[rule][0])}</h2>")
        examples = report.examples[rule]
        parts += [
            html_texts({f"line {line}": source, "": target}) for line, source, target in examples
        ]
    return html_page("Cleaned sentence pairs", parts)
