"""Score a model on parallel text, or existing translations against their references, and compare systems.

  vanilla-transformer evaluate --model runs/numbers_en_de --source test.en --reference test.de
  vanilla-transformer evaluate --model runs/numbers_en_de --source test.csv --reference test.csv
  vanilla-transformer evaluate --hypothesis translation.txt --reference test.de --bleu_tokenize none
  vanilla-transformer evaluate --model runs/new --compare runs/old marian.txt --source test.en --reference test.de

Prints the metrics with sacreBLEU's signatures, and the percentage of lines that equal their reference. --compare adds
systems, each a model folder or a file with translations. A table then shows 95 % confidence intervals, and p-values
against the first system by paired bootstrap and approximate randomization.
"""

import argparse
import json
import os
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .models import MODEL_CODE, codes_of, load_translator
from .parsing import (
    COLUMNS,
    COLUMNS_TITLE,
    DECODING,
    Flag,
    Parser,
    add_flags,
    add_shared_flags,
    columns_of,
    given_values,
)


def add_arguments(parser: Parser) -> None:
    translations = parser.add_mutually_exclusive_group(required=True)
    add_flags(
        translations,
        model=Flag("DIR", "model folder, or several; needs --source", nargs="+"),
        hypothesis=Flag("F", "an existing translation, one sentence per line"),
    )
    add_flags(
        parser,
        source=Flag("F", "text to translate, one sentence per line, .gz too, or a table"),
        reference=Flag(
            "F",
            "references, one per line, or a table such as --source; several files for several references",
            required=True,
            nargs="+",
        ),
        compare=Flag(
            "SYSTEM", "model folders or translations, beside the first", nargs="+", default=[]
        ),
        output=Flag("F", "JSON file for the scores and the settings"),
        report=Flag("F", "HTML file for tables and the sentences that differ most"),
        metrics=Flag(
            "NAME",
            "bleu, chrf, chrf++, ter, exact_match, top_k (with --n_best), token_error_rate, character_error_rate, "
            "sequence_error_rate, MODULE:FUNCTION that returns one number per sentence for the lists of sources, "
            "hypotheses and references, or what evaluate.load finds: a folder, or a metric on the Hub such as comet "
            "(default: bleu chrf; of a model of other sequences exact_match and character_error_rate, or "
            "token_error_rate by its own tokens if they are words or matches of a regular expression; with --n_best "
            "top_k). White space at both ends of a line does not count, also where a space is a symbol",
            nargs="+",
        ),
        normalize=Flag(
            "MODULE:FUNCTION",
            "brings translations and references to one form before they are scored; None is an invalid one",
        ),
        n_best=Flag(
            "N",
            "score lists of N translations, which top_k needs; a translation is then a file of `translate --n_best` "
            "or `predict --n_best`, in any --format",
            int,
        ),
        by=Flag(
            "NAME",
            "scores by length, or by the value of this column of --source, a name or a number",
        ),
        perturb=Flag(
            "NAME",
            "scores of perturbed text too: upper, title, typos, end_punctuation, merge, copy, noise, or all",
            nargs="+",
        ),
        bleu_tokenize=Flag(
            "NAME",
            "sacreBLEU's tokenizer for BLEU: 13a, none for tokenised text, intl, char, zh ... (default: fits the "
            "script of the references)",
        ),
        bleu_lowercase="case-insensitive scores",
    )
    add_shared_flags(parser.add_argument_group(COLUMNS_TITLE), *COLUMNS)
    group = parser.add_argument_group("decoding (defaults: the model's generation_config.json)")
    add_shared_flags(group, *DECODING, "workers", "device", "dtype")
    add_shared_flags(parser, *MODEL_CODE)


