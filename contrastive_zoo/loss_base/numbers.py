"""Convert settings and parameters that are one number."""

from typing import Any

import numpy as np
import torch  # noqa: F401 - the examples use it
from torch import Tensor, nn


def real(x: Any) -> Any:
    """Return a tensor of shape [1] as [], a Python or NumPy number as float, and anything else unchanged.

    A parameter of shape [1] would change dtype and shape of the loss by promotion. A NumPy float32 number would reduce
    the precision of results that are computed from it.

    Examples:
        >>> real(torch.ones(1)), real(torch.ones(2)), real(1), real("mean")
        (tensor(1.), tensor([1., 1.]), 1.0, 'mean')
    """
    if isinstance(x, Tensor):
        return x.reshape(()) if x.shape == (1,) else x
    is_number = isinstance(x, (int, np.integer, np.floating)) and not isinstance(x, bool)
    return float(x) if is_number else x


def move_towards(state: Tensor, target: Tensor, share: float | Tensor) -> None:
    """Move ``state`` in place by a share of the way to ``target``; a share that is a tensor may have any dtype.

    Examples:
        >>> centre = torch.zeros(1)
        >>> move_towards(centre, torch.ones(1), torch.tensor([0.25], dtype=torch.float64))
        >>> centre
        tensor([0.2500])
    """
    state.lerp_(target.to(state), real(share).to(state) if isinstance(share, Tensor) else share)


def widen_numbers(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Reshape saved parameters of shape [] to [1] in ``state_dict``: earlier versions saved [], which FSDP cannot shard."""
    for name, parameter in module.named_parameters(recurse=False):
        saved = state_dict.get(prefix + name)
        if isinstance(saved, Tensor) and saved.ndim == 0 and parameter.shape == (1,):
            state_dict[prefix + name] = saved.reshape(1)
