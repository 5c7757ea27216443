"""A loss that compares the batch with a memory of earlier batches."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from contrastive_zoo.collectives import all_gather, gather_rows
from contrastive_zoo.common_failure import failing_together
from contrastive_zoo.compiling import traced_as
from contrastive_zoo.devices import beside_rows, values_problem
from contrastive_zoo.engine.rowwise import sum_over_anchors
from contrastive_zoo.handshake import kind
from contrastive_zoo.loss_base.block_loss import LabelledLoss
from contrastive_zoo.loss_base.checks import labelled_problem, rows_problem
from contrastive_zoo.loss_base.graph_operator import THIRD_PARTY, GraphModule
from contrastive_zoo.loss_base.kept_state import state_kept_on_error
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.preparation import begin, prepare_rows
from contrastive_zoo.loss_base.row_loss import RowLoss
from contrastive_zoo.loss_call import loss_name
from contrastive_zoo.memory.memory_input import memory_input
from contrastive_zoo.memory.queue import MemoryQueue, present
from contrastive_zoo.randomness import one_stream
from contrastive_zoo.session import Session, refuse
from contrastive_zoo.world import Shards, World


class CrossBatchMemory(Loss):
    """Compute ``loss`` against a memory M of earlier batches of all ranks; embeddings in M carry no gradient.

    The arguments of ``loss`` decide how M is used:

    - **Labels**: SupCon, SINCERE, NCA, TupletMargin, SupSigmoid, any :class:`contrastive_zoo.RowLoss` that does not
      override ``forward`` (most pair and triplet losses), and third-party losses that take ``ref_emb`` and
      ``ref_labels``, such as pytorch-metric-learning's. Call it ``loss(embeddings, labels)``. The batch enters M; then
      each of its embeddings is an anchor and is compared with M, except with its own copy:

          L = mean_i loss_i(z_i against M without i)

    - **Negatives**: :class:`contrastive_zoo.InfoNCE` and other losses that take ``negatives``; third-party functions of
      ``(queries, keys, negatives)``, which receive all ranks' embeddings. Call it ``loss(queries, keys)``. M serves as
      negatives; then the keys enter it. InfoNCE also compares a query with the batch's other keys; with
      ``in_batch_negatives=False`` it is MoCo's loss, which compares a query with its own key and M alone.

    Slots that are not yet filled are never compared. In eval mode M does not change, and neither in a call that raises, on
    any rank.

    Args:
        loss: as above.
        size: number of embeddings in M.
        embedding_size: their width d.
        miner: for a third-party loss with labels: ``miner(embeddings, labels, ref_emb, ref_labels)`` on all ranks'
            embeddings. Its tuples, without those of an embedding and its copy, are passed on as ``indices_tuple``. None
            is all pairs.
        dtype: of the embeddings in M, see :class:`MemoryQueue`.
        check_finite: whether embeddings with NaN or infinite values are refused.

    Raises:
        ValueError: a loss that takes neither, a class in place of its instance, a miner with a loss that takes none, or a
            size or width below 1. At the call, on every rank alike: embeddings of another width, labels or a mask that
            are not one per row, NaN or infinite embeddings, an empty global batch, or memories that differ in size,
            pointer or fill.

    Examples:
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

    ring_refusal = "every rank holds the memory that it compares with, so a ring would save nothing"

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
        self.memory_input = memory_input(loss)
        if miner is not None and self.memory_input != "references":
            raise ValueError(
                f"CrossBatchMemory: {loss_name(loss)} takes no miner's indices. Leave the miner out, or pass a loss that "
                "takes labels and indices_tuple."
            )
        self.loss = loss
        self.miner = miner
        self.memory = MemoryQueue(size, embedding_size, dtype=dtype)

    def graph_problem(self) -> str | None:
        return None if isinstance(self.loss, Loss) else THIRD_PARTY

    @traced_as(GraphModule.traced_forward)
    def forward(  # type: ignore[override]  # rows by name
        self,
        rows: Tensor,
        partners: Tensor,
        *,
        enqueue_mask: Bool[Tensor, " n"] | None = None,
        world: World | None = None,
    ) -> Tensor:
        """Return the loss of the local rows against the memory, and add the batch to the memory.

        Args:
            rows: [n, d] embeddings, or queries.
            partners: [n] labels, or [n, d] keys.
            enqueue_mask: with labels, as in pytorch-metric-learning: rows that enter and are no anchors; the others are
                anchors and do not enter. With keys: which of them enter; all are compared.
            world: the ranks that hold rows; None is this process alone. ``DistributedLoss`` passes its process group.
        """
        session = Session.of(self.local() if world is None else world)
        if problem := values_problem(self):
            refuse("CrossBatchMemory", problem, world=session)
        (rows, partners, enqueue_mask), _ = beside_rows((rows, partners, enqueue_mask), {})
        shards = self._begin(rows, partners, enqueue_mask, session)
        if self.memory_input in ("negatives", "sharded negatives"):
            value = self._against_negatives(rows, partners, shards, session)
            self._enqueue(partners, None, enqueue_mask, shards, session)
            return value
        with state_kept_on_error(self):  # the batch is part of the memory that it is compared with
            slots = self._enqueue(rows, partners, enqueue_mask, shards, session)
            if enqueue_mask is not None:
                all_masks = gather_rows(enqueue_mask, shards, session).to(slots.device)
                rows, partners, slots = rows[~enqueue_mask], partners[~enqueue_mask], slots[~all_masks]
                shards = session.shards(rows)
            if self.memory_input == "candidates":
                return self._against_candidates(rows, partners, slots, shards, session)
            return self._against_references(rows, partners, slots, shards, session)

    def _begin(self, rows: Tensor, partners: Tensor, enqueue_mask: Tensor | None, session: Session) -> Shards:
        """Agree with all ranks on the rows, the memory and what the loss compares; return the shard sizes."""
        with_labels = self.memory_input in ("candidates", "references")
        names = ("embeddings", "labels") if with_labels else ("queries", "keys")
        named = dict(zip(names, (rows, partners), strict=True)) | present(enqueue_mask=enqueue_mask)
        problem = self._problem(rows, partners, enqueue_mask, names)
        compared = self._inner_settings() | self.memory.compared_state()
        own = partial(begin, "CrossBatchMemory", named, problem=problem, world=session, **compared)
        if self.memory_input == "sharded negatives" and problem is None:
            session.declare("CrossBatchMemory", [own, partial(self._against_shards, rows, partners, session)])
        return own()[0]

    def _problem(
        self, rows: Tensor, partners: Tensor, enqueue_mask: Tensor | None, names: tuple[str, str]
    ) -> str | None:
        """Return why this batch cannot be compared with the memory or enter it, in words; None if it can."""
        if names[1] == "labels":
            problem, entering, name = labelled_problem(rows, partners), rows, names[0]
        else:
            problem, entering, name = (
                rows_problem(names[0], rows) or rows_problem(names[1], partners),
                partners,
                names[1],
            )
            if not problem and len(partners) != len(rows):
                problem = f"row i of queries belongs to row i of keys, got {kind(rows)} and {kind(partners)}."
        problem = problem or self.memory.problem(entering, enqueue_mask=enqueue_mask, name=name)
        if isinstance(self.loss, Loss) and (settings_problem := self.loss.settings_problem()):
            problem = problem or f"{loss_name(self.loss)}: {settings_problem}"
        return problem

    def _inner_settings(self) -> dict[str, Any]:
        """Return the settings of the loss that ranks compare."""
        if isinstance(self.loss, RowLoss):
            return {"reduction": self.loss.reduction, "normalize": self.loss.normalize}
        return dict(self.loss.settings()) if isinstance(self.loss, Loss) else {}

    def _enqueue(
        self, rows: Tensor, labels: Tensor | None, mask: Tensor | None, shards: Shards, world: World
    ) -> Int[Tensor, " N"]:
        """Add the rows to the memory in train mode; return the slots of all ranks' rows, −1 for rows that are not in it."""
        if self.training:
            return self.memory.write(rows.detach(), labels, mask, shards, world)
        return torch.full((shards.total,), -1, device=self.memory.ids.device)

    def _stored(self, like: Tensor, share: slice = slice(None)) -> Tensor:
        """Return a copy of the embeddings in the memory, or a share of them, in the dtype and on the device of ``like``."""
        return self.memory.embeddings[: len(self.memory)][share].to(like, copy=True)

    def _against_negatives(self, queries: Tensor, keys: Tensor, shards: Shards, session: Session) -> Tensor:
        if self.memory_input == "sharded negatives":
            return self._against_shards(queries, keys, session)
        gathered = (all_gather(x, gradient="complete", shards=shards, process_group=session) for x in (queries, keys))
        compute = partial(self.loss, *gathered, negatives=self._stored(keys))
        with one_stream(session, queries.device):
            return failing_together("CrossBatchMemory", compute, session)

    def _against_shards(self, queries: Tensor, keys: Tensor, session: Session) -> Tensor:
        """Compute a loss that gathers its negatives: each rank passes its shard of the memory."""
        share = self.memory.shards(session).local
        return self.loss(queries, keys, negatives=self._stored(keys, share), world=session)

    def _against_candidates(self, rows: Tensor, labels: Tensor, slots: Tensor, shards: Shards, world: World) -> Tensor:
        """Compare the local anchors with the memory; each rank provides its shard of the memory as candidates."""
        loss: Any = self.loss
        block_loss = loss.block_loss() if isinstance(loss, LabelledLoss) else loss
        normalize = getattr(loss, "normalize", True)  # a loss without this setting always normalizes
        share = self.memory.shards(world)
        columns = self._stored(rows, share.local)
        return sum_over_anchors(
            block_loss,
            prepare_rows(rows, normalize=normalize, world=world),
            labels,
            shards=shards,
            world=world,
            candidates=prepare_rows(columns, normalize=normalize, world=world),
            candidate_ids=self.memory.labels.to(labels)[share.local],
            candidate_shards=share,
            own_candidates=slots[shards.local].to(rows.device),  # candidates stand in the order of slots
            reduction=loss.reduction,
        )

    def _against_references(self, rows: Tensor, labels: Tensor, slots: Tensor, shards: Shards, world: World) -> Tensor:
        """Compare all ranks' anchors with the memory on every rank alike: a third-party loss does not know of ranks."""
        rows = all_gather(rows, gradient="complete", shards=shards, process_group=world)
        labels = all_gather(labels, shards=shards, process_group=world)
        slots = slots.to(rows.device)
        references, ref_labels = self._stored(rows), self.memory.labels.to(labels)

        def compute() -> Tensor:
            if self.miner is None:
                indices = _all_pairs(labels, ref_labels)
            else:
                indices = tuple(self.miner(rows, labels, references, ref_labels))
            value: Tensor = self.loss(rows, labels, _without_own_copies(indices, slots), references, ref_labels)
            return value

        with one_stream(world, rows.device):
            return failing_together("CrossBatchMemory", compute, world)


def _all_pairs(labels: Tensor, ref_labels: Tensor) -> tuple[Tensor, ...]:
    """Return (anchors, positives, anchors, negatives), as pytorch-metric-learning enumerates them."""
    same = labels[:, None] == ref_labels
    return *same.nonzero(as_tuple=True), *(~same).nonzero(as_tuple=True)


def _without_own_copies(indices: tuple[Tensor, ...], slots: Tensor) -> tuple[Tensor, ...]:
    """Return the pairs or triplets without those whose positive is the anchor's copy in the memory."""
    anchors, positives, *rest = indices
    is_other = slots[anchors] != positives
    if len(indices) == 4:
        return anchors[is_other], positives[is_other], *rest
    return anchors[is_other], positives[is_other], rest[0][is_other]
