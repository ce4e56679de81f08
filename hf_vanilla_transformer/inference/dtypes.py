"""The precisions in which a model can translate, by name."""

import torch

from ..utils.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

#: products in dynamic int8, by the engine
INT8 = "int8"

#: float32, bfloat16 or int8, whichever translates fastest on this machine (transformers' "auto" is the checkpoint's)
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
