"""The roles of the tensors of a Transformer in PyTorch, by their shapes and the words in their names.

Tutorials name the modules of the same architecture differently. A layer contains an attention or two, of which each
has matrices of queries, keys, values and output, perhaps fused, two matrices of a feed-forward network, and a
normalisation for each of these. Around the layers there are embeddings, an output layer, perhaps tables of positions,
and perhaps a normalisation after each stack.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..utils.errors import UserError, shown
from .converted import Tensors
from .state_dicts import STACKS, TensorRef

_LAYER = re.compile(
    r"(?:.*?\.)?(enc|dec)(?:oder)?s?(?:_?(?:layers?|blocks?|stack)|\.(?:(?!\d)\w+\.)*?\w*(?:layer|block|stack)\w*)"
    r"\.(\d{1,4})\.(.+)",
    re.IGNORECASE,
)
_PART = re.compile(
    r"(?:(?:w|fc|to|lin|linear|proj)_?)?([qkv])(?:s|uery|ueries|ey|eys|alue|alues)?"
    r"(?:_?(?:proj|projection|linear|lin|layer|transform)s?)?",
    re.IGNORECASE,
)
_FUSED = re.compile(r"in_proj|c_attn|(?:\w+_)?(q?kv)(?:_\w+)?", re.IGNORECASE)
_OF_CROSS = re.compile(r"cross|enc|src|source|context|memory|multihead_attn|inter", re.IGNORECASE)
_OF_FFN = re.compile(r"ff|feed|final|mlp|pos", re.IGNORECASE)
_OF_SELF = re.compile(r"self|slf|mask|att", re.IGNORECASE)
_POSITIONS = re.compile(r"pos|(?:^|[._])pe(?:$|[._])", re.IGNORECASE)
_EMBEDDING = re.compile(r"(?<!un)emb|lut|tok|word", re.IGNORECASE)
_SOURCE = re.compile(r"src|source|enc|input|(?:^|[._])in(?:$|[._])", re.IGNORECASE)
_TARGET = re.compile(r"trg|tgt|target|dec|out", re.IGNORECASE)
# The names of a normalisation's gain and bias, other than PyTorch's.
_KINDS = {"alpha": "weight", "gamma": "weight", "a_2": "weight", "beta": "bias", "b_2": "bias"}

# The ends of the names of a gain, and of its bias.
_PAIRS = {".a_2": ".b_2", ".gamma": ".beta", ".alpha": ".bias", "weight": "bias"}

_USUAL_MODULES = ("", "model", "module", "net")  # the names under which a trainer keeps the model

Modules = dict[str, dict[str, str]]  # a module's path -> "weight" and "bias" -> the tensor's name


class Around(NamedTuple):
    """Names of tensors around the layers. `positions` and `norms` are in the order of source and target.

    `unordered` are those of them whose names do not tell the order, so that it is that of the file.
    """

    source: str
    target: str
    output: str
    positions: list[str]
    norms: list[str]
    unordered: list[str]


def is_transformer(names: Iterable[str]) -> bool:
    """True if these tensors have layers of an encoder and of a decoder."""
    return {match[1].lower() for name in names if (match := _LAYER.fullmatch(name))} == {
        "enc",
        "dec",
    }


def one_model(tensors: Tensors, where: str) -> tuple[Tensors, list[str]]:
    """The tensors of the model, and the prefixes of its copies, such as the average that a trainer keeps next to it.

    Integers and truth values are left out, unless they are named as weights: they are counters and masks.

    Raises:
        UserError: several models, of which none has a usual name.
    """
    floats = {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.is_floating_point() or name.endswith(("weight", "bias"))
    }
    prefixes: dict[str, set[str]] = defaultdict(set)
    for name in floats:
        if match := _LAYER.fullmatch(name):
            prefixes[name[match.start(1) :]].add(name[: match.start(1)])
    modules = [prefix.split(".")[-2::-1] for prefix in max(prefixes.values(), key=len, default=())]
    if len(modules) < 2:
        return floats, []
    while all(modules) and len({names[0] for names in modules}) == 1:
        # "transformer" of "net.transformer."
        modules = [names[1:] for names in modules]
    roots = sorted("".join(f"{name}." for name in reversed(names)) for names in modules)
    usual = [root for root in roots if root.split(".")[-2:][0] in _USUAL_MODULES]
    if len(usual) != 1:
        names = ", ".join(shown(root) or "(no prefix)" for root in roots)
        raise UserError(f"{where}: {names}: each contains a model; save the state_dict() of one")
    copies = [root for root in roots if root != usual[0]]
    kept = {name: t for name, t in floats.items() if not name.startswith(tuple(copies))}
    return kept, copies


def layer_refs(tensors: Tensors) -> tuple[dict[str, TensorRef], list[str]]:
    """Map the parameters of our layers to tensors. Also return the modules in the order of the file.

    Their names do not tell it. They are the attentions of a layer, or its normalisations.

    Raises:
        UserError: a tensor has no clear role, or a stack has no layers.
    """
    layers: dict[tuple[str, int], Modules] = defaultdict(lambda: defaultdict(dict))
    for name in tensors:
        if match := _LAYER.fullmatch(name):
            path, kind = _split(match[3])
            layers[match[1].lower(), int(match[2])][path][kind] = name
    if {stack for stack, _ in layers} != {"enc", "dec"}:
        raise UserError(
            f"there are no layers of an encoder and a decoder among {len(tensors)} tensors"
        )
    refs: dict[str, TensorRef] = {}
    unordered: dict[str, None] = {}
    for (stack, number), modules in sorted(layers.items()):
        prefix = f"model.{stack}oder.layers.{number}."
        roles, doubtful = _roles(modules, tensors, stack == "dec", prefix)
        refs |= {prefix + name: ref for name, ref in roles.items()}
        unordered |= dict.fromkeys(doubtful)
    return refs, [*unordered]


def _split(name: str) -> tuple[str, str]:
    """The path of the module, and "weight" or "bias"."""
    if match := re.fullmatch(r"(.*in_proj)_(weight|bias)", name):
        return match[1], match[2]
    path, _, kind = name.rpartition(".")
    return path, _KINDS.get(kind, kind)


def _roles(
    modules: Modules, tensors: Tensors, is_decoder: bool, where: str
) -> tuple[dict[str, TensorRef], list[str]]:
    """The references of a layer's parameters, by their names in it, and the modules in the order of the file.

    Raises:
        UserError: its tensors are not those of a layer of this architecture.
    """
    for path, names in modules.items():
        if "weight" not in names:
            raise UserError(f"{where}{shown(path)}: it has no weight")
    dimensions = {path: tensors[names["weight"]].ndim for path, names in modules.items()}
    norms = [path for path, ndim in dimensions.items() if ndim == 1]
    matrices = [path for path, ndim in dimensions.items() if ndim == 2]
    attentions, feed_forward = _attentions(matrices)
    kinds = ["self_attn", "cross_attn"] if is_decoder else ["self_attn"]
    found = len(attentions), len(feed_forward), len(norms)
    complete = all(sorted("".join(parts)) == sorted("qkvo") for parts in attentions.values())
    if found != (len(kinds), 2, len(kinds) + 1) or not complete:
        raise UserError(
            f"{where}: {found[0]} attentions, {found[1]} matrices of a feed-forward network and "
            f"{found[2]} normalisations were recognised; a layer of this architecture has {len(kinds)}, 2 and "
            f"{len(kinds) + 1}; matrices of no attention are {', '.join(map(shown, feed_forward[:6])) or 'none'}: "
            "name those of an attention q_proj, k_proj, v_proj and out_proj, and call from_torch with the dictionary"
        )
    refs: dict[str, TensorRef] = {}
    groups, unordered = _in_order(list(attentions))
    norms, unordered_norms = _in_order(norms)
    for kind, group in zip(kinds, groups, strict=True):
        refs |= _attention(f"{kind}.", attentions[group], modules, tensors)
    ours = ["fc1", "fc2", *(f"{kind}_layer_norm" for kind in kinds), "final_layer_norm"]
    matrices, unordered_matrices = _by_number(feed_forward)
    paths = [*matrices, *norms]
    for name, path in zip(ours, paths, strict=True):
        refs |= {f"{name}.{kind}": TensorRef(tensor) for kind, tensor in modules[path].items()}
    shapes = {tensors[modules[path]["weight"]].shape for path in unordered_matrices}
    # The shapes tell the first matrix from the second, unless these are square.
    square = unordered_matrices if len(shapes) == 1 else []
    return refs, [*unordered, *unordered_norms, *square]


def _attentions(
    matrices: Sequence[str],
) -> tuple[dict[str, dict[str, str]], list[str]]:
    """The matrices of each attention by their letters, and those of no attention.

    A matrix of no clear role in the same module as an attention's queries is its output projection.
    """
    attentions: dict[str, dict[str, str]] = defaultdict(dict)
    rest = []
    for path in matrices:
        group, letters = _projection(path)
        if letters:
            attentions[group][letters] = path
        else:
            rest.append((group, path))
    others = []
    for group, path in rest:
        if group in attentions and "o" not in "".join(attentions[group]):
            attentions[group]["o"] = path
        else:
            others.append(path)
    return attentions, others


def _projection(path: str) -> tuple[str, str]:
    """The path around a matrix, and by its name the letters of "qkvo" that it computes, or no letters."""
    group, _, last = path.rpartition(".")
    group, is_list = re.subn(r"\.linears$", "", group)
    letters = ""
    if part := _PART.fullmatch(last):
        letters = part[1].lower()
    elif fused := _FUSED.fullmatch(last):
        letters = (fused[1] or "qkv").lower()
    elif is_list and last in "0123":
        letters = "qkvo"[int(last)]
    return group, letters


def _attention(
    prefix: str, parts: Mapping[str, str], modules: Modules, tensors: Tensors
) -> dict[str, TensorRef]:
    refs = {}
    for part, path in parts.items():
        for kind, name in modules[path].items():
            size = len(tensors[name]) // len(part)
            for index, letter in enumerate(part):
                rows = None if len(part) == 1 else slice(index * size, (index + 1) * size)
                refs[f"{prefix}{'out' if letter == 'o' else letter}_proj.{kind}"] = TensorRef(
                    name, rows
                )
    return refs


def _in_order(paths: list[str]) -> tuple[list[str], list[str]]:
    """Attentions or normalisations: self-attention, cross-attention, feed-forward network.

    The words in the paths decide. Without them, or if they are ambiguous, the numbers do. Paths that have none either
    are also returned apart.
    """
    words = (_OF_SELF, _OF_CROSS, _OF_FFN)
    places: dict[str, int | None] = {}
    for path in paths:
        places[path] = max((i for i, word in enumerate(words) if word.search(path)), default=None)
    missing = min({0, 1, 2} - {*places.values()}, default=0)
    ranks = {path: missing if place is None else place for path, place in places.items()}
    if len({*ranks.values()}) < len(paths):
        return _by_number(paths)
    return sorted(paths, key=lambda path: ranks[path]), []


def _by_number(paths: list[str]) -> tuple[list[str], list[str]]:
    """Paths in the order of their numbers, and those whose numbers are those of others."""
    numbers = Counter(tuple(_number(path)) for path in paths)
    return sorted(paths, key=_number), [path for path in paths if numbers[tuple(_number(path))] > 1]


def _number(path: str) -> list[int]:
    """The numbers in a path, for a stable sort: paths without numbers stay in the order of the file."""
    return [int(number) for number in re.findall(r"\d{1,4}", path)]


def around_layers(
    tensors: Tensors,
    width: int,
    source: str | None,
    target: str | None,
    output: str | None,
) -> Around:
    """Find the tensors around the layers by the words in their names, except those that are given."""
    outside = {name: tensor for name, tensor in tensors.items() if not _LAYER.fullmatch(name)}
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
    norms = [name for name in outside if outside[name].ndim == 1 and _split(name)[1] == "weight"]
    if len(norms) not in (0, 2):
        reason = "here each stack ends with one, or neither does"
        raise UserError(f"{len(norms)} normalisations after the stacks: {reason}")
    unordered = []
    for names in (norms, tables):
        places = {name: bool(_TARGET.search(name)) - bool(_SOURCE.search(name)) for name in names}
        names.sort(key=places.__getitem__)
        unordered += names if len(names) > len({*places.values()}) else []
    chosen = {option: names[0] for option, names in found.items()}
    return Around(
        chosen["source_embedding"],
        chosen["target_embedding"],
        chosen["output_layer"],
        tables,
        norms,
        unordered,
    )


def with_around(
    refs: Mapping[str, TensorRef], around: Around, tensors: Tensors
) -> dict[str, TensorRef]:
    """Add embeddings, output layer, normalisations after the stacks, and their biases to the `refs` of the layers."""
    modules = {
        "model.encoder.embed_tokens": around.source,
        "model.decoder.embed_tokens": around.target,
        "lm_head": around.output,
    }
    for stack, name in zip(STACKS, around.norms, strict=False):
        modules[f"model.{stack}.layer_norm"] = name
    complete = {**refs, **{f"{module}.weight": TensorRef(name) for module, name in modules.items()}}
    for name, ref in list(complete.items()):
        for gain, bias in _PAIRS.items():
            other = ref.name.removesuffix(gain) + bias
            if name.endswith("weight") and ref.name.endswith(gain) and other in tensors:
                complete.setdefault(name.replace("weight", "bias"), TensorRef(other))
    return complete
