"""Late interaction: MaxSim scores, with InfoNCE as ColBERT, or against the hardest document as ColPali."""

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.cost import Entry, Products, Tokens
from contrastive_zoo.engine.masked import shared_max, tie_width
from contrastive_zoo.engine.max_sim import late_interaction_scores, packed_tokens, read_lengths
from contrastive_zoo.engine.plan import Needs
from contrastive_zoo.engine.softmax_arithmetic import cross_entropy, log_sum_exp
from contrastive_zoo.loss_base.loss import CallInputs, Inputs, Loss
from contrastive_zoo.loss_base.settings import Bounds, Constant, Reduction, Size, Temperature
from contrastive_zoo.loss_base.shapes import together_problem

TokenReduction = Literal["sum", "mean"]

MASKS = {"queries": "query_mask", "documents": "document_mask", "negatives": "negative_mask"}
"""The argument that says which tokens of another one are valid."""


class LateInteractionLoss(Loss, engine="tokens", matrices=4.25):
    """A loss of queries and documents that are sets of token embeddings, [n, L, d]; padding is not sent."""

    token_reduction: TokenReduction = "sum"
    normalize: bool = True
    reduction: Reduction = "mean"

    @staticmethod
    def inputs(
        queries: Float[Tensor, "n a d"],
        documents: Float[Tensor, "n b d"],
        query_mask: Bool[Tensor, "n a"] | Int[Tensor, "n a"] | None = None,
        document_mask: Bool[Tensor, "n b"] | Int[Tensor, "n b"] | None = None,
        negatives: Float[Tensor, "m c d"] | None = None,
        negative_mask: Bool[Tensor, "m c"] | Int[Tensor, "m c"] | None = None,
    ) -> Inputs:
        """State the number of tokens of each set, for which the host waits once, and the valid tokens of all sets."""
        rows = {
            "queries": queries, "documents": documents, "negatives": negatives,
            "query_mask": query_mask, "document_mask": document_mask, "negative_mask": negative_mask,
        }  # fmt: skip
        arguments = {name: x for name in MASKS if (x := rows[name]) is not None}
        read = read_lengths(arguments, {name: rows[MASKS[name]] for name in arguments})
        for name, of_sets in read.items():
            if empty := ", ".join([str(row) for row, length in enumerate(of_sets) if length == 0][:5]):
                rule = f"{name} have one valid token or more each, got none in row {empty}"
                return Inputs({}, f"{rule}. Drop the row, or correct its mask.")
        packed = {name: packed_tokens(x, rows[MASKS[name]], sum(read[name])) for name, x in arguments.items()}
        lengths = {name: result for name, (_, result) in packed.items()}
        tokens = {f"tokens of {name}": result for name, (result, _) in packed.items()}
        passed = {"the passed arguments": ", ".join(name for name, x in rows.items() if x is not None)}
        return Inputs({**lengths, **tokens}, compared=passed, host=read)

    def needs(self, inputs: Inputs) -> Needs:
        queries, *others = (name for name in inputs.rows if name.startswith("tokens of "))
        return super().needs(inputs)._replace(anchors=(queries,), candidates=(*others,))

    def split_reason(self) -> str | None:
        return "a batch of tokens is not small"

    def entries(self, stated: CallInputs) -> list[Entry]:
        queries, *others = (f"tokens of {name}" for name in stated.inputs.host)
        tokens = Tokens(queries, others, self.matrices, searched=self.__dict__.get("top_k") is not None)
        return [*self.scale_of(stated)[1], tokens, *self.reduced()]

    def scores(self, batch: Batch) -> tuple[Float[Tensor, "n c"], Float[Tensor, " n"], Bool[Tensor, "n c"]]:
        """Return local queries' scores with all documents and negatives, with their own documents, and which are these."""
        scores = late_interaction_scores(batch, normalize=self.normalize, top_k=self.__dict__.get("top_k"))
        scores = scores / batch.first[:, None] if self.token_reduction == "mean" else scores
        is_own = torch.zeros_like(scores, dtype=torch.bool)
        is_own[:, batch.samples.local].fill_diagonal_(True)
        return scores, scores[:, batch.samples.local].diagonal(), is_own


_CONSTANT = Bounds(low=0, constant=True)


