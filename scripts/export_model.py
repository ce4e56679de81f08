"""`vanilla-transformer export` in a clone, without an installation; the arguments are the same."""

from vanilla_transformer_cli.main import run_subcommand

if __name__ == "__main__":
    run_subcommand("export")
