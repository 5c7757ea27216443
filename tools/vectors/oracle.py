"""Dense formulas of the main losses in NumPy alone: a second definition, which shares no code with torch.

A formula takes settings and parameters in one dict, then the arguments of the call, and returns the loss of the global
batch. It is analytic where the loss is differentiable, and accepts complex arrays: :func:`value_and_gradients`
differentiates it by a complex step, ∂f/∂x = Im f(x + ih) / h with h = 1e-30, which has no rounding error of a difference.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

STEP = 1e-30

Array = NDArray[Any]  # float64, complex128, int64 or bool
Settings = Mapping[str, Any]  # settings and parameters of a loss, by name

Formula = Callable[..., Any]


def unit(rows: Array, settings: Settings) -> Array:
    """Return embeddings of length 1, unless the settings say otherwise. No conjugates: np.linalg.norm would take them."""
    return rows / np.sqrt((rows * rows).sum(-1, keepdims=True)) if settings.get("normalize", True) else rows


def relu(x: Array) -> Array:
    return np.where(x.real > 0, x, 0)


def softplus(x: Array) -> Array:
    """Return log(1 + exp(x))."""
    return relu(x) + np.log(1 + np.exp(np.where(x.real > 0, -x, x)))


def log_sum_exp(x: Array, where: Array | None = None) -> Array:
    """Return the logarithm of the sum of exp over each row's chosen elements, or all; −inf for none."""
    where = np.ones(x.shape, dtype=bool) if where is None else where
    peak = np.where(where, x.real, -np.inf).max(1, keepdims=True)
    peak = np.where(np.isfinite(peak), peak, 0)
    total = np.where(where, np.exp(np.where(where, x - peak, 0)), 0).sum(1)
    return np.log(np.where(total == 0, 1, total)) + peak[:, 0] + np.where(total == 0, -np.inf, 0)


def others(rows: Array) -> Array:
    return ~np.eye(len(rows), dtype=bool)


def same_class(labels: Array) -> tuple[Any, Any]:
    """Return masks of the positives and of the negatives of each embedding."""
    same = labels[:, None] == labels
    return same & others(labels), ~same


def mean(x: Array, valid: Any, settings: Settings | None = None) -> Any:
    """Return the mean, or the sum if the settings say so, of the valid elements; 0 without any."""
    total = np.where(valid, x, 0).sum()
    return total if (settings or {}).get("reduction") == "sum" else total / max(int(valid.sum()), 1)


def mean_of_rows(x: Array, settings: Settings) -> Any:
    return mean(x, np.ones(len(x), dtype=bool), settings)


def squared_distances(rows: Array, columns: Array) -> Array:
    return ((rows[:, None] - columns) ** 2).sum(-1)


def distances(z: Array, metric: str) -> Array:
    """Return the dissimilarity of each two unit embeddings; 0 of one to itself, where a root has no derivative."""
    if metric == "similarity":
        return -z @ z.T
    squared = squared_distances(z, z)
    return squared if metric == "squared distance" else np.sqrt(squared + np.eye(len(z))) * others(z)


# --------------------------------------------------------------------------------------- softmax and sigmoid over pairs


def nt_xent(s: Settings, *views: Array) -> Any:
    z = unit(np.concatenate(views), s)
    samples = np.tile(np.arange(len(views[0])), len(views))
    positive, _ = same_class(samples)
    logits = z @ z.T / s["temperature"]
    losses = log_sum_exp(logits, others(z)) - (logits * positive).sum(1) / positive.sum(1)
    return mean_of_rows(losses, s)


def info_nce(s: Settings, queries: Array, keys: Array, *negatives: Array) -> Any:
    q, k = unit(queries, s), unit(keys, s)
    logits = q @ k.T / s["temperature"]
    seen = np.eye(len(q), dtype=bool) | s.get("in_batch_negatives", True)
    extra = [unit(x, s) for x in negatives]
    of_extra = [(q @ x.T if x.ndim == 2 else (q[:, None] * x).sum(-1)) / s["temperature"] for x in extra]
    columns = np.concatenate([np.where(seen, logits, -1e300), *of_extra], 1)
    losses = log_sum_exp(columns, columns.real > -1e299) - np.diag(logits)
    if s["symmetric"]:
        losses = (losses + log_sum_exp(logits.T) - np.diag(logits)) / 2
    return mean_of_rows(losses, s)


