"""Give the weights of a model their roles, from its sublayers (`blocks`), by this package's names.

Names of modules only help with weights that no operation uses.
"""

import itertools
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hf_vanilla_transformer.utils.errors import UserError

from .blocks import (
    ATTENTIONS,
    SHAPES,
    Block,
    Graph,
    Stack,
    blocks_of,
    module_of,
    name_blocks,
    place_norms,
    sequence_of,
    stacks_of,
)
from .trace import Node, Trace, lookups


@dataclass(frozen=True)
class Sublayer:
    """The vectors around a sublayer of layer `number`, from 0.

    `stream` is what the residual connection adds, `x` and `memory` are what the function reads, `output` is what it
    returns. `reads_itself` is True if the memory depends on the target.
    """

    number: int
    role: str
    stream: Tensor
    x: Tensor
    memory: Tensor | None
    output: Tensor
    reads_itself: bool = False


@dataclass
class Roles:
    """The weights of a model by this package's names, and the vectors that flow between its layers.

    Attributes:
        tensors: name -> tensor.
        tables: stack -> its learned positions (T, D).
        flow: stack -> its output (B, T, D), as the next part reads it.
        after: stack -> all vectors (B, T, D) that are computed from it after its last block.
        sublayers: stack -> its sublayers in the order of execution.
        heads: the number of heads by the shapes of the scores.
        is_pre: the encoder is pre-norm.
        output_name: the name of the output layer's weight.
        is_applied: forward does not call the output layer.
        tied_to_source: the output layer has the table of the source, and the target another one.
        looked_up: names of the parameters in which words or positions are looked up.
        has_one_table: source and target are looked up in the same table.
        operations: the names of the operations on the sentences.
        shared: modules in two places, in words.
        unused: names of parameters that no operation uses.
        filled: those of them that got the role of a missing weight.
        half_norms: names of gains and biases that no operation uses, of normalisations that are used.
        unused_layers: the modules without a used parameter, in a stack of which other layers are called, or none.
        repeated: one small projection serves all heads of an attention.
        is_swapped: cross-attention comes before self-attention.
    """

    tensors: dict[str, Tensor]
    tables: dict[str, Tensor]
    flow: dict[str, Tensor]
    sublayers: dict[str, list[Sublayer]]
    heads: int
    is_pre: bool = False
    tied_to_source: bool = False
    looked_up: frozenset[str] = frozenset()
    has_one_table: bool = False
    operations: frozenset[str] = frozenset()
    output_name: str = ""
    is_applied: bool = False
    shared: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    filled: list[str] = field(default_factory=list)
    half_norms: list[str] = field(default_factory=list)
    unused_layers: list[str] = field(default_factory=list)
    repeated: bool = False
    is_swapped: bool = False
    after: dict[str, list[Tensor]] = field(default_factory=dict)


def roles_of(trace: Trace, module: nn.Module, given: Mapping[str, str]) -> Roles:
    """Find the weights of a model in a trace of it.

    Args:
        trace: of a call with sentences of different lengths.
        given: names of modules by role, such as "source_embedding", from the option `--role`.

    Raises:
        UserError: the layers of an encoder and of a decoder are not recognised. It names what was found.
    """
    tables = list(lookups(trace))
    if not tables:
        raise UserError("forward looks up no embeddings of the words of a source and a target")
    graph = Graph(trace, tables[0].value.shape[-1])
    blocks = _once(blocks_of(graph))
    if not any(block.is_attention for block in blocks):
        raise UserError(
            f"there are no layers with attention among {len(graph.linears)} products with weights"
        )
    stacks = stacks_of(graph, trace, blocks)
    is_swapped = name_blocks(stacks)
    source = {stacks["encoder"].table.number}
    for name, stack in stacks.items():
        norms = [
            each for each in graph.norms.values() if (each.x.reads <= source) == (name == "encoder")
        ]
        place_norms(graph, stack, norms)
        stack.positions = _learned_positions(graph, stack, dict(module.named_parameters()))
    roles = Roles({}, {}, {}, {}, next(block.heads for block in blocks if block.is_attention))
    roles.is_pre = stacks["encoder"].is_pre
    roles.is_swapped = is_swapped
    roles.repeated = any(block.repeated for block in blocks)
    roles.shared = _shared(stacks)
    roles.operations = frozenset(node.operation for node in graph.nodes if node.is_data)
    roles.looked_up = frozenset(_lookup_names(graph))
    read = [stack.table.inputs[0].parameters for stack in stacks.values()]
    roles.has_one_table = read[0] == read[1]
    for name, stack in stacks.items():
        _add_stack(roles, name, stack)
    _add_output(roles, graph, stacks, module, blocks, given)
    _add_unused(roles, graph, stacks, module)
    _add_flow(roles, stacks)
    for name, stack in stacks.items():
        roles.after[name] = _vectors_after(graph, stack, only_source=name == "encoder")
    return roles


