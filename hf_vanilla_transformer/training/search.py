"""Search for the values of fields: whole runs, one after the other, whose values Optuna proposes (extra `search`)."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..utils.atomic_write import atomic_file
from ..utils.errors import DiskFull, Interrupted, UserError, naming_extras
from ..utils.untrusted import read_json_object
from .checkpoints import complete_checkpoints
from .distributed import is_main_rank, print_main
from .recipes import parse_recipe
from .run import run_training

VALUES = "search.json"  # the values of each run, next to their folders


def search(arguments: Sequence[str], command: str = "") -> dict[str, Any]:
    """Train `search_trials` runs with other values for the fields in `search`.

    Run N is in the folder `trial-N` of `output_dir`. The same command after an interruption repeats no finished run,
    and resumes the interrupted one.

    Args:
        arguments, command: as of `parse_recipe` and `run_training`.

    Returns:
        The results of the best run, with `output_dir` and the values of its fields.

    Raises:
        UserError: a field or range that is wrong, no validation data, or no run that ends with a score.
    """
    _, data_args, args = parse_recipe(arguments)
    with naming_extras():
        import optuna
    if args.search_trials < 1:
        raise UserError(f"search_trials: {args.search_trials}: must be at least 1")
    if not (data_args.validation or data_args.held_out_pairs):
        raise UserError("search: it compares scores on validation data: give validation or held_out_pairs")
    metric = (args.metric_for_best_model or "bleu").removeprefix("eval_")
    highest = args.greater_is_better is not False
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        direction="maximize" if highest else "minimize", sampler=optuna.samplers.TPESampler(seed=args.seed)
    )
    space = dict(map(_distribution, args.search or []))
    for name, distribution in space.items():  # refuses an unknown field and a wrong value
        parse_recipe(
            [*arguments, f"--{name}={getattr(distribution, 'choices', [getattr(distribution, 'low', '')])[0]}"]
        )
    outcomes: list[tuple[float, Path, dict[str, Any]]] = []
    for number in range(args.search_trials):
        trial, folder = study.ask(space), Path(args.output_dir) / f"trial-{number}"
        values = dict(trial.params)
        print_main(f"trial {number} of {args.search_trials}: {_describe(values)}")
        _record(folder, values)
        try:
            results = _train(arguments, folder, values, command)
        except UserError as error:
            if isinstance(error, Interrupted | DiskFull):
                raise
            print_main(f"trial {number} failed: {error}")
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            continue
        score = results[f"eval_{metric}"]
        study.tell(trial, score)
        outcomes.append((score, folder, values))
    if not outcomes:
        raise UserError("search: no run has ended with a score: see the messages above")
    outcomes.sort(key=lambda outcome: outcome[0], reverse=highest)
    for score, folder, values in outcomes:
        print_main(f"validation {metric} {score:.2f}  {folder}  {_describe(values)}")
    _, folder, values = outcomes[0]
    return read_json_object(folder / "all_results.json") | values | {"output_dir": str(folder)}


def _record(folder: Path, values: dict[str, Any]) -> None:
    """Write the values of a run, or refuse a folder with those of a different search."""
    file = folder.parent / VALUES
    recorded = read_json_object(file) if file.is_file() else {}
    if recorded.setdefault(folder.name, values) != values:
        raise UserError(f"search: {folder} has the values {_describe(recorded[folder.name])}: name a new output_dir")
    if not is_main_rank():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(file) as temporary:
        temporary.write_text(json.dumps(recorded, indent=2) + "\n", encoding="utf-8")


def _train(arguments: Sequence[str], folder: Path, values: dict[str, Any], command: str) -> dict[str, Any]:
    """The results of a run with these values, from its folder if it has been trained before."""
    results = folder / "all_results.json"
    if results.is_file():
        return read_json_object(results)
    flags = [f"--{name}={value}" for name, value in values.items()]
    if complete_checkpoints(folder):
        flags.append("--resume_from_checkpoint=true")
    return run_training(*parse_recipe([*arguments, *flags, f"--output_dir={folder}"]), command=command)


def _describe(values: dict[str, Any]) -> str:
    return " ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in values.items()
    )


def _distribution(text: str) -> tuple[str, Any]:
    """The name and the distribution of `FIELD=LOW..HIGH` or `FIELD=A,B,…`.

    A range of ten times or more is searched on a logarithmic scale.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    name, _, values = text.partition("=")
    low, dots, high = values.partition("..")
    if not dots and "," in values:
        return name, CategoricalDistribution(values.split(","))
    try:
        is_int = low.isdecimal() and high.isdecimal()
        first, last = float(low), float(high)
        logarithmic = first > 0 and last >= 10 * first
        if is_int:
            return name, IntDistribution(int(low), int(high), log=logarithmic)
        return name, FloatDistribution(first, last, log=logarithmic)
    except ValueError:
        raise UserError(
            f"search: {text}: FIELD=LOW..HIGH or FIELD=A,B is needed, such as learning_rate=1e-4..1e-2"
        ) from None