def check_arguments(parser: Parser, parsed: argparse.Namespace) -> None:
    if "top_k" in (parsed.metrics or []) and not parsed.n_best:
        parser.error("--metrics top_k scores n-best lists: give --n_best N")
    if parsed.bleu_tokenize and "bleu" not in (parsed.metrics or ["bleu"]):
        parser.error("--bleu_tokenize has no effect without bleu in --metrics")
    files = [parsed.hypothesis, parsed.source, *parsed.reference, *parsed.compare]
    if files.count("-") > 1:
        parser.error("- is standard input, which is read once: name a file for the other text")
    if parsed.n_best and parsed.perturb:
        parser.error("--perturb scores single translations: leave --n_best out")
    models = [*(parsed.model or []), *(name for name in parsed.compare if os.path.isdir(name))]
    if models and parsed.source is None:
        parser.error(f"{models[0]} is a model: --source is the text that it translates")
    of_models = given_values(parsed, *DECODING, "workers", "device", "dtype", *MODEL_CODE)
    if of_models and not models:
        parser.error(
            f"--{next(iter(of_models))} is for models, and only existing translations are scored"
        )
    if parsed.perturb and len(models) < len(parsed.model or [0]) + len(parsed.compare):
        parser.error("--perturb translates perturbed text, so that every system must be a model")
    if parsed.by not in (None, "length") and parsed.source is None:
        parser.error(f"--by {parsed.by} is a column of --source")


@dataclass
class TestSet:
    """Parallel text, line by line."""

    sources: list[str] | None
    references: list[list[str]]  #: one list, or several
    cells: list[Any]  #: the other cells of each row, if --source is a table


def read_test_set(arguments: argparse.Namespace) -> TestSet:
    """Read --source and --reference."""
    from hf_vanilla_transformer.inference.sentences import read_sentence_pairs, read_sentences
    from hf_vanilla_transformer.utils.errors import UserError

    model = arguments.model[0] if arguments.model else None
    columns = columns_of(arguments, model, arguments.source, *arguments.reference)
    sources = None
    cells: list[Any] = []
    first, *others = arguments.reference
    if arguments.source:
        sources, references, cells = read_sentence_pairs(
            arguments.source, first, columns, one_line=False
        )
    else:
        references = list(read_sentences(first, "target", columns, one_line=False))
    if not references:
        raise UserError(f"{first}: it is empty, there is nothing to score")
    lists = [references]
    for name in others:
        lists.append(list(read_sentences(name, "target", columns, one_line=False)))
        check_length(name, lists[-1], first, len(references))
    return TestSet(sources, lists, cells)


def check_length(name: str, lines: list[Any], first: str, count: int) -> None:
    """Refuse lines that are not as many as those of the first reference."""
    from hf_vanilla_transformer.utils.errors import UserError

    if len(lines) != count:
        raise UserError(f"{name} has {len(lines)} lines, {first} has {count}: each needs its other")


def labels_of(arguments: argparse.Namespace, test: TestSet) -> list[str]:
    """The group of each line, by --by."""
    from hf_vanilla_transformer.evaluation.comparison import length_labels
    from hf_vanilla_transformer.inference.sentences import labels_in

    if arguments.by == "length":
        return length_labels(test.sources or test.references[0])
    return labels_in(test.cells, arguments.by, arguments.source)


def load_systems(arguments: argparse.Namespace) -> dict[str, Any]:
    """The translator of each system by its name, the first one before those of --compare. None for a translation."""
    from hf_vanilla_transformer.utils.errors import UserError

    first = arguments.hypothesis or " + ".join(arguments.model)
    folders: dict[str, Any] = {first: arguments.model}
    for name in arguments.compare:
        if name in folders:
            raise UserError(f"compare: {name} is named twice")
        folders[name] = [name] if Path(name).is_dir() else None
    return {name: models and load_translator(arguments, models) for name, models in folders.items()}


def read_outputs(arguments: argparse.Namespace, file: str, count: int) -> list[list[str]]:
    """The n-best lists of an existing translation, of one text each without --n_best."""
    from hf_vanilla_transformer.corpora.readers import require_plain_text
    from hf_vanilla_transformer.inference.candidates import read_n_best
    from hf_vanilla_transformer.inference.sentences import read_sentences

    if arguments.n_best:
        return [texts[: arguments.n_best] for texts in read_n_best(file, count)]
    require_plain_text(Path(file))
    lines = [[line] for line in read_sentences(file)]
    check_length(file, lines, arguments.reference[0], count)
    return lines


def translate_source(
    arguments: argparse.Namespace, translator: Any, sources: list[str], test: TestSet
) -> list[list[str]]:
    """The n-best lists of a model for the sources of the test set, or for perturbed ones."""
    from hf_vanilla_transformer.inference.sentences import codes_in

    codes = codes_of(arguments, translator, codes_in(test.cells))
    settings = given_values(arguments, *DECODING)
    lists = translator.translate_nbest(
        sources, arguments.n_best or 1, scores=False, protect=False, **settings, **codes
    )
    return [[hypothesis.text for hypothesis in hypotheses] for hypotheses in lists]