def part_tensors(trace: Trace, module: nn.Module, width: int) -> tuple[dict[str, Tensor], int]:
    """The weights of an attention or of a layer of the encoder, and its heads, named as those of the first layer."""
    graph = Graph(trace, width)
    blocks = blocks_of(graph)
    attentions = [block for block in blocks if block.is_attention]
    if not attentions:
        raise UserError(
            f"{type(module).__name__}: no attention among {len(graph.linears)} products with weights"
        )
    attentions[0].role = "self_attn"
    entry = next(node for node in graph.nodes if node.is_data)
    stack = Stack(entry, [blocks])
    place_norms(graph, stack, list(graph.norms.values()))
    roles = Roles({}, {}, {}, {}, attentions[0].heads)
    _add_layer(roles.tensors, "model.encoder.layers.0.", blocks)
    unused = _unused(graph, module)
    _fill_layer(roles, graph, "model.encoder.layers.0.", "encoder", blocks, "", unused)
    return roles.tensors, roles.heads


def _once(blocks: list[Block]) -> list[Block]:
    """Drop a repeated call of a block with the same vectors."""
    kept: list[Block] = []
    for block in blocks:
        same = (
            each
            for each in kept
            if each.names == block.names and each.x.value.shape == block.x.value.shape
        )
        if not any(torch.equal(each.x.value, block.x.value) for each in same):
            kept.append(block)
    return kept


def _learned_positions(
    graph: Graph, stack: Stack, parameters: Mapping[str, nn.Parameter]
) -> Tensor | None:
    """The trained vectors (T, D) that are added to the embeddings of a stack."""
    if not stack.layers:
        return None
    node = _entry(stack)
    while node is not stack.table:
        constants = [
            each
            for each in node.inputs
            if each.parameters and each.value.shape[-1:] == (graph.width,)
        ]
        is_trained = any(
            parameters[name].requires_grad for each in constants for name in each.parameters
        )
        if node.operation == "add" and constants and is_trained and constants[0].value.ndim > 1:
            value = constants[0].value
            length = max(node.value.shape[:-1][-2:]) if node.value.ndim > 2 else value.shape[0]
            if value.numel() < length * graph.width:
                return None
            return value.reshape(-1, length, graph.width)[0]
        data = [each for each in node.inputs if each.is_data]
        if not data:
            return None
        node = data[0]
    return None


def _entry(stack: Stack) -> Node:
    """The vectors in front of the first layer."""
    return _in_front(stack, stack.layers[0])


def _in_front(stack: Stack, layer: list[Block]) -> Node:
    first = layer[0]
    return sequence_of(first.norm.x) if stack.is_pre and first.norm is not None else first.x


def _shared(stacks: Mapping[str, Stack]) -> list[str]:
    """Parameters that serve two places, in words."""
    places: dict[str, list[str]] = {}
    for name, stack in stacks.items():
        for number, layer in enumerate(stack.layers):
            for block in layer:
                at = f"{name} layer {number + 1}"
                words = f"{ROLE_WORDS[block.role]} of {at}"
                if name == "encoder" and block.role == "cross_attn":
                    words = f"a second attention of {at}"
                places |= _twice_in_attention(block, words)
                for parameter in block.names:
                    places.setdefault(parameter, []).append(words)
                for parameter in block.norm.names if block.norm else ():
                    places.setdefault(parameter, []).append(f"the normalisation of {words}")
    return list(
        dict.fromkeys(f"{used[0]} and {used[1]}" for used in places.values() if len(used) > 1)
    )


def _twice_in_attention(block: Block, where: str) -> dict[str, list[str]]:
    """The projections of an attention that are one matrix, by their words."""
    twice: dict[str, list[str]] = {}
    for first, second in itertools.combinations(_PROJECTION_WORDS, 2):
        if first in block.weights and second in block.weights:
            weights = (block.weights[first].weight, block.weights[second].weight)
            if torch.equal(*weights):
                words = (_PROJECTION_WORDS[first], _PROJECTION_WORDS[second])
                twice[f"{where} {words}"] = [f"{each} of {where}" for each in words]
    return twice


