"""State dictionaries of other toolkits: loaded without running code, renamed, each tensor used exactly once.

A converter maps each of our parameters to a tensor of the file (`TensorRef`). `build_model` checks that every tensor
of the file is used, that none is used twice, and that all shapes match.
"""

import _compat_pickle
import argparse
import itertools
import pickle
import re
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors.torch import load_file
from torch import Tensor

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..layers_vanilla_transformer import sinusoidal_positions
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..utils.errors import UserError, shown
from ..utils.finite import require_finite
from ..utils.untrusted import one_line, reading_weights, require_file, unsafe_name
from .converted import Fields, Tensors

STACKS = ("encoder", "decoder")
_MAX_NAMES = 4  # in a message
_MAX_NESTING = 4
_MAX_CHILDREN = 100  # of containers around a state dictionary
_USUAL_KEYS = ("", "state_dict", "model_state_dict", "model", "module", "net", "model_state")
_MAX_PREFIX = 500  # characters of the names of nested modules
_MAX_CLASSES = 200  # of other libraries in a file: each costs a further reading
_EMBEDDINGS = (
    "model.encoder.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
    "lm_head.weight",
)
_SIZES = {"d_model"} | {f"{stack}_{size}" for stack in STACKS for size in ("layers", "ffn_dim")}
_TABLE_ROUNDING = 2e-3  # of float16. Float32 at position 5,000 is off by 3e-4

