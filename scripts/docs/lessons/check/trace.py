"""Record the operations of a forward pass as a graph, with the parameters and the inputs that each of them reads.

The roles of weights follow from the operations that use them, not from the names of modules.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_LOOKUPS = ("embedding", "index", "index_select", "gather")  # (table, ids): the vectors of ids


@dataclass(eq=False)
class Node:
    """A tensor that an operation returned, or a leaf: a parameter, a buffer or an input.

    Attributes:
        number: the place in the order of execution.
        operation: the name of the operation in ATen, "" for a leaf.
        inputs: the nodes of the tensors that the operation read, in the order of its arguments.
        value: the tensor.
        reads: numbers of the embedding lookups that a vector depends on. Masks do not count.
        ids_of: the names of the inputs, "source" and "target", that integers come from.
        parameters: the names of the parameters that the tensor depends on, if it depends on no input.
        name: the parameter's own name.
        index: the place among the tensors that the operation returned.
        children: the nodes that read this one.
    """

    number: int
    operation: str
    inputs: tuple["Node", ...]
    value: Tensor
    reads: frozenset[int] = frozenset()
    ids_of: frozenset[str] = frozenset()
    parameters: frozenset[str] = frozenset()
    name: str = ""
    index: int = 0
    children: list["Node"] = field(default_factory=list)

    @property
    def is_data(self) -> bool:
        """True if the tensor depends on the words of the sentences."""
        return bool(self.reads)


class Trace(TorchDispatchMode):
    """Context in which the operations on tensors are recorded.

    Args:
        module: its parameters get their names.
        inputs: "source" and "target" -> the integers that are passed to the module.
        vectors: the vectors that are passed to a part of a model.
    """

    def __init__(
        self, module: nn.Module, inputs: Mapping[str, Tensor], vectors: Tensor | None = None
    ) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        # An id or a storage is not used again as long as its tensor lives.
        self.kept: list[Tensor] = []
        self.of_tensor: dict[int, Node] = {}
        self.of_storage: dict[int, Node] = {}
        self.written: dict[int, Node] = {}  # the last operation in place on a storage
        for name, parameter in module.named_parameters():
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                continue
            node = self._add("", (), parameter, parameters=frozenset({name}), name=name)
            self.of_storage[_storage(parameter)] = node
        for name, ids in inputs.items():
            node = self._add("", (), ids, ids_of=frozenset({name}))
            self.of_storage[_storage(ids)] = node
        if vectors is not None:
            node = self._add("", (), vectors, reads=frozenset({len(self.nodes)}))
            self.of_storage[_storage(vectors)] = node

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        read = [
            each for each in tree_leaves((args, dict(kwargs or {}))) if isinstance(each, Tensor)
        ]
        inputs = tuple(self.node_of(each) for each in read)
        output = function(*args, **(kwargs or {}))
        operation = function.overloadpacket.__name__
        for index, tensor in enumerate(tree_leaves(output)):
            if isinstance(tensor, Tensor):
                self._record(operation, inputs, tensor, index)
        return output

    def node_of(self, tensor: Tensor) -> Node:
        """The node of a tensor, or a new leaf for an unknown one."""
        known = self.of_tensor.get(id(tensor)) or self.of_storage.get(_storage(tensor))
        if known is None:
            return self._add("", (), tensor)
        write = self.written.get(_storage(tensor))
        if write is not None and write.number > known.number:
            return self._record("written", (known, write), tensor)
        return known

    def _record(
        self, operation: str, inputs: tuple[Node, ...], tensor: Tensor, index: int = 0
    ) -> Node:
        in_place = operation.endswith("_") and not operation.endswith("__")
        name = operation.strip("_")
        provenance = _provenance(name, inputs, tensor, len(self.nodes))
        node = self._add(name, inputs, tensor, index=index, **provenance)
        if in_place:
            self.written[_storage(tensor)] = node
        return node

    def _add(self, operation: str, inputs: tuple[Node, ...], tensor: Tensor, **more: Any) -> Node:
        value = tensor.detach()
        if operation:
            value = value.clone()  # operations in place change the tensor later
        node = Node(len(self.nodes), operation, inputs, value, **more)
        self.nodes.append(node)
        self.kept.append(tensor)
        self.of_tensor[id(tensor)] = node
        self.of_storage.setdefault(_storage(tensor), node)
        for each in dict.fromkeys(inputs):
            each.children.append(node)
        return node


def _storage(tensor: Tensor) -> int:
    """The address of a tensor's memory. An empty tensor has none, and its own id."""
    return tensor.untyped_storage().data_ptr() or -id(tensor)


def _provenance(
    operation: str, inputs: Sequence[Node], output: Tensor, number: int
) -> dict[str, frozenset[Any]]:
    """The fields `reads`, `ids_of` and `parameters` of an operation's output."""
    if operation.endswith("_like") or operation.startswith("new_"):  # the shape alone
        return {}
    floats = [each for each in inputs if each.value.is_floating_point()]
    integers = [
        each
        for each in inputs
        if not each.value.is_floating_point() and each.value.dtype != torch.bool
    ]
    if not output.is_floating_point():
        ids_of = frozenset().union(*(each.ids_of for each in integers))
        return {"ids_of": ids_of if output.dtype != torch.bool else frozenset()}
    reads = frozenset().union(*(each.reads for each in floats))
    if operation in _LOOKUPS and not reads:
        ids_of = frozenset().union(*(each.ids_of for each in integers))
        if ids_of:
            reads = frozenset({number})
    parameters = frozenset() if reads else frozenset().union(*(each.parameters for each in floats))
    return {"reads": reads, "parameters": parameters}


def lookups(trace: Trace) -> Iterator[Node]:
    """The nodes that look up the embeddings of words, in the order of execution."""
    for node in trace.nodes:
        if (
            node.operation in _LOOKUPS
            and node.is_data
            and not any(each.is_data for each in node.inputs)
        ):
            yield node