_PROJECTION_WORDS = {
    "q": "the projection of the queries",
    "k": "the projection of the keys",
    "v": "the projection of the values",
    "out": "the projection of the output",
}

ROLE_WORDS = {
    "self_attn": "self-attention",
    "cross_attn": "cross-attention",
    "final": "the feed-forward network",
}


def _put(tensors: dict[str, Tensor], name: str, weight: Tensor, bias: Tensor | None) -> None:
    tensors[f"{name}.weight"] = weight
    if bias is not None:
        tensors[f"{name}.bias"] = bias


def _add_stack(roles: Roles, name: str, stack: Stack) -> None:
    tensors = roles.tensors
    tensors[f"model.{name}.embed_tokens.weight"] = stack.table.inputs[0].value
    if stack.positions is not None:
        roles.tables[name] = stack.positions
    for number, layer in enumerate(stack.layers):
        _add_layer(tensors, f"model.{name}.layers.{number}.", layer)
    if stack.final_norm is not None:
        _put(tensors, f"model.{name}.layer_norm", stack.final_norm.gain, stack.final_norm.bias)
    if stack.norm_of_embeddings is not None:
        _put(
            tensors,
            f"model.{name}.embedding_norm",
            stack.norm_of_embeddings.gain,
            stack.norm_of_embeddings.bias,
        )


def _add_layer(tensors: dict[str, Tensor], at: str, layer: list[Block]) -> None:
    for block in layer:
        for letter, linear in block.weights.items():
            place = f"{at}{block.role}.{letter}_proj" if block.is_attention else f"{at}{letter}"
            _put(tensors, place, linear.weight, linear.bias)
        if block.norm is not None:
            _put(tensors, f"{at}{block.role}_layer_norm", block.norm.gain, block.norm.bias)


def _add_output(
    roles: Roles,
    graph: Graph,
    stacks: Mapping[str, Stack],
    module: nn.Module,
    blocks: list[Block],
    given: Mapping[str, str],
) -> None:
    used = {linear.node for block in blocks for linear in block.weights.values()}
    end = max((block.end.number for block in blocks), default=0)
    rest = [
        each for each in graph.linears.values() if each.node not in used and each.node.number > end
    ]
    tables = {name: stack.table.inputs[0].parameters for name, stack in stacks.items()}
    if rest:
        output = rest[-1]
        _put(roles.tensors, "lm_head", output.weight, output.bias)
        roles.output_name = min(output.names)
        roles.flow["decoder"] = sequence_of(output.x).value
        roles.tied_to_source = output.names == tables["encoder"] != tables["decoder"]
        return
    parameters = dict(module.named_parameters())
    wanted = given.get("output_layer")
    read = {name for linear in graph.linears.values() for name in linear.names}
    read |= _lookup_names(graph)
    shape = stacks["decoder"].table.inputs[0].value.shape  # (V, D)
    candidates = [
        name
        for name, each in parameters.items()
        if each.shape == shape and name not in read and wanted in (None, _parent(name))
    ]
    if len(candidates) != 1:
        raise UserError(
            "forward gives the decoder's states, and no output layer was found: call it in forward, or name it with "
            "--role output_layer=NAME_OF_ITS_MODULE"
        )
    name = candidates[0]
    _put(roles.tensors, "lm_head", parameters[name], parameters.get(f"{_parent(name)}.bias"))
    roles.output_name = name
    roles.is_applied = True


def _lookup_names(graph: Graph) -> set[str]:
    return {
        name
        for node in graph.nodes
        if node.operation in ("embedding", "index", "index_select") and node.inputs
        for name in node.inputs[0].parameters
    }


