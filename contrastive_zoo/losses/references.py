"""Losses of pytorch-metric-learning that are wrong if their references are a memory, or another batch than the anchors."""

from typing import Any

from torch import nn

_LIBRARY = "pytorch_metric_learning."

_ANCHORS_NUMBER = "it looks up a reference's number among the anchors"

_OF_THE_BATCH = {
    "LiftedStructureLoss": (_ANCHORS_NUMBER, "GeneralizedLiftedStructureLoss()"),
    "ThresholdConsistentMarginLoss": (_ANCHORS_NUMBER, "contrastive_zoo.ThresholdConsistentMargin()"),
}
"""By the class that has the formula: why it is wrong, and what to pass."""

_WITHOUT_REFERENCES = frozenset({
    "FastAPLoss", "HistogramLoss", "InstanceLoss", "LargeMarginSoftmaxLoss", "ManifoldLoss", "NPairsLoss",
    "NormalizedSoftmaxLoss", "P2SGradLoss", "PNPLoss", "ProxyAnchorLoss", "ProxyNCALoss", "RankedListLoss",
    "SmoothAPLoss", "SoftTripleLoss", "VICRegLoss",
})  # fmt: skip

_OF_PAIRS = frozenset({
    "AngularLoss", "ContrastiveLoss", "IntraPairVarianceLoss", "LiftedStructureLoss", "NTXentLoss", "TupletMarginLoss",
})  # fmt: skip
"""Those whose losses are of pairs, which PerAnchorReducer puts into a matrix of anchors by anchors."""


def references_problem(loss: Any) -> str | None:
    """Return why a loss is wrong for ``ref_emb`` that are not its own batch, in words; None if it is right."""
    formula = _formula(loss)
    if formula == "TripletMarginLoss" and loss.swap:
        return f"with swap=True {_ANCHORS_NUMBER}. Pass TripletMarginLoss(swap=False)."
    if formula in _OF_THE_BATCH:
        reason, instead = _OF_THE_BATCH[formula]
        return f"{reason}. Pass {instead}."
    if formula in _OF_PAIRS:
        kinds = (kind for x in loss.modules() for kind in type(x).__mro__ if kind.__name__ == "PerAnchorReducer")
        if any(kind.__module__.startswith(_LIBRARY) for kind in kinds):
            return "its PerAnchorReducer counts as many references as anchors. Pass reducer=MeanReducer()."
    return None


def memory_problem(loss: Any) -> str | None:
    """Return why a loss is wrong against a memory that holds the batch too, in words; None if it is right."""
    formula = _formula(loss)
    if formula == "NCALoss":
        return "it compares an embedding with its own copy. Pass contrastive_zoo.NCA(temperature=1 / softmax_scale)."
    if formula in _WITHOUT_REFERENCES:
        return "it takes no ref_emb. Leave the memory out."
    return references_problem(loss)


def _formula(loss: Any) -> str:
    """Return the name of their class that has the formula; empty if there is none, or a user's subclass has another one."""
    names = ("compute_loss", "_compute_loss")
    kind: type = next((x for x in type(loss).__mro__ if any(name in vars(x) for name in names)), nn.Module)
    return kind.__name__ if kind.__module__.startswith(_LIBRARY) else ""
