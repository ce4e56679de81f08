"""The precisions in which a model can translate, by name."""

import torch
from transformers import PreTrainedModel

from ..utils.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

#: products in dynamic int8, by the engine
INT8 = "int8"

#: float32, bfloat16 or int8, by `fastest_dtype` (transformers' "auto" is the checkpoint's)
FASTEST = "fastest"


def torch_dtype(dtype: str | torch.dtype | None) -> torch.dtype | str:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype or "auto"
    if dtype == FASTEST:
        return torch.float32
    if dtype == INT8:
        from ..engine.kernels import has_fast_bfloat16

        return torch.bfloat16 if has_fast_bfloat16() else torch.float32
    if dtype not in DTYPES:
        raise UserError(f"dtype: {dtype!r} is none of {', '.join(DTYPES)}, {INT8}, {FASTEST}")
    return DTYPES[dtype]


def fastest_dtype(model: PreTrainedModel) -> str:
    """The dtype in which a model translates fastest, by its device.

    It is int8 where the engine computes it with the C functions. Otherwise it is bfloat16 where the processor computes
    it, and float32 elsewhere. CTranslate2 chooses its compute type "auto" by the processor in the same way. Of greedy
    translations on an AMD EPYC with AVX-512, and on the same one restricted to AVX2, int8 took the least time for
    widths from 64 to 1024 and 2 to 6 layers, and bfloat16 took less than float32 only with its instructions.
    """
    from ..engine.c_kernels import library
    from ..engine.kernels import has_fast_bfloat16
    from ..engine.linear import int8_error
    from ..engine.optimize import not_optimizable

    device = model.device
    has_int8 = not_optimizable(model) is None and int8_error(device, torch.float32) is None
    if has_int8 and library() is not None:
        return INT8
    if device.type == "cuda":
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_bfloat16 = device.type == "cpu" and has_fast_bfloat16()
    return "bfloat16" if has_bfloat16 else "float32"
