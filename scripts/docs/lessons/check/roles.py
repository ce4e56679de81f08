"""Find the role of each weight by the operations of a forward pass (`trace`).

A product of a sentence's vectors and a parameter is a linear map. A product of two such maps gives the scores of an
attention, and a product of the scores and a third map its context. Two maps in a row are a feed-forward network. A
gain multiplies normalised vectors. Names of modules only help with weights that no operation uses.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hf_vanilla_transformer.utils.errors import UserError

from .trace import Node, Trace, lookups

STACKS = ("encoder", "decoder")
ATTENTIONS = ("self_attn", "cross_attn")

_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "convolution", "mkldnn_linear")
_WITH_SUMMAND = ("addmm", "baddbmm")
_SHAPES: tuple[str, ...] = (
    "view",
    "unsafe_view",
    "reshape",
    "t",
    "transpose",
    "permute",
    "clone",
    "alias",
    "detach",
)
_SHAPES += (
    "expand",
    "squeeze",
    "unsqueeze",
    "to_copy",
    "lift_fresh",
    "numpy_T",
    "view_copy",
    "contiguous",
)
_OF_NORM = ("sub", "div", "mul", "rsub", "mul_")


@dataclass(eq=False)
class Linear:
    """x W^T + b. `names` are the parameters that W comes from, `x` is the vectors' node, `node` the product's."""

    node: Node
    x: Node
    weight: Tensor  # (out, in)
    bias: Tensor | None
    names: frozenset[str]


@dataclass(eq=False)
class Norm:
    """A normalisation: its input, its output, its gain and bias."""

    node: Node
    x: Node
    output: Node
    gain: Tensor
    bias: Tensor | None
    names: frozenset[str]


@dataclass(eq=False)
class Block:
    """A sublayer's function: an attention, or a feed-forward network (`weights` has fc1 and fc2)."""

    weights: dict[str, Linear]
    x: Node
    memory: Node | None
    start: int
    end: Node
    heads: int = 0
    repeated: bool = False  # one small map serves all heads
    norm: Norm | None = None
    role: str = "final"

    @property
    def is_attention(self) -> bool:
        return "fc1" not in self.weights

    @property
    def names(self) -> set[str]:
        return {name for linear in self.weights.values() for name in linear.names}


