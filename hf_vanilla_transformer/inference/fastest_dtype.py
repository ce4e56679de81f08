"""`dtype="fastest"`: the precision in which a model translates fastest on this machine, by trial translations."""

import copy
import json
import os
import time
from contextlib import suppress
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from .. import modeling_vanilla_transformer
from ..engine.int8_kernels import library
from ..engine.linear import INT8, int8_error
from ..engine.optimize import not_optimizable, optimize_for_inference, optimize_if_possible
from ..utils.cpu_time import on_fitting_threads
from ..utils.system_info import describe_hardware, versions
from .dtypes import DTYPES, torch_dtype

logger = logging.get_logger(__name__)

_TRIAL_SENTENCES = 32
_TRIAL_TOKENS = 8
_TRIAL_SECONDS = 1.5
_MAX_ERROR = 0.05  # of a token's log-probability. 0.01 is usual in int8
_OF_MODEL = {".json", ".safetensors", ".bin"}


def in_fastest_dtype(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The model in float32, bfloat16 or int8, as measured once for this folder and machine.

    The processor alone does not decide it: a small model loses more by conversions than it gains.
    """
    candidates = ["float32", "bfloat16"]
    if (
        not_optimizable(model) is None
        and int8_error(model.device, torch.float32) is None
        and library() is not None
    ):
        candidates.append(INT8)
    files = sorted(
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.iterdir()
        if path.suffix in _OF_MODEL
    )
    key = json.dumps([files, str(model.device), describe_hardware(), versions()])
    path = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / __package__
        / "fastest_dtypes.json"
    )
    try:
        choices = json.loads(path.read_text(encoding="utf-8"))
        chosen = choices.get(key)
    except (OSError, ValueError, AttributeError):  # none yet, or damaged
        choices = {}
        chosen = None
    if chosen not in candidates:
        chosen = choices[key] = _fastest(model, candidates)
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(choices), encoding="utf-8")
    logger.info("dtype: %s is the fastest of %s on this machine", chosen, ", ".join(candidates))
    return _converted(model, chosen)


def _converted(model: PreTrainedModel, dtype: str) -> PreTrainedModel:
    if dtype != INT8:
        return model.to(DTYPES[dtype])
    return optimize_for_inference(model.to(torch_dtype(INT8)).eval(), INT8)


def _fastest(model: PreTrainedModel, candidates: list[str]) -> str:
    """The candidate in which a few short translations take least time, measured for two seconds.

    A dtype takes part if the log-probabilities of its translations are float32's, but for `_MAX_ERROR` per token.
    """
    tokens = torch.arange(_TRIAL_SENTENCES * _TRIAL_TOKENS, device=model.device) % max(
        4, model.config.vocab_size - 1
    )
    tokens = tokens.view(_TRIAL_SENTENCES, _TRIAL_TOKENS)  # (B, S)
    models = {dtype: _converted(copy.deepcopy(model), dtype) for dtype in candidates}
    known = isinstance(
        model, modeling_vanilla_transformer.VanillaTransformerForConditionalGeneration
    )
    for dtype in candidates[1:] if known else ():
        if not error_per_token(model, models[dtype], tokens) <= _MAX_ERROR:
            del models[dtype]
    for each in models.values():
        optimize_if_possible(each)
    with on_fitting_threads():
        best = {dtype: _seconds(each, tokens) for dtype, each in models.items()}  # warms up
        start = time.perf_counter()
        best = {dtype: _seconds(each, tokens) for dtype, each in models.items()}
        while time.perf_counter() - start < _TRIAL_SECONDS:
            best = {
                dtype: min(best[dtype], _seconds(each, tokens)) for dtype, each in models.items()
            }
    return min(best, key=best.__getitem__)


@torch.inference_mode()
def error_per_token(model: PreTrainedModel, other: PreTrainedModel, tokens: torch.Tensor) -> float:
    """The mean difference between the log-probabilities of a token in translations of `tokens` (B, S) by `other`."""
    length = {
        "min_new_tokens": _TRIAL_TOKENS,
        "max_new_tokens": _TRIAL_TOKENS,
        "length_penalty": 0.0,
        "num_beams": 2,
    }
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    output = other.generate(**inputs, **length, return_dict_in_generate=True)
    targets = output.sequences[:, 1:, None]  # (B, T, 1)
    log_probs = (
        model(**inputs, decoder_input_ids=output.sequences[:, :-1])
        .logits.float()
        .log_softmax(dim=-1)
    )
    return float(
        (output.sequences_scores - log_probs.gather(2, targets).sum(dim=(1, 2))).abs().mean()
        / _TRIAL_TOKENS
    )


@torch.inference_mode()
def _seconds(model: PreTrainedModel, tokens: torch.Tensor) -> float:
    start = time.perf_counter()
    output = model.generate(
        input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=_TRIAL_TOKENS
    )
    output[0, 0].item()  # synchronises the device
    return time.perf_counter() - start
