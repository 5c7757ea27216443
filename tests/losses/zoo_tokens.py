"""Late interaction, with its scores written out token by token."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.zoo import Entry, row


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


def dense_max_sim(
    queries: Tensor, documents: Tensor, query_mask: Tensor | None = None, document_mask: Tensor | None = None,
    negatives: Tensor | None = None, negative_mask: Tensor | None = None,
    *, temperature: Any = 1.0, symmetric: bool = False, token_reduction: str = "sum", hardest: bool = False,
) -> Tensor:  # fmt: skip
    """MaxSim, or, against the hardest document alone, MaxSimPairwise."""
    n, further = len(queries), [] if negatives is None else [(negatives, negative_mask)]
    sets = [(documents, document_mask), *further]
    scores = torch.cat([dense_scores(queries, x, query_mask, mask, token_reduction) for x, mask in sets], 1)
    logits = scores / temperature
    if hardest:
        own = torch.eye(*logits.shape, dtype=torch.bool)
        if logits.shape[1] < 2:
            return 0 * logits.sum()
        return F.softplus(logits.masked_fill(own, -torch.inf).amax(1) - logits.diagonal(), threshold=40).mean()
    loss = F.cross_entropy(logits, torch.arange(n))
    return (loss + F.cross_entropy(logits[:, :n].T, torch.arange(n))) / 2 if symmetric else loss


dense_pairwise = partial(dense_max_sim, hardest=True)


def tokens_of(q: Tensor, d: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    """Tokens made of embeddings without rounding: 3 of a query, 4 of a document, 2 of a negative; some are not valid."""
    queries = torch.stack([q, q.flip(1), -q.roll(1, 1)], 1)
    documents = torch.stack([d, -d.flip(1), d.roll(1, 1), -d], 1)
    query_mask = torch.stack([q[:, 0] > -torch.inf, q[:, 0] > 0, q[:, -1] > 0], 1)
    document_mask = torch.stack([d[:, 0] > 0, d[:, -1] > 0, d[:, 0] > -torch.inf, d[:, 0] < 0], 1).long()
    negatives = [(torch.stack([x, -x], 1), torch.stack([x[:, 0] > -torch.inf, x[:, 0] > 0], 1)) for x in more]
    return queries, documents, query_mask, document_mask, *(x for of_view in negatives for x in of_view)


ENTRIES: list[Entry] = [
    row("MaxSim", dense_max_sim, "views", tokens_of),
    row("MaxSim, negatives", dense_max_sim, "views", tokens_of, 3, token_reduction="mean"),
    row("MaxSim, symmetric", dense_max_sim, "views", tokens_of, 3, symmetric=True),
    row("MaxSimPairwise", dense_pairwise, "views", tokens_of),
    row("MaxSimPairwise, negatives", dense_pairwise, "views", tokens_of, 3),
]