def clip(s: Settings, images: Array, texts: Array) -> Any:
    """The parameter is log(1/t)."""
    return info_nce({**s, "symmetric": True, "temperature": np.exp(-s["temperature.log_scale"])}, images, texts)


def sup_con(s: Settings, embeddings: Array, labels: Array) -> Any:
    z = unit(embeddings, s)
    positive, _ = same_class(labels)
    logits, count = z @ z.T / s["temperature"], np.maximum(positive.sum(1), 1)
    if s["variant"] == "out":
        of_positives = (logits * positive).sum(1) / count
    else:
        of_positives = log_sum_exp(logits, positive) - np.log(count)
    losses = log_sum_exp(logits, others(z)) - np.where(positive.any(1), of_positives, 0)
    factor = 1 if s["base_temperature"] is None else s["temperature"].real / s["base_temperature"]
    return mean(factor * losses, positive.any(1), s)


def sincere(s: Settings, embeddings: Array, labels: Array) -> Any:
    z = unit(embeddings, s)
    positive, negative = same_class(labels)
    logits = z @ z.T / s["temperature"]
    losses = softplus(log_sum_exp(logits, negative)[:, None] - logits)
    per_anchor = np.where(positive, losses, 0).sum(1) / np.maximum(positive.sum(1), 1)
    return mean(per_anchor, positive.any(1), s)


def nca(s: Settings, embeddings: Array, labels: Array) -> Any:
    z = unit(embeddings, s)
    positive, _ = same_class(labels)
    logits, valid = -squared_distances(z, z) / s["temperature"], positive.any(1)
    losses = log_sum_exp(logits, others(z)) - np.where(valid, log_sum_exp(logits, positive | ~valid[:, None]), 0)
    return mean(losses, valid, s)


def dcl(s: Settings, view1: Array, view2: Array) -> Any:
    z = unit(np.concatenate([view1, view2]), s)
    positive, negative = same_class(np.tile(np.arange(len(view1)), 2))
    logits = z @ z.T / s["temperature"]
    return mean_of_rows(log_sum_exp(logits, negative) - (logits * positive).sum(1), s)


def mil_nce(s: Settings, videos: Array, texts: Array) -> Any:
    n, k, d = texts.shape
    v, y = unit(videos, s), unit(texts, s)
    own = np.repeat(np.eye(n, dtype=bool), k, 1)
    to_texts = v @ y.reshape(n * k, d).T / s["temperature"]
    to_videos = np.einsum("ikd,jd->ijk", y, v).reshape(n, n * k) / s["temperature"]
    logits = np.concatenate([to_texts, to_videos], 1)
    positives = np.concatenate([own, np.zeros_like(own)], 1)
    again = own if s["denominator"] == "reference" else np.zeros_like(own)
    candidates = np.concatenate([own | ~own, ~own | again], 1)
    return mean_of_rows(log_sum_exp(logits, candidates) - log_sum_exp(logits, positives), s)


def siglip(s: Settings, images: Array, texts: Array) -> Any:
    """The parameters are the bias, and log(1/t)."""
    x, y = unit(images, s), unit(texts, s)
    logits = x @ y.T * np.exp(s["temperature.log_scale"]) + s["logit_bias"]
    return mean_of_rows(softplus(np.where(np.eye(len(x), dtype=bool), -logits, logits)).sum(1), s)


def sup_sigmoid(s: Settings, embeddings: Array, labels: Array) -> Any:
    z = unit(embeddings, s)
    positive, negative = same_class(labels)
    logits = z @ z.T * np.exp(s["temperature.log_scale"]) + s["logit_bias"]
    terms = softplus(np.where(positive, -logits, logits)) * (positive | negative)
    return mean_of_rows(terms.sum(1), s)


# ----------------------------------------------- late interaction: tokens [n, a, d], and masks of the tokens that count


def token_scores(s: Settings, queries: Array, documents: Array, query_mask: Array, document_mask: Array) -> Array:
    """Return Σ_a max_b q_ia·d_jb of each query and document."""
    products = np.einsum("iad,jbd->iajb", unit(queries, s), unit(documents, s))
    nearest = np.where(document_mask == 0, -np.inf, products.real).argmax(-1)[..., None]
    largest = np.take_along_axis(products, nearest, -1)[..., 0] * (query_mask != 0)[:, :, None]
    scores: Array = largest.sum(1)
    return scores / (query_mask != 0).sum(1)[:, None] if s["token_reduction"] == "mean" else scores


