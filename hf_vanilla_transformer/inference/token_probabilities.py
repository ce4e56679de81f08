"""Log-probabilities that models give to the tokens of existing translations."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..engine.shared_copy import in_evaluation_mode
from .alignment import decoder_inputs, source_inputs

#: Logits in memory at a time, in numbers: 256 MiB in float32, copied three times.
_MAX_LOGITS = 2**26


@torch.inference_mode()
def token_log_probabilities(
    models: Sequence[PreTrainedModel],
    source_tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[list[int]],
    targets: Sequence[list[int]],
) -> list[list[float]]:
    """The natural log-probability of each target token, given the source and the tokens before it.

    The token probabilities of several models are averaged. `sources` and `targets` are token ids of each sentence,
    with its end-of-sentence token but without a start token.
    """
    models = [in_evaluation_mode(model) for model in models]
    longest = max(map(len, targets), default=1)
    vocabulary = models[0].get_output_embeddings().weight.shape[0]
    step = max(1, _MAX_LOGITS // (longest * vocabulary))
    rows: list[list[float]] = []
    for start in range(0, len(targets), step):
        batch = targets[start : start + step]
        source = source_inputs(models[0], source_tokenizer, sources[start : start + step])
        rows_of_tokens = [torch.tensor(target) for target in batch]
        tokens = pad_sequence(rows_of_tokens, batch_first=True).to(models[0].device)  # (B, T)
        log_probabilities: list[Tensor] = []
        for model in models:
            inputs = decoder_inputs(model, batch)
            logits = model(**source, decoder_input_ids=inputs, use_cache=False).logits  # (B, T, V)
            chosen = logits.gather(2, tokens[..., None]).squeeze(2).float()  # (B, T)
            log_probabilities.append(chosen - logits.float().logsumexp(dim=2))
        # the log of the mean probability
        mean = torch.stack(log_probabilities).logsumexp(dim=0) - math.log(len(models))
        rows += [row[: len(target)] for row, target in zip(mean.tolist(), batch, strict=True)]
    return rows
