"""The fast paths of training: what each passes by, how it knows that this is the package's own, and what runs then.

A fast path gives the numbers of the plain one as long as all that it passes by is code of this package or of
transformers, unchanged (`ownership`). Otherwise the plain one runs, and a line at the start of the run says why.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...attention_vanilla_transformer import is_plain_linear
from ...batches.packing import BACKENDS, PackedBatchSampler
from ...engine.ownership import foreign_part
from ...masks_vanilla_transformer import mask_backend
from ...modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from . import forward_choice
from .ownership import foreign_data, foreign_loss, methods


@dataclass(frozen=True)
class Condition:
    """A part of a run that must be the package's own, because a fast path passes it by or gives it other tensors."""

    find: Callable[[Any], str | None]  #: returns what is not, for a trainer, or None
    reason: str = "{}"  #: why the path is off, with a place for that
    #: The path has the effect of that part all the same, if the caller asks for the path.
    carried: bool = False


@dataclass(frozen=True)
class FastPath:
    """A faster way to the numbers of a plain path."""

    name: str
    subject: str  #: of the reasons
    instead: str  #: the plain path
    is_off: Callable[[Any], str | None]  #: why the path is not even tried, or None
    conditions: tuple[Condition, ...]

    def why_not(self, trainer: Any, asked: bool = False) -> str | None:
        """The reason why a run of a trainer takes the plain path, or None.

        With `asked`, the reason why it cannot take the fast one.
        """
        for condition in self.conditions:
            if asked and condition.carried:
                continue
            if (found := condition.find(trainer)) is not None:
                return condition.reason.format(found)
        return None

    def is_on(self, trainer: Any) -> bool:
        """True if a run of a trainer takes the path without being asked for more."""
        return self.is_off(trainer) is None and self.why_not(trainer) is None

    def line(self, trainer: Any, is_on: bool, detail: str = "") -> str:
        """Say that the path is on, or why it is not."""
        if is_on:
            return f"{self.name}: yes{detail}"
        return self.line_of(self.is_off(trainer) or self.why_not(trainer))

    def line_of(self, reason: str | None) -> str:
        """Say why the path is not on."""
        return f"{self.name}: no, because {self.subject} {reason}: {self.instead}"


def _is_ours(trainer: Any) -> bool:
    return isinstance(trainer._base_model(), VanillaTransformerForConditionalGeneration)


def _other_model(trainer: Any) -> str | None:
    return None if _is_ours(trainer) else type(trainer._base_model()).__name__


def _foreign_model(trainer: Any) -> str | None:
    return foreign_part(trainer.model)


# Packed rows


def _packing_is_off(trainer: Any) -> str | None:
    if trainer.packing_asked is False:
        return "is not asked for"
    if trainer.packing_asked is None and trainer.args.device.type != "cuda":
        return "is the default of GPUs only"
    return None


def _other_backend(trainer: Any) -> str | None:
    """A kernel of transformers without a place for the masks of packed rows."""
    backend = mask_backend(trainer._base_model().config)
    return None if backend in BACKENDS else f"{backend!r}: choose one of {', '.join(BACKENDS)}"


def _single_pairs(trainer: Any) -> str | None:
    """An argument whose effect depends on single pairs, or on the length of a row."""
    for name, why in (
        ("crossconst_alpha", "reads pairs one by one"),
        ("teacher_top", "reads pairs one by one"),
        ("neftune_noise_alpha", "scales its noise by the length of a row"),
    ):
        if value := getattr(trainer.args, name, None):
            return f"{name}={value}, which {why}"
    return None


def _mixed_pairs(trainer: Any) -> str | None:
    if _foreign_model(trainer) is None:
        return None
    from .packing_check import mixing  # few runs need it

    return mixing(trainer.model)


PACKED_ROWS = FastPath(
    "packed rows",
    subject="packing",
    instead="padded batches",
    is_off=_packing_is_off,
    conditions=(
        Condition(
            lambda trainer: None if trainer.by_tokens else "needs max_tokens_per_batch",
        ),
        Condition(_other_model, "needs a VanillaTransformerForConditionalGeneration, not {}"),
        Condition(_other_backend, "does not go with attn_implementation={}"),
        Condition(_single_pairs, "does not go with {}"),
        # They make padded batches, or change them before the model reads them.
        Condition(
            methods(
                "get_train_dataloader", "get_batch_samples", "_prepare_inputs", "_prepare_input"
            ),
            "does not go with {}",
        ),
        # `PackedPairs` calls it in each epoch.
        Condition(foreign_data, "reads ids once, and would pass by {}", carried=True),
        Condition(foreign_loss, "gives {} rows of several pairs", carried=True),
        Condition(
            _foreign_model,
            "knows that the layers of this package keep pairs apart, but not {}",
            carried=True,
        ),
        Condition(_mixed_pairs, "does not keep pairs apart: {}"),
    ),
)


