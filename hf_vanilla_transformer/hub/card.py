"""The model card of a finished run. It states only facts that the run measured."""

import json
import math
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from itertools import chain
from numbers import Real
from pathlib import Path
from typing import Any, TypeGuard

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..evaluation.metric_names import TITLES
from ..text.language_codes import CodePair
from ..text.language_tokens import DIRECTIONS, MARKS, recorded_tokens
from ..text.tokenizer_files import TARGET_FOLDER
from ..utils.atomic_write import atomic_file
from ..utils.errors import UserError
from ..utils.markdown import isolated, markdown_table
from ..utils.untrusted import one_line, read_json_object

TEMPLATE = Path(__file__).with_name("card_template.md")

METRICS = {"bleu": "BLEU", "chrf": "chrF", "exact_match": "Exact match, %"}
METRICS |= {name: title for name, title in TITLES.items() if name not in METRICS}
# prefix in all_results.json: prefix in the recipe
SPLITS = {"test": "test", "base_test": "base_test", "eval": "validation"}
PLOTS = {
    "Loss and validation score over the updates": "curve.png",
    "Cross-attention": "attention.png",
}

# Numbers in the section on training: label and format.
NUMBERS = {
    "train_updates": ("updates", ",.0f"),
    "epoch": ("epochs", ".4g"),
    "train_loss": ("mean training loss", ".4f"),
}


@dataclass(frozen=True)
class CardFacts:
    """The facts about a run. The card omits missing ones."""

    model_name: str  #: title and name in the usage code: a folder or a repository on the Hub
    languages: tuple[str, str] | None = None  #: (source, target), as codes such as en
    directions: Sequence[CodePair] = ()  #: the pairs of a model of many languages
    task: str = "language"  #: or "sequence": the card has no words of translation
    recipe: Mapping[str, Any] = field(default_factory=dict)  #: all recipe fields that were set
    #: `all_results.json`: `test_bleu`, `test_chrf`, `eval_bleu`, `train_updates`, `epoch` …; `test_examples` of
    #: `evaluation.example_translations`
    metrics: Mapping[str, Any] = field(default_factory=dict)
    #: the numbers of pairs kept and dropped, by split (`train`, `validation`, `test`)
    data_summaries: Mapping[str, str] = field(default_factory=dict)
    #: the hash of the text, by split
    data_fingerprints: Mapping[str, str] = field(default_factory=dict)
    parameters: int | None = None  #: number of trained parameters, tied ones counted once
    #: the results of `to_dict()`. The test sets were translated with `generation_config`.
    config: Mapping[str, Any] = field(default_factory=dict)
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    #: wall time of training, including the time before a resumption
    train_seconds: float | None = None
    hardware: str | None = None  #: see `system_info`
    versions: Mapping[str, str] = field(default_factory=dict)
    #: the model that was fine-tuned. `base_model_on_hub` says that this is its name on the Hub
    base_model: str | None = None
    base_model_on_hub: bool = False
    #: by split, the names of its datasets on the Hub, each with its configuration after a colon if it has several
    datasets: Mapping[str, Sequence[str]] = field(default_factory=dict)
    license: str | None = None  #: the id of the model's license on the Hub
    example: str | None = None  #: a source sentence for the usage code


def write_model_card(directory: Path, facts: CardFacts) -> Path:
    """Write a model folder's `README.md` (atomically), with the plots and the remote code that the folder contains.

    Paths in the recipe are reduced to file names. Directories and access tokens are removed.

    Args:
        directory: the run's folder, in which the model is already saved.
        facts: what the run measured.

    Returns:
        The path of the card.

    Raises:
        OSError: it cannot be written.
    """
    card = model_card(Path(directory), facts)
    path = Path(directory) / "README.md"
    with atomic_file(path) as temporary:
        card.save(temporary)
    return path


def model_card(directory: Path, facts: CardFacts) -> ModelCard:
    """Return the card that `write_model_card` writes."""
    results = _results(facts)
    hub_names = _hub_names(facts)
    recipe = _public_recipe(facts.recipe, hub_names)
    answer = "translation" if facts.task == "language" else "prediction"
    return ModelCard.from_template(
        _metadata(facts, results),
        template_str=TEMPLATE.read_text(encoding="utf-8") + "\n",  # jinja strips the last newline
        **_model_section(directory, facts),
        results=results,
        config=facts.config,
        search=facts.generation_config,
        validation=facts.metrics,
        fields=facts.recipe,
        examples=_examples(facts.metrics.get("test_examples") or (), answer),
        sequence=facts.task == "sequence",
        result_signatures=_unique(filter(None, (row["signature"] for row in results))) or [],
        plots=[(caption, file) for caption, file in PLOTS.items() if (directory / file).is_file()],
        training=_training(facts),
        recipe=yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=119).rstrip()
        if recipe
        else None,
        data=_data(facts),
        fingerprints=any(facts.data_fingerprints.values()),
    )


