"""What the parsers of all subcommands share."""

import argparse


def make_parser(prog: str | None, description: str | None) -> argparse.ArgumentParser:
    """A parser whose description keeps its line breaks.

    Args:
        prog: the command in the usage message; None takes that of the process.
        description: of the subcommand, with its examples.
    """
    return argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
