"""The same run with several seeds, and the mean and the deviation of its scores."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from ...evaluation.metric_names import TITLES, title_of
from ...utils.atomic_write import atomic_file
from ...utils.errors import UserError
from ...utils.markdown import markdown_table
from ...utils.untrusted import read_json_object
from ..state.checkpoints import report_failed_save
from ..state.distributed import broadcast_from_main, is_main_rank, print_main
from ..state.fingerprint import Facts, differences
from .arguments import ParsedArguments, RunArguments, chosen_values
from .facts import PRECISION

SEEDS = "seeds.json"
_RESULTS = "all_results.json"
_CARD = "README.md"
# Fields that differ between the runs, or between the commands that make and resume them.
_FREE = {"seed", "seeds", "output_dir", "resume_from_checkpoint", "logging_dir", "run_name"}


def run_seeds(
    parsed: ParsedArguments, run: Callable[[list[str], Callable[[Facts], None]], object]
) -> None:
    """Make a run for each of `seeds`, one after the other, and the table of their scores.

    A complete run is not made again, and one that was interrupted goes on. The table is printed, stored in the folder
    as `seeds.json`, and added to the card of each run.

    Args:
        parsed: the arguments of the command.
        run: makes the run with these flags after those of the command. It calls the function with the
            `facts_of_seeds` before it trains.

    Raises:
        UserError: fewer than two seeds or equal ones, `push_to_hub`, or a folder with runs of other fields, data or
            code.
    """
    args = parsed[-1]
    folder = Path(args.output_dir)
    seeds = _checked_seeds(args)
    fields = _as_json(_fields(parsed))
    _require_same_fields(folder / SEEDS, fields)
    folders = {seed: folder / f"seed-{seed}" for seed in seeds}
    for seed, its_folder in folders.items():
        # The main rank may still write the card of the run before when others get here.
        flags = broadcast_from_main(partial(_flags_of_run, seed, its_folder, args.auto_bf16))
        if flags is None:
            print_main(f"seed {seed}: {its_folder} is complete")
            continue
        if is_main_rank() and not (folder / SEEDS).is_file():
            _write(folder / SEEDS, {"fields": fields})
        print_main(f"seed {seed}: {its_folder}")
        run(flags, partial(_check_facts, folder))
    if is_main_rank():
        results = {seed: read_json_object(each / _RESULTS) for seed, each in folders.items()}
        scores = scores_of_seeds(results, parsed[1].metrics or ())
        _write(folder / SEEDS, {"fields": fields} | _read(folder) | {"scores": scores})
        table = markdown_table(*_table(scores))
        print_main(table)
        for each in folders.values():
            _add_to_card(each / _CARD, table)


def scores_of_seeds(
    results: Mapping[int, Mapping[str, Any]], metrics: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """The scores of the test split, or without one of the validation split.

    Args:
        results: `all_results.json` of the run of each seed.
        metrics: scores that are not built in.

    Returns:
        By name, such as `test_bleu`, the `mean`, the `deviation` (of a sample, with n − 1) and the scores by `seeds`.
    """
    known = [*TITLES, "invalid", *metrics]
    first, *others = results.values()
    prefix = "test" if "test_exact_match" in first else "eval"
    parts = tuple(f"test_{metric}_" for metric in known)  # of directions and inputs
    names = [f"{prefix}_{metric}" for metric in known]
    names += sorted(name for name in first if name.startswith(parts) and name not in names)
    scores = {}
    for name in names:
        values: list[Any] = [each.get(name) for each in (first, *others)]
        if all(isinstance(value, Real) for value in values):
            mean, deviation = fmean(values), stdev(values)
            by_seed = dict(zip(map(str, results), values, strict=True))
            scores[name] = {"mean": mean, "deviation": deviation, "seeds": by_seed}
    return scores


def _checked_seeds(args: RunArguments) -> list[int]:
    seeds = list(args.seeds or ())
    if len(set(seeds)) < max(2, len(seeds)):
        shown = " ".join(map(str, seeds))
        raise UserError(f"seeds: {shown}: give two or more different ones, such as 1 2 3")
    if args.push_to_hub:
        raise UserError(
            "push_to_hub: it publishes one run, and seeds makes several: publish one with `publish`"
        )
    return seeds


def _fields(parsed: ParsedArguments) -> dict[str, object]:
    """The fields that all runs share, with those of `by_pairs`."""
    fields = {name: value for name, value in chosen_values(*parsed).items() if name not in _FREE}
    rows = {str(pairs): choice.fields for pairs, choice in parsed[-1].choices.items()}
    return fields | ({"by_pairs": rows} if rows else {})


def _require_same_fields(file: Path, fields: dict[str, Any]) -> None:
    """Refuse a folder whose runs have other fields: their scores would be averaged with those of this run."""
    if not file.is_file():
        return
    old = _read(file.parent).get("fields", {})
    for name in sorted(old.keys() | fields.keys()):
        if old.get(name) != fields.get(name):
            raise UserError(
                f"{name}: {fields.get(name)}, but the runs in {file.parent} have {old.get(name)}: "
                "name a new output_dir, or give the same fields"
            )


def _check_facts(folder: Path, facts: Facts) -> None:
    """Refuse a run whose data or code is not that of the complete runs. The first run records its own."""
    facts = _as_json(facts)
    if _has_complete_run(folder):
        for name, was, becomes in differences(_read(folder).get("facts", {}), facts):
            raise UserError(
                f"{name}: {becomes}, but the runs in {folder} have {was}: name a new output_dir, or "
                "restore what they had"
            )
    elif is_main_rank():
        _write(folder / SEEDS, _read(folder) | {"facts": facts})


def _flags_of_run(seed: int, folder: Path, auto_bf16: bool) -> list[str] | None:
    """Flags of the run of a seed, or None if it is complete."""
    if (folder / _CARD).is_file():  # the last file of a run
        return None
    own = {"seeds": "null", "seed": seed, "output_dir": folder}
    flags = [f"--{name}={value}" for name, value in own.items()]
    if auto_bf16:
        flags += _precision_of_first(folder.parent)
    return [*flags, "--resume_from_checkpoint=auto"]


def _precision_of_first(folder: Path) -> list[str]:
    """Flags for the precision that the first run has measured. Another measurement may differ by chance."""
    precision = _read(folder).get("facts", {}).get(PRECISION)
    if precision is None or not _has_complete_run(folder):
        return []
    return ["--auto_bf16=false", f"--bf16={str(precision == 'bf16').lower()}"]


def _has_complete_run(folder: Path) -> bool:
    return any(folder.glob(f"seed-*/{_CARD}"))


def _read(folder: Path) -> dict[str, Any]:
    """The objects in `seeds.json`, which may be missing."""
    stored = read_json_object(folder / SEEDS) if (folder / SEEDS).is_file() else {}
    return {name: value for name, value in stored.items() if isinstance(value, dict)}


def _as_json(values: Mapping[str, object]) -> dict[str, Any]:
    """Values as they are after writing and reading."""
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain


def _table(scores: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Head and rows: a score, its mean ± deviation, and the score of each seed."""
    rows = []
    seeds: list[str] = []
    for name, score in scores.items():
        seeds = list(score["seeds"])
        split, _, metric = name.partition("_")
        title = title_of(metric)
        cells = [f"{split.replace('eval', 'validation')} {title}"]
        cells.append(f"{score['mean']:.2f} ± {score['deviation']:.2f}")
        rows.append(cells + [f"{value:.2f}" for value in score["seeds"].values()])
    return ["score", "mean ± deviation", *(f"seed {seed}" for seed in seeds)], rows


def _add_to_card(card: Path, table: str) -> None:
    """Write the table into a model card, in the place of an older one. A card without limits stays as it is."""
    if not card.is_file():
        return
    text = re.sub(r"## Seeds\n.*?(?=^## )", "", card.read_text(encoding="utf-8"), flags=re.M | re.S)
    section = (
        f"## Seeds\n\nThe same run with several seeds. ± is the standard deviation.\n\n{table}\n\n"
    )
    with atomic_file(card) as temporary:
        temporary.write_text(
            text.replace("## Limits\n", f"{section}## Limits\n", 1), encoding="utf-8"
        )


def _write(file: Path, value: dict[str, Any]) -> None:
    with report_failed_save(file.parent, f"{file.name} was not written"):
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(file) as temporary:
            text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)
            temporary.write_text(text + "\n", encoding="utf-8")
