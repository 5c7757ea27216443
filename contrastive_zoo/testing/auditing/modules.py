"""Which modules of a training are losses, which are encoders, and which only wrap others."""

from collections.abc import Sequence
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

ENCODERS = {"SentenceTransformer", "PreTrainedModel"}
"""Classes of encoders that may be part of a loss: the losses of sentence-transformers hold theirs."""

Kind = Literal["encoder", "loss", None]


class Kinds:
    """Tell losses and encoders from other modules.

    A loss is a loss of this library, of pytorch-metric-learning or of sentence-transformers, or one of ``losses``, modules
    or classes. An encoder is a module with trained parameters that contains no loss and wraps no other module.
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
        if self._is_loss(module):
            return "loss"
        if is_a(module, WRAPPERS) or any(map(self._is_loss, module.modules())):
            return None
        return "encoder" if any(x.requires_grad for x in module.parameters()) else None

    def _is_loss(self, module: nn.Module) -> bool:
        if isinstance(module, (Loss, DistributedLoss, *self.classes)) or any(module is x for x in self.instances):
            return True
        return any(cls.__module__.startswith(THIRD_PARTY_LOSSES) for cls in type(module).__mro__)


def is_a(module: nn.Module, names: set[str]) -> bool:
    """Return whether a module is of a class with one of these names, whose library need not be installed."""
    return any(cls.__name__ in names for cls in type(module).__mro__)


def loss_name(module: nn.Module) -> str:
    """Return the class of a loss; of a wrapper, also that of the wrapped loss: ``DistributedLoss(NTXent)``."""
    name, inner = type(module).__name__, getattr(module, "loss", None)
    if inner is None or not isinstance(module, DistributedLoss):
        return name
    return f"{name}({getattr(inner, '__name__', type(inner).__name__)})"