def max_sim(s: Settings, *tokens_and_masks: Array) -> Any:
    logits = token_scores(s, *tokens_and_masks) / s["temperature"]
    losses = log_sum_exp(logits) - np.diag(logits)
    if s["symmetric"]:
        losses = (losses + log_sum_exp(logits.T) - np.diag(logits)) / 2
    return mean_of_rows(losses, s)


def max_sim_pairwise(s: Settings, *tokens_and_masks: Array) -> Any:
    scores = token_scores(s, *tokens_and_masks)
    hardest = np.where(others(scores), scores.real, -np.inf).argmax(1)
    rows = np.arange(len(scores))
    return mean_of_rows(softplus((scores[rows, hardest] - np.diag(scores)) / s["temperature"]), s)


# ---------------------------------------------------------------------- margins, classes, scores and feature statistics


def triplet(s: Settings, embeddings: Array, labels: Array) -> Any:
    z = unit(embeddings, s)
    positive, negative = same_class(labels)
    D, soft = distances(z, s["metric"]), s["soft"]
    if s["mining"] == "hard":
        rows = np.arange(len(z))
        farthest = np.where(positive, D.real, -np.inf).argmax(1)
        nearest = np.where(negative, D.real, np.inf).argmin(1)
        violations, mined = D[rows, farthest] - D[rows, nearest], positive.any(1) & negative.any(1)
    else:
        violations = D[:, :, None] - D[:, None, :]
        mined = positive[:, :, None] & negative[:, None, :]
        if s["mining"] == "semi-hard":
            mined = mined & (violations.real < 0) & (violations.real > -s["margin"])
    losses = softplus(violations + s["margin"]) if soft else relu(violations + s["margin"])
    counted = mined & (losses.real > 0) if s["average"] == "nonzero" else mined
    return np.where(mined, losses, 0).sum() / max(int(counted.sum()), 1)


def contrastive(s: Settings, embeddings: Array, labels: Array) -> Any:
    D = distances(unit(embeddings, s), s["metric"])
    positive, negative = same_class(labels)
    total = 0
    for pairs, x in ((positive, D - s["pos_margin"]), (negative, s["neg_margin"] - D)):
        losses = np.where(pairs, relu(x) ** s["power"], 0)
        total = total + mean(losses, losses.real > 0 if s["average"] == "nonzero" else pairs)
    return total


def multi_similarity(s: Settings, embeddings: Array, labels: Array) -> Any:
    z = unit(embeddings, s)
    positive, negative = same_class(labels)
    S = z @ z.T - s["base"]
    sums = softplus(log_sum_exp(-s["alpha"] * S, positive)), softplus(log_sum_exp(s["beta"] * S, negative))
    return mean(sums[0] / s["alpha"] + sums[1] / s["beta"], np.ones(len(z), dtype=bool), s)


def circle(s: Settings, embeddings: Array, labels: Array) -> Any:
    z = unit(embeddings, s)
    positive, negative = same_class(labels)
    S, m, gamma = z @ z.T, s["m"], s["gamma"]
    of_negatives = log_sum_exp(gamma * relu(S.real + m) * (S - m), negative)
    of_positives = log_sum_exp(-gamma * relu(1 + m - S.real) * (S - 1 + m), positive)
    valid = positive.any(1) & negative.any(1)
    losses = softplus(np.where(valid, of_negatives + of_positives, 0))
    return mean(losses, valid, s)


def normalized_softmax(s: Settings, embeddings: Array, labels: Array) -> Any:
    logits = unit(embeddings, {}) @ unit(s["weights"], {}).T / s["temperature"]
    return mean_of_rows(log_sum_exp(logits) - logits[np.arange(len(labels)), labels], s)


def cos_face(s: Settings, embeddings: Array, labels: Array) -> Any:
    own = labels[:, None] == np.arange(len(s["weights"]))
    logits = s["scale"] * (unit(embeddings, {}) @ unit(s["weights"], {}).T - s["margin"] * own)
    return mean_of_rows(log_sum_exp(logits) - logits[own], s)


