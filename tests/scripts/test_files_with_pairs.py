"""Commands with tables and translation memories in the place of text."""

import pytest

from tests.model_helpers import slow
from tests.pair_files import PAIRS, write_pairs


@pytest.mark.parametrize("name", ["x.csv", *slow("x.tmx", "x.tst")])
def test_each_command_gives_with_a_table_what_it_gives_with_text(
    command, tmp_path, model_folder, name
):
    numbers = ("--source_column", 2, "--target_column", 3) if name == "x.tst" else ()
    table, files = write_pairs(tmp_path, name), {}
    for side, text in zip(("source", "target"), zip(*PAIRS, strict=True), strict=True):
        files[side] = tmp_path / f"{side}.txt"
        files[side].write_text("\n".join(text) + "\n", encoding="utf-8")
    model, limit = ("--model", model_folder), ("--max_new_tokens", 3)

    files_of = {table: [table], files["source"]: files.values()}

    def results(source, target, folder):
        output = tmp_path / folder
        out = ("--output_dir", output)
        columns = numbers if source == table else ()
        run = [
            command("translate", *columns, *model, *limit, "--input", source),
            command(
                "translate",
                *columns,
                *model,
                *limit,
                "--input",
                source,
                "--output",
                tmp_path / f"{folder}.out",
            ),
            command("translate", *columns, *model, "--input", source, "--score", target),
            command(
                "evaluate", *columns, *model, *limit, "--source", source, "--reference", target
            ),
            command(
                "distil",
                *columns,
                "--teacher",
                model_folder,
                *out,
                "--source_file",
                source,
                "--num_beams",
                1,
            ),
            command(
                "tokenizer",
                *columns,
                *files_of[source],
                "--vocab_size",
                270,
                "--output_dir",
                output / "t",
            ),
        ]
        assert all(status == 0 for status, *_ in run), run
        texts = [path.read_text() for path in sorted((tmp_path / folder).glob("train.*"))]
        texts += [
            (tmp_path / f"{folder}.out").read_text(),
            (tmp_path / folder / "t/tokenizer.json").read_text(),
        ]
        return [printed.split(" seconds")[0].splitlines()[:3] for _, printed, _ in run[:4]] + texts

    assert results(table, table, "a") == results(files["source"], files["target"], "b")
    if not numbers:
        status, _, errors = command("evaluate", "--hypothesis", table, "--reference", table)
        assert status == 2 and errors.count("\n") == 1 and name in errors
    status, _, errors = command(
        "translate", *model, "--input", files["source"], "--source_column", "x"
    )
    assert status == 2 and errors.count("\n") == 1 and "--source_column" in errors
