"""The parts of Tatoeba: every copy of a sentence is in the same one."""

import subprocess
import sys
from hashlib import sha256
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "recipes" / "everyday" / "split.py"


def test_every_copy_of_a_sentence_is_held_out_by_its_hash(tmp_path):
    sentences = [f"Tom has {number} dogs." for number in range(300)]
    first = [
        f"{english}\tTom hat {number} Hunde.\tCC-BY" for number, english in enumerate(sentences)
    ]
    second = [
        f"{english.upper()} \tTom besitzt {number} Hunde."
        for number, english in enumerate(sentences)
    ]
    for name, lines in {
        "first.txt": first,
        "second.txt": [*second, *first, "no translation"],
    }.items():
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = [
        sys.executable,
        SCRIPT,
        "first.txt",
        "second.txt",
        "--target_lang",
        "de",
        "--output_dir",
        "data",
    ]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)

    def part(name):
        sides = [
            (tmp_path / "data" / f"{name}.{code}").read_text("utf-8").splitlines()
            for code in ("en", "de")
        ]
        return list(zip(*sides, strict=True))

    # The rule, and the two translations of each sentence.
    byte = {
        english.lower(): int(sha256(english.lower().encode()).hexdigest()[:2], 16)
        for english in sentences
    }
    of_part = {
        "train": range(6, 256),
        "held_out": range(6),
        "validation": range(2),
        "test": range(2, 6),
    }
    for name, values in of_part.items():
        chosen = sorted(english for english, first_byte in byte.items() if first_byte in values)
        copies = 2 if name in ("train", "held_out") else 1
        pairs = part(name)
        assert chosen and sorted(english.lower() for english, _ in pairs) == sorted(
            chosen * copies
        ), name
        assert len(set(pairs)) == len(pairs)
        assert copies == 2 or not any(
            "besitzt" in german for _, german in pairs
        )  # the first one is kept
