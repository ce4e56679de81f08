"""The fingerprint of a run: everything that it depends on, and what a resumed run may change.

A checkpoint keeps the fingerprint of its run (`RunState`), and a resumed run compares it with its own. There are four
groups of settings and facts:

- fixed: a change is refused. They decide what the weights and the optimizer's state mean.
- data: they decide the pairs of an update. A change is refused, unless `ignore_data_skip` starts the epoch again.
- objective and settings: a change is printed.
- `IRRELEVANT`: not recorded. The trained weights are the same with any value.

A field of the arguments that no list names belongs to the settings, so that a field of a later version of transformers
does not change silently. A setting that a checkpoint records and that no longer exists counts as changed, unless it
was switched off (`compare`).
"""

import hashlib
import json
import math
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TypeAlias, TypeGuard

from torch.distributed.fsdp import FSDPModule
from transformers import TrainingArguments

from ...configuration_vanilla_transformer import VanillaTransformerConfig
from ...utils.errors import UserError
from ...utils.untrusted import one_line
from .distributed import print_main

#: Values of settings, and other facts of a run, by their names.
Facts: TypeAlias = dict[str, object]

RUN_STATE = "run_state.json"
CHECKED = (".json", ".safetensors")
REMEDY = "optimizer and model continue with that; set it again, or start a run in a new output_dir"
_NEW_OPTIMIZER = (
    "the saved optimizer and schedule continue with that; set it again, or start a new optimizer and schedule from "
    "these weights, in a new output_dir, with model_name_or_path={checkpoint}"
)
_NEW_EPOCH = "restart the epoch with ignore_data_skip=True"
DATA_REMEDY = f"resume with that, or {_NEW_EPOCH}"
_SAME_CODE = "resume with the version of the code that trained it"

# Fixed: optimizer and schedule. Their states in a checkpoint would override new values.
OPTIMIZATION = (
    "learning_rate",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "optim",
    "optim_args",
    "optim_target_modules",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "muon",
)
# Fixed if both runs have them: the best score so far is of this metric.
SELECTION = ("metric_for_best_model", "greater_is_better")
# Fixed if both runs have them: chosen by the size of the data or the minutes of a run.
CHOICE = "by_pairs"
UPDATES = "planned updates"
# Fixed if both runs train tokenizers.
TOKENIZER = (
    "vocab_size",
    "separate_vocabularies",
    "min_frequency",
    "tokenizer_sentences",
    "lowercase",
    "source_lowercase",
    "tokens",
    "source_tokens",
    "target_tokens",
    "task",
)
# Data: the pairs of an update.
PLAN = ("max_tokens_per_batch", "tokens_per_update", "pack", "seed", "data_seed")
# Data: the version of the plan of packed rows. Those of checkpoints that do not say so are of the first.
PACKING = "version of the plan of packed rows"
# Objective: a run may change it at a checkpoint, as Bi-SimCut does.
OBJECTIVE = (
    "simcut_alpha",
    "r_drop_alpha",
    "crossconst_alpha",
    "consistency_start",
    "teacher_weight",
    "teacher_top",
    "ema_decay",
    "max_grad_norm",
    "label_smoothing_factor",
    "neftune_noise_alpha",
)
REGULARISATION = ("dropout", "attention_dropout", "activation_dropout", "label_smoothing")
_OF_TOKENS = ("vocab_size", "_token_id")
_OTHER_FIELDS = (*REGULARISATION, "attention_kernels", "use_cache")
# Fixed: the function of the weights. Vocabularies and ids are compared with the tokenizers.
ARCHITECTURE = tuple(
    each.name
    for each in fields(VanillaTransformerConfig)
    if each.name in VanillaTransformerConfig.__annotations__
    and each.name not in _OTHER_FIELDS
    and not each.name.endswith(_OF_TOKENS)
)