def proxy_anchor(s: Settings, embeddings: Array, labels: Array) -> Any:
    own = (labels[:, None] == np.arange(len(s["weights"]))).T
    S = unit(s["weights"], {}) @ unit(embeddings, {}).T
    positive = softplus(log_sum_exp(-s["alpha"] * (S - s["margin"]), own))
    negative = softplus(log_sum_exp(s["alpha"] * (S + s["margin"]), ~own))
    return positive.sum() / max(int(own.any(1).sum()), 1) + negative.mean()


def cosent(s: Settings, queries: Array, keys: Array, scores: Array) -> Any:
    similarity = (unit(queries, {}) * unit(keys, {})).sum(1) / s["temperature"]
    order = (scores[:, None] < scores).ravel()[None]
    return softplus(log_sum_exp((similarity[:, None] - similarity).ravel()[None], order))[0]


def margin_mse(s: Settings, queries: Array, positives: Array, negatives: Array, margins: Array) -> Any:
    q, p, n = (unit(x, s) for x in (queries, positives, negatives))
    differences = (q * p).sum(1)[:, None] - (q[:, None] * n).sum(-1) - margins
    return mean_of_rows((differences**2).mean(1), s)


def vicreg(s: Settings, view1: Array, view2: Array) -> Any:
    loss = s["invariance"] * ((view1 - view2) ** 2).mean()
    for z in (view1, view2):
        centred = z - z.mean(0)
        covariance = centred.T @ centred / (len(z) - 1)
        deviations = np.sqrt(np.diag(covariance) + s["eps"])
        loss = loss + s["variance"] / 2 * relu(s["gamma"] - deviations).mean()
        loss = loss + s["covariance"] / z.shape[1] * (covariance**2 * others(covariance)).sum()
    return loss


def barlow_twins(s: Settings, view1: Array, view2: Array) -> Any:
    def standardised(z: Array) -> Array:
        centred = z - z.mean(0)
        return centred / np.sqrt((centred**2).mean(0) + s["eps"])

    C = standardised(view1).T @ standardised(view2) / len(view1)
    return ((1 - np.diag(C)) ** 2).sum() + s["lambda_"] * (C**2 * others(C)).sum()


def align_uniform(s: Settings, view1: Array, view2: Array) -> Any:
    a, b = unit(view1, {}), unit(view2, {})
    align = (((a - b) ** 2).sum(1) ** (s["alpha"] / 2)).mean()
    spread = 0
    for z in (a, b):
        potentials = log_sum_exp(-s["t"] * squared_distances(z, z).reshape(1, -1), others(z).reshape(1, -1))[0]
        spread = spread + potentials - np.log(len(z) * (len(z) - 1))
    return align + s["uniformity"] / 2 * spread


def negative_cosine(s: Settings, predictions: Array, targets: Array) -> Any:
    return mean_of_rows(-(unit(predictions, {}) * unit(targets, {})).sum(1), s)


# --------------------------------------------------------------------------------------------------------- all formulas

FORMULAS: dict[str, Formula] = {
    "NTXent": nt_xent,
    "InfoNCE": info_nce,
    "Clip": clip,
    "SupCon": sup_con,
    "SINCERE": sincere,
    "NCA": nca,
    "DCL": dcl,
    "MILNCE": mil_nce,
    "SigLIP": siglip,
    "SupSigmoid": sup_sigmoid,
    "MaxSim": max_sim,
    "MaxSimPairwise": max_sim_pairwise,
    "Triplet": triplet,
    "Contrastive": contrastive,
    "MultiSimilarity": multi_similarity,
    "Circle": circle,
    "NormalizedSoftmax": normalized_softmax,
    "CosFace": cos_face,
    "ProxyAnchor": proxy_anchor,
    "CoSENT": cosent,
    "MarginMSE": margin_mse,
    "VICReg": vicreg,
    "BarlowTwins": barlow_twins,
    "AlignUniform": align_uniform,
    "NegativeCosine": negative_cosine,
}
"""The formula of each loss, by the name of its class."""


def value_and_gradients(
    loss: str, settings: Settings, arguments: Mapping[str, Array], parameters: Mapping[str, Array], wanted: list[str]
) -> tuple[float, dict[str, Array]]:
    """Return the value of a loss of :data:`FORMULAS` and its gradients with respect to the wanted arguments and parameters.

    Settings are all constructor arguments of the loss; the arguments of the call are in their order.

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
