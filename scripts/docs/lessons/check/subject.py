"""Somebody's class: how it is built and called."""

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hf_vanilla_transformer.utils.errors import UserError
from hf_vanilla_transformer.utils.untrusted import one_line

WIDTH = 32
HEADS = 4
FFN = 48
LAYERS = 2
SOURCE_TOKENS = 23
TARGET_TOKENS = 29
POSITIONS = 40
PAD = 0
BOS = 1
EOS = 2
LARGE_EPSILON = 1e-3

_SOURCE = r"src.*|source.*|enc(oder)?_in\w*|input_ids"  # names of the encoder's input
_TARGET = r"decoder_input(_id)?s|(tgt|trg|target)s?(_\w+)?|dec(oder)?_in\w*|y"  # names of the decoder's input
_MASK = r"mask|pad|valid_?len|lengths?$"  # in names of masks, or of the numbers of words
_OF_TARGET = r"tgt|trg|target|dec|look|causal|d_mask|future"  # in names of masks

#: Value of a constructor's argument by its name, in the order of decision.
_ARGUMENTS: tuple[tuple[str, Any], ...] = (
    (r"dropout.*|drop_?(prob|rate|p)?|p_?drop|p|.*_dropout", 0.0),
    (r"device", "cpu"),
    (r"batch_first", True),
    (
        r"max_?(seq(uence)?_?)?(len(gth)?|pos(itions?)?)|max_?(src|tgt|trg|source|target)_?len|seq_?len(gth)?|max_position\w*"
        r"|(src|tgt|trg|source|target)_seq_?len|context_(len|size)|block_size|n_positions",
        POSITIONS,
    ),
    (r".*pad.*", PAD),
    (r".*(bos|sos|start).*", BOS),
    (r".*eos.*", EOS),
    (
        r"(n|num|nb|number_of)?_?(attention_|attn_)?heads?(_(count|size|num))?|h|nhead|.*_n?_?heads",
        HEADS,
    ),
    (r"(d|dim)_(k|v|q|head)|head_dim|(key|value|query)_(dim|size)", WIDTH // HEADS),
    (
        r"d_?ff|ff(n|w)?(_?(dim|size|hidden))?|d_?ffn|dim_?feedforward|feed_?forward\w*|pf_dim|d_inner\w*|d_hid|ffn_hidden|inner\w*|"
        r"intermediate_size|hidden_ff|mlp_dim|filter_size|ffn_num_hiddens",
        FFN,
    ),
    (r"forward_expansion|expansion\w*|mlp_ratio|ff_mult", 2),
    (
        r"(n|num|nb)?_?(enc(oder)?_|dec(oder)?_|hidden_)?(layers?|blocks?|blks?)|n|depth|number_of_layers|layers?_count|(num_)?(encoder|decoder)_(layers|blocks|depth)",
        LAYERS,
    ),
    (
        r"d_?model|(dim_?)?model(_?(dim|size))?|emb(ed(ding)?)?s?_?(dim|size)|n_embd?|d_embed\w*|dim|d|hidden(_?(dim|size))?|features|size|normalized_shape|"
        r"hid_dim|width|num_hiddens|features_count|ffn_num_outputs|norm_shape|model_dimension|d_word_vec",
        WIDTH,
    ),
    (
        r".*(src|source|enc|inp|from).*(voc|tok|dim|size|words).*|.*(voc|tok|words).*(src|source|enc|in(put)?)\w*|input_dim|(n_)?src(_n)?",
        SOURCE_TOKENS,
    ),
    (
        r".*(tgt|trg|target|dec|out|to_).*(voc|tok|dim|size|words).*|.*(voc|tok|words).*(tgt|trg|target|dec|out(put)?)\w*|output_dim|(n_)?(tgt|trg)(_n)?",
        TARGET_TOKENS,
    ),
    (r".*vocab.*|n?_?tokens?|num_(tokens|embeddings)|n_words", TARGET_TOKENS),
)


def is_whole_model(build: Callable[..., Any]) -> bool:
    """Return whether a class or function has two vocabularies, or a `forward` of source and target."""
    if sum("voc" in name.lower() for name in inspect.signature(build).parameters) > 1:
        return True
    forward = getattr(build, "forward", None)
    names = [] if forward is None else [*inspect.signature(forward).parameters]
    return all(
        any(re.fullmatch(words, name.lower()) for name in names if not re.search(_MASK, name))
        for words in (_SOURCE, _TARGET)
    )


def constructor_arguments(build: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a class or function by the names of its parameters, those of `given` first."""
    parameters = inspect.signature(build).parameters
    flexible = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    if not flexible and (unknown := given.keys() - parameters.keys()):
        raise UserError(
            f"--set {min(unknown)}: {build.__name__} takes {', '.join(parameters) or 'no arguments'}"
        )
    arguments = dict(given)
    for name, parameter in parameters.items():
        if name in arguments or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        value = next(
            (value for names, value in _ARGUMENTS if re.fullmatch(names, name.lower())), None
        )
        if value is not None and not (
            isinstance(parameter.default, str) and not isinstance(value, str)
        ):
            arguments[name] = value
        elif parameter.default is parameter.empty:
            raise UserError(
                f"{build.__name__}: what is its argument {name}? Give --set {name}=VALUE"
            )
    return arguments


def built(build: Callable[..., Any], arguments: Mapping[str, Any]) -> nn.Module:
    """The module in eval mode, with random weights."""
    try:
        module = build(**arguments)
    except Exception as error:
        described = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        raise UserError(
            f"{build.__name__}({described}): {type(error).__name__}: {one_line(error)}; give --set NAME=VALUE"
        ) from error
    if not isinstance(module, nn.Module):
        raise UserError(f"{build.__name__} gives {type(module).__name__}, not a torch.nn.Module")
    randomise(module)
    return module.eval()


_HEADS = r"(n|num|nb)(ber_of)?_?(attention_|attn_)?heads?|n_?head|heads?|h|heads?_(count|size|num)|.*_num_heads"


def heads_of(module: nn.Module, arguments: Mapping[str, Any]) -> list[int]:
    """The numbers of heads by the attributes of the modules, or else by the arguments of the constructor."""
    numbers = [
        value
        for part in module.modules()
        for name, value in vars(part).items()
        if re.fullmatch(_HEADS, name) and isinstance(value, int) and value > 0
    ]
    numbers += [int(value) for name, value in arguments.items() if "head" in name or name == "h"]
    return list(dict.fromkeys(numbers))


class DropoutOfMask(TorchFunctionMode):
    """Context that notes whether dropout reads a tensor of two values, which is a mask. It acts in training alone."""

    is_found = False

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is functional.dropout and args and args[0].unique().numel() == 2:
            self.is_found = True
        return function(*args, **(kwargs or {}))


def switch_off_dropout(module: nn.Module) -> None:
    """Let the modules of dropout pass everything, also in training mode."""
    for part in module.modules():
        for name in ("p", "dropout"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)


def require_parameters(module: nn.Module) -> None:
    """Refuse a module that has nothing to compare."""
    if not any(True for _ in module.parameters()):
        raise UserError(
            f"{type(module).__name__} has no parameters: it needs layers of an encoder and of a decoder"
        )


def require_equal(output: Tensor, again: Tensor) -> None:
    """Refuse a module whose output is random in eval mode."""
    if not torch.equal(output, again):
        raise UserError(
            "two calls in eval mode differ: dropout is active, as in F.dropout without training=self.training"
        )


def randomise(module: nn.Module) -> None:
    """Give every trained parameter random values, also norms and biases, whose ones and zeros hide mistakes."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if not parameter.requires_grad or isinstance(
                parameter, nn.parameter.UninitializedParameter
            ):
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            is_gain = parameter.ndim <= 1 and bool((parameter == 1).all())
            spread = 0.2 if parameter.ndim <= 1 else 1.4 * parameter.shape[-1] ** -0.5
            parameter.copy_(noise * spread + (1.0 if is_gain else 0.0))


def norm_options(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    """The epsilons and kinds of normalisation that the modules may have."""
    named = {value for value in _epsilons(module) if value < LARGE_EPSILON}
    usual = {1e-5, 1e-6, 1e-12} - named if len(named) != 1 else set()
    kinds = {type(part) for part in module.modules()}
    norms: tuple[str, ...] = ("biased", "unbiased", "rms")
    if nn.LayerNorm in kinds:
        norms = ("biased",)
    elif nn.RMSNorm in kinds:
        norms = ("rms",)
    return {"norm": norms, "epsilon": (*named, *sorted(usual))}


def large_epsilon(module: nn.Module) -> float:
    """The largest epsilon of a normalisation that changes the numbers, or 0."""
    return max((value for value in _epsilons(module) if value >= LARGE_EPSILON), default=0.0)


def _epsilons(module: nn.Module) -> Iterator[float]:
    for part in module.modules():
        for name in ("eps", "epsilon", "variance_epsilon"):
            value = getattr(part, name, None)
            if isinstance(value, float):
                yield value


def shared_layers(module: nn.Module) -> bool:
    """Whether the layers of a stack are one object, as in `[layer] * n`."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList) and len(part) > 1]
    return any(len(set(map(id, part))) < len(part) for part in lists)


class Call(NamedTuple):
    """A way to call a model.

    Attributes:
        run: makes the call.
        source: the words of the source as they are passed, (B, S) or (S, B).
        target: the words of the decoder's input.
        encoding: what the masks contain: "visible", "hidden", "number" or "added". "" without masks.
    """

    run: Callable[[], Any]
    source: Tensor
    target: Tensor
    encoding: str


def calls(module: nn.Module, source: Tensor, target: Tensor) -> Iterator[Call]:
    """The ways to call a model for source (B, S) and decoder input (B, T) that its signature allows.

    Masks may be True where a key is visible or where it is hidden, numbers, or -inf to add, and of several shapes.
    Calls with all masks come first.
    """
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [
        each for each in inspect.signature(module.forward).parameters.values() if each.kind in kinds
    ]
    if len(parameters) < 2:
        names = ", ".join(each.name for each in parameters) or "nothing"
        raise UserError(
            f"forward of {type(module).__name__} takes {names}, and a source and a target are needed: write a forward "
            "that calls the encoder, the decoder and the output layer"
        )
    first = parameters[0].name
    second = next(
        (each.name for each in parameters[1:] if re.fullmatch(_TARGET, each.name)),
        parameters[1].name,
    )
    required = {each.name for each in parameters if each.default is each.empty} - {first, second}
    masks = {
        each.name for each in parameters if re.search(_MASK, each.name) and "head" not in each.name
    }
    if unknown := sorted(required - masks):
        raise UserError(
            f"forward: what is its argument {unknown[0]}? It is no mask, source or target"
        )
    of_source = {name for name in masks if not re.search(_OF_TARGET, name.lower())}
    sets = list(dict.fromkeys(map(frozenset, (masks, required | of_source, required))))
    for chosen, batch_first in itertools.product(sets, (True, False)):
        ids = (source, target) if batch_first else (source.T, target.T)
        ways = itertools.product((3, 4, 2), ("visible", "hidden", "number", "added"))
        for dimensions, encoding in ways if chosen else [(3, "")]:
            named = {
                name: _mask(name, source, target, dimensions, encoding) for name in sorted(chosen)
            }
            words = dict(zip((first, second), ids, strict=True))
            has_masks = any("len" not in name.lower() for name in chosen)
            yield Call(partial(module, **words, **named), *ids, encoding if has_masks else "")


def _mask(name: str, source: Tensor, target: Tensor, dimensions: int, encoding: str) -> Tensor:
    """A mask by the words in its name. Two dimensions are those of `torch.nn.Transformer`."""
    of_target = re.search(_OF_TARGET, name.lower()) is not None
    words = target if of_target else source
    batch, length = words.shape
    is_word = words.ne(PAD)  # (B, T)
    if "len" in name.lower():
        return is_word.sum(dim=1)
    shapes = {2: is_word, 3: is_word[:, None], 4: is_word[:, None, None]}
    all_pairs = torch.ones(length, length, dtype=torch.bool)
    if re.search(r"pad|memory|attention_mask", name.lower()) is None:
        shapes[2] = all_pairs
        if of_target:
            causal = all_pairs.tril()
            shapes = {
                2: causal,
                3: causal.expand(batch, length, length),
                4: causal.expand(batch, 1, length, length),
            }
    visible = shapes[dimensions]
    if encoding == "added":
        return torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
    return {"visible": visible, "hidden": ~visible, "number": visible.long()}[encoding]


def logits_of(output: Any, batch: int, length: int) -> Tensor | None:
    """The output (B, T', V) of a call, T' at most `length`, or None if it has no such tensor."""
    if hasattr(output, "logits"):
        output = output.logits
    if isinstance(output, tuple | list):
        output = next(
            (each for each in output if isinstance(each, Tensor) and each.ndim >= 2), None
        )
    if not isinstance(output, Tensor) or not output.is_floating_point():
        return None
    if output.ndim == 2 and len(output) % batch == 0:
        output = output.view(batch, -1, output.shape[-1])  # (B · T, V) to (B, T, V)
    if output.ndim == 3 and output.shape[0] != batch and output.shape[1] == batch:
        output = output.transpose(0, 1)
    fits = output.ndim == 3 and output.shape[0] == batch and output.shape[1] in (length, length - 1)
    return output.detach() if fits else None


def describe_failure(errors: list[BaseException]) -> str:
    return one_line(errors[-1]) if errors else "no output is a tensor (B, T, V)"
