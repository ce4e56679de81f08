"""State dictionaries of other toolkits: loaded without running code, renamed, each tensor used exactly once.

A converter maps each of our parameters to a tensor of the file (`TensorRef`). `build_model` checks that every tensor
of the file is used, that none is used twice, and that all shapes match.
"""

import argparse
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..errors import UserError
from ..layers_vanilla_transformer import sinusoidal_positions
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..untrusted import one_line, reading_weights, require_file, shown

STACKS = ("encoder", "decoder")
_MAX_NAMES = 4  # in a message
_MAX_LAYERS = 1000
_TABLE_ROUNDING = 2e-3  # float16; float32 at position 5,000 is off by 3e-4


class TensorRef(NamedTuple):
    """The tensor of a foreign checkpoint that contains one of our parameters."""

    name: str  #: the tensor's name
    #: the rows of the tensor; None for all. Fused projections have queries, keys and values in one tensor.
    rows: slice | int | None = None
    transposed: bool = False  #: the toolkit computes x W where we compute x W^T


# Pairs of a pattern in our parameter names and its replacement in the toolkit's, applied in turn.
Renames = tuple[tuple[str, str], ...]


def rename(name: str, renames: Renames) -> str:
    """`name` with every replacement applied."""
    for pattern, replacement in renames:
        name = re.sub(pattern, replacement, name)
    return name


class Tying(NamedTuple):
    """Which of source embedding, target embedding and output matrix are equal (§3.4)."""

    fields: dict[str, Any]  #: `share_encoder_decoder_embeddings`, `tie_word_embeddings` and both vocabulary sizes
    copies: set[str]  #: names of tensors that equal one before them


class Ignored:
    """Replaces a class of a toolkit if its objects are not needed; keeps nothing."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def read_torch_file(path: str | Path, ignored: Iterable[str] = ()) -> Any:
    """Load a file of `torch.save` or safetensors. No code of the file is run.

    The file may contain tensors, plain containers and `argparse.Namespace`. Objects of the classes in `ignored` become
    `Ignored`. Anything else is refused.
    """
    path = require_file(Path(path))
    with reading_weights(path):
        if path.suffix == ".safetensors":
            return load_file(path)
        if zipfile.is_zipfile(path):
            _check_archive(path)
        allowed: list[Any] = [argparse.Namespace, *((Ignored, name) for name in ignored)]
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True)


def _check_archive(path: Path) -> None:
    """Refuse TorchScript, and compressed members, which may be huge and which `torch.save` does not write."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    if any(member.filename.endswith("/constants.pkl") for member in members):
        raise UserError(f"{path}: a TorchScript archive contains code; save the state_dict() of the model instead")
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise UserError(f"{path}: an archive with compressed members, which torch.save does not write")


def require_tensors(state: Any, where: str) -> dict[str, Tensor]:
    """Return `state` if it is a state dictionary of finite tensors; otherwise raise a UserError that names `where`."""
    if not isinstance(state, Mapping) or not state:
        raise UserError(f"{where}: a state dictionary is needed there, not {type(state).__name__}")
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise UserError(f"{where}: {str(name)[:60]!r} is {type(tensor).__name__}, not a tensor")
        if tensor.layout != torch.strided or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise UserError(f"{where}: {name[:60]!r} {list(tensor.shape)} is larger than its data in the file")
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise UserError(f"{where}: {name} contains numbers that are not finite")
    return dict(state)


