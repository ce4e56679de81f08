"""Read training text, train its tokenizers and encode it, once for all runs and processes that train on it.

  vanilla-transformer prepare small_corpus --train train.en train.de --output_dir data
  vanilla-transformer train small_corpus --data data --output_dir runs/mine

It takes the recipe and the flags of `train`. Those of the data, such as --held_out_pairs or --max_source_length, are
those of every run on the folder. A run does not read the text again. Its processes map one file, and with packed rows
(pack: true) none of them copies the ids. It is worth it for text of millions of pairs, for several runs on the same
text, and where the hosts of a run share a file system.

--workers N encodes in N processes. The same command goes on after an interruption, with any N, to the same folder.
Jobs of a scheduler whose hosts share the cache of `datasets` (HF_DATASETS_CACHE) take --shard 1/64 to --shard 64/64 of
it, in any order. Then the command without --shard joins them.
"""

import argparse

from .parsing import Parser, add_shared_flags, parse_run, unparsed

HELP = """usage: {prog} [RECIPE] [--FIELD VALUE ...]

{description}
--help-all                          list every field and exit"""


def parse_arguments(arguments: list[str], prog: str) -> list[str]:
    return unparsed(arguments, HELP.format(prog=prog, description=__doc__))


def main(arguments: list[str]) -> None:
    from hf_vanilla_transformer.cleaning.judging import sample_warnings
    from hf_vanilla_transformer.training.run.run_data import prepare_run

    parser = Parser("vanilla-transformer prepare")
    add_shared_flags(parser, "shard")
    # not its own: it refuses the fields of the package
    own, flags = argparse.ArgumentParser.parse_known_args(parser, arguments)
    parsed, importers = parse_run(flags)
    prepare_run(*parsed, pair_warnings=sample_warnings, importers=importers, shard=own.shard)
