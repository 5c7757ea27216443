"""Turn a function of one block of anchors, and its settings, into the module that the row-wise engine takes."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from contrastive_zoo.engine.anchor_block import AnchorBlock
from contrastive_zoo.engine.row_statistics import LogSumExp, Rows, Sum

Average = Literal["anchors", "pairs"]
"""What a mean is taken over."""


class BlockLoss(nn.Module):
    """Call ``function(block, **settings)`` in the form that the row-wise engine takes, ``on_block(block)``.

    Args:
        function: returns for a block the losses of its anchors and whether they count.
        settings: further arguments of the function. A tensor is learnable: it gets the gradient of all ranks' anchors,
            even if it is no leaf, such as the value of a :class:`LearnableTemperature`.
    """

    terms: int = 1
    """The number of columns that the function returns, each a mean of its own."""

    def __init__(self, function: Callable[..., tuple[Tensor, Tensor] | Rows], **settings: Any) -> None:
        super().__init__()
        self.learnable = [name for name, x in settings.items() if isinstance(x, Tensor)]
        self.graph_kind = getattr(function, "__code__", type(function))
        self.yields = inspect.isgeneratorfunction(function)
        self.function = functools.partial(function, **{k: x for k, x in settings.items() if k not in self.learnable})
        for name in self.learnable:
            setattr(self, name, settings[name])

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Yield the learnable settings."""
        return ((name, getattr(self, name)) for name in self.learnable)

    def can_ring(self) -> bool:
        """Return whether the function yields statistics, so that it can see the candidates in parts."""
        return self.yields

    def on_block(self, block: AnchorBlock) -> tuple[Tensor, Tensor] | Rows:
        """Call the function with its settings."""
        return self.function(block, **{name: getattr(self, name) for name in self.learnable})


def info_nce_per_positive(
    logits: Float[Tensor, "c N"],
    block: AnchorBlock,
    average: Average,
    positive_logits: Float[Tensor, "c N"] | None = None,
) -> Rows:
    """Return of each anchor log(1 + Σ_n exp(logits_n − logits_p)) over its positives p.

    For ``"anchors"`` this is the mean over positives and whether there are any; for ``"pairs"`` the sum and the number
    of positives.

    ``positive_logits`` are the logits of positives, if they differ from ``logits``.
    """
    (negatives,) = yield (LogSumExp(logits, block.negative),)
    positives = logits if positive_logits is None else positive_logits
    of_pairs = -F.logsigmoid(positives - negatives[:, None]).where(block.positive, 0)
    losses, pairs = yield Sum(of_pairs.sum(1)), Sum(block.positive.sum(1))
    return (losses, pairs) if average == "pairs" else (losses / pairs.clamp(min=1), pairs > 0)
