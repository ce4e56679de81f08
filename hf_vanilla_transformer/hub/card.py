"""The model card of a finished run. It says what the run measured, and nothing else."""

import json
import math
import os
import platform
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from importlib import metadata
from numbers import Real
from pathlib import Path
from typing import Any, TypeGuard

import torch
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..atomic_write import atomic_file
from ..data.tokenizer_training import TARGET_FOLDER

TEMPLATE = Path(__file__).with_name("card_template.md")

METRICS = {"bleu": "BLEU", "chrf": "chrF", "exact_match": "Exact match, %"}
SPLITS = {"test": "test", "eval": "validation"}  # the prefix in all_results.json, and what the recipe calls it
PICTURES = {"Loss and validation score over the updates": "curve.png", "Cross-attention": "attention.png"}
PACKAGES = ("hf_vanilla_transformer", "torch", "transformers", "tokenizers", "datasets", "accelerate", "sacrebleu")

# Sizes that tell a model from another, with the paper's names; both languages' are told apart where they differ.
SIZES = {
    "d_model": "d_model",
    "encoder_layers": "encoder layers",
    "decoder_layers": "decoder layers",
    "encoder_ffn_dim": "d_ff, encoder",
    "decoder_ffn_dim": "d_ff, decoder",
    "encoder_attention_heads": "heads, encoder",
    "decoder_attention_heads": "heads, decoder",
    "head_dim": "d_k",
    "value_head_dim": "d_v",
    "vocab_size": "vocabulary",
    "decoder_vocab_size": "target vocabulary",
    "position_encoding_type": "positions",
    "activation_function": "activation",
    "dropout": "dropout",
    "label_smoothing": "label smoothing",
}


@dataclass(frozen=True)
class CardFacts:
    """What is known of a run. Whatever is left out has no line in the card.

    Attributes:
        model_name: the title, and what the usage lines load: a folder's name or a repository on the Hub.
        languages: (source, target), as codes such as en.
        recipe: every value that the run was given, by its name.
        command: how the run was called.
        metrics: `all_results.json`: `test_bleu`, `test_chrf`, `eval_bleu`, `train_updates`, `epoch` …
        signatures: sacreBLEU's, by metric (`bleu`) or by split and metric (`test_bleu`); those that stand in
            `metrics` as `test_bleu_signature` are found there.
        data_summaries: by split (`train`, `validation`, `test`), how many pairs were kept and dropped.
        data_fingerprints: by split, the hash of the text.
        parameters: how many numbers the model has learned, tied ones counted once.
        config: `config.to_dict()`.
        train_seconds: wall time of training, of all its parts where it was resumed.
        hardware: `describe_hardware()`.
        versions: `versions()`.
        datasets: names of data sets on the Hub.
        license: the model's, as the Hub names it.
        example: a source sentence for the usage lines.
    """

    model_name: str
    languages: tuple[str, str] | None = None
    recipe: Mapping[str, Any] = field(default_factory=dict)
    command: str | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    signatures: Mapping[str, str] = field(default_factory=dict)
    data_summaries: Mapping[str, str] = field(default_factory=dict)
    data_fingerprints: Mapping[str, str] = field(default_factory=dict)
    parameters: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    train_seconds: float | None = None
    hardware: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    datasets: Sequence[str] = ()
    license: str | None = None
    example: str | None = None