def card_for_repository(text: str, repo_id: str, license: str | None = None) -> str:
    """Replace the model's name in a card by its name on the Hub, so that the usage code loads it from there.

    A card that this package did not write keeps its name. `license` is an id of the Hub. None keeps the card's.

    Raises:
        UserError: the metadata that would change cannot be read.
    """
    text = text.removeprefix("\ufeff")  # before the metadata, it hides them
    usage = re.search(r'^name = "([^"\n]+)"', text, re.MULTILINE)
    if usage is None and license is None:
        return text
    try:
        card = ModelCard(text, ignore_metadata_errors=True)
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise UserError(
            f"README.md: its metadata between the lines --- is damaged ({one_line(error)}): correct it"
        ) from None
    data: Any = card.data
    if license is not None:
        data.license = license
    if usage is not None:
        old = usage[1]
        short = repo_id.rpartition("/")[2]
        if data.model_name is not None:
            data.model_name = short
        named = re.sub(
            rf"^# {re.escape(old)}$", lambda _: f"# {short}", card.text, count=1, flags=re.MULTILINE
        )
        lines = re.compile(rf'^name = "{re.escape(old)}"', re.MULTILINE)
        card.text = lines.sub(lambda _: f'name = "{repo_id}"', named)
    return str(card)


# 1. Metadata for the Hub

#: the type and the name of a task. A sequence has no `pipeline_tag`, because no task of the Hub fits
_TASKS = {
    "language": ("translation", "Translation"),
    "sequence": ("sequence-to-sequence", "Sequence to sequence"),
}


def _metadata(facts: CardFacts, results: list[dict[str, Any]]) -> ModelCardData:
    named = [*(facts.languages or ()), *chain(*facts.directions)]
    codes = [code.replace("_", "-") for code in dict.fromkeys(named)]
    codes = [code for code in codes if _LANGUAGE.fullmatch(code)]
    datasets = [name.partition(":")[0] for name in facts.datasets.get("train", ())]
    of_splits = [row["result"] for row in results if "," not in row["label"].removesuffix(", %")]
    return ModelCardData(
        library_name="transformers",
        pipeline_tag="translation" if facts.task == "language" else None,
        language=_unique(code.split("-")[0] for code in codes),
        language_bcp47=codes if any("-" in code for code in codes) else None,
        license=facts.license,
        base_model=facts.base_model if facts.base_model_on_hub else None,
        datasets=_unique(datasets),
        metrics=_unique(row["result"].metric_type for row in results),
        tags=["vanilla_transformer", _TASKS[facts.task][0], "attention-is-all-you-need"],
        model_name=_public_value("model_name", facts.model_name) if results else None,
        eval_results=of_splits or None,
    )


def _unique(values: Iterable[str]) -> list[str] | None:
    """The values in their order, each once, or None if there are none."""
    return list(dict.fromkeys(values)) or None


def _results(facts: CardFacts) -> list[dict[str, Any]]:
    """One row per measured score: the fields of the template's table, and the `result` in the metadata."""
    task_type, task_name = _TASKS[facts.task]
    rows = []
    for prefix, split in SPLITS.items():
        text, dataset = _text(facts, split)
        dataset, _, configuration = (dataset or "").partition(":")
        for metric, label, part in _measured(facts.metrics, prefix):
            name = f"{prefix}_{metric}{part}"
            value = facts.metrics.get(name)
            before = facts.metrics.get(f"before_{name}")
            if not _is_number(value):
                continue
            # Scores of a direction or an input are not in the metadata: those are of whole splits.
            signature = None if part else facts.metrics.get(f"{name}_signature")
            result = EvalResult(
                task_type=task_type,
                task_name=task_name,
                dataset_type=dataset or "parallel-text",
                dataset_name=text or "parallel text",
                dataset_config=configuration or None,
                dataset_split=split,
                metric_type=metric,
                metric_name=label,
                metric_value=round(float(value), 2),
                metric_args={"signature": signature} if signature else None,
            )
            rows.append(
                {
                    "split": split,
                    "text": text,
                    "label": label,
                    "signature": signature,
                    "result": result,
                    "before": f"{float(before):.2f}" if _is_number(before) else "",
                    "shown": f"{float(value):.2f}",
                }
            )
    return rows


