"""The parser that all subcommands share."""

import argparse
import difflib
import glob
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

# Flags of other toolkits -> their names here, if the subcommand has them.
_HINTS = {
    "beam": "num_beams",
    "beam_size": "num_beams",
    "beams": "num_beams",
    "checkpoint": "model",
    "file": "input",
    "lenpen": "length_penalty",
    "lowercase": "bleu_lowercase",
    "max_length": "max_new_tokens",
    "model_name_or_path": "model",
    "nbest": "n_best",
    "src": "source",
    "tgt": "reference",
    "target": "reference",
    "threads": "workers",
    "tokenize": "bleu_tokenize",
}


class Flag(NamedTuple):
    """A flag with a value, as `ArgumentParser.add_argument` takes it."""

    metavar: str | None
    help: str
    type: Callable[[str], Any] | None = None
    default: Any = None
    choices: Sequence[str] | None = None
    nargs: str | int | None = None
    required: bool = False
    dest: str | None = None


CELLS = "source_column", "target_column", "line_pattern"
COLUMNS = "source_lang", "target_lang", *CELLS
REPETITION = "no_repeat_ngram_size", "repetition_penalty"
CANDIDATES = "format", "normalize", "spellings"  # of n-best lists
OF_SEARCHES = "num_beams", "length_penalty", "max_new_tokens", *REPETITION
DECODING = *OF_SEARCHES, "batch_size", "max_tokens_per_batch"


COLUMNS_TITLE = "files with both languages: CSV, TSV, JSON lines, Parquet, TMX, XLIFF"


def _shard(text: str) -> tuple[int, int]:
    """(I, N) of "I/N"."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r}: I/N with 1 <= I <= N is needed, such as 3/64")
    return int(number), int(count)


def name_and_value(text: str) -> tuple[str, str]:
    """The name and the value of "NAME=VALUE"."""
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals):
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME=VALUE")
    return name, value


# Flags that several subcommands share. The package's defaults apply to those that are not given.
SHARED: dict[str, Flag | str] = {
    "num_beams": Flag("N", "beam size; 1 is greedy decoding", int),
    "length_penalty": Flag("A", "score log P / length^A (default: the paper's)", float),
    "max_new_tokens": Flag("N", "(default: longest source of the batch + 50)", int),
    "no_repeat_ngram_size": Flag("N", "no N tokens occur twice in an output", int),
    "repetition_penalty": Flag("P", "above 1, tokens rarely repeat", float),
    "batch_size": Flag("N", "lines per batch, at most (default: 64)", int),
    "max_tokens_per_batch": Flag(
        "N",
        "source tokens per batch, padding included, at most; fewer need less memory (default: 4096)",
        int,
    ),
    "format": Flag(
        None,
        "of --n_best: moses (default), or candidates with probabilities as tsv or jsonl",
        choices=["moses", "tsv", "jsonl"],
        dest="n_best_format",
    ),
    "normalize": Flag(
        "MODULE:FUNCTION",
        "with tsv and jsonl: makes texts of the same meaning equal, whose probabilities are then added; None "
        "or an exception means an invalid text",
    ),
    "spellings": Flag(
        "M", "with tsv and jsonl: M lines in turn are spellings of one input, read as they are", int
    ),
    "source_lang": Flag(
        "CODE", "source language, such as en (default: that of a model, if one is named)"
    ),
    "target_lang": Flag(
        "CODE", "target language, such as de (default: that of a model, if one is named)"
    ),
    "source_column": Flag(
        "NAME",
        "column of the source in a CSV, TSV, JSON or Parquet file (default: source, or the language), or its number, "
        "from 1, in text with tabs or commas and without a header; {3:;}{1} joins two, the first of tags between ;",
    ),
    "target_column": Flag("NAME", "column of the target (default: target, or the language)"),
    "line_pattern": Flag(
        "REGEX",
        "text whose lines have both sides: an expression with the groups (?P<source>...) and (?P<target>...), or "
        "cmudict",
    ),
    "shard": Flag(
        "I/N", "only the I-th of N shares of the lines, for the jobs of a scheduler", _shard
    ),
    "ray": Flag(
        "ADDRESS",
        'work on the cluster of Ray at this address, "auto", or "local" for all cores of this machine; '
        "each worker loads the model from the same path (extra: ray)",
    ),
    "workers": Flag(
        "N",
        "parallel searches on a CPU, each with a share of the threads (default: one per thread, up to 8)",
        int,
    ),
    "shortlist": Flag(
        "F", "file of `vanilla-transformer shortlist`: compute its candidate tokens only"
    ),
    "trust_remote_code": "run the code that the folder of a subclass contains, to load its model, and import the "
    "function that a folder names as its source_form",
    "model_class": Flag("MODULE:CLASS", "the class of the model, if it is a subclass of one's own"),
    "device": Flag(None, 'such as "cpu" or "cuda:1" (default: the accelerator if there is one)'),
    "dtype": Flag(
        None,
        "precision; int8 is dynamic int8, the fastest on x86 CPUs with the C functions; fastest "
        "chooses by the processor (default: the checkpoint's, of serve: fastest)",
        choices=["float32", "bfloat16", "float16", "int8", "fastest"],
    ),
}


def add_flags(parser: argparse._ActionsContainer, **flags: Flag | str) -> None:
    """Add flags by name. A text is the help of a switch. A repeated flag of several values keeps all of them."""
    for name, flag in flags.items():
        if isinstance(flag, str):
            parser.add_argument(f"--{name}", action="store_true", help=flag)
        else:
            action = "extend" if flag.nargs == "+" else "store"
            parser.add_argument(f"--{name}", action=action, **flag._asdict())


def add_shared_flags(parser: argparse._ActionsContainer, *names: str) -> None:
    """Add flags that several subcommands share, by name."""
    add_flags(parser, **{name: SHARED[name] for name in names})


def given_values(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The values of the flags that the subcommand has and that are given."""
    values = {name: getattr(arguments, name, None) for name in names}
    return {
        name: value for name, value in values.items() if value is not None and value is not False
    }