# Added to names by DataParallel, torch.compile, FSDP and activation checkpointing.
_WRAPPERS = re.compile(
    r"(?:(?<=\.)|^)(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
# Masks, counters, and the buffers of losses and metrics.
_NOT_WEIGHTS = re.compile(
    r"(?:.*\.)?(?:(?:\w+_)?mask|_extra_state|num_batches_tracked|position_ids)"
    r"|(?:\w+_)?(?:criterion|loss|metrics?|bleu|acc|accuracy|perplexity)(?:_\w+)?\..*"
)
# Classes and functions of the standard library and NumPy that create data only.
_DATA = re.compile(
    r"argparse\.Namespace|_codecs\.encode|copyreg\._reconstructor|functools\.partial|re\._compile|random\.Random"
    r"|(?:collections|datetime|pathlib|pathlib\._local|decimal|fractions|enum|uuid)\.[A-Z]\w*|types\.SimpleNamespace"
    r"|collections\.(?:defaultdict|deque)|datetime\.(?:datetime|date|time|timedelta|timezone)"
    r"|builtins\.(?:set|frozenset|slice|range|complex|bytearray|object|list|dict|tuple|str|int|float|bool|bytes|type)"
    r"|numpy\.(?:dtype|ndarray|bool_?|u?int\d+|float\d+|str_|dtypes\.\w+|random\..+|_?core\.(?:multiarray|numeric)\..+)"
)
# Also under the names of Python 2, which `torch.save` writes.
_STANDARD_LIBRARY = {*sys.stdlib_module_names, *_compat_pickle.IMPORT_MAPPING}
_NOT_ITS_ITEMS = re.compile(r"Can only (SETITEMS?|append|extend) .*<class '([\w.]+)'>")


class TensorRef(NamedTuple):
    """The tensor of a foreign checkpoint that contains one of our parameters."""

    name: str  #: the tensor's name
    #: the rows of the tensor, or None for all. Fused projections have queries, keys and values in one tensor.
    rows: slice | int | None = None
    transposed: bool = False  #: the toolkit computes x W where we compute x W^T


#: From the name of our parameter to the toolkit's tensor.
Locate: TypeAlias = Callable[[str], str | TensorRef]
# Pairs of a pattern in our parameter names and its replacement in the toolkit's, applied in turn.
Renames = tuple[tuple[str, str], ...]


def rename(name: str, renames: Renames) -> str:
    """`name` with every replacement applied."""
    for pattern, replacement in renames:
        name = re.sub(pattern, replacement, name)
    return name


class Ignored:
    """Replaces an object of another library, so that none of its code runs. Keeps its state as the file has it."""

    state: object = None

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __setstate__(self, state: object) -> None:
        self.state = state


class _IgnoredMapping(Ignored):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return {}


class _IgnoredSequence(Ignored):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return []


class _IgnoredFunction(Ignored):
    """A function that the file only refers to. A call of it is refused."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        raise pickle.UnpicklingError(f"GLOBAL {cls.__module__}.{cls.__qualname__}")


def read_torch_file(path: str | Path) -> Any:
    """Load a file of `torch.save` or safetensors. No code of the file is run.

    The file may contain tensors, plain containers, `argparse.Namespace`, and objects of other libraries, which become
    `Ignored`. Functions of the standard library are refused, and so are calls of other functions.
    """
    path = require_file(Path(path))
    with reading_weights(path):
        if path.suffix == ".safetensors":
            return load_file(path, backend="pread")
        placeholders: dict[str, type] = {}
        if zipfile.is_zipfile(path):
            _check_archive(path)
            with torch.serialization.safe_globals([argparse.Namespace]):
                names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            for name in names:
                _add_placeholder(placeholders, name)
        # Files of torch before 1.6 have no such list: torch refuses one name after the other. It also refuses items
        # of a class that turns out to be a container.
        while True:
            allowed = [(kind, name) for name, kind in placeholders.items()]
            try:
                with torch.serialization.safe_globals([argparse.Namespace, *allowed]):
                    return torch.load(path, map_location="cpu", weights_only=True)
            except pickle.UnpicklingError as error:
                if "persistent_load" in str(error) and placeholders:
                    # Old files store modules with their code.
                    raise pickle.UnpicklingError(f"GLOBAL {next(iter(placeholders))}") from None
                if items := _NOT_ITS_ITEMS.search(str(error)):
                    container = _IgnoredMapping if items[1].startswith("SET") else _IgnoredSequence
                    is_new = _add_placeholder(placeholders, items[2], container)
                else:
                    is_new = _add_placeholder(placeholders, unsafe_name(error))
                if not is_new:
                    raise


def _add_placeholder(
    placeholders: dict[str, type], name: str | None, kind: type[Ignored] | None = None
) -> bool:
    """Replace a class or function of another library. False if it stays refused.

    Functions of the standard library do, because they can do anything.
    """
    if name is None or len(placeholders) > _MAX_CLASSES:
        return False
    module, _, attribute = name.rpartition(".")
    if kind is None:
        is_data = _DATA.fullmatch(name) is not None
        if not is_data and name.partition(".")[0] in _STANDARD_LIBRARY:
            return False
        kind = Ignored if is_data or attribute[0].isupper() else _IgnoredFunction
    if issubclass(placeholders.get(name, object), kind):
        return False
    placeholders[name] = type(attribute, (kind,), {"__module__": module, "__qualname__": attribute})
    return True


def _check_archive(path: Path) -> None:
    """Refuse TorchScript, and compressed members, which may be huge and which `torch.save` does not write."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    if any(member.filename.endswith("/constants.pkl") for member in members):
        raise UserError(
            f"{path}: a TorchScript archive contains code; save the state_dict() of the model instead"
        )
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise UserError(
            f"{path}: an archive with compressed members, which torch.save does not write"
        )


def require_tensors(state: object, where: str, *known: str) -> Tensors:
    """Return a state dictionary without the traces of wrappers, or raise a UserError that names `where`.

    Its tensors are finite. Masks, counters, and the buffers of losses and metrics are left out. Names lose the prefix
    that is in front of `known` ones. If there are several, one has a usual name, and the rest are averages of it.
    """
    if not isinstance(state, Mapping) or not state or not all(map(_is_text, state)):
        raise UserError(f"{where}: a state dictionary is needed there, not {type(state).__name__}")
    unwrapped = {_WRAPPERS.sub("", name): value for name, value in state.items()}
    if len(unwrapped) < len(state):
        unwrapped = dict(state)
    tensors = {
        name: value
        for name, value in unwrapped.items()
        if value is not None and not _NOT_WEIGHTS.fullmatch(name)
    }
    for name in unwrapped.keys() - tensors.keys():
        if name.endswith("mask") and _is_learned(unwrapped[name]):
            raise UserError(
                f"{where}: {shown(name)} has more than two values, and is no mask: such a model is not converted"
            )
    for name, tensor in tensors.items():
        _check_tensor(tensor, f"{where}: {shown(name)}")
    named = ((shown(name), tensor) for name, tensor in tensors.items())
    require_finite(named, where, "convert an earlier checkpoint")
    return without_prefix(tensors, known)


def _is_learned(mask: object) -> bool:
    """Return whether a tensor with the name of a mask has more than two values, as gates of heads do."""
    if not isinstance(mask, Tensor) or not mask.is_floating_point() or not mask.numel():
        return False
    return bool(((mask != mask.min()) & (mask != mask.max())).any())


def _check_tensor(tensor: object, where: str) -> None:
    """Refuse anything but a tensor of numbers that are all in the file."""
    if not isinstance(tensor, Tensor):
        raise UserError(f"{where} is {type(tensor).__name__}, not a tensor")
    if tensor.layout != torch.strided or tensor.nbytes > tensor.untyped_storage().nbytes():
        raise UserError(f"{where} {list(tensor.shape)} is larger than its data in the file")


def without_prefix(tensors: Tensors, known: Iterable[str]) -> Tensors:
    """The tensors without the prefix of `known` ones, and without averages of the model."""
    prefixes = {
        name.removesuffix(end)
        for name in tensors
        for end in known
        if f".{name}".endswith(f".{end}")
    }
    usual = [prefix for prefix in prefixes if prefix.split(".")[-2:][0] in _USUAL_KEYS]
    chosen = usual or list(prefixes)
    if len(chosen) != 1:
        return tensors
    averages = tuple(prefixes - {*chosen})
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(averages)}
    return {name.removeprefix(chosen[0]): tensor for name, tensor in kept.items()}


