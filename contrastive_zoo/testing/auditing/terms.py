"""Find terms that a script adds to a loss; there is no hook of backward, so ``torch.autograd.backward`` is wrapped."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from contrastive_zoo.ranks.compat import in_backward


class TermWatch:
    """Call ``on_terms(parameters)`` if a backward pass reaches parameters by another way than through a recorded loss.

    Args:
        losses: returns the nodes of the losses in the graph.
        on_terms: called with the parameters of the other terms.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> loss = (2 * weight).sum()
        >>> watch = TermWatch(lambda: [loss.grad_fn], lambda parameters: print(len(parameters)))
        >>> watch.start()
        >>> (loss / 2).backward(retain_graph=True)
        >>> (loss + weight.square().sum()).backward()
        1
        >>> watch.stop()
    """

    def __init__(self, losses: Callable[[], Collection[Any]], on_terms: Callable[[list[Tensor]], None]) -> None:
        self.losses, self.on_terms = losses, on_terms

    def start(self) -> None:
        """Wrap ``torch.autograd.backward``."""
        self._original = original = torch.autograd.backward

        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if not in_backward():  # not a pass within a pass, as of a cache of gradients
                roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
                if result := other_parameters(roots, self.losses()):
                    self.on_terms(result)
            original(tensors, *args, **kwargs)

        torch.autograd.backward = backward

    def stop(self) -> None:
        """Restore ``torch.autograd.backward``."""
        torch.autograd.backward = self._original


def other_parameters(roots: Sequence[Tensor], losses: Collection[Any]) -> list[Tensor]:
    """Return the leaves of the graph that are reached without passing a loss; none if no loss is reached at all."""
    pending = [x.grad_fn for x in roots if isinstance(x, Tensor) and x.grad_fn is not None]
    seen: set[Any] = set()
    leaves, reached = [], False
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in losses:
            reached = True
        elif hasattr(node, "variable"):
            leaves.append(node.variable)
        else:
            pending += [x for x, _ in node.next_functions if x is not None]
    return leaves if reached else []