# The forward pass


def has_shards(trainer: Any) -> bool:
    """True if no process has the weights whole."""
    return trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or trainer.get_tp_size() > 1


def _different_pass(trainer: Any) -> str | None:
    """What the forward pass of a run does that `training.trainer.forward` does not, or None."""
    model = trainer._base_model()
    reasons = {
        # outside of the context in which they have cast weights
        "computes activations again": any(
            getattr(layer, "gradient_checkpointing", False) for layer in model.modules()
        ),
        "has adapters": trainer.model is not model,
        "shards weights": has_shards(trainer),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _own_autocast(trainer: Any) -> str | None:
    handler = trainer.accelerator.autocast_handler
    if handler is not None and not (handler.enabled and handler.cache_enabled):
        return "an autocast_handler"
    return methods("compute_loss_context_manager", "autocast_smart_context_manager")(trainer)


_PASS = (
    Condition(_other_model, "trains a {}"),
    Condition(_different_pass),
    Condition(_foreign_model, "has its own {}"),
    Condition(_own_autocast, "has {}"),
)


def _casting_is_off(trainer: Any) -> str | None:
    if trainer.accelerator.mixed_precision != "bf16":
        return "is not in bf16"
    return None if forward_choice.is_bound_by_launches(trainer.args.device) else "is on a CPU"


CAST_WEIGHTS = FastPath(
    "weights cast together",
    subject="the run",
    instead="one by one",
    is_off=_casting_is_off,
    conditions=_PASS,
)


def _compiling_is_off(trainer: Any) -> str | None:
    if trainer.args.torch_compile is False:
        return "is not asked to compile"
    if trainer.args.torch_compile is None and trainer.args.device.type != "cuda":
        return "is not on a GPU"
    return None if isinstance(trainer._updates, PackedBatchSampler) else "has no packed rows"


def _other_objective(trainer: Any) -> str | None:
    if trainer.consistency is not None:
        return "computes two passes over a batch"
    if trainer.teacher is not None:
        return "asks a teacher"
    own = foreign_loss(trainer) or trainer.label_smoother
    return "has a loss of its own" if own else None


COMPILED_UPDATES = FastPath(
    "compiled updates",
    subject="the run",
    instead="eager ones",
    is_off=_compiling_is_off,
    conditions=(
        Condition(_other_objective),
        *_PASS,
        Condition(
            lambda trainer: (
                "scales its loss for fp16"
                if trainer.accelerator.mixed_precision == "fp16"
                else None
            )
        ),
    ),
)


# The loss, and the shapes of batches


def _read_logits(trainer: Any) -> str | None:
    if trainer.label_smoother is not None:
        return "label_smoothing_factor"
    return "compute_loss_func" if trainer.compute_loss_func is not None else None


def _other_output_layer(trainer: Any) -> str | None:
    layer = trainer._base_model().get_output_embeddings()
    return None if is_plain_linear(layer) else type(layer).__name__


FUSED_LOSS = FastPath(
    "loss without logits",
    subject="the run",
    instead="logits of whole batches",
    is_off=lambda trainer: "is in fp16" if trainer.accelerator.mixed_precision == "fp16" else None,
    conditions=(
        Condition(_other_model, "trains a {}"),
        Condition(_read_logits, "has {}"),
        Condition(_other_output_layer, "has hooks or another layer at the output: {}"),
    ),
)


def _rounding_is_off(trainer: Any) -> str | None:
    if not trainer.by_tokens or trainer.packs:
        return "has no padded token batches"
    if not trainer.args.bf16 or trainer.args.device.type != "cpu":
        return "is not in bf16 on a CPU"
    return None


def _table_of_positions(trainer: Any) -> str | None:
    """Return the kind of positions if padding could pass the end of their table. Models of transformers have one."""
    config = trainer._base_model().config
    kind = getattr(config, "position_encoding_type", "learned")
    return kind if kind == "learned" else None


ROUNDED_SHAPES = FastPath(
    "rounded shapes",
    subject="the run",
    instead="batches as the collator makes them",
    is_off=_rounding_is_off,
    conditions=(
        Condition(_table_of_positions, "has {} positions"),
        # They would see dummy pairs. A collator with tensors of its own is noticed in each batch.
        Condition(foreign_loss, "has {}"),
        Condition(_foreign_model, "has its own {}"),
    ),
)