def _add_unused(roles: Roles, graph: Graph, stacks: Mapping[str, Stack], module: nn.Module) -> None:
    """Give weights that no operation uses the roles that are missing next to them."""
    unused = _unused(graph, module)
    if roles.is_applied:
        prefix = _parent(roles.output_name)
        for name in (roles.output_name, f"{prefix}.bias"):
            unused.pop(name, None)
    roles.half_norms = _half_norms(graph, unused)
    biases = _unused_biases(unused, module)
    for name in (*roles.half_norms, *biases):
        del unused[name]
    for name, stack in stacks.items():
        prefixes = [module_of(layer) for layer in stack.layers]
        for number, (layer, prefix) in enumerate(zip(stack.layers, prefixes, strict=True)):
            if prefix and prefixes.count(prefix) == 1:
                _fill_layer(
                    roles, graph, f"model.{name}.layers.{number}.", name, layer, prefix, unused
                )
    roles.unused = [*biases, *unused]
    roles.unused_layers = _unused_layers(roles.unused, module)
    if not all(stack.layers for stack in stacks.values()):
        roles.unused_layers += _unused_modules(roles.unused, module)
    unused = {
        name: each
        for name, each in unused.items()
        if not name.startswith(tuple(roles.unused_layers))
    }
    norms = [
        name for name, each in unused.items() if each.numel() == graph.width and each.ndim == 1
    ]
    gains = [
        name
        for name in norms
        if f"{name.rpartition('.')[0]}.weight" == name or _is_first(name, norms)
    ]
    for name, gain in zip(_without_final_norm(stacks), gains, strict=False):
        parent = gain.rpartition(".")[0]
        bias = next(
            (each for each in norms if each != gain and each.rpartition(".")[0] == parent), None
        )
        roles.filled += [each for each in (gain, bias) if each is not None]
        _put(
            roles.tensors,
            f"model.{name}.layer_norm",
            unused[gain].detach(),
            None if bias is None else unused[bias].detach(),
        )


def is_trained(parameter: nn.Parameter) -> bool:
    """True for a parameter that training changes. A module that is never called may have one without a shape."""
    return parameter.requires_grad and not isinstance(
        parameter, nn.parameter.UninitializedParameter
    )


