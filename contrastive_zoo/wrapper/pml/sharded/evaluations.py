"""The table of losses that can be sharded."""

from collections.abc import Callable
from typing import Any

from pytorch_metric_learning import losses
from torch import nn

from contrastive_zoo.wrapper.pml.meaning import CLASSIFIERS, PAIR_LOSSES, TRIPLET_LOSSES
from contrastive_zoo.wrapper.pml.sharded import anchor_losses, library_code
from contrastive_zoo.wrapper.pml.sharded.anchor_batch import AnchorBatch, Indices, Info

EVALUATED: dict[type[nn.Module], Callable[[Any, AnchorBatch, Indices | None], dict[str, Info]]] = {
    **dict.fromkeys(PAIR_LOSSES, library_code.of_pairs),
    **dict.fromkeys(TRIPLET_LOSSES, library_code.of_triplets),
    **dict.fromkeys(CLASSIFIERS, library_code.of_classes),
    losses.FastAPLoss: anchor_losses.fast_ap,
    losses.InstanceLoss: anchor_losses.instance,
    losses.IntraPairVarianceLoss: anchor_losses.intra_pair_variance,
    losses.LiftedStructureLoss: anchor_losses.lifted_structure,
    losses.NCALoss: anchor_losses.nca,
    losses.NPairsLoss: anchor_losses.n_pairs,
    losses.P2SGradLoss: anchor_losses.p2s_grad,
    losses.PNPLoss: anchor_losses.pnp,
    losses.RankedListLoss: anchor_losses.ranked_list,
    losses.ThresholdConsistentMarginLoss: anchor_losses.threshold_consistent,
}
"""Losses, and the function that evaluates the local anchors. MultipleLosses and SelfSupervisedLoss of these work, too."""
