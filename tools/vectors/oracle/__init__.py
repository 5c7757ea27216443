"""Dense formulas of the main losses in NumPy alone: a second definition, which shares no code with torch.

A formula takes settings and parameters in one dict, then the arguments of the call, and returns the loss of the global
batch. It is analytic where the loss is differentiable, and accepts complex arrays: :func:`value_and_gradients`
differentiates it by a complex step, ∂f/∂x = Im f(x + ih) / h with h = 1e-30, which has no rounding error of a difference.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tools.vectors.oracle import labels_and_statistics, pairs
from tools.vectors.oracle.arithmetic import Array, Formula, Settings

STEP = 1e-30

FORMULAS: dict[str, Formula] = {
    "NTXent": pairs.nt_xent,
    "InfoNCE": pairs.info_nce,
    "Clip": pairs.clip,
    "SupCon": pairs.sup_con,
    "SINCERE": pairs.sincere,
    "NCA": pairs.nca,
    "DCL": pairs.dcl,
    "MILNCE": pairs.mil_nce,
    "SigLIP": pairs.siglip,
    "SupSigmoid": pairs.sup_sigmoid,
    "MaxSim": pairs.max_sim,
    "MaxSimPairwise": pairs.max_sim_pairwise,
    "Triplet": labels_and_statistics.triplet,
    "Contrastive": labels_and_statistics.contrastive,
    "MultiSimilarity": labels_and_statistics.multi_similarity,
    "Circle": labels_and_statistics.circle,
    "NormalizedSoftmax": labels_and_statistics.normalized_softmax,
    "CosFace": labels_and_statistics.cos_face,
    "ProxyAnchor": labels_and_statistics.proxy_anchor,
    "CoSENT": labels_and_statistics.cosent,
    "MarginMSE": labels_and_statistics.margin_mse,
    "VICReg": labels_and_statistics.vicreg,
    "BarlowTwins": labels_and_statistics.barlow_twins,
    "AlignUniform": labels_and_statistics.align_uniform,
    "NegativeCosine": labels_and_statistics.negative_cosine,
}
"""The formula of each loss, by the name of its class."""


def value_and_gradients(
    loss: str, settings: Settings, arguments: Mapping[str, Array], parameters: Mapping[str, Array], wanted: list[str]
) -> tuple[float, dict[str, Array]]:
    """Return the value of a loss and its gradients with respect to some arguments and parameters.

    Args:
        loss: the name of a class of contrastive_zoo; a key of :data:`FORMULAS`.
        settings: the constructor arguments of the loss, all of them.
        arguments: the arguments of the call, in their order.
        parameters: the loss's own parameters, by name.
        wanted: the names of those whose gradient is returned.

    Raises:
        KeyError: a loss without a formula here.

    Examples:
        >>> eye, settings = np.eye(2), {"symmetric": False}
        >>> value, gradients = value_and_gradients(
        ...     "InfoNCE", settings, {"queries": eye, "keys": eye}, {"temperature": np.array(1.0)}, ["temperature"]
        ... )
        >>> f"{value:.4f} {gradients['temperature']:.4f}"   # log(e + 1) − 1, and 1 / (e + 1)
        '0.3133 0.2689'
    """
    formula, inputs = FORMULAS[loss], {**arguments, **parameters}

    def evaluate(x: Mapping[str, Array]) -> Any:
        return formula({**settings, **{name: x[name] for name in parameters}}, *(x[name] for name in arguments))

    gradients = {}
    for name in wanted:
        gradient = np.empty_like(inputs[name])
        for index in np.ndindex(gradient.shape):
            shifted = np.array(inputs[name], dtype=complex)
            shifted[index] += STEP * 1j
            gradient[index] = np.imag(evaluate({**inputs, name: shifted})).item() / STEP
        gradients[name] = gradient
    return np.real(evaluate(inputs)).item(), gradients