def _unused(graph: Graph, module: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters that no operation on the sentences uses."""
    read = {
        name
        for node in graph.nodes
        if node.is_data
        for each in node.inputs
        for name in each.parameters
    }
    return {
        name: each
        for name, each in module.named_parameters()
        if name not in read and is_trained(each)
    }


def _half_norms(graph: Graph, unused: Mapping[str, nn.Parameter]) -> list[str]:
    """The unused gains and biases next to a gain or a bias that a normalisation uses."""
    used = {_parent(name) for norm in graph.norms.values() for name in norm.names}
    return [
        name
        for name, each in unused.items()
        if _parent(name) in used and each.shape == (graph.width,)
    ]


def _unused_biases(unused: Mapping[str, nn.Parameter], module: nn.Module) -> list[str]:
    """The unused vectors next to a matrix that is used: biases of projections, and not gains of a normalisation."""
    used = {
        _parent(name)
        for name, each in module.named_parameters()
        if name not in unused and each.ndim > 1
    }
    return [name for name, each in unused.items() if each.ndim == 1 and _parent(name) in used]


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _unused_layers(unused: Collection[str], module: nn.Module) -> list[str]:
    """The numbered modules of which no parameter is used, although others of the list are, such as "layers.1."."""
    numbered: dict[str, dict[str, bool]] = {}
    for name, _ in module.named_parameters():
        if match := re.match(r"(.*?)(\D+?\d+)\.(?=\w+\.)", name):
            within = numbered.setdefault(re.sub(r"\d+$", "", f"{match[1]}{match[2]}"), {})
            layer = f"{match[1]}{match[2]}."
            within[layer] = within.get(layer, True) and name in unused
    return [
        layer
        for layers in numbered.values()
        if not all(layers.values())
        for layer, is_unused in layers.items()
        if is_unused and len([name for name in unused if name.startswith(layer)]) > 4
    ]


def _unused_modules(unused: Collection[str], module: nn.Module) -> list[str]:
    """The outermost modules of at least one layer of which no parameter is used, such as "encoder."."""
    outermost: list[str] = []
    for name, part in module.named_modules():
        inside = {f"{name}.{each}" for each, value in part.named_parameters() if is_trained(value)}
        if len(inside) > 4 and inside <= {*unused} and not name.startswith(tuple(outermost)):
            outermost.append(f"{name}.")
    return outermost


def _without_final_norm(stacks: Mapping[str, Stack]) -> Iterator[str]:
    return (name for name, stack in stacks.items() if stack.final_norm is None)


def _is_first(name: str, names: Iterable[str]) -> bool:
    parent = name.rpartition(".")[0]
    return next(each for each in names if each.rpartition(".")[0] == parent) == name


def _fill_layer(
    roles: Roles,
    graph: Graph,
    at: str,
    stack: str,
    layer: list[Block],
    prefix: str,
    unused: dict[str, nn.Parameter],
) -> None:
    inside = {
        name: each
        for name, each in unused.items()
        if name.startswith(f"{prefix}." if prefix else "")
    }
    width = graph.width
    attentions = ATTENTIONS if stack == "decoder" else ATTENTIONS[:1]

    def take(place: str, name: str) -> None:
        weight = inside.pop(name)
        unused.pop(name)
        parent = name.rpartition(".")[0]
        others = [
            each for each in inside if each.rpartition(".")[0] == parent and inside[each].ndim == 1
        ]
        bias = others[0] if others and len(inside[others[0]]) == len(weight) else None
        _put(
            roles.tensors,
            f"{at}{place}",
            weight.detach().flatten(1) if weight.ndim > 1 else weight.detach(),
            None,
        )
        if bias is not None:
            roles.tensors[f"{at}{place}.bias"] = inside.pop(bias).detach()
            unused.pop(bias)

    def matrices(rows: int | None, columns: int | None) -> list[str]:
        shapes = ((name, each.flatten(1).shape) for name, each in inside.items() if each.ndim > 1)
        return [name for name, (r, c) in shapes if rows in (None, r) and columns in (None, c)]

    for role in attentions:
        block = next((each for each in layer if each.role == role and each.is_attention), None)
        for letter in ("q", "k", "v", "out"):
            if block is not None and letter in block.weights:
                continue
            found = matrices(width, width)
            if block is not None:  # next to the other projections of this attention
                near = os.path.commonprefix(sorted(block.names)).rpartition(".")[0]
                found = [name for name in found if name.startswith(near)] or found
            if found:
                take(f"{role}.{letter}_proj", found[0])
    if all(each.is_attention for each in layer):
        wide = [name for name in matrices(None, width)]
        if len(wide) >= 1:
            size = len(inside[wide[0]])
            back = [name for name in matrices(width, size) if name != wide[0]]
            if back:
                take("fc1", wide[0])
                take("fc2", back[0])
    present = {block.role for block in layer if block.norm is not None}
    for role in (*attentions, "final"):
        if role not in present:
            gains = [
                name for name, each in inside.items() if each.ndim == 1 and each.numel() == width
            ]
            if gains:
                take(f"{role}_layer_norm", gains[0])


def _unflattened(node: Node) -> Tensor:
    """The output of a block (B, T, D), with its bias, which a product of two dimensions lacks."""
    value = node.value
    for _ in range(4):
        if node.value.ndim == 3:
            value = node.value
        child = node.children[0] if len(node.children) == 1 else None
        if child is None or child.operation not in SHAPES:
            is_bias = (
                child is not None
                and child.operation == "add"
                and any(each.parameters for each in child.inputs)
            )
            return child.value if child is not None and is_bias else value
        node = child
    return value


def _vectors_after(graph: Graph, stack: Stack, only_source: bool) -> list[Tensor]:
    """The vectors that are computed from the words of a stack after its last block."""
    if not stack.layers:
        return []
    end = stack.layers[-1][-1].end
    label = stack.table.number
    return [
        node.value
        for node in graph.nodes
        if node.number > end.number
        and label in node.reads
        and (not only_source or node.reads == {label})
        and node.value.ndim > 1
        and node.value.shape[-1] == graph.width
    ]


def _add_flow(roles: Roles, stacks: Mapping[str, Stack]) -> None:
    """The vectors between the layers."""
    for name, stack in stacks.items():
        roles.sublayers[name] = []
        for number, layer in enumerate(stack.layers):
            for block in layer:
                stream = (
                    sequence_of(block.norm.x)
                    if stack.is_pre and block.norm is not None
                    else block.x
                )
                memory = None if block.memory is None else block.memory.value
                reads_itself = (
                    block.memory is not None
                    and stacks["decoder"].table.number in block.memory.reads
                )
                output = _unflattened(block.end)
                roles.sublayers[name].append(
                    Sublayer(
                        number,
                        block.role,
                        stream.value,
                        block.x.value,
                        memory,
                        output,
                        reads_itself,
                    )
                )
    streams = [each.stream for each in roles.sublayers["encoder"]]
    for sublayer in roles.sublayers["decoder"]:
        memory = sublayer.memory
        if sublayer.role != "cross_attn" or memory is None or sublayer.reads_itself:
            continue
        if not any(torch.equal(memory, stream) for stream in streams):
            roles.flow["encoder"] = memory
            return