def write_model_card(directory: Path, facts: CardFacts) -> Path:
    """Write `README.md` into a model folder; pictures and code files that lie there are shown and explained.

    Files are told by their names: no folder, home directory or access token of the recipe or command gets into it.

    Args:
        directory: the run's folder, in which the model is already saved.
        facts: what the run measured.

    Returns:
        The path of the card, which appears whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    directory = Path(directory)
    card = model_card(directory, facts)
    path = directory / "README.md"
    with atomic_file(path) as temporary:
        card.save(temporary)
    return path


def model_card(directory: Path, facts: CardFacts) -> ModelCard:
    """The card of a model folder, without writing it.

    Args:
        directory: where the model, its code and its pictures lie.
        facts: what the run measured.
    """
    results = _results(facts)
    return ModelCard.from_template(
        _metadata(facts, results),
        template_str=TEMPLATE.read_text(encoding="utf-8") + "\n",  # jinja takes the last one away
        **_model_section(directory, facts),
        results=results,
        result_signatures=list(dict.fromkeys(row["signature"] for row in results if row["signature"])),
        pictures=[(caption, file) for caption, file in PICTURES.items() if (directory / file).is_file()],
        training=_training(facts),
        command=_public_command(facts.command) if facts.command else None,
        recipe=_yaml(facts.recipe),
        data=_data(facts),
        fingerprints=any(facts.data_fingerprints.values()),
        limits=_limits(facts),
    )


def card_for_repository(text: str, repo_id: str, license: str | None = None) -> str:
    """A card in which the model has the name that it has on the Hub, so that the usage lines load it from there.

    Args:
        text: a card; only one of this package has usage lines to change.
        repo_id: the model's name on the Hub.
        license: as the Hub names it; None keeps what the card says.
    """
    usage = re.search(r'^name = "([^"\n]+)"', text, re.MULTILINE)
    if usage is None and license is None:
        return text
    card = ModelCard(text, ignore_metadata_errors=True)
    data: Any = card.data
    if license is not None:
        data.license = license
    if usage is not None:
        old, short = usage[1], repo_id.rpartition("/")[2]
        if data.model_name is not None:
            data.model_name = short
        named = re.sub(rf"^# {re.escape(old)}$", lambda _: f"# {short}", card.text, count=1, flags=re.MULTILINE)
        lines = re.compile(rf'^name = "{re.escape(old)}"', re.MULTILINE)
        card.text = lines.sub(lambda _: f'name = "{repo_id}"', named)
    return str(card)


def describe_hardware() -> str:
    """The machine in one line: `AMD EPYC 7B13, 2 of 64 cores, 2 torch threads; 1 x NVIDIA H200`."""
    total = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    cores = f"{usable} cores" if usable == total else f"{usable} of {total} cores"
    parts = [f"{_cpu_name()}, {cores}, {torch.get_num_threads()} torch threads"]
    names = Counter(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    parts += [f"{count} x {name}" for name, count in names.items()]
    return "; ".join(parts)


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(\S.*)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """The version of Python and of each package that a run's numbers depend on, where it is installed."""
    from .. import __version__  # a source tree on PYTHONPATH has no metadata

    found = {"python": platform.python_version(), "hf_vanilla_transformer": __version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


# 1. What the Hub reads


def _metadata(facts: CardFacts, results: list[dict[str, Any]]) -> ModelCardData:
    return ModelCardData(
        library_name="transformers",
        pipeline_tag="translation",
        language=list(dict.fromkeys(facts.languages)) if facts.languages else None,
        license=facts.license,
        datasets=[name for name in facts.datasets if _is_hub_name(name)] or None,
        metrics=list(dict.fromkeys(row["metric"] for row in results)) or None,
        tags=["vanilla_transformer", "translation", "attention-is-all-you-need"],
        model_name=_public_value("model_name", facts.model_name) if results else None,
        eval_results=[_eval_result(row) for row in results] or None,
    )


def _eval_result(row: dict[str, Any]) -> EvalResult:
    return EvalResult(
        task_type="translation",
        task_name="Translation",
        dataset_type=row["dataset"] or "parallel-text",
        dataset_name=row["text"] or "parallel text",
        dataset_config=row["config"],
        dataset_split=row["split"],
        metric_type=row["metric"],
        metric_name=row["label"],
        metric_value=row["value"],
        metric_args={"signature": row["signature"]} if row["signature"] else None,
    )


def _results(facts: CardFacts) -> list[dict[str, Any]]:
    """One row for each score that was measured."""
    rows = []
    for prefix, split in SPLITS.items():
        text, dataset = _text(facts, split)
        for metric, label in METRICS.items():
            name = f"{prefix}_{metric}"
            value = facts.metrics.get(name)
            if not _is_number(value):
                continue
            signature = facts.signatures.get(name) or facts.metrics.get(f"{name}_signature")
            row = {"split": split, "text": text, "dataset": dataset, "metric": metric, "label": label}
            row["config"] = facts.recipe.get("dataset_config_name") if dataset else None
            row["signature"] = signature or facts.signatures.get(metric)
            rows.append(row | {"value": round(float(value), 2), "shown": f"{float(value):.2f}"})
    return rows


def _text(facts: CardFacts, split: str) -> tuple[str | None, str | None]:
    """What a split was read from, and its name on the Hub if it has one; a recipe's files win over its data set."""
    recipe = facts.recipe
    files = [recipe.get(f"{split}{side}_file") for side in ("", "_source", "_target")]
    if any(files):
        return ", ".join(_public_value("file", str(file)) for file in files if file), None
    if recipe.get("numbers_size"):
        return "number words made by num2words", None
    if recipe.get("train_file") or recipe.get("train_source_file"):
        return None, None  # the data set was not read
    name = recipe.get("dataset_name") or next(iter(facts.datasets), None)
    if not name:
        return None, None
    return _public_value("dataset_name", str(name)), str(name) if _is_hub_name(str(name)) else None


# 2. What people read


def _model_section(directory: Path, facts: CardFacts) -> dict[str, Any]:
    sizes = {label: facts.config.get(name) for name, label in SIZES.items()}
    example = json.dumps(facts.example or "Put your text here.", ensure_ascii=False)
    translate = [f"sentences = [{example}]"]
    translate.append('inputs = tokenizer(sentences, padding=True, return_tensors="pt")')
    translate.append("outputs = model.generate(**inputs)")
    decoder = "tokenizer"
    if (directory / TARGET_FOLDER).is_dir():
        decoder = "target_tokenizer"
        translate.append(f'{decoder} = AutoTokenizer.from_pretrained(name, subfolder="{TARGET_FOLDER}")')
    translate.append(f"print({decoder}.batch_decode(outputs, skip_special_tokens=True))")
    return {
        "name": _public_value("model_name", facts.model_name),
        "languages": facts.languages,
        "parameters": f"{facts.parameters:,}" if facts.parameters is not None else None,
        "sizes": [(label, f"{size:,}" if isinstance(size, int) else size) for label, size in sizes.items() if size],
        "translate": "\n".join(translate),
        "example": example,
        "ships_code": (directory / "modeling_vanilla_transformer.py").is_file(),
        "ships_pipeline": (directory / "pipeline_vanilla_transformer.py").is_file(),
    }


def _training(facts: CardFacts) -> list[tuple[str, str]]:
    measured = facts.metrics
    lines = []
    if _is_number(measured.get("train_updates")):
        lines.append(("updates", f"{int(measured['train_updates']):,}"))
    if _is_number(measured.get("epoch")):
        lines.append(("epochs", f"{float(measured['epoch']):.4g}"))
    if _is_number(measured.get("train_loss")):
        lines.append(("mean training loss", f"{float(measured['train_loss']):.4f}"))
    if measured.get("averaged_checkpoints"):
        lines.append(("weights", f"the mean of the last {measured['averaged_checkpoints']} checkpoints"))
    if facts.train_seconds is not None:
        lines.append(("wall time (h:min:s)", str(timedelta(seconds=round(facts.train_seconds)))))
    if facts.hardware:
        lines.append(("hardware", _public_text(facts.hardware)))
    if facts.versions:
        lines.append(("versions", ", ".join(f"{name} {version}" for name, version in facts.versions.items())))
    return lines


def _data(facts: CardFacts) -> list[tuple[str, str]]:
    lines = []
    for split in dict.fromkeys(("train", "validation", "test", *facts.data_summaries, *facts.data_fingerprints)):
        text, dataset = _text(facts, split)
        summary, fingerprint = facts.data_summaries.get(split), facts.data_fingerprints.get(split)
        if not (summary or fingerprint or (text and not dataset)):
            continue
        parts = [text, _public_text(summary or "")]
        parts.append(f"fingerprint `{fingerprint}`" if fingerprint else "")
        lines.append((split, "; ".join(part for part in parts if part)))
    return lines


def _limits(facts: CardFacts) -> list[str]:
    recipe, limits = facts.recipe, []
    if recipe.get("numbers_size"):
        limits.append("It was trained on number words, and can translate nothing else.")
    if recipe.get("lowercase"):
        limits.append("It lower-cases what it reads, and writes lower case.")
    for side in ("source", "target"):
        if recipe.get(f"max_{side}_length"):
            longest = recipe[f"max_{side}_length"]
            limits.append(f"It was trained on no {side} sentence of more than {longest} tokens.")
    if facts.config.get("position_encoding_type") == "learned" and facts.config.get("max_position_embeddings"):
        limits.append(f"It can read and write at most {facts.config['max_position_embeddings']} tokens.")
    return limits


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, Real) and math.isfinite(value)


