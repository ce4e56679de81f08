"""Somebody's class: how it is built and called, and which of its tensors is which weight."""

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_vanilla_transformer.interop.state_dicts import STACKS, TensorRef, require_tensors
from hf_vanilla_transformer.interop.torch_roles import around_layers, layer_refs, with_around
from hf_vanilla_transformer.utils.errors import UserError
from hf_vanilla_transformer.utils.untrusted import one_line

WIDTH, HEADS, FFN, LAYERS, SOURCE_TOKENS, TARGET_TOKENS, POSITIONS = 32, 4, 48, 2, 23, 29, 40
PAD, BOS, EOS = 0, 1, 2

_TARGET = r"decoder_input(_id)?s|(tgt|trg|target)s?(_\w+)?|dec(oder)?_in\w*|y"  # names of the decoder's input
_OF_TARGET = r"tgt|trg|target|dec|look|causal|d_mask|future"  # in names of masks

#: Value of a constructor's argument by its name, in the order of decision.
_ARGUMENTS: tuple[tuple[str, Any], ...] = (
    (r"dropout.*|drop_?(prob|rate|p)?|p_?drop|p|.*_dropout", 0.0),
    (r"device", "cpu"),
    (r"batch_first", True),
    (r"max_?(seq(uence)?_?)?(len(gth)?|pos(itions?)?)|max_?(src|tgt|trg|source|target)_?len|seq_?len(gth)?|max_position\w*"
     r"|(src|tgt|trg|source|target)_seq_?len|context_(len|size)|block_size|n_positions", POSITIONS),
    (r".*pad.*", PAD),
    (r".*(bos|sos|start).*", BOS),
    (r".*eos.*", EOS),
    (r"(n|num|nb)?_?(attention_|attn_)?heads?|h|nhead|.*_n?_?heads", HEADS),
    (r"d_?ff|ff(n|w)?(_?(dim|size|hidden))?|d_?ffn|dim_?feedforward|feed_?forward\w*|pf_dim|d_inner\w*|d_hid|ffn_hidden|inner\w*|"
     r"intermediate_size|hidden_ff|mlp_dim", FFN),
    (r"forward_expansion|expansion\w*|mlp_ratio|ff_mult", 2),
    (r"(n|num|nb)?_?(enc(oder)?_|dec(oder)?_|hidden_)?(layers?|blocks?)|n|depth|(num_)?(encoder|decoder)_(layers|blocks|depth)",
     LAYERS),
    (r"d_?model|(dim_?)?model(_?(dim|size))?|emb(ed(ding)?)?s?_?(dim|size)|n_embd?|d_embed\w*|dim|d|hidden(_?(dim|size))?|features|size|normalized_shape|"
     r"hid_dim|width", WIDTH),
    (r".*(src|source|enc|inp|from).*(voc|tok|dim|size|words).*|.*(voc|tok|words).*(src|source|enc|in(put)?)\w*|input_dim|src",
     SOURCE_TOKENS),
    (r".*(tgt|trg|target|dec|out|to_).*(voc|tok|dim|size|words).*|.*(voc|tok|words).*(tgt|trg|target|dec|out(put)?)\w*|output_dim",
     TARGET_TOKENS),
    (r".*vocab.*|n?_?tokens?|num_(tokens|embeddings)|n_words", TARGET_TOKENS),
)  # fmt: skip