# Arguments that are compared as something else.
COMPARED_AS = (
    # precision
    "bf16",
    "fp16",
    "auto_bf16",
    # pairs per update
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    # unless token batches leave them without effect
    "dataloader_drop_last",
    "train_sampling_strategy",
    # the contents of folders
    "teacher",
    "model_name_or_path",
    # the name and the code of the class
    "model_class",
    "trust_remote_code",
    # with the settings that PEFT records
    "lora_r",
)

# Names of earlier versions for what is compared by another name.
_FORMER = ("fine-tuning",)

# Arguments that do not change the trained weights.
IRRELEVANT = (
    # the place of the run
    "output_dir",
    # says that a run is resumed
    "resume_from_checkpoint",
    # says how a run is resumed, and prints that the epoch starts again
    "ignore_data_skip",
    # says how a run is resumed, and the trainer restores them itself
    "restore_callback_states_from_checkpoint",
    # logging
    "logging_strategy",
    "logging_steps",
    "logging_first_step",
    "logging_nan_inf_filter",
    "log_on_each_node",
    "log_level",
    "log_level_replica",
    "disable_tqdm",
    "report_to",
    "run_name",
    "project",
    "trackio_space_id",
    "trackio_bucket_id",
    "trackio_static_space_id",
    # a count for the log
    "include_num_input_tokens_seen",
    # a measurement for the log
    "skip_memory_metrics",
    # publishing
    "push_to_hub",
    # a secret, which a checkpoint must not contain
    "hub_token",
    # publishing
    "hub_private_repo",
    "hub_model_id",
    "hub_strategy",
    "hub_always_push",
    "hub_revision",
    # encodes the same ids in other processes
    "workers",
    # reads the same batches in other processes
    "dataloader_num_workers",
    # copies the same batches
    "dataloader_pin_memory",
    # reads the same batches in other processes
    "dataloader_persistent_workers",
    # reads the same batches earlier
    "dataloader_prefetch_factor",
    # reads the same batches in other processes
    "dataloader_multiprocessing_context",
    # not read
    "do_train",
    "do_eval",
    "do_predict",
    # set by the launcher
    "local_rank",
    # how long a rank waits
    "ddp_timeout",
)


# What a checkpoint keeps


@dataclass(frozen=True)
class RunState:
    """The fingerprint of a run and its position in the data, next to weights, optimizer and counters."""

    fixed: Facts  #: settings that cannot change within a run, such as the precision
    #: settings and digests that determine the batches. They may change with `ignore_data_skip`.
    data: Facts
    #: the next batch in the data, if the number of updates is not enough to find it
    position: Facts
    #: settings of the loss. A resume prints their changes.
    objective: Facts = field(default_factory=dict)
    #: all others. A resume prints their changes.
    settings: Facts = field(default_factory=dict)
    #: the names of the checkpoint's files of settings and weights, which a partial copy lacks
    files: list[str] = field(default_factory=list)

    def write(self, checkpoint: Path) -> None:
        """Write `run_state.json` into a checkpoint that is complete otherwise."""
        files = sorted(path.name for path in checkpoint.iterdir() if path.suffix in CHECKED)
        text = json.dumps(asdict(self) | {"files": files}, indent=2)
        (checkpoint / RUN_STATE).write_text(text + "\n", encoding="utf-8")


