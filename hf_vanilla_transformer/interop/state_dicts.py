"""Weights of other programs: read without running anything, renamed by a table, each used exactly once.

A converter says for each of our parameters where the other program keeps it (`Place`), and `build_model` checks the
rest: that every tensor of the file was used, that none was used twice, and that all have the right shape.
"""

import argparse
import re
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
from ..untrusted import reading_weights

_SHOWN = 4  # names in a message
_TABLE_ROUNDING = 2e-3  # float16; float32 at position 5,000 is off by 3e-4


class Place(NamedTuple):
    """Where another program keeps one of our parameters.

    Attributes:
        name: of its tensor.
        rows: of that tensor; None for all. Fused projections keep queries, keys and values in one.
        transposed: it computes x W where we compute x W^T.
    """

    name: str
    rows: slice | int | None = None
    transposed: bool = False


# Patterns of our names and what stands there in another program's, each applied in turn.
Names = tuple[tuple[str, str], ...]


def rename(name: str, names: Names) -> str:
    """`name` with every pattern of the table replaced."""
    for ours, theirs in names:
        name = re.sub(ours, theirs, name)
    return name


class WordMatrices(NamedTuple):
    """Which of the three matrices of words (§3.4) are one.

    Attributes:
        fields: `share_encoder_decoder_embeddings`, `tie_word_embeddings` and the two numbers of words.
        copies: names of tensors that say again what another one says.
    """

    fields: dict[str, Any]
    copies: set[str]