def require_matrix(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """The matrix of this name, or a UserError."""
    if name not in tensors or tensors[name].ndim != 2:
        raise UserError(f"there is no matrix {name} among {len(tensors)} tensors, such as {_some(tensors)}")
    return tensors[name]


def find_sizes(
    tensors: Mapping[str, Tensor],
    embedding: str,
    layers: Iterable[str] = ("encoder.layers.", "decoder.layers."),
    ffn: str | None = None,
) -> dict[str, int]:
    """The configuration fields `d_model`, `encoder_layers`, `decoder_layers` and perhaps the widths d_ff.

    Args:
        embedding: the name of an embedding matrix (V, D).
        layers: for encoder and decoder, the part of tensor names before the layer number.
        ffn: the part of the name of a matrix (d_ff, D) after the layer number, for the d_ff of both stacks.
    """
    sizes = {"d_model": require_matrix(tensors, embedding).shape[1]}
    for stack, prefix in zip(STACKS, layers, strict=True):
        numbers = {match[1] for name in tensors if (match := re.match(re.escape(prefix) + r"(\d+)", name))}
        if not numbers:
            raise UserError(f"there is no tensor {prefix}…: this is no encoder-decoder Transformer of that toolkit")
        if len(numbers) > _MAX_LAYERS or numbers - set(map(str, range(len(numbers) + 1))):
            highest = max(numbers, key=lambda number: (len(number), number))
            raise UserError(f"{prefix}{shown(highest)}: there are {len(numbers)} layers, so their numbers have gaps")
        sizes[f"{stack}_layers"] = max(map(int, numbers)) + 1
        if ffn is not None:
            sizes[f"{stack}_ffn_dim"] = len(require_matrix(tensors, f"{prefix}0.{ffn}"))
    return sizes


def find_tying(tensors: Mapping[str, Tensor], source: str, target: str, output: str) -> Tying:
    """Compare the (V, D) matrices of these names; if target or output is missing, it is tied to the one before it."""
    encoder = require_matrix(tensors, source)
    decoder = require_matrix(tensors, target) if target in tensors else encoder
    head = require_matrix(tensors, output) if output in tensors else decoder
    shared, tied = same(encoder, decoder), same(decoder, head)
    if head.shape[0] != decoder.shape[0]:
        raise UserError(
            f"{output} has {head.shape[0]} tokens, {target} has {decoder.shape[0]}: the numbers must agree"
        )
    fields = {
        "vocab_size": encoder.shape[0],
        "decoder_vocab_size": decoder.shape[0],
        "share_encoder_decoder_embeddings": shared,
        "tie_word_embeddings": tied,
    }
    copies = {name for name, is_copy in ((target, shared), (output, tied)) if is_copy and name in tensors}
    return Tying(fields, copies - {source})


def same(one: Tensor, other: Tensor) -> bool:
    """True if both have the same shape and the same numbers."""
    return one is other or (one.shape == other.shape and torch.equal(one, other))


def position_layout(tables: Iterable[Tensor]) -> str:
    """The `position_encoding_type` of the stacks' tables of positions, each (P, D): one of two layouts, or "learned".

    The tables are rounded to float32 or less; training changes a table much more.
    """

    def matches(table: Tensor, layout: str) -> bool:
        sinusoids = sinusoidal_positions(torch.arange(len(table))[None], table.shape[1], layout)[0]  # (P, D)
        return torch.allclose(sinusoids, table.float(), rtol=0, atol=_TABLE_ROUNDING)

    tables, layouts = list(tables), ("sinusoidal", "sinusoidal_split")
    return next((layout for layout in layouts if all(matches(table, layout) for table in tables)), "learned")


def build_model(
    fields: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    locate: Callable[[str], str | TensorRef],
    unused: Iterable[str] = (),
) -> VanillaTransformerForConditionalGeneration:
    """The model with these weights.

    Args:
        fields: arguments of `VanillaTransformerConfig`.
        tensors: the toolkit's state dictionary.
        locate: maps the name of our parameter to the toolkit's tensor.
        unused: tensors that need not be used: copies of tied matrices, tables of sinusoids, counters.

    Returns:
        The model in evaluation mode, with the dtype of the weights.
    """
    try:
        config = VanillaTransformerConfig(**fields)
        # on the meta device: the weights are assigned below
        with torch.device("meta"):
            model = VanillaTransformerForConditionalGeneration(config)
    except (ValueError, TypeError) as error:
        raise UserError(f"the settings do not fit together: {one_line(error)}") from None
    located = {name: locate(name) for name, _ in model.named_parameters()}
    refs = {name: TensorRef(ref) if isinstance(ref, str) else ref for name, ref in located.items()}
    _require_all(refs, tensors, set(unused))
    dtypes = {tensors[ref.name].dtype for ref in refs.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    if not dtype.is_floating_point:
        raise UserError(f"the weights are {str(dtype).removeprefix('torch.')}: quantised weights cannot be converted")
    weights, used = {}, dict.fromkeys(tensors, 0)
    for name, parameter in model.named_parameters():
        source, rows, transposed = refs[name]
        weight = tensors[source] if rows is None else tensors[source][rows]
        weight = weight.T if transposed else weight
        if weight.shape != parameter.shape:
            raise UserError(f"{source} gives {tuple(weight.shape)} for {name}, which is {tuple(parameter.shape)}")
        weights[name] = weight.to(dtype, copy=True).contiguous()
        used[source] += weight.numel()
    wrong = [name for name, count in used.items() if count and count != tensors[name].numel()]
    if wrong:
        raise UserError(f"not used exactly once: {_some(wrong)}")
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    return model.eval()


def _require_all(refs: Mapping[str, TensorRef], tensors: Mapping[str, Tensor], unused: set[str]) -> None:
    needed = {ref.name for ref in refs.values()}
    missing, surplus = needed - tensors.keys(), tensors.keys() - needed - unused
    if missing:
        raise UserError(f"tensors are missing ({len(missing)}): {_some(missing)}")
    if surplus:
        raise UserError(f"tensors that this architecture does not have ({len(surplus)}): {_some(surplus)}")


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(map(shown, ordered[:_MAX_NAMES])) + (" …" if len(ordered) > _MAX_NAMES else "")