def columns_of(arguments: argparse.Namespace, model: str | None, *files: str | None) -> Any:
    """The columns or languages that the flags `COLUMNS` name, with the languages of the model folder as defaults.

    For a model of many languages, the languages are also the direction of plain text. With --paragraphs
    they choose the rules that split sentences.
    """
    from hf_vanilla_transformer.corpora.columns import Columns
    from hf_vanilla_transformer.inference.languages import has_language_tokens, model_languages
    from hf_vanilla_transformer.utils.errors import UserError

    languages = model_languages(model) if model else None
    columns = Columns(**given_values(arguments, *COLUMNS), languages=languages)
    has_columns = any(columns.are_in(Path(file)) for file in files if file)
    given = {} if has_columns else given_values(arguments, *COLUMNS)
    paragraphs = getattr(arguments, "paragraphs", False)
    if given and (paragraphs or (model and has_language_tokens(model))):
        given = given_values(arguments, *CELLS)
    if given:
        raise UserError(
            f"--{next(iter(given))} has no effect: plain text has no columns and one language"
        )
    return columns


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """As of `hf_vanilla_transformer.utils.errors`, whose import takes seconds."""
    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {nearest[0]}?" if nearest else None


# Arguments that name files or folders to write. All others that name an existing one read it.
OUTPUTS = "output", "report", "dropped"


_NOT_WRITTEN = ".bz2", ".xz", ".zst", ".zip", ".7z", ".xlsx", ".ods", ".parquet.gz"


def output_that_is_input(parsed: argparse.Namespace) -> str | None:
    """A line that refuses an output which the command would also read, or write twice. None if there is none.

    Files are compared as the system does: a link, other capitals and "./" are the same file.
    """
    taken: list[tuple[str, str]] = []
    for name, value in vars(parsed).items():
        if name not in OUTPUTS:
            for path in _paths(value):
                taken += [(name, file) for file in (glob.glob(path) or [path])]
    for name in OUTPUTS:
        for path in _paths(getattr(parsed, name, None)):
            for other, file in taken:
                if is_same_file(path, file):
                    return f"{name}: {path} is the same file as {other}: name another one"
            taken.append((name, path))
    return None