class MaxSim(LateInteractionLoss):
    r"""Compute InfoNCE of queries against documents, scored token by token.

    With q, d the valid unit tokens of all ranks,

        S_ij = Σ_a max_b q_ia·d_jb
        loss = mean_i [ log Σ_{j∈D} exp(S_ij / t)  −  S_ii / t ]

    where D are documents and negatives. With ``top_k=k``, as in XTR, only the k tokens of D most similar to q_ia count, and
    equally similar ones. S_ij is the mean over the a for which document j has one; 0 for none. Without it equal to
    PyLate's ``Contrastive(temperature=t)`` if all tokens are valid. Of equal tokens the first gets the gradient.

    Called as ``loss(queries, documents, query_mask, document_mask, negatives, negative_mask)``:

    - queries, documents: [n, a, d] and [n, b, d] tokens; document i belongs to query i. n, a and b may differ between ranks.
    - negatives: [m, c, d] tokens of hard negatives of all queries; m and c may differ between ranks. If one rank passes
      them, all must: a rank without any passes [0, 1, d].
    - query_mask, document_mask, negative_mask: [n, a], [n, b] and [m, c], which tokens are valid (not 0), one or more of
      each text. None is all of them.

    Args:
        temperature: t, 1 in PyLate, 0.02 with ``"mean"`` in colpali-engine.
        token_reduction: ``"sum"`` over the query's tokens, or ``"mean"``, as colpali-engine's ``normalize_scores``.
        top_k: k; None for all tokens.
        normalize: normalise each token to unit length first.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> tokens = torch.eye(2)[:, None].repeat(1, 3, 1)
        >>> MaxSim()(tokens, tokens, torch.tensor([[1, 0, 0], [1, 1, 1]]))   # mean of log(1 + e⁻¹) and log(1 + e⁻³)
        tensor(0.1809)

    Source: Khattab & Zaharia 2020 (ColBERT), §3.2, https://arxiv.org/abs/2004.12832; Santhanam et al. 2022,
    https://arxiv.org/abs/2112.01488; Faysse et al. 2024 (ColPali), https://arxiv.org/abs/2407.01449; Lee et al. 2023
    (XTR), eq. 5, https://arxiv.org/abs/2304.01982
    """

    temperature: Temperature = 1.0
    top_k: Size | None = None

    def settings_problem(self) -> str | None:
        both = self.top_k is not None and self.token_reduction == "mean"
        problem = "top_k has a mean of its own. Leave token_reduction out." if both else None
        return super().settings_problem() or problem

    def ring_problem(self) -> str | None:
        return None if self.top_k is None else "the k best of all documents' tokens are selected at once"

    def compute(self, batch: Batch) -> Tensor:
        scores, positive, is_own = self.scores(batch)
        scale = batch.scale(batch.settings.temperature)
        others = log_sum_exp((scale * scores).masked_fill(is_own, -torch.inf), 1)
        return batch.reduce(cross_entropy(scale * positive, others), reduction=self.reduction)


class MaxSimPairwise(LateInteractionLoss):
    r"""Compute the softplus of the hardest document's score minus that of the query's own.

    Called as ``loss(queries, documents, query_mask, document_mask, negatives, negative_mask)``, as :class:`MaxSim`.
    With S the scores of :class:`MaxSim`, of the documents and negatives D of all ranks,

        loss = mean_i log(1 + exp( (max_{j∈D, j≠i} S_ij − S_ii) / t ))

    Equal to colpali-engine's ``ColbertPairwiseCELoss()`` on one process, for unit tokens without padding. A query without
    another document does not count. Documents of equal score, up to rounding, share the gradient of the maximum.

    Args:
        temperature: t > 0; a tensor or module is learnable.
        token_reduction: ``"sum"`` over the query's tokens, or ``"mean"``.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> tokens = torch.eye(2)[:, None].repeat(1, 3, 1)               # 3 equal tokens each
        >>> MaxSimPairwise()(tokens, tokens, torch.tensor([[1, 0, 0], [1, 0, 0]]))   # log(1 + e⁻¹)
        tensor(0.3133)

    Source: Faysse et al. 2024 (ColPali), §4.1, https://arxiv.org/abs/2407.01449
    """

    temperature: Temperature = 1.0

    def compute(self, batch: Batch) -> Tensor:
        scores, positive, is_own = self.scores(batch)
        hardest, has_others = torch.zeros_like(positive), scores.shape[1] > 1
        if has_others:
            # a score is a sum of rounded maxima, of documents at several places of several matmuls
            ties = tie_width(scores) * (1 + scores.detach().abs().amax(1))
            hardest = shared_max(scores.masked_fill(is_own, -torch.inf), ties)
        losses = F.softplus(batch.scale(batch.settings.temperature) * (hardest - positive), threshold=40)
        return batch.reduce(losses, torch.full_like(losses, has_others, dtype=torch.bool), reduction=self.reduction)


