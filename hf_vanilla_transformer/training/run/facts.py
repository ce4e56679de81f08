"""The facts of a run that its checkpoints keep: digests of its data, its tokenizers, its base model.

`fingerprint` says what a resumed run does with them.
"""

from pathlib import Path
from typing import Any

from ...text.tokenizer_files import tokenizer_digest
from ..state.fingerprint import TOKENIZER, UPDATES, Facts, content_of, source_digest
from .arguments import RunArguments
from .run_state import Run

# Data arguments that determine the pairs and batches.
_OF_DATA = (
    "max_source_length",
    "max_target_length",
    "augment",
    "rewrite",
    "source_form",
)
_OF_DIRECTIONS = ("directions", "language_token", "add_languages")
# Those that determine the scores that select the weights.
_OF_SCORES = ("metrics", "normalize", "bleu_tokenize", "bleu_lowercase")
# Splits that are scored after training.
SCORED = ("test", "base_test")
# Those that change nothing that is trained.
_OTHER = ("source_lang", "target_lang")
# Those that may name functions of the user.
_CODE = ("rewrite", "source_form", "normalize", "metrics")
PRECISION = "precision"


def model_facts(args: RunArguments, base: Path | None) -> Facts:
    """The fixed facts about the base model and the adapters. `base` is the folder, if it is on this machine."""
    name = args.model_name_or_path
    content = None
    if name is not None:
        content = {"name": name, "digest": content_of(base)["digest"] if base is not None else None}
    return {"model_name_or_path": content, "lora_r": args.lora_r}


def fixed_facts(run: Run) -> dict[str, Any]:
    """Facts that cannot change within a run: the base model, the tokenizers, and the settings of their training."""
    facts = {
        **run.facts,
        "tokenizer": tokenizer_digest(run.tokenizers),
        "special tokens": [sorted(each.all_special_ids) for each in run.tokenizers],
    }
    for name in _OF_DIRECTIONS:
        facts[name] = getattr(run.data_args, name)
    # A resumed run takes the tokenizers of its checkpoint.
    if not run.data_args.tokenizer_name:
        arguments = vars(run.model_args) | vars(run.data_args)
        facts |= {name: arguments[name] for name in TOKENIZER}
    return facts


def data_facts(run: Run) -> Facts:
    """The facts about the data that determine the batches: digests of the content, length limits, perturbations.

    The validation data counts if it selects the weights or ends the run.
    """
    facts: Facts = {"training data": _digest_of_split(run, "train")}
    for name in _OF_DATA:
        facts[name] = getattr(run.data_args, name)
    return facts | (_score_facts(run) if run.args.metric_for_best_model else {})


def other_facts(run: Run) -> Facts:
    """Facts that change nothing that is trained, unless the scores select the weights (`data_facts`)."""
    facts = {name: getattr(run.data_args, name) for name in _OTHER}
    for split in SCORED:
        facts[split_fact(split)] = _digest_of_split(run, split)
    for name in _CODE:
        facts[f"code of {name}"] = names_digest(getattr(run.data_args, name))
    return facts | _score_facts(run)


def facts_of_seeds(run: Run) -> Facts:
    """The facts that runs with several seeds share, so that the seed alone decides between their scores."""
    args = run.args
    # The minutes of a run decide how many updates it has.
    facts = {name: value for name, value in run.facts.items() if name != UPDATES}
    if run.data_args.data or run.data_args.tokenizer_name:  # others depend on the seed
        facts["tokenizer"] = tokenizer_digest(run.tokenizers)
    return {
        **facts,
        **data_facts(run),
        **other_facts(run),
        "code of model_class": names_digest(args.model_class),
        "teacher": content_of(*args.teacher) if args.teacher else None,
        PRECISION: "bf16" if args.bf16 else "fp16" if args.fp16 else "float32",
    }


def names_digest(names: str | list[str] | None) -> str | None:
    """A digest of the modules of MODULE:FUNCTION names, and of the folders of metrics. Other names have none."""
    listed = [names] if isinstance(names, str) else names or []
    functions = source_digest(name.partition(":")[0] for name in listed if ":" in name)
    folders = [str(content_of(name)["digest"]) for name in listed if Path(name).is_dir()]
    return " ".join(filter(None, [functions, *folders])) or None


def split_fact(split: str) -> str:
    """The name of the fact about the content of an evaluation split."""
    return f"{split} data"


def _score_facts(run: Run) -> Facts:
    facts: Facts = {split_fact("validation"): _digest_of_split(run, "validation")}
    for name in _OF_SCORES:
        facts[name] = getattr(run.data_args, name)
    return facts


def _digest_of_split(run: Run, split: str) -> str | None:
    pairs = run.corpus.pairs.get(split)
    if pairs is None:
        return None
    return f"{len(pairs):,} pairs with digest {run.corpus.fingerprint(split)[:16]}"