def output_that_is_no_file(parsed: argparse.Namespace) -> str | None:
    """A line that refuses a folder, a format that no command writes, or a missing folder. None: there is none."""
    for name in OUTPUTS:
        for path in _paths(getattr(parsed, name, None)):
            if os.path.isdir(path):
                return f"{name} {path} is a folder: name a file"
            if path.lower().endswith(_NOT_WRITTEN):
                return f"{name} {path}: this format is not written: name a file of text, which .gz compresses"
            folder = os.path.dirname(path) or "."
            if not os.path.isdir(folder):
                return f"{path}: there is no folder {folder}: make it, or name another file"
    return None


def _paths(value: Any) -> list[str]:
    values = value if isinstance(value, list | tuple) else [value]
    return [each for each in values if isinstance(each, str) and each not in ("", "-")]


def is_same_file(first: str, second: str) -> bool:
    """True if two paths are one file or folder, whether it exists or not."""
    if os.path.exists(first) and os.path.exists(second):
        # A pipe or a device, such as /dev/null, keeps nothing.
        return os.path.samefile(first, second) and (os.path.isfile(first) or os.path.isdir(first))
    return os.path.realpath(first) == os.path.realpath(second)


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of descriptions, with a column wide enough for the longest flags."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=36, width=119)


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` with one-line errors. It names an unknown flag before a missing one.

    A flag may be spelt with dashes or with underscores. Line breaks of the description are kept.
    """

    def __init__(self, prog: str | None = None, description: str | None = None, **settings: Any):
        defaults: dict[str, Any] = {"formatter_class": HelpFormatter, "allow_abbrev": False}
        super().__init__(prog=prog, description=description, **(defaults | settings))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        arguments = list(sys.argv[1:] if args is None else args)
        if self._subparsers is None:  # otherwise the parser of the subcommand checks the flags
            arguments = list(self._known_flags(arguments))
        return super().parse_known_args(arguments, namespace)

    def _known_flags(self, arguments: Sequence[str]) -> Iterator[str]:
        """The arguments, with every flag as it was defined. Exits at the first unknown one."""
        known = {flag.replace("_", "-"): flag for flag in self._option_string_actions}
        flags_end = arguments.index("--") if "--" in arguments else len(arguments)
        for position, argument in enumerate(arguments):
            if position >= flags_end or not argument.startswith("--"):
                yield argument
                continue
            name, equals, value = argument.partition("=")
            flag = known.get(name.replace("_", "-"))
            if flag is None:
                usual = f"--{_HINTS.get(name[2:], '')}"
                hint = did_you_mean(usual if usual in known.values() else name, known.values())
                self.error(f"{name}: unknown flag" + (f"; {hint}" if hint else ""))
            yield flag + equals + value

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} ({self.prog} --help lists the flags)\n")


def installed_recipes() -> dict[str, Path]:
    """name -> file. A wheel has the recipes in this package, a clone next to it, in scripts/recipes."""
    here = Path(__file__).parent
    files = [*(here / "recipes").glob("*.yaml"), *(here.parent / "recipes").glob("*.yaml")]
    return {path.stem: path for path in sorted(files) if not path.stem.startswith("accelerate_")}


def recipe_path(recipe: str) -> str:
    """The file of a recipe with this name. Anything else is a path and is returned unchanged."""
    recipes = installed_recipes()
    hint = did_you_mean(recipe, recipes)
    if recipe not in recipes and hint and not os.path.exists(recipe):
        from hf_vanilla_transformer.utils.errors import UserError

        raise UserError(f"there is no recipe {recipe}; {hint}")
    return str(recipes.get(recipe, recipe))


def unparsed(arguments: list[str], help: str) -> list[str]:
    """Return the arguments of a run as they are, because the package defines the fields. `--help` is answered here."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(help)
        sys.exit(0)
    return arguments


def parse_run(arguments: list[str]) -> tuple[tuple[Any, Any, Any], Any]:
    """The arguments of a run from a recipe and flags, and the importers of foreign models, if it starts from one."""
    from hf_vanilla_transformer.training.run.recipes import parse_recipe
    from hf_vanilla_transformer.training.run.report import hide_bars_without_terminal

    hide_bars_without_terminal()
    flags = ["--help" if argument == "--help-all" else argument for argument in arguments]
    if not flags[0].startswith("-"):
        flags[0] = recipe_path(flags[0])
    parsed = parse_recipe(flags)
    if parsed[2].model_name_or_path is None:
        return parsed, {}
    from hf_vanilla_transformer.interop.importers import IMPORTERS

    return parsed, IMPORTERS