class M3(LateInteractionLoss, matrices=14.5, no_ring="the softmax of the sum of its scores is the target of each"):
    r"""Compute BGE-M3's loss of three kinds of scores, each of which also learns from their sum.

    With D the unit embeddings and X the lexical weights of all ranks' queries and documents, and S the scores of
    :class:`MaxSim` of their tokens, means over the query's tokens,

        s¹ = D_q D_dᵀ / t,   s² = X_q X_dᵀ / t,   s³ = S / t,   s⁰ = s¹ + w s² + s³
        L_k = cross_entropy(s^k, arange(N)),      L'_k = cross_entropy(s^k, softmax(s⁰))
        loss = (1 − δ) (L_1 + λ L_2 + L_3 + L_0) / 4  +  δ (L'_1 + λ L'_2 + L'_3) / 3

    The targets softmax(s⁰) carry no gradient. Hard negatives are further documents.

    Called as ``loss(queries, documents, query_embeddings, document_embeddings, query_weights, document_weights, query_mask,
    document_mask, negatives, negative_embeddings, negative_weights, negative_mask)``:

    - queries, documents, negatives, and masks: tokens, [n, a, e], [n, b, e] and [m, c, e], as of MaxSim.
    - query_embeddings, document_embeddings, negative_embeddings: [n, d], [n, d] and [m, d].
    - query_weights, document_weights, negative_weights: [n, v], [n, v] and [m, v], a number for each word.

    Args:
        temperature: t > 0, a constant.
        lexical_weight: w ≥ 0, of the lexical scores in the sum.
        lexical_loss_weight: λ ≥ 0, of their loss.
        distillation: δ, 0 … 1; 0 for the first steps, as the authors train.
        token_reduction: ``"mean"`` over the query's tokens, or ``"sum"``.
        normalize: normalise embeddings and tokens to unit length first.
        reduction: ``"mean"`` over all ranks' queries, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> x = torch.eye(2)
        >>> loss = M3(temperature=1.0, distillation=0.0)
        >>> loss(x[:, None], x[:, None], x, x, x, x)   # ¼ (2.1 log(1 + e⁻¹) + log(1 + exp(−2.3)))
        tensor(0.1883)

    Source: Chen et al. 2024, eqs. 4-8, https://arxiv.org/abs/2402.03216
    """

    embedding_dims = "d", "e"

    temperature: Constant = 0.02
    lexical_weight: Annotated[float, _CONSTANT] = 0.3
    lexical_loss_weight: Annotated[float, _CONSTANT] = 0.1
    distillation: Annotated[float, _CONSTANT._replace(high=1)] = 0.5
    token_reduction: TokenReduction = "mean"

    @staticmethod
    def inputs(  # type: ignore[override]  # more than tokens
        queries: Float[Tensor, "n a e"],
        documents: Float[Tensor, "n b e"],
        query_embeddings: Float[Tensor, "n d"],
        document_embeddings: Float[Tensor, "n d"],
        query_weights: Float[Tensor, "n v"],
        document_weights: Float[Tensor, "n v"],
        query_mask: Bool[Tensor, "n a"] | Int[Tensor, "n a"] | None = None,
        document_mask: Bool[Tensor, "n b"] | Int[Tensor, "n b"] | None = None,
        negatives: Float[Tensor, "m c e"] | None = None,
        negative_embeddings: Float[Tensor, "m d"] | None = None,
        negative_weights: Float[Tensor, "m v"] | None = None,
        negative_mask: Bool[Tensor, "m c"] | Int[Tensor, "m c"] | None = None,
    ) -> Inputs:
        tokens = LateInteractionLoss.inputs(queries, documents, query_mask, document_mask, negatives, negative_mask)
        of_queries = {"query_embeddings": query_embeddings, "query_weights": query_weights}
        of_documents = {"document_embeddings": document_embeddings, "document_weights": document_weights}
        of_negatives = {"negative_embeddings": negative_embeddings, "negative_weights": negative_weights}
        problem = together_problem(negatives=negatives, **of_negatives)
        return tokens.plus({**of_queries, **of_documents, **of_negatives}, problem)

    def entries(self, stated: CallInputs) -> list[Entry]:
        return [*super().entries(stated), Products("_embeddings"), Products("_weights")]

    def compute(self, batch: Batch) -> Tensor:
        settings, (multiple, _, is_own) = batch.settings, self.scores(batch)
        dense = batch.products("_embeddings", normalize=self.normalize)
        lexical = batch.products("_weights", normalize=False)
        s1, s2, s3 = (x / settings.temperature for x in (dense, lexical, multiple))
        of_each = s1.log_softmax(1) + settings.lexical_loss_weight * s2.log_softmax(1) + s3.log_softmax(1)
        of_sum = (s1 + settings.lexical_weight * s2 + s3).log_softmax(1)
        one_hot = (1 - settings.distillation) / 4 * is_own.to(of_sum)
        targets = one_hot + settings.distillation / 3 * of_sum.detach().exp()
        return batch.reduce(-(targets * of_each + one_hot * of_sum).sum(1), reduction=self.reduction)