def _measured(metrics: Mapping[str, object], prefix: str) -> Iterator[tuple[str, str, str]]:
    """The metrics of a split, with their labels, and those of its directions or inputs, with the end of their name."""
    for metric, label in METRICS.items():
        yield metric, label, ""
    for metric, label in METRICS.items():
        start = f"{prefix}_{metric}_"
        names = (name.removeprefix(start) for name in metrics if name.startswith(start))
        yield from ((metric, f"{label}, {name}", f"_{name}") for name in names)


def _examples(rows: Sequence[Sequence[str]], answer: str) -> str | None:
    """A table of sources, references and answers of the model, or None."""
    cells = [
        [isolated(re.sub(r"([\\|<*_`\[])", r"\\\1", " ".join(text.split()))) for text in row]
        for row in rows
    ]
    return markdown_table(("source", "reference", answer), cells) if rows else None


_BUILT_IN = "number words made by num2words"
_PARTS = {
    "validation": "max_eval_samples",
    "test": "max_test_samples",
}


def _text(facts: CardFacts, split: str) -> tuple[str | None, str | None]:
    """The description of a split's text, and its dataset on the Hub or None."""
    inputs = [str(name) for name in facts.recipe.get(split) or ()]
    shown = [
        _BUILT_IN if name == "numbers" else _public_value("input", name, _hub_names(facts))
        for name in inputs
    ]
    text = ", ".join(shown) or None
    on_hub = list(facts.datasets.get(split, ()))
    dataset = on_hub[0] if inputs == on_hub and len(on_hub) == 1 else None
    part = facts.recipe.get(_PARTS.get(split.removeprefix("base_"), ""))
    if text is None and split == "validation" and facts.recipe.get("held_out_pairs"):
        text = "pairs held out of the training text"
    return f"{text}, the first {part:,} pairs" if text and isinstance(part, int) else text, dataset


def _hub_names(facts: CardFacts) -> set[str]:
    """The datasets on the Hub. Their names look like relative paths."""
    return {name for names in facts.datasets.values() for name in names}


# 2. The text

# The classes that need the extra `convert`.
_OF_EXTRA = ("MarianTokenizer", "FSMTTokenizer", "M2M100Tokenizer")


def _model_section(directory: Path, facts: CardFacts) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    with suppress(UserError, OSError):
        settings = read_json_object(directory / "tokenizer_config.json")
    # the usage code gives the target language at the start of the text, or as an argument of `generate`
    mark = forced = ""
    if directions := settings.get(DIRECTIONS):
        tokens = recorded_tokens(settings)
        direction = dict(zip(("source", "target"), directions[0], strict=True))
        source_mark, target_mark = settings[MARKS]
        if source_mark:
            mark = f"{tokens[direction[source_mark]]} "
        if target_mark:
            token = tokens[direction["target"]]
            forced = f', forced_bos_token_id=tokenizer.convert_tokens_to_ids("{token}")'
    kind = settings.get("tokenizer_class")
    return {
        "name": _public_value("model_name", facts.model_name),
        "languages": facts.languages,
        "directions": facts.directions,
        "forced": forced,
        "both_ways": " and back" if facts.recipe.get("bidirectional") else "",
        "base_model": _public_value("base_model_id", facts.base_model)
        if facts.base_model
        else None,
        "parameters": f"{facts.parameters:,}" if facts.parameters is not None else None,
        "target_tokenizer": TARGET_FOLDER if (directory / TARGET_FOLDER).is_dir() else None,
        "tokenizer": kind if kind in _OF_EXTRA else None,
        "typed_example": shlex.quote(facts.example or "…"),
        "example": json.dumps(mark + (facts.example or "Put your text here."), ensure_ascii=False),
        "ships_code": (directory / "modeling_vanilla_transformer.py").is_file(),
        "ships_pipeline": (directory / "pipeline_vanilla_transformer.py").is_file(),
    }


