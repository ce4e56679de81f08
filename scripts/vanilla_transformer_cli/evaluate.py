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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .models import MODEL_CODE, codes_of, load_translator
from .parsing import (
    COLUMNS,
    COLUMNS_TITLE,
    DECODING,
    Parser,
    add_shared_flags,
    columns_of,
    given_values,
)


def parse_arguments(arguments: list[str] | None, prog: str | None) -> argparse.Namespace:
    parser = Parser(prog, __doc__)
    translations = parser.add_mutually_exclusive_group(required=True)
    translations.add_argument(
        "--model", nargs="+", metavar="DIR", help="model folder, or several; needs --source"
    )
    translations.add_argument(
        "--hypothesis", metavar="F", help="an existing translation, one sentence per line"
    )
    parser.add_argument(
        "--source",
        metavar="F",
        help="text to translate, one sentence per line, .gz too, or a table",
    )
    parser.add_argument(
        "--reference",
        required=True,
        nargs="+",
        metavar="F",
        help="references, one per line, or a table such as --source; several files for several references",
    )
    parser.add_argument(
        "--compare",
        nargs="+",
        default=[],
        metavar="SYSTEM",
        help="model folders or translations, beside the first",
    )
    parser.add_argument("--output", metavar="F", help="JSON file for the scores and the settings")
    parser.add_argument(
        "--report", metavar="F", help="HTML file for tables and the sentences that differ most"
    )
    parser.add_argument(
        "--format",
        choices=["text", "markdown", "latex"],
        default="text",
        help="of the tables (default: text)",
    )
    parser.add_argument(
        "--metrics",
        nargs="+",
        metavar="NAME",
        help="bleu, chrf, chrf++, ter, exact_match, top_k (with --n_best), token_error_rate, character_error_rate, "
        "sequence_error_rate, MODULE:FUNCTION that returns one number per sentence for the lists of sources, "
        "hypotheses and references, or what evaluate.load finds: a folder, or a metric on the Hub such as comet "
        "(default: bleu chrf; of a model of other sequences exact_match character_error_rate; with --n_best top_k)",
    )
    parser.add_argument(
        "--normalize",
        metavar="MODULE:FUNCTION",
        help="brings translations and references to one form before they are scored; None is an invalid one",
    )
    parser.add_argument(
        "--n_best",
        type=int,
        metavar="N",
        help="score lists of N translations, which top_k needs; a translation is then a file of `translate --n_best` "
        "or `predict --n_best`, in any --format",
    )
    parser.add_argument(
        "--by", metavar="NAME", help="scores by length, or by the value of this column of --source"
    )
    parser.add_argument(
        "--perturb",
        nargs="+",
        metavar="NAME",
        help="scores of perturbed text too: upper, title, typos, end_punctuation, merge, copy, noise, or all",
    )
    parser.add_argument(
        "--bleu_tokenize",
        metavar="NAME",
        help="sacreBLEU's tokenizer for BLEU: 13a, none for tokenised text, intl, char, zh … (default: fits the "
        "script of the references)",
    )
    parser.add_argument("--bleu_lowercase", action="store_true", help="case-insensitive scores")
    add_shared_flags(parser.add_argument_group(COLUMNS_TITLE), *COLUMNS)
    group = parser.add_argument_group("decoding (defaults: the model's generation_config.json)")
    add_shared_flags(group, *DECODING, "workers", "device", "dtype")
    add_shared_flags(parser, *MODEL_CODE)
    parsed = parser.parse_args(arguments)
    if "top_k" in (parsed.metrics or []) and not parsed.n_best:
        parser.error("--metrics top_k scores n-best lists: give --n_best N")
    if parsed.n_best and parsed.perturb:
        parser.error("--perturb scores single translations: leave --n_best out")
    models = [*(parsed.model or []), *(name for name in parsed.compare if os.path.isdir(name))]
    if models and parsed.source is None:
        parser.error(f"{models[0]} is a model: --source is the text that it translates")
    if parsed.perturb and len(models) < len(parsed.model or [0]) + len(parsed.compare):
        parser.error("--perturb translates perturbed text, so that every system must be a model")
    if parsed.by not in (None, "length") and parsed.source is None:
        parser.error(f"--by {parsed.by} is a column of --source")
    return parsed


def translators(arguments: argparse.Namespace) -> dict[str, Any]:
    """The translator of each system by its name, the first one before those of --compare. None for a translation."""
    from hf_vanilla_transformer.utils.errors import UserError

    systems: dict[str, Any] = {}
    for name, models in [
        (arguments.hypothesis, arguments.model),
        *((name, [name]) for name in arguments.compare),
    ]:
        name = name or " + ".join(models)
        if name in systems:
            raise UserError(f"compare: {name} is named twice")
        is_model = name != arguments.hypothesis and (
            models == arguments.model or Path(name).is_dir()
        )
        systems[name] = load_translator(arguments, models) if is_model else None
    return systems