@dataclass
class Stack:
    """The layers of an encoder or a decoder, each a list of blocks in the order of execution."""

    table: Node
    layers: list[list[Block]] = field(default_factory=list)
    is_pre: bool = False
    norm_of_embeddings: Norm | None = None
    final_norm: Norm | None = None
    positions: Tensor | None = None


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
        flow: stack -> its output (B, T, D).
        sublayers: stack -> its sublayers in the order of execution.
        heads: the number of heads by the shapes of the scores.
        is_pre: the encoder is pre-norm.
        tied_to_source: the output layer has the table of the source, and the target another one.
        missing: the output layer that forward does not call, as weight and bias, with its name.
        shared: modules in two places, in words.
        unused: names of parameters that no operation uses.
        filled: those of them that got the role of a missing weight.
        unused_layers: the modules whose parameters are all unused, although other layers of the stack are called.
        unnamed: places that the architecture does not have, in words.
    """

    tensors: dict[str, Tensor]
    tables: dict[str, Tensor]
    flow: dict[str, Tensor]
    sublayers: dict[str, list[Sublayer]]
    heads: int
    is_pre: bool = False
    tied_to_source: bool = False
    output_name: str = ""
    is_applied: bool = False
    shared: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    filled: list[str] = field(default_factory=list)
    unused_layers: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)
    repeated: bool = False
    is_swapped: bool = False


class Graph:
    """The linear maps, products and normalisations of a trace."""

    def __init__(self, trace: Trace, width: int) -> None:
        self.nodes = trace.nodes
        self.width = width
        self.linears: dict[Node, Linear] = {}
        self.products: dict[Node, tuple[Node, ...]] = {}
        self.norms: dict[Node, Norm] = {}
        self.origins: dict[Node, Node] = {}
        for node in self.nodes:
            if node.is_data:
                self._classify(node)
                self.origins[node] = self._origin(node)

    def _classify(self, node: Node) -> None:
        if node.index > 0:
            return
        if node.operation in _PRODUCTS:
            self._classify_product(node)
        elif "scaled_dot_product" in node.operation and len(node.inputs) >= 3:
            self.products[node] = node.inputs[:3]
        elif "layer_norm" in node.operation or "rms_norm" in node.operation:
            self._add_norm(
                node, node.inputs[0], [each for each in node.inputs[1:] if each.parameters], node
            )
        elif node.operation in ("mul", "div"):
            self._classify_gain(node)

    def _classify_product(self, node: Node) -> None:
        factors = node.inputs[1:] if node.operation in _WITH_SUMMAND else node.inputs
        data = [each for each in factors[:2] if each.is_data]
        constant = next((each for each in factors[:2] if each.parameters), None)
        if len(data) == 2:
            self.products[node] = factors[:2]
        elif len(data) == 1 and constant is not None:
            weight = _matrix(node.operation, constant, is_first=factors[0] is constant)
            summand = node.inputs[0] if node.operation in _WITH_SUMMAND else None
            summand = factors[2] if len(factors) > 2 else summand
            bias = summand.value.flatten() if summand is not None and summand.parameters else None
            if bias is None:
                bias = _added(node, len(weight))
            names = constant.parameters
            self.linears[node] = Linear(node, sequence_of(data[0]), weight, bias, names)

    def _classify_gain(self, node: Node) -> None:
        gain = next(
            (
                each
                for each in node.inputs
                if each.parameters and each.value.numel() in (1, self.width)
            ),
            None,
        )
        data = [each for each in node.inputs if each.is_data]
        if gain is None or len(data) != 1 or node.value.shape[-1] != self.width:
            return
        x = data[0]
        steps = 0
        while x.operation in _OF_NORM and any(each.is_data for each in x.inputs):
            x = next(each for each in x.inputs if each.is_data)
            steps += 1
        if not steps:
            return
        output = node
        parameters = [gain]
        for _ in range(4):
            child = next(
                (each for each in output.children if each.operation in ("div", "mul", "add")), None
            )
            if child is None or child.value.shape != node.value.shape:
                break
            bias = next((each for each in child.inputs if each.parameters), None)
            if child.operation == "add":
                if bias is not None and bias.value.numel() in (1, self.width):
                    parameters.append(bias)
                    output = child
                break
            output = child
        self._add_norm(node, x, parameters, output)

    def _add_norm(self, node: Node, x: Node, parameters: list[Node], output: Node) -> None:
        vectors = [each.value.flatten().expand(self.width) for each in parameters]
        gain = vectors[0] if vectors else torch.ones(self.width)
        names = frozenset().union(*(each.parameters for each in parameters))
        self.norms[node] = Norm(
            node, sequence_of(x), output, gain, vectors[1] if len(vectors) > 1 else None, names
        )

    def _origin(self, node: Node) -> Node:
        """The last linear map, product, normalisation or lookup in front of a node, or the sum of several."""
        if node in self.linears or node in self.products or node in self.norms:
            return node
        data = [each for each in node.inputs if each.is_data]
        if not data:
            return node
        origins = dict.fromkeys(self.origins[each] for each in data)
        return next(iter(origins)) if len(origins) == 1 else node


def sequence_of(node: Node) -> Node:
    """The node of the vectors, before operations that change their shape alone."""
    while node.operation in _SHAPES and node.inputs:
        node = node.inputs[0]
    return node


def _matrix(operation: str, constant: Node, is_first: bool) -> Tensor:
    """The matrix (out, in) of a product with a parameter."""
    value = constant.value
    if operation in ("convolution", "linear", "mkldnn_linear"):
        return value.flatten(1)
    if value.ndim == 3:  # (1 or H, in, out), or H times the same
        value = value if is_first else value.transpose(1, 2)
        same = all(torch.equal(each, value[0]) for each in value)
        return value[0] if same else value.flatten(0, 1)
    return value if is_first else value.T


def _added(node: Node, size: int) -> Tensor | None:
    """The parameter (out) that is added to a product."""
    for _ in range(4):
        if len(node.children) != 1:
            return None
        node = node.children[0]
        if node.operation == "add":
            bias = next((each for each in node.inputs if each.parameters), None)
            return bias.value.flatten() if bias is not None and bias.value.numel() == size else None
        if node.operation not in _SHAPES:
            return None
    return None


def _rows(linear: Linear, operand: Node) -> Linear:
    """The part of a fused map whose output is `operand`, such as the queries of queries, keys and values."""
    size = operand.value.numel() // linear.x.value[..., 0].numel() if linear.x.value.ndim > 1 else 0
    total = len(linear.weight)
    if not 0 < size < total or total % size:
        return linear
    vectors = linear.node.value.reshape(-1, total) if linear.node.value.shape[-1] == total else None
    if vectors is None:
        return linear
    if linear.bias is not None and linear.node.operation in ("mm", "bmm"):
        vectors = vectors + linear.bias
    parts = torch.arange(total).view(total // size, size)
    heads = size // operand.value.shape[-1] if size % operand.value.shape[-1] == 0 else 1
    by_head = torch.arange(total).view(heads, total // size, -1).transpose(0, 1).flatten(1)
    for rows in (*parts, *by_head):
        if torch.allclose(_profile(vectors[:, rows]), _profile(operand.value), atol=1e-5):
            bias = None if linear.bias is None else linear.bias[rows]
            return Linear(linear.node, linear.x, linear.weight[rows], bias, linear.names)
    return linear


def _profile(values: Tensor) -> Tensor:
    """The sorted values, without their scale and order."""
    flat = values.flatten().sort().values
    return flat / flat.norm()


def blocks_of(graph: Graph) -> list[Block]:
    """The attentions and feed-forward networks, in the order of execution."""
    contexts: dict[Node, tuple[Linear | None, ...]] = {}
    operands: dict[Node, Node] = {}
    scores: dict[Node, tuple[Node, Node]] = {}
    for node, factors in graph.products.items():
        if len(factors) == 3:
            contexts[node] = tuple(_projection(graph, each) for each in factors)
            operands[node] = factors[0]
            continue
        first, second = (graph.origins[each] for each in factors)
        score = next((each for each in (first, second) if each in scores), None)
        if score is None:
            scores[node] = factors[0], factors[1]
            continue
        values = factors[1] if first is score else factors[0]
        contexts[node] = tuple(_projection(graph, each) for each in (*scores[score], values))
        operands[node] = scores[score][0]
    blocks = _attentions(graph, contexts, operands)
    used = {linear.node for block in blocks for linear in block.weights.values()}
    for node, outer in graph.linears.items():
        inner = graph.linears.get(graph.origins[outer.x])
        if node in used or inner is None or inner.node in used or len(outer.weight) != graph.width:
            continue
        used |= {inner.node, node}
        blocks.append(Block({"fc1": inner, "fc2": outer}, inner.x, None, inner.node.number, node))
    return sorted(blocks, key=lambda block: block.start)


def _projection(graph: Graph, operand: Node) -> Linear | None:
    linear = graph.linears.get(graph.origins[operand])
    return None if linear is None else _rows(linear, operand)


def _attentions(
    graph: Graph, contexts: Mapping[Node, tuple[Linear | None, ...]], operands: Mapping[Node, Node]
) -> list[Block]:
    """One block for each output projection, which may join the contexts of several heads."""
    outputs: dict[Node, tuple[Linear | None, list[Node]]] = {}
    joined: set[Node] = set()
    for linear in graph.linears.values():
        origin = graph.origins[linear.x]
        parts = [origin] if origin in contexts else []
        if origin.operation in ("cat", "stack"):
            parts = [graph.origins[each] for each in origin.inputs if each.is_data]
        if parts and all(part in contexts for part in parts) and not joined & set(parts):
            joined |= set(parts)
            outputs[linear.node] = linear, parts
    for context in contexts:
        if context not in joined:
            outputs[context] = None, [context]
    blocks = []
    for end, (output, parts) in outputs.items():
        weights: dict[str, Linear] = {}
        repeated = False
        heads = 0
        for index, letter in enumerate("qkv"):
            maps = [each for part in parts if (each := contexts[part][index]) is not None]
            if len(maps) < len(parts):
                continue
            weights[letter] = _joined(maps)
            size = operands[parts[0]].value.shape[-1]
            if letter == "q":
                heads = max(1, len(weights["q"].weight) // size)
                if weights["q"].weight.shape[1] < graph.width:
                    heads = graph.width // size
            if weights[letter].weight.shape[1] < graph.width:
                repeated = True
                weights[letter] = _for_all_heads(weights[letter], graph.width)
        if output is not None:
            weights["out"] = output
        if "q" not in weights:
            continue
        memory = weights["k"].x if "k" in weights else None
        start = min(linear.node.number for linear in weights.values())
        blocks.append(Block(weights, weights["q"].x, memory, start, end, heads, repeated))
    return blocks


def _joined(maps: list[Linear]) -> Linear:
    first = maps[0]
    if len(maps) == 1:
        return first
    weight = torch.cat([each.weight for each in maps])
    bias = (
        None
        if first.bias is None
        else torch.cat([each.bias for each in maps if each.bias is not None])
    )
    return Linear(
        first.node, first.x, weight, bias, frozenset().union(*(each.names for each in maps))
    )


def _for_all_heads(linear: Linear, width: int) -> Linear:
    """One map (d_k, d_k) for the features of every head, as a map (D, D)."""
    heads = width // linear.weight.shape[1]
    weight = torch.block_diag(*[linear.weight] * heads)
    bias = None if linear.bias is None else linear.bias.repeat(heads)
    return Linear(linear.node, linear.x, weight, bias, linear.names)


def stacks_of(graph: Graph, trace: Trace, blocks: list[Block]) -> dict[str, Stack]:
    """The two stacks, by the embeddings that their blocks read."""
    tables = list(lookups(trace))
    merged: dict[int, int] = {}  # two lookups of the same words in the same table are one
    first_of: dict[tuple[frozenset[str], Node], int] = {}
    for table in tables:
        ids = next(each for each in table.inputs if not each.value.is_floating_point())
        merged[table.number] = first_of.setdefault((table.inputs[0].parameters, ids), table.number)
    reads = {block: {merged[number] for number in block.x.reads} for block in blocks}
    labels = sorted(set().union(*reads.values())) if reads else []
    if len(labels) == 1 and len(tables) > 1:  # nothing of one of the two sides is used
        labels = sorted({*labels, *merged.values()})
    if len(labels) != 2:
        raise UserError(
            f"the layers read {len(labels)} lookups of words, and an encoder and a decoder read two: of a source and "
            "of a target"
        )
    crossing = (
        ({merged[number] for number in block.memory.reads}, reads[block])
        for block in blocks
        if block.memory is not None
    )
    source = next(
        (min(memory) for memory, own in crossing if len(memory) == 1 and not memory & own), None
    )
    if source is None:
        named = [
            table.number
            for table in tables
            if _ids_of(table) == {"source"} and table.number in labels
        ]
        source = named[0] if len(named) == 1 else labels[0]
    by_number = {table.number: table for table in tables}
    target = next(label for label in labels if label != source)
    stacks = {"encoder": Stack(by_number[source]), "decoder": Stack(by_number[target])}
    for name, stack in stacks.items():
        own = [block for block in blocks if (reads[block] == {source}) == (name == "encoder")]
        stack.layers = _layers(own)
    return stacks


def _ids_of(table: Node) -> set[str]:
    return {name for each in table.inputs for name in each.ids_of}


def _layers(blocks: list[Block]) -> list[list[Block]]:
    """Divide the blocks of a stack after each feed-forward network, or by the numbers in the names without one."""
    layers: list[list[Block]] = []
    if any(not block.is_attention for block in blocks):
        layer: list[Block] = []
        for block in blocks:
            layer.append(block)
            if not block.is_attention:
                layers.append(layer)
                layer = []
        return [*layers, layer] if layer else layers
    by_number: dict[str, list[Block]] = {}
    for block in blocks:
        number = re.search(r"\d+", min(block.names, default=""))
        by_number.setdefault(number[0] if number else "", []).append(block)
    return list(by_number.values())


def _name_blocks(stacks: Mapping[str, Stack]) -> bool:
    """Give each block its role, and return whether cross-attention comes before self-attention."""
    source = stacks["encoder"].table.number
    is_swapped = False
    for stack in stacks.values():
        for layer in stack.layers:
            attentions = [block for block in layer if block.is_attention]
            for block, role in zip(attentions, ATTENTIONS, strict=False):
                block.role = role
            if stack is stacks["encoder"]:
                continue
            crossing = [
                each
                for each in attentions
                if each.memory is not None and each.memory.reads == {source}
            ]
            if len(crossing) == 1 and len(attentions) <= 2:
                for block in attentions:
                    block.role = "cross_attn" if block is crossing[0] else "self_attn"
                is_swapped |= len(attentions) == 2 and crossing[0] is attentions[0]
    return is_swapped


def _place_norms(graph: Graph, stack: Stack, norms: list[Norm]) -> list[Norm]:
    """Assign the normalisations of a stack to its blocks, and return those without a place."""
    blocks = [block for layer in stack.layers for block in layer]
    if not blocks:
        return norms
    read = {block.x for block in blocks}
    # of two calls with the same vectors, the one that a block reads
    ordered = sorted(norms, key=lambda norm: norm.output not in read)
    calls: dict[tuple[frozenset[str], Node], Norm] = {}
    for norm in ordered:
        calls.setdefault((norm.names, norm.x), norm)
    norms = sorted(calls.values(), key=lambda norm: norm.node.number)
    before = {
        block: next(
            (each for each in norms if each.output is block.x or each.node is block.x), None
        )
        for block in blocks
    }
    first = before[blocks[0]]
    stack.is_pre = first is not None and (
        _is_inside(first, stack) or _is_bypassed(graph, first, blocks[0])
    )
    rest: list[Norm] = []
    for norm in norms:
        if stack.is_pre:
            place = next((block for block in blocks if before[block] is norm), None)
        else:
            place = next(
                (block for block in reversed(blocks) if block.end.number < norm.node.number), None
            )
        if place is not None and place.norm is None:
            place.norm = norm
        else:
            rest.append(norm)
    left: list[Norm] = []
    for norm in rest:
        if norm.node.number < blocks[0].start and stack.norm_of_embeddings is None:
            stack.norm_of_embeddings = norm
        elif norm.node.number > blocks[-1].end.number and stack.final_norm is None:
            stack.final_norm = norm
        else:
            left.append(norm)
    return left


def _is_inside(norm: Norm, stack: Stack) -> bool:
    """True if the norm belongs to the module of the first layer, and this module is not that of all layers."""
    modules = [_prefix(layer) for layer in stack.layers]
    inside = bool(norm.names) and all(name.startswith(f"{modules[0]}.") for name in norm.names)
    return bool(modules[0]) and modules.count(modules[0]) == 1 and len(modules) > 1 and inside


def _is_bypassed(graph: Graph, norm: Norm, block: Block) -> bool:
    """True if the block's residual is the input of the norm, or if nothing adds the norm's output to the block's."""
    after = {node for node in graph.nodes if node.is_data and graph.origins[node] is block.end}
    sums = [child for node in after for child in node.children if child.operation == "add"]
    others = {sequence_of(each) for node in sums for each in node.inputs if each not in after}
    if not others:
        return not any(each.x in after for each in graph.norms.values())
    return norm.x in others and norm.output not in others


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
    is_swapped = _name_blocks(stacks)
    source = {stacks["encoder"].table.number}
    left: list[Norm] = []
    for name, stack in stacks.items():
        norms = [
            each for each in graph.norms.values() if (each.x.reads <= source) == (name == "encoder")
        ]
        left += _place_norms(graph, stack, norms)
        stack.positions = _learned_positions(graph, stack, dict(module.named_parameters()))
    roles = Roles({}, {}, {}, {}, next(block.heads for block in blocks if block.is_attention))
    roles.is_pre = stacks["encoder"].is_pre
    roles.is_swapped = is_swapped
    roles.repeated = any(block.repeated for block in blocks)
    roles.shared = _shared(stacks)
    for name, stack in stacks.items():
        _add_stack(roles, name, stack)
    _add_output(roles, graph, stacks, module, blocks, given)
    _add_unused(roles, graph, stacks, module)
    roles.unnamed += [
        f"a normalisation ({', '.join(sorted(norm.names)) or 'without gain'})" for norm in left
    ]
    _add_flow(roles, stacks)
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
    _place_norms(graph, stack, list(graph.norms.values()))
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
            return (
                value.reshape(-1, length, graph.width)[0]
                if value.numel() >= length * graph.width
                else None
            )
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
                for parameter in block.names:
                    places.setdefault(parameter, []).append(f"{ROLE_WORDS[block.role]} of {at}")
                for parameter in block.norm.names if block.norm else ():
                    places.setdefault(parameter, []).append(
                        f"the normalisation of {ROLE_WORDS[block.role]} of {at}"
                    )
    return list(
        dict.fromkeys(f"{used[0]} and {used[1]}" for used in places.values() if len(used) > 1)
    )


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
    touched = {name for linear in graph.linears.values() for name in linear.names}
    candidates = [
        name
        for name, each in parameters.items()
        if each.ndim == 2
        and each.shape[1] == graph.width
        and name not in touched
        and name not in _lookup_names(graph)
        if wanted is None or name.rpartition(".")[0] == wanted
    ]
    candidates = [
        name
        for name in candidates
        if len(parameters[name]) == len(stacks["decoder"].table.inputs[0].value)
    ]
    if len(candidates) != 1:
        raise UserError(
            "forward gives the decoder's states, and no output layer was found: call it in forward, or name it with "
            "--role output_layer=NAME_OF_ITS_MODULE"
        )
    name = candidates[0]
    bias = parameters.get(name.rpartition(".")[0] + ".bias")
    _put(
        roles.tensors, "lm_head", parameters[name].detach(), None if bias is None else bias.detach()
    )
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
        prefix = roles.output_name.rpartition(".")[0]
        for name in (roles.output_name, f"{prefix}.bias"):
            unused.pop(name, None)
    for name, stack in stacks.items():
        prefixes = [_prefix(layer) for layer in stack.layers]
        for number, (layer, prefix) in enumerate(zip(stack.layers, prefixes, strict=True)):
            if prefix and prefixes.count(prefix) == 1:
                _fill_layer(
                    roles, graph, f"model.{name}.layers.{number}.", name, layer, prefix, unused
                )
    roles.unused = list(unused)
    roles.unused_layers = _unused_layers(unused, module)
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


