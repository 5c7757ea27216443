"""Any loss against a memory of earlier batches."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from contrastive_zoo.collectives import all_gather, gather_rows
from contrastive_zoo.compiling import uncompiled
from contrastive_zoo.engine.rowwise import sum_over_anchors
from contrastive_zoo.handshake import kind
from contrastive_zoo.loss_base.block_loss import LabelledLoss
from contrastive_zoo.loss_base.checks import labelled_problem, rows_problem
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.preparation import begin, prepare_rows
from contrastive_zoo.loss_base.row_loss import RowLoss
from contrastive_zoo.memory.queue import MemoryQueue, given
from contrastive_zoo.memory.uses import name_of, takes_of
from contrastive_zoo.randomness import one_stream
from contrastive_zoo.world import Shards, World


class CrossBatchMemory(Loss):
    """``loss`` against a memory of earlier batches of all ranks.

    How depends on what ``loss`` takes. M is the memory; what lies in it carries no gradient.

    - **Labels**: SupCon, SINCERE, NCA, TupletMargin and SupSigmoid, any :class:`contrastive_zoo.RowLoss` that leaves
      ``forward`` as it is (most pair and triplet losses of the zoo, and yours), and losses from elsewhere that take
      ``ref_emb`` and ``ref_labels``, as pytorch-metric-learning's do. Called ``loss(embeddings, labels)``. The batch
      enters M; then each of its rows is an anchor and is compared with M, but not with its own copy:

          L = mean_i loss_i(z_i against M without i)

    - **Negatives**: :class:`contrastive_zoo.InfoNCE` and other losses with shared ``negatives``; functions of
      ``(queries, keys, negatives)`` from elsewhere, which are given all ranks' rows. Called ``loss(queries, keys)``. M
      serves as negatives; then the keys enter it. InfoNCE compares a query with the batch's other keys, too; with
      ``in_batch_negatives=False`` it is MoCo's loss, of a query's own key and M alone.

    Slots not yet filled are never compared. In eval mode nothing enters M, and rows are compared with it as it is.

    Args:
        loss: as above.
        size: rows of M.
        embedding_size: their width d.
        miner: for a loss with labels from elsewhere: ``miner(embeddings, labels, ref_emb, ref_labels)`` on all ranks'
            rows, whose tuples are passed on as ``indices_tuple`` without those of a row and its copy. None is all pairs.
        dtype: in which M is kept, see :class:`MemoryQueue`.
        check_finite: whether rows with NaN or infinite values are refused.

    Raises:
        ValueError: a loss that takes neither, a class in place of its instance, a miner with a loss that takes none, or a
            size or width below 1. At the
            call, on every rank alike: rows of another width, labels or a mask that are not one per row, NaN or infinite
            rows, no rows at all, or ranks whose memories do not stand at the same place.

    Example:
        >>> import contrastive_zoo as cz
        >>> loss = CrossBatchMemory(cz.InfoNCE(temperature=1.0), size=8, embedding_size=2)
        >>> loss(torch.eye(2), torch.eye(2)), loss(torch.eye(2), torch.eye(2))   # log(e + 1) − 1; then log(2 (e + 1)) − 1
        (tensor(0.3133), tensor(1.0064))
        >>> east, west = torch.tensor([[1.0, 0.0]]), torch.tensor([[-1.0, 0.0]])
        >>> loss = CrossBatchMemory(cz.SupCon(temperature=1.0), size=8, embedding_size=2)
        >>> label = torch.tensor([3])
        >>> loss(east, label), loss(east, label)   # no positive yet; then the only candidate is one
        (tensor(0.), tensor(0.))
        >>> loss(west, label + 1), loss(east, label)   # no positive; then log(2 e + 1/e) − 1
        (tensor(0.), tensor(0.7586))

    Source: Wang et al. 2020, alg. 1, https://arxiv.org/abs/1912.06798; negatives: He et al. 2020, alg. 1,
    https://arxiv.org/abs/1911.05722
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        size: int,
        embedding_size: int,
        *,
        miner: Callable[..., Any] | None = None,
        dtype: torch.dtype | None = None,
        check_finite: bool = True,
    ) -> None:
        super().__init__(check_finite=check_finite)
        self.takes = takes_of(loss)
        if miner is not None and self.takes != "references":
            raise ValueError(
                f"CrossBatchMemory: {name_of(loss)} takes no miner's indices. Leave the miner out, or pass a loss that "
                "takes labels and indices_tuple."
            )
        self.loss = loss
        self.miner = miner
        self.memory = MemoryQueue(size, embedding_size, dtype=dtype)

    @uncompiled
    def forward(  # type: ignore[override]
        self,
        rows: Tensor,
        partners: Tensor,
        *,
        enqueue_mask: Bool[Tensor, " n"] | None = None,
        world: World | None = None,
    ) -> Tensor:
        """The loss of my rows against the memory, which then is one batch further.

        Args:
            rows: [n, d] embeddings, or queries.
            partners: [n] labels, or [n, d] keys.
            enqueue_mask: with labels, as in pytorch-metric-learning: rows that enter and are no anchors; the others are
                anchors and do not enter. With keys: which of them enter; all are compared.
            world: who else holds rows; None is nobody. ``DistributedLoss`` passes the process group's.
        """
        world = self.local() if world is None else world
        shards = self._begin(rows, partners, enqueue_mask, world)
        if self.takes in ("negatives", "own negatives"):
            value = self._against_negatives(rows, partners, shards, world)
            self._enqueue(partners, None, enqueue_mask, shards, world)
            return value
        slots = self._enqueue(rows, partners, enqueue_mask, shards, world)
        if enqueue_mask is not None:
            everywhere = gather_rows(enqueue_mask, shards, world)
            rows, partners, slots = rows[~enqueue_mask], partners[~enqueue_mask], slots[~everywhere.to(slots.device)]
            shards = world.shards(rows)
        if self.takes == "panels":
            return self._by_panels(rows, partners, slots, shards, world)
        return self._against_references(rows, partners, slots, shards, world)

    def _begin(self, rows: Tensor, partners: Tensor, enqueue_mask: Tensor | None, world: World) -> Shards:
        """Agree with all ranks that these rows and this memory fit together."""
        with_labels = self.takes in ("panels", "references")
        names = ("embeddings", "labels") if with_labels else ("queries", "keys")
        named = dict(zip(names, (rows, partners), strict=True)) | given(enqueue_mask=enqueue_mask)
        if with_labels:
            problem = labelled_problem(rows, partners)
        else:
            problem = rows_problem("queries", rows) or rows_problem("keys", partners)
            if not problem and len(partners) != len(rows):
                problem = f"row i of queries belongs to row i of keys, got {kind(rows)} and {kind(partners)}."
        problem = problem or self.memory.problem(
            rows if with_labels else partners, enqueue_mask=enqueue_mask, name=names[0] if with_labels else names[1]
        )
        own: dict[str, Any] = {}
        if isinstance(self.loss, RowLoss):
            own = {"reduction": self.loss.reduction, "normalize": self.loss.normalize}
        elif isinstance(self.loss, Loss):
            own = dict(self.loss.settings())
        if isinstance(self.loss, Loss) and (of_loss := self.loss.settings_problem()):
            problem = problem or f"{name_of(self.loss)}: {of_loss}"
        return begin("CrossBatchMemory", named, problem=problem, world=world, **own, **self.memory.place())[0]

    def _enqueue(
        self, rows: Tensor, labels: Tensor | None, mask: Tensor | None, shards: Shards, world: World
    ) -> Int[Tensor, " N"]:
        """The slots of all ranks' rows."""
        if self.training:
            return self.memory.write(rows.detach(), labels, mask, shards, world)
        return torch.full((shards.total,), -1, device=self.memory.ids.device)

    def _remembered(self, like: Tensor) -> Tensor:
        return self.memory.rows.to(like)

    def _against_negatives(self, queries: Tensor, keys: Tensor, shards: Shards, world: World) -> Tensor:
        negatives = self._remembered(keys)
        if self.takes == "own negatives":  # it gathers what ranks bring, so each brings its share of the ring
            return self.loss(queries, keys, negatives=negatives[self.memory.share(world).mine], world=world)
        everybody = (all_gather(x, gradient="complete", shards=shards, process_group=world) for x in (queries, keys))
        with one_stream(world, queries.device):
            return self.loss(*everybody, negatives=negatives)

    def _by_panels(self, rows: Tensor, labels: Tensor, slots: Tensor, shards: Shards, world: World) -> Tensor:
        """My anchors against the ring, of which each rank brings its share as columns."""
        loss: Any = self.loss
        block_loss = loss.block_loss() if isinstance(loss, LabelledLoss) else loss
        normalize = getattr(loss, "normalize", True)  # of a loss that has no choice rows are unit rows
        share = self.memory.share(world)
        columns = self._remembered(rows)[share.mine]
        return sum_over_anchors(
            block_loss,
            prepare_rows(rows, normalize=normalize, world=world),
            labels,
            shards=shards,
            world=world,
            candidates=prepare_rows(columns, normalize=normalize, world=world),
            candidate_ids=self.memory.labels.to(labels)[share.mine],
            candidate_shards=share,
            own_candidates=slots[shards.mine].to(rows.device),  # candidates stand in the order of slots
            reduction=loss.reduction,
        )

    def _against_references(self, rows: Tensor, labels: Tensor, slots: Tensor, shards: Shards, world: World) -> Tensor:
        """All ranks' anchors against the ring, on every rank alike: a loss from elsewhere knows no ranks."""
        rows = all_gather(rows, gradient="complete", shards=shards, process_group=world)
        labels = all_gather(labels, shards=shards, process_group=world)
        slots = slots.to(rows.device)
        remembered, their_labels = self._remembered(rows), self.memory.labels.to(labels)
        with one_stream(world, rows.device):
            if self.miner is None:
                indices = _all_pairs(labels, their_labels)
            else:
                indices = tuple(self.miner(rows, labels, remembered, their_labels))
            return self.loss(rows, labels, _without_own_copies(indices, slots), remembered, their_labels)


def _all_pairs(labels: Tensor, ref_labels: Tensor) -> tuple[Tensor, ...]:
    """(anchor, positive, anchor, negative), as pytorch-metric-learning enumerates them."""
    alike = labels[:, None] == ref_labels
    return *alike.nonzero(as_tuple=True), *(~alike).nonzero(as_tuple=True)


def _without_own_copies(indices: tuple[Tensor, ...], slots: Tensor) -> tuple[Tensor, ...]:
    """The same pairs or triplets without those whose positive is the anchor's copy in the memory."""
    anchors, positives, *rest = indices
    others = slots[anchors] != positives
    if len(indices) == 4:
        return anchors[others], positives[others], *rest
    return anchors[others], positives[others], rest[0][others]