def read_hypotheses(file: str, references: list[str], name: str) -> list[str]:
    """An existing translation, one line for each reference."""
    from hf_vanilla_transformer.data.readers import require_plain_text
    from hf_vanilla_transformer.inference.sentences import read_sentences
    from hf_vanilla_transformer.utils.errors import UserError

    require_plain_text(Path(file))
    lines = list(read_sentences(file))
    if len(lines) != len(references):
        raise UserError(
            f"{file} has {len(lines)} lines, {name} has {len(references)}: each needs its other"
        )
    return lines


def translate_source(
    arguments: argparse.Namespace, translator: Any, sources: list[str]
) -> tuple[list[list[str]], dict[str, Any]]:
    """The n-best lists of --source, and the settings that produced them."""
    settings = given_values(arguments, *DECODING)
    start = time.perf_counter()
    codes = codes_of(arguments, translator, arguments.source)
    n_best = arguments.n_best or 1
    found = translator.translate_nbest(sources, n_best, scores=False, **settings, **codes)
    translations = [[hypothesis.text for hypothesis in hypotheses] for hypotheses in found]
    seconds = time.perf_counter() - start
    # Without --model the settings of a compared model are not reported.
    models = arguments.model or [None]
    return translations, {
        "model": models if len(models) > 1 else models[0],
        "source": arguments.source,
        "settings": translator.describe(**settings),
        "seconds": round(seconds, 3),
        "sentences_per_second": round(len(sources) / seconds, 3),
    }


def read_texts(
    arguments: argparse.Namespace,
) -> tuple[list[str] | None, list[list[str]], list[str] | None]:
    """Sources, if there are any, lists of references, and the labels of --by."""
    from hf_vanilla_transformer.evaluation.comparison import length_labels
    from hf_vanilla_transformer.inference.sentences import (
        read_labels,
        read_sentence_pairs,
        read_sentences,
    )
    from hf_vanilla_transformer.utils.errors import UserError

    columns = columns_of(
        arguments, (arguments.model or [None])[0], arguments.source, *arguments.reference
    )
    sources = None
    first = arguments.reference[0]
    if arguments.source:
        sources, references = read_sentence_pairs(arguments.source, first, columns, one_line=False)
    else:
        references = list(read_sentences(first, "target", columns, one_line=False))
    if not references:
        raise UserError(f"{first}: it is empty, there is nothing to score")
    lists = [
        references,
        *(
            list(read_sentences(name, "target", columns, one_line=False))
            for name in arguments.reference[1:]
        ),
    ]
    labels = None
    if arguments.by == "length":
        labels = length_labels(sources or references)
    elif arguments.by:
        labels = read_labels(arguments.source, arguments.by)
    for name, lines in (
        *zip(arguments.reference, lists, strict=True),
        (f"--by {arguments.by}", labels),
    ):
        if lines is not None and len(lines) != len(references):
            raise UserError(
                f"{name} has {len(lines)} lines, {first} has {len(references)}: each needs its other"
            )
    return sources, lists, labels


def score_perturbed(
    arguments: argparse.Namespace,
    systems: dict[str, Any],
    clean: dict[str, Any],
    pairs: list[tuple[str, str]],
    perturbations: list[str],
    options: dict[str, Any],
) -> dict[str, Any]:
    """Scores by perturbation and system, as of `scores_by_group`. `clean` has the scores of the text as it is."""
    from hf_vanilla_transformer.data.perturbations import perturb_all
    from hf_vanilla_transformer.evaluation.bleu_tokenizers import fitting_tokenizer
    from hf_vanilla_transformer.evaluation.comparison import scores_by_group

    groups: dict[str, Any] = {"none": clean}
    # one for all rows of the table, although foreign letters are among the perturbations
    tokenize = options["tokenize"] or fitting_tokenizer([reference for _, reference in pairs])
    options = options | {"tokenize": tokenize}
    languages: Any = (arguments.source_lang, arguments.target_lang)
    codes = codes_of(arguments, next(iter(systems.values())), arguments.source)
    if {"source_lang", "target_lang"} <= codes.keys():
        languages = list(zip(codes["source_lang"], codes["target_lang"], strict=True))
    for name in perturbations:
        sources, references = map(list, zip(*perturb_all(name, pairs, languages), strict=True))
        hypotheses = {}
        for system, translator in systems.items():
            settings = given_values(arguments, *DECODING) | codes_of(
                arguments, translator, arguments.source
            )
            hypotheses[system] = list(translator.translate(sources, **settings))
        labels = [name] * len(sources)
        groups |= scores_by_group(hypotheses, references, labels, sources=sources, **options)
    return groups


