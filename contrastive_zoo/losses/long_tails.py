"""Long tails: supervised contrastive losses in which frequent classes count no more than rare ones."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.masked import masked_log_sum_exp
from contrastive_zoo.engine.precision import at_least_float32
from contrastive_zoo.engine.rowwise import AnchorBlock, BlockLoss, reduce_rows
from contrastive_zoo.engine.softmax_arithmetic import cross_entropy
from contrastive_zoo.loss_base.class_loss import ClassLoss
from contrastive_zoo.loss_base.loss import Inputs, Loss
from contrastive_zoo.loss_base.row_loss import AnchorLoss
from contrastive_zoo.loss_base.settings import NonNegative, Reduction, Smoothing, Temperature
from contrastive_zoo.loss_base.shapes import together_problem
from contrastive_zoo.ranks.row_checks import described, range_rule, safe_index


class BalSCL(AnchorLoss, ClassLoss, engine="rows"):
    r"""Compute the balanced supervised contrastive loss: each class is a mean in the softmax, and has a prototype in it.

    Called as ``loss(embeddings, labels)``, [n, d] and [n]; the prototypes are ``weights``, [C, d], of :class:`ClassLoss`.
    With z the unit embeddings of all ranks, and A_j(i) the embeddings of class j other than z_i, and its unit prototype,

        loss_i = log Σ_j mean_{a∈A_j(i)} exp(z_i·a / t)  −  mean_{a∈A_{y_i}(i)} z_i·a / t

    A mean counts the samples of all ranks. Each class is in each batch by its prototype, so that every embedding has a
    positive. Prototypes are parameters of the loss. The authors compute them from a classifier's weights by an MLP.

    Args:
        num_classes: the number of classes, C.
        embedding_size: the width of embeddings, d.
        temperature: t > 0; a tensor or module is learnable.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> loss = BalSCL(2, 2, temperature=1.0)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2)})
        >>> loss(torch.eye(2)[[0, 0, 1]], torch.tensor([0, 0, 1])).detach()   # log(e + 1) − 1
        tensor(0.3133)

    Source: Zhu et al. 2022, https://arxiv.org/abs/2207.09052
    """

    temperature: Temperature = 0.1

    def block_loss(self, batch: Batch) -> BlockLoss:
        return BlockLoss.of(_balanced, batch.settings, columns=len(self.weights), matrices=5.5)


def _balanced(block: AnchorBlock, weights: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    prototypes = F.normalize(at_least_float32(weights), dim=1).to(block.candidates)
    classes = torch.arange(len(weights), device=weights.device)
    ids = safe_index(torch.cat([block.candidate_ids, classes]), len(weights))
    hit = block.ids[:, None] == classes
    positive, negative = torch.cat([block.positive, hit], 1), torch.cat([block.negative, ~hit], 1)
    logits = block.anchors @ torch.cat([block.candidates, prototypes]).T / temperature
    sizes = logits.new_zeros(len(weights)).index_add(0, ids, logits.new_ones(len(ids)))
    others = masked_log_sum_exp(logits - sizes.log()[ids], negative)
    count = positive.sum(1, dtype=logits.dtype)
    mean, target = logits.where(positive, 0).sum(1) / count, masked_log_sum_exp(logits, positive) - count.log()
    several = cross_entropy(target, others) + (target - mean)
    return cross_entropy(mean, others).where(count == 1, several), torch.ones_like(block.ids, dtype=torch.bool)


class PaCo(Loss, engine="rows"):
    r"""Compute the parametric contrastive loss: a softmax over the centres of all classes and over other embeddings.

    Called as ``loss(embeddings, labels, logits, keys, key_labels)``:

    - embeddings, labels: [n, d] and [n], classes 0 … C − 1.
    - logits: u, [n, C], of a classifier, whose weights are the centres. For a long tail pass ``logits + log_prior``, with
      the logarithm of each class's share of the data set.
    - keys, key_labels: [m, d] and [m], m may differ between ranks: further candidates, such as those of a momentum
      encoder, and of a :class:`MemoryQueue` this rank's share, ``queue.rows[queue.shards(cz.World.of()).local]``.

    With z the unit embeddings of all ranks, A(i) these without z_i, and the unit keys, P(i) those of A(i) with z_i's label,

        loss_i = log[ Σ_j exp(u_ij) + Σ_{a∈A(i)} exp(z_i·a / t) ]  −  [ u_{i y_i} + α Σ_{p∈P(i)} z_i·p / t ] / (1 + α |P(i)|)

    GPaCo has no prior, smooths labels, and both views are embeddings.

    Args:
        temperature: t > 0; a tensor or module is learnable.
        alpha: α ≥ 0, the weight of a positive, where the centre's is 1.
        label_smoothing: ε, 0 … 1: (1 − ε) u_{i y_i} + ε mean_j u_ij takes the place of u_{i y_i}.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings, keys and logits.

    Raises:
        ValueError: labels that are no classes, keys without labels.

    Examples:
        >>> PaCo(temperature=1.0, alpha=1.0)(torch.eye(2), torch.arange(2), torch.eye(2))   # log(e + 1 + 1) − 1
        tensor(0.5514)

    Source: Cui et al. 2021, eq. 4, https://arxiv.org/abs/2107.12028; GPaCo: Cui et al. 2022,
    https://arxiv.org/abs/2209.12400
    """

    compares = ("embeddings",), ("embeddings", "keys")

    temperature: Temperature = 0.2
    alpha: NonNegative = 0.05
    label_smoothing: Smoothing = 0.0
    reduction: Reduction = "mean"

    def inputs(
        self,
        embeddings: Float[Tensor, "n d"],
        labels: Int[Tensor, " n"],
        logits: Float[Tensor, "n C"],
        keys: Float[Tensor, "m d"] | None = None,
        key_labels: Int[Tensor, " m"] | None = None,
    ) -> Inputs:
        rule = f"labels are classes, columns of the logits {described(logits)}"
        values = range_rule(labels, 0, logits.shape[1] - 1, rule)
        problem = together_problem(keys=keys, key_labels=key_labels)
        if keys is None or key_labels is None:
            keys, key_labels = embeddings[:0], labels[:0]
        rows = {"embeddings": embeddings, "labels": labels, "logits": logits}
        return Inputs({**rows, "keys": keys, "key_labels": key_labels}, problem, [values])

    def compute(self, batch: Batch) -> Tensor:
        rows, candidates = batch.rows, batch.candidates("embeddings", "keys", normalize=True)
        ids = torch.cat([rows["labels"], rows["key_labels"]]).long()
        copies = candidates.shards.start + torch.arange(len(batch.first), device=ids.device)
        z, logits = candidates.local[: len(copies)], rows["logits"]
        return reduce_rows(
            batch, BlockLoss.of(_paco, batch.settings), torch.cat([z, logits.to(z)], 1), ids[: len(copies)],
            candidates=candidates, candidate_ids=ids, own_candidates=copies, reduction=self.reduction,
        )  # fmt: skip


def _paco(block: AnchorBlock, temperature: Tensor, alpha: Tensor, label_smoothing: float) -> tuple[Tensor, Tensor]:
    z, centers = block.anchors.tensor_split([block.candidates.shape[1]], 1)
    logits = z @ block.candidates.T / temperature
    total = torch.logaddexp(centers.logsumexp(1), masked_log_sum_exp(logits, block.positive | block.negative))
    target = centers.gather(1, safe_index(block.ids, centers.shape[1])[:, None])[:, 0]
    target = target + label_smoothing * (centers.mean(1) - target)
    positives, count = logits.where(block.positive, 0).sum(1), block.positive.sum(1, dtype=logits.dtype)
    return total - (target + alpha * positives) / (1 + alpha * count), torch.ones_like(block.ids, dtype=torch.bool)
