"""A check that a model of the caller's keeps the pairs of a packed row apart."""

import copy
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ...batches.packing import FlatPairs, PackedLayout
from ...engine.ownership import is_own
from ...loss_vanilla_transformer import IGNORED
from ...utils.random_state import kept_random_state
from ...utils.untrusted import one_line

PAIRS = 10  # of the row
LONGEST = 9  # tokens of a pair, so that all of them fit into a row
NOISE = (
    0.1  # is added to the weights, because a gate that is 0 at the start hides what is behind it
)
TOLERANCE = 1e-5  # losses are float32


@torch.no_grad()
def mixing(model: Any) -> str | None:
    """Say how a model's outputs for some pairs in a row differ from those for padded pairs, or return None.

    A copy in float64 with changed weights computes both, without dropout.
    """
    device = torch.device("cpu") if model.device.type == "mps" else model.device
    with kept_random_state(device):
        try:
            tried = copy.deepcopy(model, _computed_weights(model)).to(device, torch.float64).eval()
            before = vars(tried).pop("_original_forward", None)
            if before is not None and is_own(tried.forward):
                tried.forward = before  # without accelerate's wrapper, which calls the model itself
            generator = torch.Generator().manual_seed(0)
            for weight in tried.parameters():
                weight += NOISE * torch.randn(weight.shape, generator=generator).to(weight)
            difference = _difference(tried)
        except Exception as error:  # of the caller's code
            return f"{type(error).__name__}: {one_line(error)}"
    if difference < TOLERANCE:
        return None
    return f"a token of one changes by {difference:.0e} of its logits next to others"


def _computed_weights(model: Any) -> dict[int, torch.Tensor]:
    """Copies, by id, of what hooks compute from parameters, as for pruned layers. `deepcopy` refuses it."""
    return {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, torch.Tensor) and not value.is_leaf
    }


def _difference(model: PreTrainedModel) -> float:
    """The largest difference of the logits and of the loss, relative to their size."""
    config: Any = model.config
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(PAIRS):
        source = rng.integers(0, config.vocab_size, rng.integers(1, LONGEST + 1))
        source[source == config.pad_token_id] = config.decoder_start_token_id
        target = rng.integers(0, config.target_vocab_size, rng.integers(1, LONGEST + 1))
        rows.append({"input_ids": source, "labels": target})
    pairs = FlatPairs.of_rows(rows)
    places = PAIRS * LONGEST, PAIRS * LONGEST
    packed = PackedLayout.of(config, places).pack(pairs, [np.arange(PAIRS)])
    ids, labels = (
        pad_sequence(
            [torch.tensor(row[name]) for row in rows], batch_first=True, padding_value=value
        )
        for name, value in (("input_ids", config.pad_token_id), ("labels", IGNORED))
    )
    mask = ids.ne(config.pad_token_id).long()
    batches = packed, {"input_ids": ids, "attention_mask": mask, "labels": labels}
    outputs = [
        model(**{name: each.to(model.device) for name, each in batch.items()}) for batch in batches
    ]
    actual, expected = (
        torch.cat(
            [each.logits[batch["labels"] != IGNORED].flatten(), each.loss[None].to(each.logits)]
        )
        for each, batch in zip(outputs, batches, strict=True)
    )
    return float((actual - expected).abs().max() / expected.std())