def outputs_of_systems(
    arguments: argparse.Namespace, systems: dict[str, Any], test: TestSet
) -> tuple[dict[str, list[list[str]]], dict[str, Any]]:
    """The n-best lists of each system, and the settings or the file that those of the first system come from.

    Files are read before a model translates.
    """
    lists: dict[str, list[list[str]]] = {}
    for name, translator in systems.items():
        if translator is None:
            lists[name] = read_outputs(arguments, name, len(test.references[0]))
    origin: dict[str, Any] = {"hypothesis": arguments.hypothesis}
    for number, (name, translator) in enumerate(systems.items()):
        if translator is None:
            continue
        start = time.perf_counter()
        lists[name] = translate_source(arguments, translator, test.sources or [], test)
        seconds = time.perf_counter() - start
        if number == 0:
            models = arguments.model
            origin = {
                "model": models if len(models) > 1 else models[0],
                "source": arguments.source,
                "settings": translator.describe(**given_values(arguments, *DECODING)),
                "seconds": round(seconds, 3),
                "sentences_per_second": round(len(lists[name]) / seconds, 3),
            }
    return {name: lists[name] for name in systems}, origin


def score_perturbed(
    arguments: argparse.Namespace,
    systems: dict[str, Any],
    hypotheses: dict[str, list[str]],
    test: TestSet,
    perturbations: list[str],
    options: dict[str, Any],
) -> dict[str, Any]:
    """Scores by perturbation and system, as of `scores_by_group`.

    "none" has the `hypotheses` of the text as it is.
    """
    from hf_vanilla_transformer.evaluation.comparison import scores_by_group
    from hf_vanilla_transformer.inference.sentences import codes_in
    from hf_vanilla_transformer.text.perturbations import perturb_test_set
    from hf_vanilla_transformer.utils.errors import UserError

    if codes_of(arguments, next(iter(systems.values())), codes_in(test.cells)):
        raise UserError(
            f"perturb: {arguments.source} has columns of languages: choose one pair of them by --source_lang and "
            "--target_lang"
        )
    languages = (arguments.source_lang, arguments.target_lang)
    texts: dict[str, Any] = {"none": (test.sources, test.references, hypotheses)}
    for name in perturbations:
        sources, columns = perturb_test_set(name, test.sources or [], test.references, languages)
        outputs = {}
        for system, translator in systems.items():
            lists = translate_source(arguments, translator, sources, test)
            outputs[system] = [best for best, *_ in lists]
        texts[name] = sources, columns, outputs

    metrics = fitting_metrics(options, test.references[0])
    scores: dict[str, Any] = {}
    for name, (sources, columns, outputs) in texts.items():
        its_options = options | {"sources": sources, "metrics": metrics}
        scores |= scores_by_group(outputs, columns, [name] * len(sources), **its_options)
    return scores


def fitting_metrics(options: dict[str, Any], references: list[str]) -> dict[str, Any]:
    """The metrics, with BLEU's tokenizer for these references, although perturbed ones may have foreign letters."""
    from hf_vanilla_transformer.evaluation.bleu_tokenizers import fitting_tokenizer
    from hf_vanilla_transformer.evaluation.metrics import make_metrics

    metrics: dict[str, Any] = options["metrics"]
    if "bleu" not in metrics or metrics["bleu"].tokenize:
        return metrics
    return metrics | make_metrics(["bleu"], fitting_tokenizer(references), options["lowercase"])


def scoring_options(
    arguments: argparse.Namespace, task: str, translators: list[Any]
) -> dict[str, Any]:
    """The arguments of `score_translations` that the flags give. The first translator gives the tokens."""
    from hf_vanilla_transformer.evaluation.metric_names import default_metrics
    from hf_vanilla_transformer.evaluation.metrics import make_metrics
    from hf_vanilla_transformer.text.token_kinds import token_splitter
    from hf_vanilla_transformer.utils.normalization import import_normalizer

    split = token_splitter(translators[0].target_tokenizer) if translators else None
    names = arguments.metrics or (["top_k"] if arguments.n_best else default_metrics(task, split))
    tokenize, lowercase = arguments.bleu_tokenize, arguments.bleu_lowercase
    return {
        "metrics": make_metrics(names, tokenize, lowercase, split),
        "lowercase": arguments.bleu_lowercase,
        "normalize": import_normalizer(arguments.normalize),
    }