def with_zero_biases(tensors: Tensors, weights: re.Pattern[str]) -> Tensors:
    """The tensors, with zeros for the biases (outputs) that matching `weights` lack: here their layers have one."""
    filled = dict(tensors)
    for name, tensor in tensors.items():
        if weights.fullmatch(name):
            bias = name.removesuffix("weight") + "bias"
            filled.setdefault(bias, tensor.new_zeros(len(tensor)))
    return filled


def plain_options(options: object) -> Fields:
    """The options that a toolkit saved: a mapping, a namespace, or an object of another library."""
    options = options.state if isinstance(options, Ignored) else options
    options = vars(options) if isinstance(options, argparse.Namespace) else options
    return dict(options) if isinstance(options, Mapping) else {}


def find_weights(
    saved: object,
    is_model: Callable[[Iterable[str]], bool],
    where: str,
    left_out: list[str] | None = None,
) -> Tensors:
    """Find the weights of a model, by `is_model` of a state dictionary's names, in what a trainer saved.

    `saved` is a state dictionary, a module, or containers of them, such as {"state_dict": …} or (model, optimizer).
    The keys of other models next to it, such as an average, are appended to `left_out`.
    """
    level = {"": saved}
    seen = {id(saved)}
    for _ in range(_MAX_NESTING):
        states = {
            key: _state_of_module(value) if isinstance(value, Ignored) else value
            for key, value in level.items()
        }
        models = [
            key for key, state in states.items() if is_model(filter(_is_text, _as_mapping(state)))
        ]
        usual = [key for name in _USUAL_KEYS for key in models if key.rpartition("/")[2] == name]
        if len(models) > 1 and not usual:
            raise UserError(
                f"{where}: {_some(models)}: each contains a model; save the state_dict() of one"
            )
        if models:
            chosen = (usual or models)[0]
            if left_out is not None:
                left_out += [key for key in models if key != chosen]
            return require_tensors(states[chosen], where)
        parents = level
        level = {}
        for parent, value in parents.items():
            children = dict(enumerate(value)) if isinstance(value, list | tuple) else value
            for key, child in itertools.islice(_as_mapping(children).items(), _MAX_CHILDREN):
                if id(child) not in seen:
                    seen.add(id(child))
                    level[f"{parent}/{shown(key)}".lstrip("/")] = child
    return require_tensors(saved, where)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _as_mapping(value: object) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}


