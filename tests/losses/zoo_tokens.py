"""Late interaction, with its scores written out token by token."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastive_zoo.loss_base.late_interaction import LateInteractionLoss
from contrastive_zoo.loss_base.loss import Inputs
from contrastive_zoo.losses.max_sim import MaxSim, MaxSimPairwise
from contrastive_zoo.ranks.row_checks import views_problem
from tests.zoo import Entry, row

EvaluationInputs = dict[str, Tensor | None]


def dense_scores(q: Tensor, d: Tensor, q_mask: Tensor | None, d_mask: Tensor | None, token_reduction: str) -> Tensor:
    """The scores of all queries and all documents, by way of all products of tokens."""
    q, d = F.normalize(q, dim=2), F.normalize(d, dim=2)
    products = torch.einsum("iad,jbd->ijab", q, d)
    if d_mask is not None:
        products = products.masked_fill(d_mask[:, None] == 0, -torch.inf)
    best = products.max(3).values
    valid = torch.ones(q.shape[:2], dtype=q.dtype) if q_mask is None else (q_mask != 0).to(q.dtype)
    scores = torch.einsum("ija,ia->ij", best, valid)
    return scores / valid.sum(1, keepdim=True) if token_reduction == "mean" else scores


def all_scores(given: EvaluationInputs, token_reduction: str) -> Tensor:
    q, d, x = given["queries"], given["documents"], given.get("negatives")
    assert q is not None
    assert d is not None
    scores = [dense_scores(q, d, given.get("query_mask"), given.get("document_mask"), token_reduction)]
    if x is not None:
        scores.append(dense_scores(q, x, given.get("query_mask"), given.get("negative_mask"), token_reduction))
    return torch.cat(scores, 1)


def dense_max_sim(
    given: EvaluationInputs, temperature: Any = 1.0, symmetric: bool = False, token_reduction: str = "sum"
) -> Tensor:
    logits = all_scores(given, token_reduction) / temperature
    n = len(logits)
    loss = F.cross_entropy(logits, torch.arange(n))
    return (loss + F.cross_entropy(logits[:, :n].T, torch.arange(n))) / 2 if symmetric else loss


def dense_pairwise(given: EvaluationInputs, temperature: Any = 1.0, token_reduction: str = "sum") -> Tensor:
    scores = all_scores(given, token_reduction)
    losses = []
    for i, of_query in enumerate(scores):
        others = [s for j, s in enumerate(of_query) if j != i]
        if others:
            losses.append(F.softplus((torch.stack(others).amax() - of_query[i]) / temperature, threshold=40))
    return torch.stack(losses).mean() if losses else 0 * scores.sum()


def tokens_of(*views: Tensor) -> EvaluationInputs:
    """Tokens made of embeddings without rounding: 3 of a query, 4 of a document, 2 of a negative; some are not valid."""
    q, d, *more = views
    found: EvaluationInputs = {
        "queries": torch.stack([q, q.flip(1), -q.roll(1, 1)], 1),
        "documents": torch.stack([d, -d.flip(1), d.roll(1, 1), -d], 1),
        "query_mask": torch.stack([q[:, 0] > -torch.inf, q[:, 0] > 0, q[:, -1] > 0], 1),
        "document_mask": torch.stack([d[:, 0] > 0, d[:, -1] > 0, d[:, 0] > -torch.inf, d[:, 0] < 0], 1).long(),
    }
    for x in more:
        found |= {
            "negatives": torch.stack([x, -x], 1),
            "negative_mask": torch.stack([x[:, 0] > -torch.inf, x[:, 0] > 0], 1),
        }
    return found


def inputs_of_views(*views: Tensor) -> Inputs:
    problem = views_problem(views)
    return Inputs({}, problem) if problem else LateInteractionLoss.inputs(**tokens_of(*views))  # type: ignore[arg-type]  # masks and tokens alike


class MaxSimOfViews(MaxSim):
    """The loss of tokens made of rows."""

    inputs = staticmethod(inputs_of_views)  # type: ignore[assignment]  # of views in place of tokens


class MaxSimPairwiseOfViews(MaxSimPairwise):
    """The loss of tokens made of rows."""

    inputs = staticmethod(inputs_of_views)  # type: ignore[assignment]  # of views in place of tokens


def of_views(dense: Any) -> Any:
    return lambda *views, **settings: dense(tokens_of(*views), **settings)


ENTRIES: list[Entry] = [
    row("MaxSim", MaxSimOfViews, of_views(dense_max_sim), "views"),
    row("MaxSim, negatives", MaxSimOfViews, of_views(dense_max_sim), "views", 3, token_reduction="mean"),
    row("MaxSim, symmetric", MaxSimOfViews, of_views(dense_max_sim), "views", 3, symmetric=True),
    row("MaxSimPairwise", MaxSimPairwiseOfViews, of_views(dense_pairwise), "views"),
    row("MaxSimPairwise, negatives", MaxSimPairwiseOfViews, of_views(dense_pairwise), "views", 3),
]
