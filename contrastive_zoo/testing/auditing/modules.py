"""Which modules of a training are losses, which are encoders, and which only wrap others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import nn

from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.wrapper.distributed import DistributedLoss

THIRD_PARTY_LOSSES = (
    "pytorch_metric_learning.losses",
    "pytorch_metric_learning.utils.distributed",
    "sentence_transformers.losses",
    "sentence_transformers.sentence_transformer.losses",
    "sentence_transformers.sparse_encoder.losses",
    "contrastive_zoo.adapters.sentence_transformers",
)
"""Modules whose classes are losses."""

WRAPPERS = {
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "OptimizedModule",
    "LightningModule",
    "_FabricModule",
    "DeepSpeedEngine",
}
"""Classes that only forward their calls to another module, or to the training step that calls it."""

Kind = Literal["encoder", "loss", None]


class Kinds:
    """Tell losses and encoders from other modules.

    A loss is a loss of this library, of pytorch-metric-learning or of sentence-transformers, or one of those given. An
    encoder is a module with trained parameters that contains no loss and wraps no other module.

    Args:
        losses: further losses: modules or classes.

    Examples:
        >>> import contrastive_zoo as cz
        >>> kinds = Kinds()
        >>> kinds(cz.NTXent()), kinds(nn.Linear(1, 1)), kinds(nn.ReLU()), kinds(nn.Sequential(nn.Linear(1, 1), cz.NTXent()))
        ('loss', 'encoder', None, None)
    """

    def __init__(self, losses: Sequence[Any] = ()) -> None:
        self.classes = tuple(x for x in losses if isinstance(x, type))
        self.instances = [x for x in losses if not isinstance(x, type)]
        self._known: dict[nn.Module, Kind] = {}

    def __call__(self, module: nn.Module) -> Kind:
        """Return the kind of a module, which is looked at once."""
        if module not in self._known:
            self._known[module] = self._kind(module)
        return self._known[module]

    def _kind(self, module: nn.Module) -> Kind:
        if self.is_loss(module):
            return "loss"
        if is_wrapper(module) or any(map(self.is_loss, module.modules())):
            return None
        return "encoder" if any(x.requires_grad for x in module.parameters()) else None

    def is_loss(self, module: nn.Module) -> bool:
        """Return whether a module is a loss."""
        if isinstance(module, (Loss, DistributedLoss, *self.classes)) or any(module is x for x in self.instances):
            return True
        return any(cls.__module__.startswith(THIRD_PARTY_LOSSES) for cls in type(module).__mro__)


def is_wrapper(module: nn.Module) -> bool:
    """Return whether a module only forwards its calls, as DDP does."""
    return any(cls.__name__ in WRAPPERS for cls in type(module).__mro__)


def contains_encoder(module: nn.Module) -> bool:
    """Return whether a part of a loss is an encoder: the losses of sentence-transformers hold theirs."""
    return any(cls.__name__ in ("SentenceTransformer", "PreTrainedModel") for cls in type(module).__mro__)


def core_name(module: nn.Module) -> str:
    """Return the class of a loss; of a wrapper, also the class of the wrapped loss.

    Examples:
        >>> import contrastive_zoo as cz
        >>> core_name(cz.DistributedLoss(cz.NTXent()))
        'DistributedLoss(NTXent)'
    """
    inner = getattr(module, "loss", None) if isinstance(module, DistributedLoss) else None
    return (
        type(module).__name__
        if inner is None
        else f"{type(module).__name__}({getattr(inner, '__name__', type(inner).__name__)})"
    )


def reduction_option(module: nn.Module) -> str | None:
    """Return ``grad_reduction`` of a loss of the global batch; None for a loss of the rows that it is given."""
    own: Callable[..., Any] = vars(module).get  # not an attribute of the wrapped loss
    return own("grad_reduction")