def _state_of_module(module: Ignored) -> Fields:
    """The state dictionary of a module that was saved whole."""
    state: Fields = {}
    modules: list[tuple[str, object]] = [("", module)]
    seen = {id(module)}
    for prefix, part in modules:
        content = _as_mapping(part.state if isinstance(part, Ignored) else None)
        for kind in ("_parameters", "_buffers"):
            tensors = _as_mapping(content.get(kind))
            state |= {f"{prefix}{shown(name)}": tensor for name, tensor in tensors.items()}
        for name, child in _as_mapping(content.get("_modules")).items():
            if id(child) not in seen and len(prefix) < _MAX_PREFIX:
                seen.add(id(child))
                modules.append((f"{prefix}{shown(name)}.", child))
    return state


def weights_decide(tensors: Tensors, locate: Locate) -> Fields:
    """The configuration fields that the weights decide: sizes, depths, biases, and which matrices are equal (§3.4).

    `locate` is as in `build_model`. A missing target embedding or output matrix is tied to the one before it.
    """

    def find(name: str) -> Tensor | None:
        reference = _reference(locate(name))
        return referred(tensors[reference.name], reference) if reference.name in tensors else None

    def matrix(name: str, default: Tensor | None = None) -> Tensor:
        found = default if find(name) is None else find(name)
        if found is None or found.ndim != 2:
            raise UserError(
                f"there is no matrix {_reference(locate(name)).name} among {len(tensors)} tensors, such as "
                f"{_some(tensors)}: this is no encoder-decoder Transformer of that toolkit"
            )
        return found

    source = matrix(_EMBEDDINGS[0])
    target = matrix(_EMBEDDINGS[1], source)
    output = matrix(_EMBEDDINGS[2], target)
    fields = {
        "d_model": source.shape[1],
        "vocab_size": len(source),
        "decoder_vocab_size": len(target),
        "share_encoder_decoder_embeddings": same(source, target),
        "tie_word_embeddings": same(target, output),
        "attention_bias": find("model.encoder.layers.0.self_attn.q_proj.bias") is not None,
        "lm_head_bias": find("lm_head.bias") is not None,
    }
    for stack in STACKS:
        layer = f"model.{stack}.layers.{{}}.fc1.weight"
        fields[f"{stack}_ffn_dim"] = len(matrix(layer.format(0)))
        fields[f"{stack}_layers"] = next(
            i for i in itertools.count() if find(layer.format(i)) is None
        )
    return fields


def same(one: Tensor | None, other: Tensor) -> bool:
    """True if both have the same shape and the same numbers."""
    return one is other or (one is not None and torch.equal(one, other))


def position_layout(tables: Iterable[Tensor]) -> str:
    """The `position_encoding_type` of the stacks' tables of positions, each (P, D): one of two layouts, or "learned".

    The tables are rounded to float32 or less. Training changes a table much more.
    """
    layouts = ["sinusoidal", "sinusoidal_split"]
    for table in tables:
        positions = torch.arange(len(table))[None]
        # (P, D)
        expected = {
            layout: sinusoidal_positions(positions, table.shape[1], layout)[0] for layout in layouts
        }
        near: Fields = {"rtol": 0, "atol": _TABLE_ROUNDING}
        layouts = [
            layout for layout in layouts if torch.allclose(expected[layout], table.float(), **near)
        ]
    return layouts[0] if layouts else "learned"


