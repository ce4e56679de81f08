"""The parser that all subcommands share."""

import argparse
import difflib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

# Flags of other toolkits -> what they are called here, where a subcommand has it.
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


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """As of `hf_vanilla_transformer.errors`, whose import takes seconds."""
    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {nearest[0]}?" if nearest else None


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of descriptions, with a column wide enough for the longest flags."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=36, width=119)


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors are one line, and which names an unknown flag before a missing one.

    A flag may be spelt with dashes or with underscores.

    Args:
        prog: the command in the usage message; None takes that of the process.
        description: of the subcommand, with its examples; line breaks are kept.
        **others: as for `ArgumentParser`.
    """

    def __init__(self, prog: str | None = None, description: str | None = None, **others: Any):
        settings: dict[str, Any] = {"formatter_class": HelpFormatter, "allow_abbrev": False}
        super().__init__(prog=prog, description=description, **(settings | others))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        if self._subparsers is None:  # otherwise the parser of the chosen one checks its own flags
            given = list(self._known_flags(given))
        return super().parse_known_args(given, namespace)

    def _known_flags(self, given: Sequence[str]) -> Iterator[str]:
        """The arguments, with every flag as it was defined; exits at the first unknown one."""
        known = {flag.replace("_", "-"): flag for flag in self._option_string_actions}
        flags_end = given.index("--") if "--" in given else len(given)
        for position, argument in enumerate(given):
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

    def print_help(self, file: Any = None) -> None:
        """As `ArgumentParser`; what the encoding of the output lacks becomes a question mark."""
        file = file or sys.stdout
        encoding = getattr(file, "encoding", None) or "utf-8"
        file.write(self.format_help().encode(encoding, "replace").decode(encoding))

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} ({self.prog} --help lists the flags)\n")
