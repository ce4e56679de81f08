"""Find the sublayers of a model and their order by the operations of a forward pass (`trace`).

A product of a sentence's vectors and a parameter is a linear map. A product of two such maps gives the scores of an
attention, and a product of the scores and a third map its context. Two maps in a row are a feed-forward network. A
gain multiplies normalised vectors. No name of a module is needed.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_vanilla_transformer.utils.errors import UserError

from .trace import Node, Trace, lookups

STACKS = ("encoder", "decoder")
ATTENTIONS = ("self_attn", "cross_attn")

_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "convolution", "mkldnn_linear")
_WITH_SUMMAND = ("addmm", "baddbmm")
SHAPES: tuple[str, ...] = (
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
SHAPES += (
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
        if not steps and not _is_divided(node):
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


def _is_divided(node: Node) -> bool:
    """True if a number of each vector divides or multiplies it, as in gain * x / root(mean(x²))."""
    return any(
        child.operation in ("div", "mul")
        and any(each.is_data and each.value.shape[-1] == 1 for each in child.inputs)
        for child in node.children
    )


def sequence_of(node: Node) -> Node:
    """The node of the vectors, before operations that change their shape alone."""
    while node.operation in SHAPES and node.inputs:
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
        if node.operation not in SHAPES:
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
    """Divide the blocks of a stack into layers.

    They repeat a pattern with one feed-forward network, or else each layer ends with one. Without any, the numbers in
    the names tell the layers apart.
    """
    layers: list[list[Block]] = []
    count = sum(not block.is_attention for block in blocks)
    if count:
        size = len(blocks) // count
        kinds = [block.is_attention for block in blocks]
        if kinds == kinds[:size] * count:
            return [blocks[start : start + size] for start in range(0, len(blocks), size)]
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


def name_blocks(stacks: Mapping[str, Stack]) -> bool:
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


def place_norms(graph: Graph, stack: Stack, norms: list[Norm]) -> None:
    """Assign the normalisations of a stack to its blocks."""
    blocks = [block for layer in stack.layers for block in layer]
    if not blocks:
        return
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
    for norm in rest:
        if norm.node.number < blocks[0].start and stack.norm_of_embeddings is None:
            stack.norm_of_embeddings = norm
        elif norm.node.number > blocks[-1].end.number and stack.final_norm is None:
            stack.final_norm = norm


def _is_inside(norm: Norm, stack: Stack) -> bool:
    """True if the norm belongs to the module of the first layer, and this module is not that of all layers."""
    modules = [module_of(layer) for layer in stack.layers]
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


def module_of(layer: list[Block]) -> str:
    """The module of a layer: what the names of its weights have in common."""
    names = [name for block in layer for name in block.names]
    names += [name for block in layer if block.norm is not None for name in block.norm.names]
    return os.path.commonprefix([f"{name}." for name in names]).rpartition(".")[0]