def build_model(
    fields: Fields,
    tensors: Tensors,
    locate: Locate,
    unused: Iterable[str] = (),
) -> VanillaTransformerForConditionalGeneration:
    """The model with these configuration fields, and with the weights and the dtype of a toolkit's `tensors`.

    Args:
        fields: they complete and override those of `weights_decide`, but sizes and depths must agree with these.
        locate: maps the name of our parameter to the toolkit's tensor.
        unused: tensors that may be left out, such as tables of sinusoids. Copies of tied matrices always may.
    """
    decided = weights_decide(tensors, locate)
    for name in decided.keys() & fields.keys() & _SIZES:
        if fields[name] != decided[name]:
            raise UserError(f"{name}={shown(fields[name])}, but the weights have {decided[name]}")
    try:
        config = VanillaTransformerConfig(**decided | fields)
        # on the meta device: the weights are assigned below
        with torch.device("meta"):
            model = VanillaTransformerForConditionalGeneration(config)
    except (ValueError, TypeError) as error:
        raise UserError(f"the settings do not fit together: {one_line(error)}") from None
    _check_special_values(config)
    parameters = dict(model.named_parameters())
    references = {name: _reference(locate(name)) for name in parameters}
    used = dict.fromkeys((reference.name for reference in references.values()), 0)
    copies = {_reference(locate(name)).name for name in _EMBEDDINGS}
    if missing := used.keys() - tensors.keys():
        raise UserError(f"tensors are missing ({len(missing)}): {_some(missing)}")
    if surplus := tensors.keys() - used.keys() - copies - {*unused}:
        raise UserError(
            f"tensors that this architecture does not have ({len(surplus)}): {_some(surplus)}"
        )
    for name in used:
        if not tensors[name].is_floating_point():
            kind = str(tensors[name].dtype).removeprefix("torch.")
            raise UserError(f"{name} is {kind}: quantised weights cannot be converted")
    dtypes = {tensors[name].dtype for name in used}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    weights = {}
    for name, reference in references.items():
        weight = referred(tensors[reference.name], reference)
        shape = parameters[name].shape
        if weight.shape != shape:
            raise UserError(
                f"{reference.name} gives {tuple(weight.shape)} for {name}, which is {tuple(shape)}"
            )
        weights[name] = weight.to(dtype, copy=True).contiguous()
        used[reference.name] += weight.numel()
    if wrong := [name for name, count in used.items() if count != tensors[name].numel()]:
        raise UserError(f"not used exactly once: {_some(wrong)}")
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    return model.eval()


def _reference(located: str | TensorRef) -> TensorRef:
    return TensorRef(located) if isinstance(located, str) else located


def referred(tensor: Tensor, reference: TensorRef) -> Tensor:
    """The part of a tensor that a reference means, in our orientation."""
    part = tensor if reference.rows is None else tensor[reference.rows]
    return part.T if reference.transposed else part


def _check_special_values(config: VanillaTransformerConfig) -> None:
    """Refuse ids outside the vocabularies, because no sequence would end with them, and a useless epsilon."""
    larger = max(config.vocab_size, config.target_vocab_size)
    sizes = dict.fromkeys(("bos_token_id", "unk_token_id"), larger)
    sizes |= dict.fromkeys(("pad_token_id", "eos_token_id"), config.vocab_size)
    targets = ("decoder_start_token_id", "target_pad_token_id", "target_eos_token_id")
    sizes |= dict.fromkeys(targets, config.target_vocab_size)
    for name, size in sizes.items():
        value = getattr(config, name)
        for token in value if isinstance(value, list) else [value]:
            if token is not None and not 0 <= token < size:
                known = name.replace("target_", "")
                raise UserError(
                    f"{known}={token}: the vocabulary has {size} tokens, from 0 to {size - 1}"
                )
    if config.layer_norm_eps < 0:
        raise UserError(f"layer_norm_eps={config.layer_norm_eps}: a number of at least 0 is needed")


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(map(shown, ordered[:_MAX_NAMES])) + (" …" if len(ordered) > _MAX_NAMES else "")
