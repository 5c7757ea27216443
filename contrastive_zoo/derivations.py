"""How the rows of one step were computed from others, so that the others can be sent in their place."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Function = Callable[..., Tensor]
"""Computes rows from one or several tensors of rows of equal length, row by row, or concatenates them."""


@dataclass
class Derivations:
    """Records of each derived tensor the function and its arguments, as long as the tensor exists.

    Examples:
        >>> derivations = Derivations()
        >>> unit = derivations.derive(lambda x: x.float() / 2, torch.tensor([2.0], dtype=torch.bfloat16))
        >>> both = derivations.derive(lambda *x: torch.cat(x), unit, unit)
        >>> sent, restore = derivations.narrowest(both)
        >>> sent, restore(sent)
        (tensor([2., 2.], dtype=torch.bfloat16), tensor([1., 1.]))
    """

    _found: WeakTensorKeyDictionary | None = None
    """None as long as nothing is derived that may be sent, as in most steps."""

    def derive(self, function: Function, *rows: Tensor) -> Tensor:
        """Return ``function(*rows)``, and record it unless it is one of ``rows``."""
        result = function(*rows)
        if all(result is not x for x in rows):
            self._found = WeakTensorKeyDictionary() if self._found is None else self._found
            self._found[result] = function, rows
        return result

    def of(self, rows: Tensor) -> tuple[Function, tuple[Tensor, ...]] | None:
        """Return the function and the arguments that ``rows`` were derived from, None if they were not."""
        found: tuple[Function, tuple[Tensor, ...]] | None = None if self._found is None else self._found.get(rows)
        return found

    def narrowest(self, rows: Tensor) -> tuple[Tensor, Function]:
        """Return the rows of 16 bits that ``rows`` were derived from, and the function; ``rows`` if there are none.

        Sources that were concatenated are concatenated here, too. The function holds no tensor.
        """
        found = self.of(rows)
        if found is None:
            return rows, unchanged
        function, sources = found
        narrow, functions = zip(*map(self.narrowest, sources), strict=True)
        if any(x.dtype.itemsize != 2 for x in narrow):
            return rows, unchanged

        def restore(received: Tensor) -> Tensor:
            count = len(received) // len(functions)
            parts = (received[i * count : (i + 1) * count] for i in range(len(functions)))
            return function(*(of_source(x) for of_source, x in zip(functions, parts, strict=True)))

        return (narrow[0] if len(narrow) == 1 else torch.cat(narrow)), restore


def unchanged(rows: Tensor) -> Tensor:
    """Return ``rows``, which were derived from no others.

    Examples:
        >>> unchanged(torch.ones(1))
        tensor([1.])
    """
    return rows