def constructor_arguments(build: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a class or function by the names of its parameters, those of `given` first."""
    parameters = inspect.signature(build).parameters
    flexible = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    if not flexible and (unknown := given.keys() - parameters.keys()):
        raise UserError(f"--set {min(unknown)}: {build.__name__} takes {', '.join(parameters) or 'no arguments'}")
    arguments = dict(given)
    for name, parameter in parameters.items():
        if name in arguments or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        value = next((value for names, value in _ARGUMENTS if re.fullmatch(names, name.lower())), None)
        if value is not None and not (isinstance(parameter.default, str) and not isinstance(value, str)):
            arguments[name] = value
        elif parameter.default is parameter.empty:
            raise UserError(f"{build.__name__}: what is its argument {name}? Give --set {name}=VALUE")
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


def heads_of(arguments: Mapping[str, Any]) -> int:
    """The number of heads among a constructor's arguments."""
    return next((int(value) for name, value in arguments.items() if "head" in name or name == "h"), HEADS)


def require_equal(output: Tensor, again: Tensor) -> None:
    """Refuse a module whose output is random in eval mode."""
    if not torch.equal(output, again):
        raise UserError(
            "two calls in eval mode differ: dropout is active, as in F.dropout without training=self.training"
        )


def randomise(module: nn.Module) -> None:
    """Give every parameter random values, also norms and biases, whose initial ones and zeros hide mistakes."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_gain = parameter.ndim == 1 and re.search(r"(weight|alpha|gamma|a_2|gain|scale|g)$", name)
            spread = 0.2 if parameter.ndim == 1 else 1.4 * parameter.shape[-1] ** -0.5
            parameter.copy_(noise * spread + (1.0 if is_gain else 0.0))


class Weights(NamedTuple):
    """The tensors of a model by this package's names, and where they are."""

    tensors: dict[str, Tensor]
    tables: dict[str, Tensor]  #: stack -> its table of learned positions (P, D)
    modules: dict[str, str]  #: this package's name of a module -> the model's
    tied_to_source: bool  #: the output layer shares its matrix with the source's embedding, and the target's does not


def referenced(tensors: Mapping[str, Tensor], refs: Mapping[str, TensorRef]) -> dict[str, Tensor]:
    """The tensors, or their rows, by the names of `refs`."""
    return {name: tensors[ref.name] if ref.rows is None else tensors[ref.name][ref.rows] for name, ref in refs.items()}


def weights_of(module: nn.Module) -> Weights:
    """Find the role of each tensor by its name and shape."""
    if not any(True for _ in module.parameters()):
        raise UserError(f"{type(module).__name__} has no parameters: it needs layers of an encoder and of a decoder")
    tensors = _with_joined_heads(require_tensors(dict(module.state_dict()), type(module).__name__))
    layers, _ = layer_refs(tensors)
    width = tensors[layers["model.encoder.layers.0.fc1.weight"].name].shape[-1]
    around = around_layers(tensors, width, None, None, None)
    refs = with_around(layers, around, tensors)
    modules = {name.rpartition(".")[0]: ref.name.rpartition(".")[0] for name, ref in refs.items()}
    parameters = dict(module.named_parameters())
    # a table that is no parameter is computed, perhaps wrongly
    tables = [tensors[name].flatten(0, -2) for name in around.positions if name in parameters]  # (…, P, D) to (P, D)
    output, source, target = (tensors[name].data_ptr() for name in (around.output, around.source, around.target))
    return Weights(
        referenced(tensors, refs),
        dict(zip(STACKS, (tables[0], tables[-1]) if tables else (), strict=False)),
        modules,
        tied_to_source=output == source != target,
    )


def _with_joined_heads(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join the projections of a module for each head, such as "heads.0.query.weight" (d_k, D), to one (D, D)."""
    joined: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():  # the heads are in order
        joined.setdefault(re.sub(r"(?<=[._])(?:attn_)?heads\.\d+\.(?=\w+\.(?:weight|bias)$)", "", name), []).append(
            tensor
        )
    return {name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in joined.items()}


def norm_options(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    """The epsilons and kinds of normalisation that the modules may have."""
    named = {
        value
        for part in module.modules()
        for name in ("eps", "epsilon", "variance_epsilon")
        if isinstance(value := getattr(part, name, None), float)
    }
    torchs = any(isinstance(part, nn.LayerNorm) for part in module.modules())
    return {
        "norm": ("biased",) if torchs else ("biased", "unbiased"),
        "epsilon": tuple(named) if len(named) == 1 else (*named, *sorted({1e-5, 1e-6, 1e-12} - named)),
    }


def shared_layers(module: nn.Module) -> bool:
    """Whether the layers of a stack are one object, as in `[layer] * n`."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList) and len(part) > 1]
    return any(len(set(map(id, part))) < len(part) for part in lists)


def calls(module: nn.Module, source: Tensor, target: Tensor) -> Iterator[Callable[[], Any]]:
    """The ways to call a model for source (B, S) and decoder input (B, T) that its signature allows.

    Masks may be True where a key is visible or where it is hidden, numbers, or -inf to add, and of several shapes.
    """
    parameters = [each for each in inspect.signature(module.forward).parameters.values()
                  if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]  # fmt: skip
    if len(parameters) < 2:
        raise UserError(f"forward: it takes {[each.name for each in parameters]}; a source and a target are needed")
    first = parameters[0].name
    second = next((each.name for each in parameters[1:] if re.fullmatch(_TARGET, each.name)), parameters[1].name)
    required = {each.name for each in parameters if each.default is each.empty} - {first, second}
    masks = {each.name for each in parameters if re.search(r"mask|pad", each.name) and "head" not in each.name}
    if unknown := sorted(required - masks):
        raise UserError(f"forward: what is its argument {unknown[0]}? It is no mask, source or target")
    of_source = {name for name in masks if not re.search(_OF_TARGET, name.lower())}
    for names, batch_first in itertools.product((required, masks, required | of_source), (True, False)):
        ids = (source, target) if batch_first else (source.T, target.T)
        ways = itertools.product((3, 4, 2), ("visible", "hidden", "number", "added"))
        for dimensions, encoding in ways if names else [(3, "visible")]:
            named = {name: _mask(name, source, target, dimensions, encoding) for name in names}
            yield partial(module, **dict(zip((first, second), ids, strict=True)), **named)


def _mask(name: str, source: Tensor, target: Tensor, dimensions: int, encoding: str) -> Tensor:
    """A mask by the words in its name. Two dimensions are those of `torch.nn.Transformer`."""
    of_target = re.search(_OF_TARGET, name.lower()) is not None
    pads = re.search(r"pad|memory|attention_mask", name.lower()) is not None
    batch, length = target.shape
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    if dimensions == 2 and not pads:
        visible = causal if of_target else torch.ones(source.shape[1], source.shape[1], dtype=torch.bool)
    elif of_target and not pads:
        visible = causal.expand(batch, 1, length, length) if dimensions == 4 else causal.expand(batch, length, length)
    else:
        visible = (target if of_target else source).ne(PAD)
        visible = visible if dimensions == 2 else visible[:, None, None] if dimensions == 4 else visible[:, None]
    if encoding == "added":
        return torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
    return {"visible": visible, "hidden": ~visible, "number": visible.long()}[encoding]


def logits_of(output: Any, batch: int, length: int) -> Tensor | None:
    """The output (B, T', V) of a call, T' at most `length`, or None if it has no such tensor."""
    if hasattr(output, "logits"):
        output = output.logits
    if isinstance(output, tuple | list):
        output = next((each for each in output if isinstance(each, Tensor) and each.ndim >= 2), None)
    if not isinstance(output, Tensor) or not output.is_floating_point() or not torch.isfinite(output).all():
        return None
    if output.ndim == 2 and len(output) % batch == 0:
        output = output.view(batch, -1, output.shape[-1])  # (B · T, V) to (B, T, V)
    if output.ndim == 3 and output.shape[0] != batch and output.shape[1] == batch:
        output = output.transpose(0, 1)
    fits = output.ndim == 3 and output.shape[0] == batch and output.shape[1] in (length, length - 1)
    return output.detach() if fits else None


def describe_failure(errors: list[BaseException]) -> str:
    return one_line(errors[-1]) if errors else "no output is a tensor (B, T, V)"
