"""The roles of the tensors of a model around `torch.nn.Transformer`.

Its stacks are known by its names within a layer. The tensors around them, embeddings, an output layer and perhaps
tables of positions, are known by their shapes and the words in their names.
"""

import os
import re
from collections.abc import Iterable
from typing import NamedTuple

from ..utils.errors import UserError, shown
from .converted import Tensors
from .state_dicts import STACKS, Locate, Renames, TensorRef, rename, without_prefix

_FIRST_LAYER = ".layers.0."
_SELF_ATTENTION = f"{_FIRST_LAYER}self_attn.in_proj_weight"
_CROSS_ATTENTION = f"{_FIRST_LAYER}multihead_attn.in_proj_weight"
_POSITIONS = re.compile(r"pos|(?:^|[._])pe(?:$|[._])", re.IGNORECASE)
_EMBEDDING = re.compile(r"(?<!un)emb|lut|tok|word", re.IGNORECASE)
_SOURCE = re.compile(r"src|source|enc|input|(?:^|[._])in(?:$|[._])", re.IGNORECASE)
_TARGET = re.compile(r"trg|tgt|target|dec|out", re.IGNORECASE)

# Our names within a stack, and those of `torch.nn.TransformerEncoder` and `TransformerDecoder`.
_RENAMES: Renames = (
    ("^layer_norm", "norm"),
    (r"self_attn_layer_norm", "norm1"),
    (r"cross_attn_layer_norm", "norm2"),
    ("cross_attn", "multihead_attn"),
    ("fc1", "linear1"),
    ("fc2", "linear2"),
)
_LAST_NORM = {"encoder": "norm2", "decoder": "norm3"}


class Around(NamedTuple):
    """Names of tensors around the stacks. `positions` are those of source and target."""

    source: str
    target: str
    output: str
    positions: list[str]


def is_transformer(names: Iterable[str]) -> bool:
    """True if these tensors have layers of a decoder."""
    return any(f".{name}".endswith(_CROSS_ATTENTION) for name in names)


def one_model(tensors: Tensors) -> Tensors:
    """The tensors of the model, without those of its copies, such as the average that a trainer keeps next to it.

    Integers and truth values are left out, unless they are named as weights: they are counters and masks.
    """
    floats = {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.is_floating_point() or name.endswith(("weight", "bias"))
    }
    modules = [path.split(".")[::-1] for path in paths_of_stacks(floats)["decoder"]]
    inner = os.path.commonprefix(modules)[
        ::-1
    ]  # "transformer.decoder" of "net.transformer.decoder"
    return without_prefix(floats, [".".join(inner) + _CROSS_ATTENTION])


def paths_of_stacks(tensors: Tensors) -> dict[str, list[str]]:
    """The paths of the modules with layers. Those of a decoder have a cross-attention."""
    dotted = [f".{name}" for name in tensors]
    paths = [
        name.removesuffix(_SELF_ATTENTION) for name in dotted if name.endswith(_SELF_ATTENTION)
    ]
    decoders = [path for path in paths if f"{path}{_CROSS_ATTENTION}" in dotted]
    encoders = [path for path in paths if path not in decoders]
    return {
        stack: [path.removeprefix(".") for path in found]
        for stack, found in zip(STACKS, (encoders, decoders), strict=True)
    }


def stack_paths(tensors: Tensors, where: str) -> dict[str, str]:
    """The path of the encoder and that of the decoder.

    Raises:
        UserError: the tensors are not those of one `torch.nn.Transformer`.
    """
    paths = paths_of_stacks(tensors)
    if any(len(found) != 1 for found in paths.values()):
        listed = " and ".join(
            f"{len(found)} {stack}s ({', '.join(map(shown, sorted(found)))})"
            for stack, found in paths.items()
        )
        raise UserError(
            f"{where}: there are {listed} of torch.nn.Transformer among {len(tensors)} tensors, and one of each is "
            "needed; save the state_dict() of one model, or rename the tensors of other code to these names, such as "
            "encoder.layers.0.self_attn.in_proj_weight, and call from_torch with the dictionary"
        )
    return {stack: found[0] for stack, found in paths.items()}


def locate_in_stacks(paths: dict[str, str], width: int) -> Locate:
    """A function from our parameters of the stacks to the tensors of `torch.nn.Transformer`."""

    def locate(name: str) -> str | TensorRef:
        stack, _, rest = name.removeprefix("model.").partition(".")
        rest = rename(rest.replace("final_layer_norm", _LAST_NORM[stack]), _RENAMES)
        path = f"{paths[stack]}.{rest}"
        projection = re.fullmatch(r"(.*)\.([qkv])_proj\.(weight|bias)", path)
        if projection is None:
            return path
        start = "qkv".index(projection[2]) * width
        fused = f"{projection[1]}.in_proj_{projection[3]}"
        return TensorRef(fused, slice(start, start + width))

    return locate


def around_stacks(
    tensors: Tensors,
    paths: dict[str, str],
    width: int,
    source: str | None,
    target: str | None,
    output: str | None,
) -> Around:
    """Find the tensors around the stacks by the words in their names, except those that are given."""
    inside = tuple(f"{path}.{part}" for path in paths.values() for part in ("layers.", "norm."))
    outside = {name: tensor for name, tensor in tensors.items() if not name.startswith(inside)}
    tables = [name for name in outside if _POSITIONS.search(name) and outside[name].ndim > 1]
    matrices = [
        name for name in outside if name not in tables and outside[name].shape[1:] == (width,)
    ]
    embeddings = [name for name in matrices if _EMBEDDING.search(name) and name != output]
    outputs = [name for name in matrices if name not in (*embeddings, source, target)]
    sources = [name for name in embeddings if _SOURCE.search(name)]
    targets = [name for name in embeddings if _TARGET.search(name)]
    if len(embeddings) == 1:
        sources = targets = embeddings
    found = {
        "source_embedding": [source] if source else sources,
        "target_embedding": [target] if target else targets,
        "output_layer": [output] if output else outputs,
    }
    for option, names in found.items():
        if len(names) != 1:
            reason = (
                f"because {len(names)} tensors of {len(outside)} around the layers look like it"
            )
            raise UserError(f"{option} is missing: give the name of that module, {reason}")
    tables.sort(key=lambda name: bool(_TARGET.search(name)) - bool(_SOURCE.search(name)))
    chosen = [names[0] for names in found.values()]
    return Around(chosen[0], chosen[1], chosen[2], tables)
