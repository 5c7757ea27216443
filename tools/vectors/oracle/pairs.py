"""Losses of softmax and of sigmoid over pairs."""

from typing import Any

import numpy as np

from tools.vectors.oracle.arithmetic import (
    Array,
    Settings,
    every,
    log_sum_exp,
    mean,
    mean_of_rows,
    others,
    same_class,
    softplus,
    squared_distances,
    unit,
)


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
    seen = every(q, k) if s.get("in_batch_negatives", True) else np.eye(len(q), dtype=bool)
    extra = [unit(x, s) for x in negatives]
    of_extra = [(q @ x.T if x.ndim == 2 else (q[:, None] * x).sum(-1)) / s["temperature"] for x in extra]
    columns = np.concatenate([np.where(seen, logits, -1e300), *of_extra], 1)
    losses = log_sum_exp(columns, columns.real > -1e299) - np.diag(logits)
    if s["symmetric"]:
        losses = (losses + log_sum_exp(logits.T, every(k, q)) - np.diag(logits)) / 2
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


# late interaction: tokens [n, a, d], and masks of the tokens that count


def token_scores(s: Settings, queries: Array, documents: Array, query_mask: Array, document_mask: Array) -> Array:
    """Return Σ_a max_b q_ia·d_jb of each query and document."""
    products = np.einsum("iad,jbd->iajb", unit(queries, s), unit(documents, s))
    nearest = np.where(document_mask == 0, -np.inf, products.real).argmax(-1)[..., None]
    largest = np.take_along_axis(products, nearest, -1)[..., 0] * (query_mask != 0)[:, :, None]
    scores: Array = largest.sum(1)
    return scores / (query_mask != 0).sum(1)[:, None] if s["token_reduction"] == "mean" else scores


def max_sim(s: Settings, *tokens_and_masks: Array) -> Any:
    logits = token_scores(s, *tokens_and_masks) / s["temperature"]
    losses = log_sum_exp(logits, every(logits, logits)) - np.diag(logits)
    if s["symmetric"]:
        losses = (losses + log_sum_exp(logits.T, every(logits, logits)) - np.diag(logits)) / 2
    return mean_of_rows(losses, s)


def max_sim_pairwise(s: Settings, *tokens_and_masks: Array) -> Any:
    scores = token_scores(s, *tokens_and_masks)
    hardest = np.where(others(scores), scores.real, -np.inf).argmax(1)
    rows = np.arange(len(scores))
    return mean_of_rows(softplus((scores[rows, hardest] - np.diag(scores)) / s["temperature"]), s)