def items_of(task: str) -> str:
    """The name of what is scored, in the plural."""
    return "sentences" if task == "language" else "sequences"


def task_of_models(arguments: argparse.Namespace) -> str:
    """The task of the models: "sequence" if that of one is. Without a model it is "language"."""
    from hf_vanilla_transformer.data import load_tokenizers
    from hf_vanilla_transformer.data.token_kinds import tokenizer_task

    folders = [*(arguments.model or []), *arguments.compare]
    tasks = {tokenizer_task(*load_tokenizers(name)) for name in folders if Path(name).is_dir()}
    return "sequence" if "sequence" in tasks else "language"


def print_scores(
    results: dict[str, Any],
    scores: dict[str, float],
    tables: list[Any],
    signatures: list[str],
    form: str,
) -> None:
    """Print scores with their signatures, then tables with the signatures of groups."""
    from hf_vanilla_transformer.evaluation.metric_names import title_of
    from hf_vanilla_transformer.evaluation.score_tables import render

    # A file of hypotheses does not say what they are.
    items = "lines" if "hypothesis" in results else items_of(results.get("task", "language"))
    for name, score in scores.items() if "comparison" not in results else ():
        if name not in ("exact_match", "invalid"):
            print(f"{results.get(f'{name}_signature') or title_of(name)} = {score:.2f}")
    for table in tables:
        print(render(table, form), end="\n\n")
    for signature in signatures:
        print(signature)
    for signature in results.get("comparison", {}).get("signatures", {}).values():
        print(signature)
    print(f"exact match = {results['exact_match']:.2f} % of {results['sentences']} {items}")
    if "invalid" in scores:
        print(f"invalid = {scores['invalid']:.2f} % of {results['sentences']} {items}")
    if "seconds" in results:
        print(
            f"{results['seconds']:.1f} seconds, {results['sentences_per_second']:.1f} {items} per second"
        )


@dataclass
class Report:
    """The results for --output, and what is printed of them."""

    results: dict[str, Any]
    tables: list[Any] = field(default_factory=list)
    signatures: list[str] = field(default_factory=list)  #: of groups, each once

    def add_groups(self, name: str, title: str, groups: dict[str, Any], items: str) -> None:
        """Add the result `name` of `scores_by_group`, with its table. `items` names what is counted."""
        from hf_vanilla_transformer.evaluation import score_tables

        self.results[name] = groups
        self.tables.append(score_tables.group_table(title, groups, items))
        new = (
            each for each in score_tables.group_signatures(groups) if each not in self.signatures
        )
        self.signatures += dict.fromkeys(new)


@dataclass(frozen=True)
class Scored:
    """The texts of all systems, by the name of the system, and what they are compared with."""

    hypotheses: dict[str, list[str]]
    n_best: dict[str, list[list[str]]] | None  #: with --n_best
    references: list[list[str]]
    sources: list[str] | None

    @property
    def first(self) -> str:
        """The name of the first system, the baseline of a comparison."""
        return next(iter(self.hypotheses))

    def groups(self, labels: list[str], **options: Any) -> dict[str, Any]:
        """`scores_by_group` of these texts."""
        from hf_vanilla_transformer.evaluation.comparison import scores_by_group

        return scores_by_group(
            self.hypotheses, self.references, labels, sources=self.sources, **options
        )


def outputs_of_systems(
    arguments: argparse.Namespace,
    systems: dict[str, Any],
    sources: list[str] | None,
    references: list[list[str]],
) -> tuple[Scored, dict[str, Any]]:
    """The texts of files and models, and the settings or the file that those of the first system come from.

    Files are read before a model translates. Their lines have no line breaks, so that models and references that are
    compared with them lose theirs.
    """
    from hf_vanilla_transformer.inference.candidates import read_n_best
    from hf_vanilla_transformer.inference.text_io import on_one_line

    lists: dict[str, list[list[str]]] = {}
    for name, model in systems.items():
        if model is None and arguments.n_best:
            read = read_n_best(name, len(references[0]))
            lists[name] = [texts[: arguments.n_best] for texts in read]
        elif model is None:
            lines = read_hypotheses(name, references[0], arguments.reference[0])
            lists[name] = [[line] for line in lines]
    first = next(iter(systems))
    origin: dict[str, Any] = {"hypothesis": arguments.hypothesis}
    for name, translator in systems.items():
        if translator is None:
            continue
        lists[name], settings = translate_source(arguments, translator, sources or [])
        if name == first:
            origin = settings
    in_order = {name: lists[name] for name in systems}
    if None in systems.values():
        references = [list(map(on_one_line, texts)) for texts in references]
        in_order = {
            name: [list(map(on_one_line, texts)) for texts in of_system]
            for name, of_system in in_order.items()
        }
    hypotheses = {name: [texts[0] for texts in of_system] for name, of_system in in_order.items()}
    n_best = in_order if arguments.n_best else None
    return Scored(hypotheses, n_best, references, sources), origin


