"""The command `vanilla-transformer`: its subcommands, their help, and the recipes that come with it."""

import subprocess
import sys

import pytest
import yaml

from vanilla_transformer_cli.installed_recipes import installed_recipes, recipe_path
from vanilla_transformer_cli.main import SUBCOMMANDS, main

# its fields are defined by the package
WITHOUT_TORCH = sorted(SUBCOMMANDS.keys() - {"train"})


@pytest.fixture
def command(capfd):
    """Run the command in this process; return exit status, standard output and standard error."""

    def command(*arguments):
        with pytest.raises(SystemExit) as leaving:
            main(list(arguments))
        return leaving.value.code or 0, *capfd.readouterr()

    return command


def test_command_without_arguments_lists_the_subcommands(command):
    status, printed, _ = command()
    assert status == 0
    listed = [line.split()[0] for line in printed.split("subcommands:\n")[1].split("\n\n")[0].splitlines()]
    assert listed == list(SUBCOMMANDS)


def test_unknown_subcommand_is_one_line_with_the_nearest(command):
    assert command("trnslate") == (2, "", "error: trnslate: no such subcommand; did you mean translate?\n")
    status, _, errors = command("wipe")
    assert status == 2 and errors.startswith("error: wipe: no such subcommand; choose from train, ")


def test_version_is_that_of_the_package(command):
    import hf_vanilla_transformer

    assert command("--version") == (0, f"{hf_vanilla_transformer.__version__}\n", "")


@pytest.mark.parametrize("subcommand", WITHOUT_TORCH)
def test_help_imports_neither_torch_nor_the_package(subcommand, repository, tmp_path):
    code = (
        "import sys\nfrom vanilla_transformer_cli.main import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "finally:\n    print({'torch', 'hf_vanilla_transformer'} & sys.modules.keys(), file=sys.stderr)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, subcommand, "--help"],
        capture_output=True, text=True, cwd=tmp_path, timeout=60,
        env={"PYTHONPATH": str(repository / "scripts"), "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert f"usage: vanilla-transformer {subcommand} " in process.stdout
    assert f"\n  vanilla-transformer {subcommand} " in process.stdout, "it has an example"
    assert process.stderr == "set()\n"


@pytest.mark.parametrize("subcommand", [name for name in SUBCOMMANDS if name not in ("train", "recipes")])
def test_missing_arguments_are_refused_before_torch_is_imported(subcommand, command):
    status, printed, errors = command(subcommand)
    assert status == 2 and printed == "" and f"vanilla-transformer {subcommand}" in errors


def test_recipes_are_listed_with_what_they_train(command, repository):
    status, printed, _ = command("recipes")
    files = {path.stem for path in (repository / "scripts" / "recipes").glob("*.yaml")}
    assert status == 0
    assert {line.split()[0] for line in printed.splitlines()} == {
        name for name in files if not name.startswith("accelerate_")
    }
    assert all(len(line.split()) > 3 for line in printed.splitlines())


def test_recipe_is_printed_as_a_file_that_can_be_edited(command, repository):
    status, printed, _ = command("recipes", "numbers_en_de")
    assert status == 0
    assert printed == (repository / "scripts" / "recipes" / "numbers_en_de.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(printed)["numbers_size"] == 20_000


def test_recipe_path_takes_a_name_or_a_path(repository):
    assert recipe_path("numbers_en_de") == str(repository / "scripts" / "recipes" / "numbers_en_de.yaml")
    assert recipe_path("mine/numbers_en_de.yaml") == "mine/numbers_en_de.yaml"
    assert installed_recipes().keys() >= {"numbers_en_de", "wmt14_en_fr_big"}


def test_unknown_recipe_names_those_there_are(command):
    status, _, errors = command("recipes", "numbers")
    assert status == 2 and "numbers: no such recipe; choose from iwslt14_de_en" in errors
