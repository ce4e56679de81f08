"""`python -m tests.interop.imports_table [FORMAT …]` runs the tests of the converters and prints what they record.

They call pytest's `record_property`, each after its check, with
    logits: (the peer, the largest difference of a logit), of one model.
    tokens: the tokenizer or search whose tokens are the same.
    refused: a model that cannot be converted.
    not exported: a model that cannot be exported, for the table of exports.
    bad file: the format of a damaged, foreign or malicious file that was refused.
"""

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from hf_vanilla_transformer.interop.converting import FORMATS
from hf_vanilla_transformer.utils.markdown import markdown_table

FOLDER = Path(__file__).parent
# A description of each format, and its tests.
TESTS = {
    "marian": ("a `MarianMTModel` folder", "test_marian.py"),
    "fsmt": ("an `FSMTForConditionalGeneration` folder", "test_fsmt.py"),
    "m2m100": ("an `M2M100ForConditionalGeneration` folder", "test_m2m100.py"),
    "torch": ("a state dictionary", "test_torch_transformer.py"),
    "fairseq": ("a `.pt` checkpoint", "test_fairseq.py"),
    "marian-npz": ("Marian's own checkpoint", "test_marian_npz.py"),
    "joeynmt": ("a model folder", "test_joeynmt.py"),
    "opennmt": ("a `.pt` checkpoint of OpenNMT-py", "test_opennmt.py"),
    "eole": ("a model folder of eole", "test_eole.py"),
}
BAD_FILES = "test_untrusted.py"


class Records:
    """A pytest plugin that keeps what passed tests record, by file and property, and the ids of failed tests."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], list[Any]] = defaultdict(list)
        self.failed: list[str] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.passed and report.when == "call":
            for name, value in report.user_properties:
                self.found[Path(report.location[0]).name, name].append(value)

    def print_failures(self) -> int:
        """Print the failed tests. Return the exit code."""
        for failed in self.failed:
            print(f"failed: {failed}", file=sys.stderr)
        return bool(self.failed)


def run(tests: Iterable[str | Path]) -> Records:
    """Run tests of this folder, FILE or FILE::NAME, without pytest's output."""
    records = Records()
    options = [
        "-p",
        "no:terminal",
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
    ]
    code = pytest.main([*options, *(str(FOLDER / test) for test in tests)], [records])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        records.failed.append(f"pytest itself: {code!r}")
    return records


def table(records: Records, formats: Iterable[str]) -> str:
    """As Markdown, a row for each format and peer."""
    rows = []
    bad_files = Counter(records.found[BAD_FILES, "bad file"])
    for name in formats:
        what, file = TESTS[name]
        peers = defaultdict(list)
        for peer, difference in records.found[file, "logits"]:
            peers[peer].append(difference)
        tokens, refused = (
            "; ".join(dict.fromkeys(records.found[file, each])) for each in ("tokens", "refused")
        )
        last = [tokens, refused, str(bad_files[name] or "")]
        for peer, differences in peers.items() or [("", [])]:
            largest = max(differences, default=None)
            logits = "" if largest is None else f"{largest:.1e}" if largest else "0"
            rows.append([f"`{name}`, {what}", peer, str(len(differences)), logits, *last])
            last = [""] * len(last)
    head = ["format", "checked against", "models", "logits differ by", "same tokens as"]
    return markdown_table([*head, "refused", "bad files refused"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "formats",
        nargs="*",
        metavar="FORMAT",
        help=f"of {', '.join(FORMATS)}; default: all",
    )
    formats = parser.parse_args().formats or list(FORMATS)
    if unknown := set(formats) - TESTS.keys():
        parser.error(f"FORMAT: {', '.join(unknown)} is none of {', '.join(TESTS)}")
    records = run([*(TESTS[name][1] for name in formats), BAD_FILES])
    print(table(records, formats))
    return records.print_failures()


if __name__ == "__main__":
    sys.exit(main())