def read_torch_file(path: str | Path) -> Any:
    """What `torch.save` wrote, or a safetensors file. No code of the file is run.

    Args:
        path: tensors, plain containers and `argparse.Namespace` are read; anything else is refused.

    Raises:
        UserError: no such file, a damaged one, or one that asks for a class or function.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    with reading_weights(path):
        if path.suffix == ".safetensors":
            return load_file(path)
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)


def require_tensors(found: Any, where: str) -> dict[str, Tensor]:
    """`found`, if it is a table of named tensors of numbers; otherwise a UserError that names `where`."""
    if not isinstance(found, Mapping) or not found:
        raise UserError(f"{where}: a table of weights is needed there, not {type(found).__name__}")
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise UserError(f"{where}: {str(name)[:60]!r} is {type(tensor).__name__}, not a tensor")
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise UserError(f"{where}: {name} holds numbers that are not finite")
    return dict(found)


def width_and_depth(tensors: Mapping[str, Tensor], embedding: str, layers: Mapping[str, str]) -> dict[str, int]:
    """`d_model`, and the number of layers of each stack.

    Args:
        embedding: the name of a matrix of words, (V, D).
        layers: for each field, such as `encoder_layers`, what stands before the number of a layer in names.

    Raises:
        UserError: there is no such matrix, or a stack without layers.
    """
    found = {"d_model": _matrix(tensors, embedding).shape[1]}
    for field, prefix in layers.items():
        numbers = {int(match[1]) for name in tensors if (match := re.match(re.escape(prefix) + r"(\d+)", name))}
        if not numbers:
            raise UserError(f"there is no tensor {prefix}…: this is no encoder-decoder Transformer of that program")
        found[field] = max(numbers) + 1
    return found


def _matrix(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors or tensors[name].ndim != 2:
        raise UserError(f"there is no matrix {name} among {len(tensors)} tensors, such as {_some(tensors)}")
    return tensors[name]


def word_matrices(tensors: Mapping[str, Tensor], source: str, target: str, output: str) -> WordMatrices:
    """See which of the three matrices of words are one, by their numbers; a missing one is the one before it.

    Args:
        source, target, output: names of (V, D) matrices; the first has to be there.
    """
    words = _matrix(tensors, source)
    read = _matrix(tensors, target) if target in tensors else words
    written = _matrix(tensors, output) if output in tensors else read
    shared, tied = _same(words, read), _same(read, written)
    if written.shape[0] != read.shape[0]:
        raise UserError(f"{output} has {written.shape[0]} words, {target} has {read.shape[0]}: it must be as many")
    fields = {
        "vocab_size": words.shape[0],
        "decoder_vocab_size": read.shape[0],
        "share_encoder_decoder_embeddings": shared,
        "tie_word_embeddings": tied,
    }
    copies = {name for name, is_copy in ((target, shared), (output, tied)) if is_copy and name in tensors}
    return WordMatrices(fields, copies - {source})


def _same(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.shape == other.shape and torch.equal(one, other))


def position_layout(tables: Iterable[Tensor]) -> str:
    """Name what stands in the stacks' tables of positions, each (P, D): one of two kinds of sinusoids, or "learned".

    Tables are made in float32 or less, and so a little off the formula; what training did to one is much more.
    """
    found = set()
    for table in tables:
        sinusoids = (
            layout
            for layout in ("sinusoidal", "sinusoidal_split")
            if torch.allclose(_sinusoids(table, layout), table.float(), rtol=0, atol=_TABLE_ROUNDING)
        )
        found.add(next(sinusoids, "learned"))
    return found.pop() if len(found) == 1 else "learned"


def _sinusoids(table: Tensor, layout: str) -> Tensor:
    rows, width = table.shape
    return sinusoidal_positions(torch.arange(rows)[None], width, layout)[0]  # (P, D)


def build_model(
    fields: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    place: Callable[[str], str | Place],
    unused: Iterable[str] = (),
) -> VanillaTransformerForConditionalGeneration:
    """The translator with these weights.

    Args:
        fields: of `VanillaTransformerConfig`.
        tensors: the other program's, by its names.
        place: from the name of our parameter to where it stands there.
        unused: names that need not be used: copies of tied matrices, tables of sinusoids, counters.

    Returns:
        The model in evaluation mode, in the precision of the weights.

    Raises:
        UserError: settings that do not fit together, a tensor that is missing, left over, used in part or twice, or
            of the wrong shape.
    """
    try:
        config = VanillaTransformerConfig(**fields)
        # no memory, and no random numbers, for weights that come from elsewhere
        with torch.device("meta"):
            model = VanillaTransformerForConditionalGeneration(config)
    except (ValueError, TypeError) as error:
        raise UserError(f"the settings do not fit together: {' '.join(str(error).split())}") from None
    places = {name: _as_place(place(name)) for name, _ in model.named_parameters()}
    _require_all(places, tensors, set(unused))
    dtypes = {tensors[each.name].dtype for each in places.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    if not dtype.is_floating_point:
        raise UserError(f"the weights are {str(dtype).removeprefix('torch.')}: quantised ones cannot be converted")
    weights, used = {}, dict.fromkeys(tensors, 0)
    for name, parameter in model.named_parameters():
        weight = _part(tensors[places[name].name], places[name])
        if weight.shape != parameter.shape:
            there, expected = tuple(weight.shape), tuple(parameter.shape)
            raise UserError(f"{places[name].name} gives {there} for {name}, which is {expected}")
        weights[name] = weight.to(dtype, copy=True).contiguous()
        used[places[name].name] += weight.numel()
    wrong = [name for name, times in used.items() if times and times != tensors[name].numel()]
    if wrong:
        raise UserError(f"not used exactly once: {_some(wrong)}")
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    return model.eval()


def _as_place(place: str | Place) -> Place:
    return Place(place) if isinstance(place, str) else place


def _part(tensor: Tensor, place: Place) -> Tensor:
    part = tensor if place.rows is None else tensor[place.rows]
    return part.T if place.transposed else part


def _require_all(places: Mapping[str, Place], tensors: Mapping[str, Tensor], unused: set[str]) -> None:
    wanted = {place.name for place in places.values()}
    missing, surplus = wanted - tensors.keys(), tensors.keys() - wanted - unused
    if missing:
        raise UserError(f"tensors are missing ({len(missing)}): {_some(missing)}")
    if surplus:
        raise UserError(f"tensors that have no place in this architecture ({len(surplus)}): {_some(surplus)}")


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:_SHOWN]) + (" …" if len(ordered) > _SHOWN else "")
