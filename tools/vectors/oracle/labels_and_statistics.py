"""Margins, classes, scores and feature statistics."""

from typing import Any

import numpy as np

from tools.vectors.oracle.arithmetic import (
    Array,
    Settings,
    distances,
    every,
    log_sum_exp,
    mean,
    mean_of_rows,
    others,
    relu,
    same_class,
    softplus,
    squared_distances,
    unit,
)


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
    return mean_of_rows(
        log_sum_exp(logits, every(embeddings, s["weights"])) - logits[np.arange(len(labels)), labels], s
    )


def cos_face(s: Settings, embeddings: Array, labels: Array) -> Any:
    own = labels[:, None] == np.arange(len(s["weights"]))
    logits = s["scale"] * (unit(embeddings, {}) @ unit(s["weights"], {}).T - s["margin"] * own)
    return mean_of_rows(log_sum_exp(logits, every(embeddings, s["weights"])) - logits[own], s)


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
