"""The graph that autograd has recorded: its nodes, and the leaves at which it ends."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def graph_nodes(outputs: Iterable[Tensor], until: Iterable[Tensor] = ()) -> list[Any]:
    """Return the nodes that a backward pass from outputs runs, but for those of the tensors ``until`` and after these."""
    ends = {x.grad_fn for x in until}
    nodes: dict[Any, None] = dict.fromkeys(x.grad_fn for x in outputs)
    remaining = list(nodes)
    while remaining:
        after = [x for x, _ in remaining.pop().next_functions if x is not None and x not in nodes and x not in ends]
        nodes.update(dict.fromkeys(after))
        remaining += after
    return list(nodes)


def leaf_of(node: Any) -> Tensor | None:
    """Return the leaf whose gradient a node adds up; None of other nodes."""
    return node.variable if node is not None and node.name() == "torch::autograd::AccumulateGrad" else None