def print_results(results: dict[str, Any], names: list[str], tables: list[Any]) -> None:
    """Print the scores with these names and their signatures, then tables with theirs."""
    from hf_vanilla_transformer.evaluation.metric_names import title_of
    from hf_vanilla_transformer.evaluation.score_tables import group_signatures, render

    items = "sequences" if "task" in results else "sentences"
    compared = results.get("comparison")
    for name in names if compared is None else ():
        if name in results and name != "exact_match":
            print(f"{results.get(f'{name}_signature') or title_of(name)} = {results[name]:.2f}")
    for table in tables:
        print(render(table), end="\n\n")
    groups = (results.get("groups"), results.get("perturbations"))
    signatures = [each for of_tables in groups if of_tables for each in group_signatures(of_tables)]
    of_systems = compared["signatures"].values() if compared else ()
    for signature in (*dict.fromkeys(signatures), *of_systems):
        print(signature)
    # A file of hypotheses does not say what they are.
    scored = "lines" if "hypothesis" in results else items
    for name in ("exact_match", "invalid"):
        if name in results:
            print(f"{title_of(name)} = {results[name]:.2f} % of {results['sentences']} {scored}")
    if "seconds" in results:
        speed = f"{results['sentences_per_second']:.1f} {items} per second"
        print(f"{results['seconds']:.1f} seconds, {speed}")


def main(arguments: argparse.Namespace) -> None:
    from hf_vanilla_transformer.evaluation import comparison, score_tables
    from hf_vanilla_transformer.evaluation.metrics import score_names, score_translations
    from hf_vanilla_transformer.inference.text_io import line_writer, on_one_line
    from hf_vanilla_transformer.text.perturbations import perturbation_names
    from hf_vanilla_transformer.utils.errors import UserError

    systems = load_systems(arguments)
    translators = [translator for translator in systems.values() if translator]
    tasks = {translator.task for translator in translators}
    task = "sequence" if "sequence" in tasks else "language"
    if arguments.perturb and task == "sequence":
        raise UserError(
            "perturb: it perturbs text in a language, and the model reads other sequences"
        )
    # before the model translates for an hour
    options = scoring_options(arguments, task, translators)
    names = score_names(options["metrics"])
    perturbations = perturbation_names(arguments.perturb or [])
    with (
        line_writer(arguments.output) if arguments.output else nullcontext() as write,
        line_writer(arguments.report) if arguments.report else nullcontext() as write_page,
    ):
        test = read_test_set(arguments)
        labels = labels_of(arguments, test) if arguments.by else None
        options["sources"] = test.sources
        lists, origin = outputs_of_systems(arguments, systems, test)
        if None in systems.values():  # the lines of a file have no line breaks
            test.references = [list(map(on_one_line, texts)) for texts in test.references]
            lists = {
                name: [list(map(on_one_line, texts)) for texts in of_system]
                for name, of_system in lists.items()
            }
        hypotheses = {name: [best for best, *_ in texts] for name, texts in lists.items()}
        first = next(iter(systems))
        n_best = lists if arguments.n_best else {}
        results = score_translations(
            hypotheses[first], test.references, n_best=n_best.get(first), **options
        )
        results |= origin
        if task == "sequence":
            results["task"] = task
        files = arguments.reference
        results["reference"] = files if len(files) > 1 else files[0]
        items = "sentences" if task == "language" else "sequences"
        tables = []
        if arguments.compare or any(":" in name for name in options["metrics"]):
            compared = comparison.compare_systems(
                hypotheses, test.references, n_best=n_best, **options
            )
            results["comparison"] = compared
            results["differences"] = comparison.largest_differences(
                hypotheses, test.references, test.sources, task=task
            )
            tables.append(score_tables.comparison_table(compared))
        if labels is not None:
            groups = comparison.scores_by_group(
                hypotheses, test.references, labels, n_best=n_best, **options
            )
            results["groups"] = groups
            tables.append(score_tables.group_table(arguments.by, groups, items))
        if perturbations:
            groups = score_perturbed(arguments, systems, hypotheses, test, perturbations, options)
            results["perturbations"] = groups
            tables.append(score_tables.group_table("perturbation", groups, items))
        print_results(results, names, tables)
        if write:
            write(json.dumps(results, indent=2, ensure_ascii=False))
        if write_page:
            title = f"Scores on {results['reference']}"
            write_page(score_tables.comparison_page(title, tables, results))