# 3. What nobody should read: folders, home directories, access tokens

# A path from the root, a drive, a share or a home directory, inside other text; the group is its last part.
_ABSOLUTE_PATH = re.compile(
    r"""(?<![^\s"'(=,:;`\[])(?:file://)?(?:~[^\s\\/]*|[A-Za-z]:)?(?:\\\\|[\\/])(?:[^\s"'()<>,;:`|\\/\]]+[\\/]+)*"""
    r"""([^\s"'()<>,;:`|\\/\]]+)"""
)
_PATH_START = re.compile(r"(file://|~|[A-Za-z]:)?[\\/]")
_HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
_SECRET_FIELD = re.compile(r"(^|[_-])(token|password|secret|key)$", re.IGNORECASE)
_SECRET = re.compile(r"\bhf_[A-Za-z0-9]{16,}")


def _is_hub_name(value: str) -> bool:
    return bool(_HUB_NAME.fullmatch(value))


def _public_text(text: str) -> str:
    """A sentence with each absolute path reduced to its last part, and no access token."""
    return _SECRET.sub("hf_…", _ABSOLUTE_PATH.sub(r"\1", text))


def _public_value(name: str, value: str) -> str:
    """The value of a recipe's field or a flag; a path is reduced to its last part, a name on the Hub is kept."""
    is_path = _PATH_START.match(value) or not re.search(r"[\s{\[]|://", value)
    if is_path and not (name.endswith(("_name", "_id")) and _is_hub_name(value)):
        value = re.split(r"[\\/]", value.rstrip("\\/"))[-1]
    return _public_text(value)


