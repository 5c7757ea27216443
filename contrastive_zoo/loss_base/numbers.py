"""Settings and parameters that are one number."""

from typing import Any

import numpy as np
import torch  # noqa: F401 - the examples use it
from torch import Tensor, nn


def real(x: Any) -> Any:
    """A number as formulas take it: a tensor of shape [1] as [], Python's and NumPy's as float; anything else as it is.

    A parameter of shape [1] would otherwise raise its dtype to the result's, and its shape to the loss's; a number of
    NumPy's would round what is computed of it to its own few digits.

    Example:
        >>> real(torch.ones(1)), real(torch.ones(2)), real(1), real("mean")
        (tensor(1.), tensor([1., 1.]), 1.0, 'mean')
    """
    if isinstance(x, (int, np.integer, np.floating)) and not isinstance(x, bool):
        return float(x)
    return x.reshape(()) if isinstance(x, Tensor) and x.shape == (1,) else x


def widen_numbers(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Parameters that were saved as [], before they became [1] for FSDP's sake, as [1]."""
    for name, parameter in module.named_parameters(recurse=False):
        saved = state_dict.get(prefix + name)
        if isinstance(saved, Tensor) and saved.ndim == 0 and parameter.shape == (1,):
            state_dict[prefix + name] = saved.reshape(1)
