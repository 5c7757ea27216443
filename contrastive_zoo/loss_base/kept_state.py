"""The state of a loss in a call that fails: it stays as it was."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def state_kept_on_error(module: nn.Module) -> Iterator[None]:
    """Run the body; if it raises, every buffer of the module is what it was before.

    Most losses need no copy of their state, since they move it at the end of a call, after everything that may raise. This
    is for calls that continue after a state has moved: a batch that is stored before it is compared, a sum of losses. It
    copies the buffers, and writes only those back that have changed: autograd may have saved the others.

    Args:
        module: the loss, with its submodules.

    Examples:
        >>> norm = nn.BatchNorm1d(1)
        >>> with state_kept_on_error(norm):
        ...     norm(torch.ones(2, 1)), 1 / 0
        Traceback (most recent call last):
        ...
        ZeroDivisionError: division by zero
        >>> norm.running_mean
        tensor([0.])
    """
    places = [(x._buffers, name) for x in module.modules() for name in x._buffers]
    before = [(of, name, x, x.clone()) for of, name in places if (x := of[name]) is not None]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for of, name, x, values in before:
                # by value: batch_norm changes its statistics without a new version
                of[name] = x if torch.equal(x, values) else x.copy_(values)
        raise
