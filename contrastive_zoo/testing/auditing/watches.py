"""Watch functions of torch that have no hook, and find the terms that a script adds to a loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor


@contextmanager
def watched(home: Any, name: str, before: Callable[..., Any]) -> Iterator[None]:
    """Call ``before`` with the arguments of every call of ``home.name``; it may return other ``(args, kwargs)``.

    Examples:
        >>> import math
        >>> with watched(math, "sqrt", lambda x: print("sqrt of", x)):
        ...     math.sqrt(4)
        sqrt of 4
        2.0
    """
    original = getattr(home, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = before(*args, **kwargs) or (args, kwargs)
        return original(*args, **kwargs)

    setattr(home, name, call)
    try:
        yield
    finally:
        setattr(home, name, original)


def other_parameters(roots: Sequence[Any], losses: Collection[Any]) -> list[Tensor]:
    """Return the leaves of the graph that are reached without passing a loss; none if no loss is reached at all.

    Examples:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> loss = (2 * weight).sum()
        >>> len(other_parameters([loss / 2], [loss.grad_fn])), len(other_parameters([loss + weight.sum()], [loss.grad_fn]))
        (0, 1)
    """
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
