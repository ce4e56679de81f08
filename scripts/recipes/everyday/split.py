"""Split the pairs of Tatoeba that manythings.org distributes into training, validation and test text.

  python scripts/recipes/everyday/split.py deu.txt --target_lang de --output_dir data

A line has an English sentence, a tab and its translation. A hash of the English sentence chooses the part. All its
translations are thus in one part, and every copy of Tatoeba is split alike.
"""

import argparse
import hashlib
from collections.abc import Iterable
from pathlib import Path

# Of 256 values of the first byte.
VALIDATION = 2
HELD_OUT = 6

Pair = tuple[str, str]


def read_pairs(files: Iterable[Path]) -> list[Pair]:
    """The distinct pairs of the files, in their order."""
    pairs: dict[Pair, None] = {}
    for file in files:
        for line in file.read_text(encoding="utf-8").split("\n"):
            english, *translations = line.split("\t")[:2]
            for translation in translations:
                pairs[english.strip(), translation.strip()] = None
    return list(pairs)


def split_pairs(pairs: Iterable[Pair]) -> dict[str, list[Pair]]:
    """The pairs of each part.

    `held_out` has every pair that is not for training. `validation` and `test` have the first pair of each English
    sentence.
    """
    parts: dict[str, list[Pair]] = {
        name: [] for name in ("train", "validation", "test", "held_out")
    }
    seen: set[str] = set()
    for pair in pairs:
        sentence = pair[0].casefold()
        byte = hashlib.sha256(sentence.encode()).digest()[0]
        if byte >= HELD_OUT:
            parts["train"].append(pair)
            continue
        parts["held_out"].append(pair)
        if sentence not in seen:
            parts["validation" if byte < VALIDATION else "test"].append(pair)
        seen.add(sentence)
    return parts


def main() -> None:
    """Write PART.en and PART.TARGET_LANG of each part."""
    summary, *rest = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(
        description=summary,
        epilog="\n\n".join(rest),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="such as deu.txt")
    parser.add_argument("--target_lang", required=True, metavar="CODE", help="suffix, such as de")
    parser.add_argument("--output_dir", required=True, type=Path, metavar="DIR")
    arguments = parser.parse_args()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    for part, pairs in split_pairs(read_pairs(arguments.files)).items():
        for side, suffix in enumerate(("en", arguments.target_lang)):
            lines = "".join(pair[side] + "\n" for pair in pairs)
            (arguments.output_dir / f"{part}.{suffix}").write_text(lines, encoding="utf-8")
        print(f"{part}: {len(pairs):,} pairs")


if __name__ == "__main__":
    main()
