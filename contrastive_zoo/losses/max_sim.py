"""Late interaction: MaxSim scores, with InfoNCE as ColBERT, or against the hardest document as ColPali."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.cost import Entry, Summed, Tokens
from contrastive_zoo.engine.masked import shared_max, tie_width
from contrastive_zoo.engine.max_sim import late_interaction_scores, packed_tokens, read_lengths
from contrastive_zoo.engine.plan import Needs
from contrastive_zoo.engine.precision import without_autocast
from contrastive_zoo.engine.softmax_arithmetic import cross_entropy, log_sum_exp
from contrastive_zoo.loss_base.loss import CallInputs, Inputs, Loss
from contrastive_zoo.loss_base.settings import Reduction, Temperature

TokenReduction = Literal["sum", "mean"]

MASKS = {"queries": "query_mask", "documents": "document_mask", "negatives": "negative_mask"}
"""The argument that says which tokens of another one are valid."""


@dataclass(frozen=True)
class Scores:
    """The scores of the local queries and the documents of all ranks."""

    # [n, N + K], those of the N documents that queries belong to, then those of K negatives
    scores: Float[Tensor, "n c"]
    local: slice  # of all ranks' queries, and of the documents that belong to them, those of this rank

    @property
    def is_pair(self) -> Tensor:
        """Which document each query belongs to, as a mask [n, N + K]."""
        is_pair = torch.zeros_like(self.scores, dtype=torch.bool)
        is_pair[:, self.local].fill_diagonal_(True)
        return is_pair

    @property
    def positive(self) -> Tensor:
        """The score of each query and its own document, [n]."""
        return self.scores[:, self.local].diagonal()


class LateInteractionLoss(Loss):
    """A loss of queries and documents that are sets of token embeddings, [n, L, d].

    Every number of tokens L may differ between ranks, and from call to call. A rank computes the scores of its own queries;
    documents are gathered, without padding, or pass from rank to rank with ``ring=True``.
    """

    token_reduction: TokenReduction = "sum"  # ``"sum"`` over the query's tokens, or ``"mean"``
    normalize: bool = True  # normalise each token to unit length first
    # ``"mean"`` over all ranks' queries, ``"sum"``, or ``"none"`` for the local queries, [n]
    reduction: Reduction = "mean"

    engine = "tokens"

    @staticmethod
    def inputs(
        queries: Float[Tensor, "n a d"],
        documents: Float[Tensor, "n b d"],
        query_mask: Bool[Tensor, "n a"] | Int[Tensor, "n a"] | None = None,
        document_mask: Bool[Tensor, "n b"] | Int[Tensor, "n b"] | None = None,
        negatives: Float[Tensor, "m c d"] | None = None,
        negative_mask: Bool[Tensor, "m c"] | Int[Tensor, "m c"] | None = None,
    ) -> Inputs:
        """State the number of tokens of each set, and the valid tokens of all sets, one set after the other.

        The host waits once for the numbers of an accelerator; :meth:`compute` finds them in the batch.
        """
        rows = {
            "queries": queries, "documents": documents, "negatives": negatives,
            "query_mask": query_mask, "document_mask": document_mask, "negative_mask": negative_mask,
        }  # fmt: skip
        arguments = {name: x for name in MASKS if (x := rows[name]) is not None}
        read = read_lengths(arguments, {name: rows[MASKS[name]] for name in arguments})
        if problem := _lengths_problem(read):
            return Inputs({}, problem)
        packed = {name: packed_tokens(x, rows[MASKS[name]], sum(read[name])) for name, x in arguments.items()}
        lengths = {name: result for name, (_, result) in packed.items()}
        tokens = {f"tokens of {name}": result for name, (result, _) in packed.items()}
        passed = {"the passed arguments": ", ".join(name for name, x in rows.items() if x is not None)}
        return Inputs({**lengths, **tokens}, compared=passed, host=read)

    def needs(self, inputs: Inputs) -> Needs:
        queries, *others = (name for name in inputs.rows if name.startswith("tokens of "))
        return super().needs(inputs)._replace(anchors=[queries], candidates=others)

    def split_reason(self) -> str | None:
        return "a batch of tokens is not small"

    def entries(self, stated: CallInputs) -> list[Entry]:
        queries, *others = stated.inputs.host
        tokens: list[Entry] = []
        for name in others:
            mean_length = sum(stated.inputs.host[name]) / max(1, len(stated.inputs.host[name]))
            tokens.append(Tokens(f"tokens of {queries}", f"tokens of {name}", mean_length))
        return [*self.scale_of(stated)[1], *tokens, *self.reduced()]

    def scores(self, batch: Batch) -> Scores:
        scores = late_interaction_scores(batch, normalize=self.normalize)
        return Scores(scores / batch.first[:, None] if self.token_reduction == "mean" else scores, batch.samples.local)


def _lengths_problem(lengths: Mapping[str, Sequence[int]]) -> str | None:
    for name, of_sets in lengths.items():
        empty = [str(row) for row, length in enumerate(of_sets) if length == 0]
        if empty:
            return (
                f"{name} have one valid token or more each, got none in row {', '.join(empty[:5])}. Drop the row, or "
                "correct its mask."
            )
    return None


class MaxSim(LateInteractionLoss):
    r"""Compute InfoNCE of queries against documents, scored token by token.

    With q, d the unit tokens of queries and documents of all ranks, valid ones only,

        S_ij = Σ_a max_b q_ia·d_jb
        loss = mean_i [ log Σ_{j∈D} exp(S_ij / t)  −  S_ii / t ]

    where D are all documents and all negatives. ``symmetric`` averages it with the direction from documents to queries,
    ``cross_entropy(S[:, :n].T / t, arange(n))``. Equal to PyLate's ``Contrastive(temperature=t)`` on one process
    where all tokens are valid; there padding counts as a similarity of 0. Of equal tokens of a document the first one gets
    the gradient.

    Called as ``loss(queries, documents, query_mask, document_mask, negatives, negative_mask)``:

    - queries: [n, a, d] tokens; n and the number of tokens a may differ between ranks.
    - documents: [n, b, d] tokens; document i belongs to query i, b may differ between ranks.
    - query_mask: [n, a], which tokens are valid (not 0); at least one of each query. None is all of them.
    - document_mask: [n, b], likewise.
    - negatives: [m, c, d] tokens of hard negatives, candidates of every query of every rank; m and c may differ between
      ranks. If one rank passes them, all must: a rank without any passes [0, 1, d].
    - negative_mask: [m, c], likewise.

    Args:
        temperature: t, 1 in PyLate, 0.02 with ``"mean"`` in colpali-engine.
        symmetric: whether to average with the direction from documents to queries, without negatives.
        token_reduction: ``"sum"`` over the query's tokens, or ``"mean"``, as colpali-engine's ``normalize_scores``.
        normalize: normalise each token to unit length first.

    Examples:
        >>> tokens = torch.eye(2)[:, None].repeat(1, 3, 1)               # 3 equal tokens each
        >>> MaxSim()(tokens, tokens, torch.tensor([[1, 0, 0], [1, 1, 1]]))   # mean of log(1 + e⁻¹) and log(1 + e⁻³)
        tensor(0.1809)

    Source: Khattab & Zaharia 2020 (ColBERT), §3.2, https://arxiv.org/abs/2004.12832; Santhanam et al. 2022,
    https://arxiv.org/abs/2112.01488; Faysse et al. 2024 (ColPali), https://arxiv.org/abs/2407.01449
    """

    temperature: Temperature = 1.0
    symmetric: bool = False

    def entries(self, stated: CallInputs) -> list[Entry]:
        over_queries = Summed(stated.wide, each="sample"), Summed(stated.wide, True, "sample")
        return [*super().entries(stated), *(over_queries if self.symmetric else ())]

    def compute(self, batch: Batch) -> Tensor:
        scores = self.scores(batch)
        losses = _losses(scores, batch.scale(batch.settings.temperature), batch if self.symmetric else None)
        return batch.reduce(losses, reduction=self.reduction)


@without_autocast
def _losses(result: Scores, scale: float | Tensor, batch: Batch | None) -> Tensor:
    """Return the losses of the local queries, with the direction from documents to queries if there is a batch."""
    positive = scale * result.positive
    others = (scale * result.scores).masked_fill(result.is_pair, -torch.inf)
    losses = cross_entropy(positive, log_sum_exp(others, 1))
    if batch is None:
        return losses
    of_documents = torch.full_like(positive, -torch.inf)
    if batch.total > 1:
        of_columns = log_sum_exp(others[:, : batch.total], 0)
        of_documents = batch.log_sum_exp(of_columns, gradient="partial")[batch.samples.local]
    return (losses + cross_entropy(positive, of_documents)) / 2


class MaxSimPairwise(LateInteractionLoss):
    r"""Compute the softplus of the hardest document's score minus that of the query's own.

    Called as ``loss(queries, documents, query_mask, document_mask, negatives, negative_mask)``, as :class:`MaxSim`.
    With S the scores of :class:`MaxSim`, of the documents and negatives D of all ranks,

        loss = mean_i log(1 + exp( (max_{j∈D, j≠i} S_ij − S_ii) / t ))

    Equal to colpali-engine's ``ColbertPairwiseCELoss()`` on one process, for unit tokens without padding; releases that
    normalise scores have ``token_reduction="mean"``. A query without another document does not count. Documents of equal
    score, up to 64 units of rounding of the query's largest score, share the gradient of the maximum.

    Examples:
        >>> tokens = torch.eye(2)[:, None].repeat(1, 3, 1)               # 3 equal tokens each
        >>> MaxSimPairwise()(tokens, tokens, torch.tensor([[1, 0, 0], [1, 0, 0]]))   # log(1 + e⁻¹)
        tensor(0.3133)

    Source: Faysse et al. 2024 (ColPali), §4.1, https://arxiv.org/abs/2407.01449
    """

    temperature: Temperature = 1.0

    def compute(self, batch: Batch) -> Tensor:
        result = self.scores(batch)
        losses = _pairwise_losses(result, batch.scale(batch.settings.temperature))
        counts = torch.full_like(losses, result.scores.shape[1] > 1, dtype=torch.bool)
        return batch.reduce(losses, counts, reduction=self.reduction)


@without_autocast
def _pairwise_losses(result: Scores, scale: float | Tensor) -> Tensor:
    others = result.scores.masked_fill(result.is_pair, -torch.inf)
    hardest = torch.zeros_like(result.positive)
    if result.scores.shape[1] > 1:
        # a score is a sum of rounded maxima, of documents at several places of several matmuls
        hardest = shared_max(others, tie_width(others) * (1 + result.scores.detach().abs().amax(1)))
    return F.softplus(scale * (hardest - result.positive), threshold=40)