def _unused_layers(unused: Mapping[str, nn.Parameter], module: nn.Module) -> list[str]:
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


def _without_final_norm(stacks: Mapping[str, Stack]) -> Iterator[str]:
    return (name for name, stack in stacks.items() if stack.final_norm is None)


def _is_first(name: str, names: Iterable[str]) -> bool:
    parent = name.rpartition(".")[0]
    return next(each for each in names if each.rpartition(".")[0] == parent) == name


def _prefix(layer: list[Block]) -> str:
    """The module of a layer: what the names of its weights have in common."""
    names = [name for block in layer for name in block.names]
    names += [name for block in layer if block.norm is not None for name in block.norm.names]
    return os.path.commonprefix([f"{name}." for name in names]).rpartition(".")[0]


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
        if child is None or child.operation not in _SHAPES:
            is_bias = (
                child is not None
                and child.operation == "add"
                and any(each.parameters for each in child.inputs)
            )
            return child.value if child is not None and is_bias else value
        node = child
    return value


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
    for layer in stacks["decoder"].layers:
        crossing = next((block for block in layer if block.role == "cross_attn"), None)
        if crossing is None or crossing.memory is None:
            continue
        if stacks["decoder"].table.number not in crossing.memory.reads:
            roles.flow.setdefault("encoder", crossing.memory.value)
