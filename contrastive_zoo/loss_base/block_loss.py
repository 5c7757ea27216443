"""Turn a function of one block of anchors into a loss over all anchors."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.engine.row_statistics import LogSumExp, Rows, Sum
from contrastive_zoo.engine.rowwise import AnchorBlock, sum_over_anchors
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.numbers import real
from contrastive_zoo.loss_base.preparation import begin_labelled
from contrastive_zoo.world import World

Average = Literal["anchors", "pairs"]
"""What a mean is taken over."""


class BlockLoss(nn.Module):
    """Call ``function(block, **settings)`` in the form that the row-wise engine takes, ``on_block(block)``.

    Args:
        function: returns for a block the losses of its anchors and whether they count.
        settings: further arguments of the function. A tensor is learnable: it gets the gradient of all ranks' anchors,
            even if it is no leaf, such as the value of a :class:`LearnableTemperature`.

    Examples:
        >>> import torch
        >>> nearest = lambda block, t: ((block.anchors @ block.candidates.T).amax(1) / t, block.negative.any(1))
        >>> [name for name, _ in BlockLoss(nearest, t=torch.tensor(1.0)).named_parameters()]
        ['t']
    """

    terms: int = 1
    """The number of columns that the function returns, each a mean of its own."""

    def __init__(self, function: Callable[..., tuple[Tensor, Tensor] | Rows], **settings: Any) -> None:
        super().__init__()
        settings = {name: real(x) for name, x in settings.items()}
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


class LabelledLoss(Loss):
    """A function of labelled embeddings that is a sum over anchors of ``block_function(block, **settings)``.

    A class that is declared with its block function, as in
    ``class NCA(LabelledLoss, function=nca, block_function=_neighbours)``, can also compare anchors with candidates that
    are no anchors, such as those of a memory.

    Examples:
        >>> import torch
        >>> from contrastive_zoo.losses.nca import NCA
        >>> NCA(temperature=torch.tensor(2.0)).block_loss().learnable
        ['temperature']
    """

    block_function: ClassVar[Callable[..., tuple[Tensor, Tensor] | Rows]]

    def __init_subclass__(
        cls, block_function: Callable[..., tuple[Tensor, Tensor] | Rows] | None = None, **kwargs: Any
    ) -> None:
        super().__init_subclass__(**kwargs)
        if block_function is not None:
            cls.block_function = staticmethod(block_function)

    def can_ring(self) -> bool:
        return inspect.isgeneratorfunction(type(self).block_function)

    def block_loss(self) -> BlockLoss:
        """Return ``block_function`` with those of the current settings that it takes."""
        function = type(self).block_function
        taken = inspect.signature(function).parameters
        return BlockLoss(function, **{name: x for name, x in self.settings().items() if name in taken})


def sum_over_labelled_anchors(
    caller: str,
    block_function: Callable[..., tuple[Tensor, Tensor] | Rows],
    embeddings: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None,
    *,
    normalize: bool = True,
    reduction: Reduction,
    problem: str | None = None,
    world: World,
    **settings: Any,
) -> Float[Tensor, "..."]:
    """Check and prepare labelled embeddings, and return ``block_function(block, **settings)`` reduced over all anchors.

    Examples:
        >>> import torch
        >>> from contrastive_zoo.world import ALONE
        >>> nearest = lambda block, t: ((block.anchors @ block.candidates.T).amax(1) / t, block.negative.any(1))
        >>> call = {"reduction": "mean", "t": 2.0, "world": ALONE}
        >>> sum_over_labelled_anchors("Loss", nearest, torch.eye(2), torch.arange(2), **call)
        tensor(0.5000)
    """
    z, ids, shards = begin_labelled(
        caller, embeddings, labels, normalize=normalize, reduction=reduction, problem=problem, world=world, **settings
    )
    loss = BlockLoss(block_function, **settings)
    return sum_over_anchors(loss, z, ids, shards=shards, reduction=reduction, world=world)


def info_nce_per_positive(
    logits: Float[Tensor, "c N"],
    block: AnchorBlock,
    average: Average,
    positive_logits: Float[Tensor, "c N"] | None = None,
) -> Rows:
    """Return of each anchor log(1 + Σ_n exp(logits_n − logits_p)) over its positives p.

    For ``"anchors"`` this is the mean over positives and whether there are any; for ``"pairs"`` the sum and the number
    of positives.

    Args:
        logits: logits of the anchors.
        block: the anchors and candidates.
        average: ``"anchors"`` or ``"pairs"``.
        positive_logits: the logits of positives, if they differ from ``logits``.
    """
    (negatives,) = yield (LogSumExp(logits, block.negative),)
    positives = logits if positive_logits is None else positive_logits
    of_pairs = -F.logsigmoid(positives - negatives[:, None]).where(block.positive, 0)
    losses, pairs = yield Sum(of_pairs.sum(1)), Sum(block.positive.sum(1))
    return (losses, pairs) if average == "pairs" else (losses / pairs.clamp(min=1), pairs > 0)