def add_comparison(report: Report, texts: Scored, options: dict[str, Any], task: str) -> None:
    """Add the comparison of the systems with the first one."""
    from hf_vanilla_transformer.evaluation import comparison, score_tables

    metrics = {name: each for name, each in options["metrics"].items() if name != "top_k"}
    compared = comparison.compare_systems(
        texts.hypotheses,
        texts.references,
        sources=texts.sources,
        **options | {"metrics": metrics},
    )
    report.results["comparison"] = compared
    report.results["differences"] = comparison.largest_differences(
        texts.hypotheses, texts.references, texts.sources, task=task
    )
    report.tables.append(score_tables.comparison_table(compared))


def scoring_options(arguments: argparse.Namespace, task: str) -> dict[str, Any]:
    """The arguments of `score_translations` that the flags give."""
    from hf_vanilla_transformer.evaluation.metric_names import DEFAULT, OF_SEQUENCES
    from hf_vanilla_transformer.evaluation.metrics import make_metrics
    from hf_vanilla_transformer.utils.normalization import import_normalizer

    of_task = DEFAULT if task == "language" else OF_SEQUENCES
    names = arguments.metrics or (["top_k"] if arguments.n_best else of_task)
    return {
        "metrics": make_metrics(names, arguments.bleu_tokenize, arguments.bleu_lowercase),
        "tokenize": arguments.bleu_tokenize,
        "lowercase": arguments.bleu_lowercase,
        "normalize": import_normalizer(arguments.normalize),
    }


def main(arguments: argparse.Namespace) -> None:
    from hf_vanilla_transformer.data.perturbations import perturbation_names
    from hf_vanilla_transformer.evaluation.metrics import score_names, score_translations
    from hf_vanilla_transformer.evaluation.score_tables import comparison_page
    from hf_vanilla_transformer.inference.text_io import line_writer
    from hf_vanilla_transformer.utils.errors import UserError

    task = task_of_models(arguments)
    items = items_of(task)
    if arguments.perturb and task == "sequence":
        raise UserError(
            "perturb: it perturbs text in a language, and the model reads other sequences"
        )
    # before the model translates for an hour
    options = scoring_options(arguments, task)
    names = score_names(options["metrics"])
    perturbations = perturbation_names(arguments.perturb or [])
    with (
        line_writer(arguments.output) if arguments.output else nullcontext() as write,
        line_writer(arguments.report) if arguments.report else nullcontext() as write_page,
    ):
        sources, references, labels = read_texts(arguments)
        systems = translators(arguments)
        texts, origin = outputs_of_systems(arguments, systems, sources, references)
        results = score_translations(
            texts.hypotheses[texts.first],
            texts.references,
            sources=sources,
            n_best=None if texts.n_best is None else texts.n_best[texts.first],
            **options,
        )
        scores = {name: results[name] for name in (*names, "invalid") if name in results}
        results |= origin
        if task == "sequence":
            results["task"] = task
        results["reference"] = (
            arguments.reference if len(references) > 1 else arguments.reference[0]
        )
        report = Report(results)
        if arguments.compare or any(":" in name for name in options["metrics"]):
            add_comparison(report, texts, options, task)
        if labels is not None:
            groups = texts.groups(labels, n_best=texts.n_best, **options)
            report.add_groups("groups", arguments.by, groups, items)
        if perturbations:
            clean = texts.groups(["none"] * len(references[0]), **options)["none"]
            pairs = list(zip(sources or [], references[0], strict=True))
            perturbed = score_perturbed(arguments, systems, clean, pairs, perturbations, options)
            report.add_groups("perturbations", "perturbation", perturbed, items)
        print_scores(results, scores, report.tables, report.signatures, arguments.format)
        if write:
            write(json.dumps(results, indent=2, ensure_ascii=False))
        if write_page:
            title = f"Scores on {results['reference']}"
            write_page(comparison_page(title, report.tables, results))
