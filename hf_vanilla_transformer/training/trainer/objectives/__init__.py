"""Training objectives beyond cross-entropy: consistency and word-level distillation, and the interface they share."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

from torch import Tensor, nn

from ....loss_vanilla_transformer import fused_objective, target_tokens


class Objective:
    """An objective for the argument `objective` of a model's forward pass.

    From logits, or chunk by chunk with their derivatives (see `fused_objective`), subclasses compute the summed loss
    and the unsmoothed cross-entropy. `uniform` of ε is u of `fused_objective`.
    """

    passes: ClassVar[int] = 1  # P passes over a batch, with equal labels
    from_logits: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
    differentiate: Callable[..., Tensor]
    uniform: Callable[[float], Sequence[float]]

    def __call__(
        self,
        hidden_states: Tensor,
        logits: Tensor | None,
        lm_head: nn.Linear,
        labels: Tensor,
        label_smoothing: float,
        num_items_in_batch: Tensor | int | None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss and, for the log, the unsmoothed cross-entropy, of the first of P passes.

        Args:
            hidden_states: (P B, T, D), the decoder's output.
            logits: (P B, T, V), or None to compute them chunk by chunk from the hidden states.
            lm_head: the output layer.
            labels: (P B, T), -100 for padding.
            label_smoothing: ε of the cross-entropies.
            num_items_in_batch: target tokens of the whole update, counted once. None: the tokens of this batch.
        """
        labels = labels.chunk(self.passes)[0]  # (B, T)
        if logits is not None:
            total, plain = self.from_logits(logits, labels, label_smoothing)
        else:
            hidden = hidden_states.unflatten(0, (self.passes, -1)).flatten(1, 2)  # (P, B T, D)
            differentiate = partial(self.differentiate, smoothing=label_smoothing)
            weights = lm_head.weight, lm_head.bias
            uniform = self.uniform(label_smoothing)
            total, plain = fused_objective(
                hidden, *weights, labels.flatten(), differentiate, uniform
            )
        tokens = target_tokens(labels, num_items_in_batch)
        return total / tokens, plain / tokens