def _public_command(command: str) -> str:
    """A command line in which files and folders are told by their names; the script and recipe keep relative paths."""
    try:
        words = shlex.split(command)
    except ValueError:  # an open quotation
        words = command.split()
    shown: list[str] = []
    flag = ""  # whose value comes next
    for word in words:
        name, equals, value = word.partition("=")
        if equals and re.fullmatch(r"[\w-]+", name):  # --flag=value, VARIABLE=value
            if not _SECRET_FIELD.search(name):
                shown.append(f"{name}={_public_value(name, value)}")
            flag = ""
        elif word.startswith("-"):
            flag = word
            if not _SECRET_FIELD.search(flag):
                shown.append(word)
        elif flag:
            if not _SECRET_FIELD.search(flag):
                shown.append(_public_value(flag, word))
            flag = ""
        else:
            inside = not _PATH_START.match(word) and ".." not in re.split(r"[\\/]", word)
            shown.append(_public_text(word) if inside else _public_value("file", word))
    return shlex.join(shown)


def _yaml(recipe: Mapping[str, Any]) -> str | None:
    public = _public_recipe(recipe)
    if not public:
        return None
    return yaml.safe_dump(public, sort_keys=False, allow_unicode=True, width=119).rstrip()


def _public_recipe(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {
        str(name): _plain(str(name), value)
        for name, value in recipe.items()
        if value is not None and not (isinstance(value, str) and _SECRET_FIELD.search(str(name)))
    }


def _plain(name: str, value: Any) -> Any:
    """What YAML can write, without what is private."""
    if isinstance(value, Enum):
        return _plain(name, value.value)
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return _public_recipe(value)
    if isinstance(value, list | tuple | set):
        return [_plain(name, each) for each in value if each is not None]
    return _public_value(name, str(value))