def _training(facts: CardFacts) -> list[tuple[str, str]]:
    measured = facts.metrics
    lines = []
    for name, (label, style) in NUMBERS.items():
        if _is_number(value := measured.get(name)):
            lines.append((label, format(value, style)))
    if count := measured.get("averaged_checkpoints"):
        lines.append(("weights", f"the mean of the last {count} checkpoints"))
    if decay := measured.get("ema_decay"):
        lines.append(("weights", f"their exponential moving average with decay {decay:g}"))
    if facts.train_seconds is not None:
        lines.append(("wall time (h:min:s)", str(timedelta(seconds=round(facts.train_seconds)))))
    if facts.hardware:
        lines.append(("hardware", _public_text(facts.hardware)))
    versions = [
        f"{name} {version}"
        for name, version in facts.versions.items()
        if facts.task != "sequence" or name != "sacrebleu"
    ]
    if versions:
        lines.append(("versions", ", ".join(versions)))
    return lines


def _data(facts: CardFacts) -> list[tuple[str, str]]:
    lines = []
    usual = ("train", "validation", "test")
    for split in dict.fromkeys((*usual, *facts.data_summaries, *facts.data_fingerprints)):
        text, dataset = _text(facts, split)
        summary = facts.data_summaries.get(split)
        fingerprint = facts.data_fingerprints.get(split)
        parts = [text, _public_text(summary or ""), fingerprint and f"fingerprint `{fingerprint}`"]
        if summary or fingerprint or (text and not dataset):
            lines.append((split, "; ".join(part for part in parts if part)))
    return lines


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and math.isfinite(value)


# 3. Redaction of directories and secrets

# An absolute path within other text: from the root, a drive, a share or a home directory. Group 1: its last part.
_ABSOLUTE_PATH = re.compile(
    r"""(?<![^\s"'(=,:;`\[])(?:file://)?(?:~[^\s\\/]*|[A-Za-z]:)?(?:\\\\|[\\/])(?:[^\s"'()<>,;:`|\\/\]]+[\\/]+)*"""
    r"""([^\s"'()<>,;:`|\\/\]]+)"""
)
_PATH_START = re.compile(r"(file://|~|[A-Za-z]:)?[\\/]")
# The Hub accepts a code of ISO 639 as `language`, and one with subtags only as `language_bcp47`.
_LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]{2,8})*")
_HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
_SECRET_FIELD = re.compile(r"(^|[_-])(token|password|secret|key)$", re.IGNORECASE)
#: Keys of the Hub, AWS, GitHub, GitLab, Google, Slack, OpenAI and Anthropic, and of any service: tokens of JSON,
#: private keys, addresses with a password.
SECRET = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|(?:AKIA|ASIA)[A-Z0-9]{16}\b|gh[opsru]_[A-Za-z0-9]{36}|github_pat_\w{22,}"
    r"|glpat-[\w-]{20}|AIza[\w-]{35}|xox[abeprs]-[\w-]{10,}"
    r"|sk-(?:(?:ant|proj|svcacct)-[\w-]{32,}|[A-Za-z0-9]{40,})|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,})"
    r"|-----BEGIN (?:[A-Z]+ )*PRIVATE KEY|(?<=://)[^\s/:@\"'<>]+:[^\s/:@\"'<>]+@"
)


def _public_text(text: str) -> str:
    """Text with absolute paths reduced to their last part, and without secrets."""
    return _ABSOLUTE_PATH.sub(r"\1", SECRET.sub("…", text))


def _public_value(name: str, value: str, hub_names: Collection[str] = ()) -> str:
    """The value of a recipe field or a flag: a path is reduced to its last part, a name on the Hub is kept."""
    if value in hub_names:
        return value
    is_path = _PATH_START.match(value) or not re.search(r"[\s{\[]|://", value)
    if is_path and not (name.endswith(("_name", "_id")) and _HUB_NAME.fullmatch(value)):
        value = re.split(r"[\\/]", value.rstrip("\\/"))[-1]
    return _public_text(value)


def _public_recipe(recipe: Mapping[str, object], hub_names: Collection[str]) -> dict[str, object]:
    return {
        str(name): _plain(str(name), value, hub_names)
        for name, value in recipe.items()
        if value is not None and not (isinstance(value, str) and _SECRET_FIELD.search(str(name)))
    }


def _plain(name: str, value: object, hub_names: Collection[str]) -> Any:
    """A value that YAML can represent, without private parts."""
    if isinstance(value, Enum):
        return _plain(name, value.value, hub_names)
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return _public_recipe(value, hub_names)
    if isinstance(value, list | tuple | set):
        items = [_plain(name, each, hub_names) for each in value if each is not None]
        # A recipe takes a list of one without brackets.
        return items[0] if len(items) == 1 else items
    return _public_value(name, str(value), hub_names)