def read_run_state(checkpoint: Path) -> RunState:
    """Read the `run_state.json` of a checkpoint."""
    file = checkpoint / RUN_STATE
    try:
        return RunState(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        remedy = f"delete {checkpoint.name} to resume from the checkpoint before it"
        raise UserError(f"{file} is missing or damaged ({one_line(error)}): {remedy}") from None


# Compare


def compare(checkpoint: Path, saved: RunState, now: RunState, new_epoch: bool) -> None:
    """Compare a run with the one that wrote a checkpoint: refuse or print what differs.

    Args:
        checkpoint: the folder, for messages.
        saved: its fingerprint.
        now: the fingerprint of the run that resumes it.
        new_epoch: the epoch starts again (`ignore_data_skip`), so that the data may differ.

    Raises:
        UserError: a fixed setting differs, or one that determines the data.
    """
    known = {*now.fixed, *now.data, *now.objective, *now.settings}
    known |= {*SELECTION, CHOICE, UPDATES, *TOKENIZER, *COMPARED_AS, *IRRELEVANT, *_FORMER}
    chosen = {name: now.fixed[name] for name in (*OPTIMIZATION, "precision") if name in now.fixed}
    require_same(checkpoint, saved.fixed, chosen, _NEW_OPTIMIZER.format(checkpoint=checkpoint))
    require_same(checkpoint, saved.fixed, now.fixed, REMEDY)
    new_run = "start a run in a new output_dir"
    _require_known(checkpoint, _unknown(saved.fixed, known), f"{_SAME_CODE}, or {new_run}")
    print_changes("objective", saved.objective, now.objective)
    print_changes("setting", saved.settings, now.settings)
    without = _unknown(saved.objective, known) | _unknown(saved.settings, known)
    if new_epoch:
        without |= _unknown(saved.data, known)
        print_main("resuming at the start of the epoch, because of ignore_data_skip")
    else:
        settings = {name: value for name, value in now.data.items() if name != PACKING}
        require_same(checkpoint, saved.data, settings, DATA_REMEDY)
        remedy = f"{_SAME_CODE}, or {_NEW_EPOCH}"
        if now.data.get(PACKING):
            require_same(checkpoint, {PACKING: 1} | saved.data, now.data, remedy)
        _require_known(checkpoint, _unknown(saved.data, known), remedy)
    if without:
        listed = ", ".join(f"{name}={value}" for name, value in without.items())
        print_main(f"resuming without {listed}: this run has no such setting")


def require_same(checkpoint: Path, saved: Facts, now: Facts, remedy: str) -> None:
    """Refuse to resume with a value that differs from the checkpoint's. Only names in both are compared."""
    for name, was, becomes in differences(saved, now):
        raise UserError(f"{name}: {becomes}, but {checkpoint} was trained with {was}: {remedy}")


def print_changes(kind: str, saved: Facts, now: Facts) -> None:
    """Print each value that differs from the checkpoint's. Only names in both are compared."""
    for name, was, becomes in differences(saved, now):
        print_main(f"resuming with another {kind}: {name} was {was}, is now {becomes}")


def differences(saved: Facts, now: Facts) -> Iterator[tuple[str, str, str]]:
    """Yield the name of each value that differs, and both values for a message."""
    for name, value in now.items():
        if name in saved and not _equal(saved[name], value):
            yield name, _shown(saved[name], value), _shown(value, saved[name])


def _unknown(saved: Facts, known: Collection[str]) -> Facts:
    """The recorded settings that no longer exist, but for those that were switched off: None, False, 0, empty."""
    return {name: value for name, value in saved.items() if name not in known and value}


def _require_known(checkpoint: Path, unknown: Facts, remedy: str) -> None:
    for name, value in unknown.items():
        raise UserError(
            f"{name}: {checkpoint} was trained with {value}, and this run has no such setting: {remedy}"
        )


def _equal(saved: object, now: object) -> bool:
    """Compare two values, of a content by its digest. If one digest is unknown, the names must be equal."""
    if _is_content(saved) and _is_content(now) and saved["digest"] and now["digest"]:
        return bool(saved["digest"] == now["digest"])
    if _is_content(saved) and _is_content(now):
        return bool(saved["name"] == now["name"])
    return bool(saved == now)


def _shown(value: object, other: object) -> str:
    """A value in a message. A digest is shown if the name alone does not tell the two apart."""
    if not _is_content(value):
        return str(value)
    same_name = _is_content(other) and other["name"] == value["name"]
    return f"{value['name']} with digest {value['digest']}" if same_name else str(value["name"])


# Values


def plain_values(arguments: object, names: Sequence[str]) -> Facts:
    """The named arguments as JSON values."""
    return {name: _plain(getattr(arguments, name, None)) for name in names}


def other_settings(arguments: TrainingArguments) -> Facts:
    """The arguments that are in no other group, as JSON values."""
    elsewhere = {*OPTIMIZATION, *SELECTION, *PLAN, *OBJECTIVE, *COMPARED_AS, *IRRELEVANT}
    names = [each.name for each in fields(arguments) if each.init and each.name not in elsewhere]
    return plain_values(arguments, names)


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if hasattr(value, "to_dict"):
        return _plain(value.to_dict())
    return type(value).__name__


# Contents

# The files of a model folder that decide what the model computes.
_WEIGHTS_AND_CODE = (".safetensors", ".bin", ".py", ".spm", ".model")
_SETTINGS = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
_TOKENIZER_FOLDER = "target_tokenizer"
_BLOCK = 1 << 22


def content_of(*folders: str | os.PathLike) -> Facts:
    """Return the names of model folders with a digest of their weights, settings, tokenizers and code.

    The digest is None if a folder is not on this machine.
    """
    paths = [Path(folder) for folder in folders]
    is_here = all(path.is_dir() for path in paths)
    return {
        "name": " ".join(map(str, folders)),
        "digest": " ".join(map(_digest, paths)) if is_here else None,
    }


def _is_content(value: object) -> TypeGuard[dict[str, str | None]]:
    return isinstance(value, dict) and value.keys() == {"name", "digest"}


def _digest(root: Path) -> str:
    digest = hashlib.blake2b(digest_size=8)
    candidates = [*root.iterdir(), *root.glob(f"{_TOKENIZER_FOLDER}/*")]
    files = [
        path for path in candidates if path.suffix in _WEIGHTS_AND_CODE or path.name in _SETTINGS
    ]
    for path in sorted(files):
        if not path.is_file():
            continue
        digest.update(f"{path.relative_to(root)} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()


# Models

_REMOTE_CODE = "transformers_modules."
_PACKAGE = __package__.partition(".")[0]


def class_name(instance: object) -> str:
    """The name MODULE:CLASS of a class. FSDP2 replaces the class of a model by a subclass of its own."""
    kind = next(each for each in type(instance).__mro__ if not issubclass(each, FSDPModule))
    module = kind.__module__
    if module.startswith(_REMOTE_CODE):  # then come the names of folders in a cache
        module = module.rpartition(".")[2]
    return f"{module}:{kind.__qualname__}"


def code_digest(part: object) -> str | None:
    """A digest of the code of a user's own function, or of the class of an object. None for those of libraries."""
    return source_digest(
        getattr(each, "__module__", "builtins") for each in (part, *type(part).__mro__)
    )


_LIBRARIES = {_PACKAGE, "torch", "transformers", *sys.stdlib_module_names}


def source_digest(names: Iterable[str]) -> str | None:
    """A digest of the files of imported modules, without libraries. What these import is not part of it.

    None if there are none, as for code of an interactive session.
    """
    digest = hashlib.blake2b(digest_size=8)
    files = sorted(set(filter(None, map(_source_of, names))))
    for file in files:
        # hashes of one length: code cannot move from one file to the other
        digest.update(hashlib.blake2b(file.read_bytes()).digest())
    return digest.hexdigest() if files else None


def _source_of(name: str) -> Path | None:
    """The file of a module of the user."""
    module = sys.modules.get(name)  # None for that of a class that was made at run time
    file = Path(getattr(module, "__file__", None) or "")
    is_own = name.partition(".")[0] not in _LIBRARIES
    return file if is_own and file.suffix == ".py" and file.is_file() else None


# Fields of an adapter's configuration that do not change its function.
_INCIDENTAL = (
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "auto_mapping",
    "peft_version",
    "task_type",
)


def adapter_facts(model: object) -> Facts:
    """The settings of the adapters of a PEFT model. A scale or a dropout is not in the weights."""
    facts: Facts = {}
    for name, config in getattr(model, "peft_config", {}).items():
        for setting, value in config.to_dict().items():
            if setting not in _INCIDENTAL:
                facts[f"{setting} of adapter {name}"] = _plain(value)
    return facts
