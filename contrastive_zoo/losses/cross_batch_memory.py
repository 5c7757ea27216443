"""A loss that compares the batch with a memory of earlier batches."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.cost import Entry, Gathered, Member, Pairs, Summed
from contrastive_zoo.engine.ledger import Stored
from contrastive_zoo.engine.plan import Needs
from contrastive_zoo.engine.rowwise import blocks_of, reduce_rows
from contrastive_zoo.loss_base.loss import CallInputs, Inputs, Loss
from contrastive_zoo.loss_base.loss_modules import is_plain, loss_name
from contrastive_zoo.loss_base.row_loss import AnchorLoss
from contrastive_zoo.loss_base.shapes import arguments_problem, call_form
from contrastive_zoo.losses.memory_queue import NO_RING_OF_A_MEMORY, MemoryQueue
from contrastive_zoo.losses.references import memory_problem
from contrastive_zoo.ranks.differences import failing_together
from contrastive_zoo.ranks.one_process import in_one_process
from contrastive_zoo.ranks.randomness import one_stream
from contrastive_zoo.ranks.row_checks import described, instance_problem

MemoryInput = Literal["candidates", "sharded negatives", "references", "negatives"]
"""How the loss takes the memory: as candidates, a rank's shard of it or all of it as ``negatives``, or as ``ref_emb``."""


def memory_input(loss: Any) -> MemoryInput:
    if problem := instance_problem(loss):
        raise ValueError(f"CrossBatchMemory: {problem}")
    if not callable(loss):
        raise ValueError(f"CrossBatchMemory: loss must be callable, got {type(loss).__name__}. Pass a loss module.")
    is_own = isinstance(loss, Loss) and is_plain(loss)
    if is_own and isinstance(loss, AnchorLoss) and _is_sum_of_blocks(type(loss)):
        return "candidates"
    parameters = _parameters(loss)
    required = [name for name, x in parameters.items() if x.default is x.empty and name != "negatives"]
    if "negatives" in parameters and len(required) == 2 and not (is_own and _negatives_problem(loss)):
        return "sharded negatives" if is_own else "negatives"
    if not is_own and {"indices_tuple", "ref_emb", "ref_labels"} <= parameters.keys():
        if problem := memory_problem(loss):
            raise ValueError(f"CrossBatchMemory: {loss_name(loss)}: {problem}")
        return "references"
    raise ValueError(
        f"CrossBatchMemory: {loss_name(loss)} cannot compare a batch with a memory. Pass SupCon, SINCERE, NCA, "
        "TupletMargin, BalSCL, a RowLoss, InfoNCE, InfoNCE(in_batch_negatives=False), a loss that takes ref_emb and "
        "ref_labels (pytorch-metric-learning's pair and triplet losses), or a function of (queries, keys, negatives)."
    )


def _negatives_problem(loss: Loss) -> str | None:
    """Return why a loss cannot take negatives [m, d] of all queries [n, d], in words, or None."""
    x = torch.zeros(1, 1, device="cpu")
    return arguments_problem(type(loss), (x, x), {"negatives": x}) or loss.inputs(x, x, x).problem


def _is_sum_of_blocks(kind: type[AnchorLoss]) -> bool:
    """Return whether ``block_loss`` is the whole loss: no subclass of the class that defines it has another ``compute``."""
    computing, blocks = (next(x for x in kind.__mro__ if name in vars(x)) for name in ("compute", "block_loss"))
    return issubclass(blocks, computing)


def _parameters(loss: Any) -> Mapping[str, inspect.Parameter]:
    if isinstance(loss, Loss) and type(loss).forward is Loss.forward:
        return call_form(type(loss)).signature.parameters  # type: ignore[arg-type]  # mypy takes a class for its instance
    try:
        return inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters
    except ValueError:  # a built-in function has no signature
        return {}


class CrossBatchMemory(Loss, no_ring=NO_RING_OF_A_MEMORY):
    """Compute ``loss`` against a memory M of earlier batches of all ranks; embeddings in M carry no gradient.

    - A loss of **labels** (SupCon, SINCERE, NCA, TupletMargin, BalSCL, any :class:`contrastive_zoo.RowLoss`,
      third-party losses with ``ref_emb`` and ``ref_labels``): the batch enters M; then each of its embeddings is an anchor,
      compared with all of M but itself:

          L = mean_i loss_i(z_i against M without i)

    - A loss with **negatives** (:class:`contrastive_zoo.InfoNCE`, third-party functions of ``(queries, keys, negatives)``):
      M serves as negatives; then the keys enter it. InfoNCE with ``in_batch_negatives=False`` is MoCo's loss.

    Slots that are not filled are never compared. M does not change in eval mode, or if a call raises on any rank. If a step
    has several calls, use :func:`contrastive_zoo.one_step`.

    Called as ``loss(rows, partners, enqueue_mask)``:

    - rows: [n, d] embeddings, or queries.
    - partners: [n] labels, or [n, d] keys.
    - enqueue_mask: [n]. Labels: rows that enter; the others are the anchors. Keys: those that enter. None: all enter, and
      all are compared.

    Args:
        loss: as above.
        size: number of embeddings in M.
        embedding_size: their width d.
        miner: ``miner(embeddings, labels, ref_emb, ref_labels)`` for a third-party loss; None: all pairs.
        dtype: of M, see :class:`MemoryQueue`.
        check_finite: refuse NaN and infinite embeddings.

    Raises:
        ValueError: a loss that cannot take the memory so, or that is wrong for other references than its batch, such as
            ``TripletMarginLoss(swap=True)``; a miner that the loss cannot use. At the call: memories that differ.

    Examples:
        >>> import contrastive_zoo as cz
        >>> loss = CrossBatchMemory(cz.InfoNCE(temperature=1.0), size=8, embedding_size=2)
        >>> loss(torch.eye(2), torch.eye(2)), loss(torch.eye(2), torch.eye(2))   # log(e + 1) − 1; then log(2 (e + 1)) − 1
        (tensor(0.3133), tensor(1.0064))

    Source: Wang et al. 2020, alg. 1, https://arxiv.org/abs/1912.06798; He et al. 2020, https://arxiv.org/abs/1911.05722
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
        self.memory_input = memory_input(loss)
        if miner is not None and self.memory_input != "references":
            raise ValueError(
                f"CrossBatchMemory: {loss_name(loss)} takes no miner's indices. Leave the miner out, or pass a loss that "
                "takes labels and indices_tuple."
            )
        self.loss = loss
        self.miner = miner
        self.memory = MemoryQueue(size, embedding_size, dtype=dtype)

    def inputs(
        self,
        rows: Float[Tensor, "n d"],
        partners: Int[Tensor, " n"] | Float[Tensor, "n d"],
        enqueue_mask: Bool[Tensor, " n"] | None = None,
    ) -> Inputs:
        labelled = self.memory_input in ("candidates", "references")
        names = ("embeddings", "labels") if labelled else ("queries", "keys")
        arguments = {**dict(zip(names, (rows, partners), strict=True)), "enqueue_mask": enqueue_mask}
        problem, inner = self._problem(rows, partners, labelled=labelled), Inputs({})
        if problem is None and self._is_own():
            # a rank's share of the memory has the shape of keys
            more = {"negatives": partners[:0]} if self._way() == "sharded negatives" else {}
            inner = self.loss.inputs(rows, partners, **more)  # type: ignore[attr-defined]  # a Loss
            problem = None if inner.problem is None else f"{loss_name(self.loss)}: {inner.problem}"
        compared = self._inner_settings() | self.memory.compared_state()
        return Inputs.of(arguments, problem, values=inner.values, compared=compared)

    def entries(self, stated: CallInputs) -> list[Entry]:
        """Return what a step takes once the memory is full."""
        (first, second, *mask), way = stated.inputs.rows, self._way()
        row, loss = stated.width * stated.inputs.rows[first].dtype.itemsize, cast(Any, self.loss)
        memory = Stored(self.memory.size)
        labelled = way in ("candidates", "references")
        partners = Gathered([second], 8 if labelled else row)
        written: list[Entry] = [Gathered([first], row), partners] if labelled else [partners]
        written += [Gathered(mask, 1)] * (1 + labelled) if mask else []
        of_loss: list[Entry] = []  # every rank computes a loss from elsewhere of what it has received with the step
        if way == "candidates":
            block_loss = loss.block_loss(Batch({}, {}, stated.settings.members[0]))
            blocks = blocks_of(block_loss, [first], memory, reduction=loss.reduction, watched=loss.may_draw)
            of_loss = [blocks, *([Summed(8)] if mask else [])]
        elif way == "sharded negatives":
            keys = stated.inputs.rows[second]
            inputs = loss.inputs(stated.inputs.rows[first], keys, negatives=keys[:0])
            inner = CallInputs(loss_name(loss), inputs, stated.settings.members[0], needs=loss.needs(inputs))
            names = dict(zip(inputs.rows, (first, second), strict=False))
            of_loss = [Member(None, names, [_against(memory, x) for x in loss.entries(inner)])]
        return [*of_loss, *(written if self.training else [])]

    def compute(self, batch: Batch) -> Tensor:
        rows, partners, *_ = batch.rows.values()
        mask = batch.rows.get("enqueue_mask")
        if "keys" in batch.rows:
            against = self._against_shards if self._way() == "sharded negatives" else self._against_negatives
            value = against(batch, rows, partners)
            if self.training:
                self.memory.write(partners.detach(), None, mask, batch.samples, batch.world)
            return value
        memory, slots, entering = self.memory, torch.full((batch.total,), -1, device=self.memory.ids.device), None
        if self.training:  # the batch is part of the memory that it is compared with
            entering, slots = memory.entering(rows.detach(), partners, mask, batch.samples, batch.world)
            memory = memory.holding(entering)
        batch = replace(batch, rows={"embeddings": rows, "labels": partners}, local_slice=None)
        if mask is not None:
            slots = slots[~batch.gather_detached(mask).to(slots.device)]
            anchors = {name: x[~mask] for name, x in batch.rows.items()}
            shards = batch.world.shards(anchors["embeddings"])
            batch = replace(batch, rows=anchors, shards=dict.fromkeys(anchors, shards))
        of_memory = self._against_candidates if self._is_own() else self._against_references
        value = of_memory(batch, memory, slots) if len(memory) else self._against_nothing(batch)
        if entering is not None:
            self.memory.record(entering)
        return value

    def evaluated(self) -> tuple[SimpleNamespace, dict[str, Any], str | None]:
        """Return the values of the settings, with those of the loss as ``members[0]`` if its ``forward`` is not called."""
        values, computed, problem = super().evaluated()
        if isinstance(self.loss, Loss) and self._is_own():
            inner, computed, reason = self.loss.evaluated()
            values.members, problem = [inner], None if reason is None else f"{loss_name(self.loss)}: {reason}"
        return values, computed, problem

    def settings_problem(self) -> str | None:
        """Return what is wrong with the settings of the loss, or None; until the constructor has set it, nothing is."""
        loss = getattr(self, "loss", None)
        problem = loss.settings_problem() if isinstance(loss, Loss) else None
        return super().settings_problem() or (None if problem is None else f"{loss_name(loss)}: {problem}")

    def needs(self, inputs: Inputs) -> Needs:
        needs = super().needs(inputs)
        if self._way() == "sharded negatives":
            return needs._replace(engine=self.loss.engine, no_kernel=self.loss.no_kernel)  # type: ignore[attr-defined]  # a Loss
        if self._is_own():
            return needs._replace(engine="rows")
        return needs._replace(engine="other", split=None, whole="every rank compares all samples with its memory")

    def split_reason(self) -> str | None:
        reductions = [getattr(x, "reduction", None) for x in self.modules()]
        return "reduction='none' returns losses of local samples" if "none" in reductions else None

    def _way(self) -> MemoryInput:
        """Return how the loss takes the memory in this call: hooks of a loss of this library run only if it is called."""
        has_hooks = self.memory_input == "sharded negatives" and not is_plain(self.loss)  # type: ignore[arg-type]  # a Loss
        return "negatives" if has_hooks else self.memory_input

    def _is_own(self) -> bool:
        return self._way() in ("candidates", "sharded negatives")

    def _problem(self, rows: Tensor, partners: Tensor, *, labelled: bool) -> str | None:
        if partners.ndim != 2 - labelled:
            expected = "labels, integer [n]" if labelled else "keys, floating-point [n, d]"
            return f"partners of {loss_name(self.loss)} are {expected}, got {described(partners)}."
        return self.memory.width_problem(rows if labelled else partners)

    def _inner_settings(self) -> dict[str, Any]:
        if not isinstance(self.loss, Loss):
            return {}
        values = {name: getattr(self.loss, name) for name in self.loss.fields if name not in self.fields}
        return {name: x for name, x in values.items() if not isinstance(x, (Tensor, nn.Module))}

    def _against_negatives(self, batch: Batch, queries: Tensor, keys: Tensor) -> Tensor:
        gathered = map(batch.gather_with_gradient, (queries, keys))
        return self._alike(partial(self.loss, *gathered, negatives=_stored(self.memory, keys)), batch, queries.device)

    def _against_shards(self, batch: Batch, queries: Tensor, keys: Tensor) -> Tensor:
        """Compute a loss that gathers its negatives: each rank passes its shard of the memory."""
        loss: Any = self.loss
        share = self.memory.shards(batch.world)
        inputs: Inputs = loss.inputs(queries, keys, negatives=_stored(self.memory, keys, share.local))
        shards = {name: batch.samples if index < 2 else share for index, name in enumerate(inputs.rows)}
        return loss.compute(self._of_loss(replace(batch, rows=inputs.rows, shards=shards, host=inputs.host)))

    def _of_loss(self, batch: Batch) -> Batch:
        return replace(batch, settings=batch.settings.members[0], name=loss_name(self.loss))

    def _against_nothing(self, batch: Batch) -> Tensor:
        """Return the loss of anchors that do not count: a row function need not take a block without candidates."""
        rows = batch.rows["embeddings"]
        losses = sum((x.sum().to(rows) for x in self.parameters()), rows.sum(1))
        valid = torch.zeros_like(losses, dtype=torch.bool)
        return batch.reduce(losses, valid, reduction=getattr(self.loss, "reduction", "mean"))

    def _against_candidates(self, batch: Batch, memory: MemoryQueue, slots: Tensor) -> Tensor:
        loss: Any = self.loss
        rows, labels = batch.rows.values()
        share = memory.shards(batch.world)
        known = {"rows": rows, "stored": _stored(memory, rows, share.local)}
        compared = replace(batch, rows=known, shards={"rows": batch.samples, "stored": share})
        anchors, candidates = (compared.candidates(name, normalize=loss.normalizes) for name in known)
        copies = slots[batch.samples.local].to(rows.device)  # candidates stand in the order of slots
        return reduce_rows(
            batch, loss.block_loss(self._of_loss(batch)), anchors, labels, candidates=candidates,
            candidate_ids=memory.labels.to(labels)[share.local], candidate_shards=share, own_candidates=copies,
            reduction=loss.reduction, may_draw=loss.may_draw,
        )  # fmt: skip

    def _against_references(self, batch: Batch, memory: MemoryQueue, slots: Tensor) -> Tensor:
        """Compare all ranks' anchors with the memory on every rank alike: a third-party loss does not know of ranks."""
        rows, labels = batch.rows.values()
        rows, labels = batch.gather_with_gradient(rows), batch.gather_detached(labels)
        references, ref_labels, slots = _stored(memory, rows), memory.labels.to(labels), slots.to(rows.device)

        def compute() -> Tensor:
            if self.miner is None:  # all pairs, as pytorch-metric-learning enumerates them
                same = labels[:, None] == ref_labels
                indices = (*same.nonzero(as_tuple=True), *(~same).nonzero(as_tuple=True))
            else:
                indices = tuple(self.miner(rows, labels, references, ref_labels))
            value: Tensor = self.loss(rows, labels, _without_own_copies(indices, slots), references, ref_labels)
            return value

        return self._alike(compute, batch, rows.device)

    def _alike(self, compute: Callable[[], Tensor], batch: Batch, device: torch.device) -> Tensor:
        """Compute on every rank from the rows of all, with the same random numbers, as in one process."""
        alone = partial(in_one_process, compute, loss_name(self.loss), batch.world, self.loss)
        with one_stream(batch.world, device):
            return failing_together(batch.name, alone, batch.world)


def _stored(memory: MemoryQueue, like: Tensor, share: slice = slice(None)) -> Tensor:
    return memory.embeddings[: len(memory)][share].to(like, copy=True)


def _against(memory: Stored, entry: Entry) -> Entry:
    """Return the entry of a loss with the memory as its negatives, which get no gradient."""
    if isinstance(entry, Summed) and entry.of == "negatives":
        return entry._replace(partial=False)
    is_negatives = isinstance(entry, Pairs) and [*cast(Any, entry.candidates)] == ["negatives"]
    return cast(Pairs, entry)._replace(candidates=memory) if is_negatives else entry


def _without_own_copies(indices: tuple[Tensor, ...], slots: Tensor) -> tuple[Tensor, ...]:
    """Return the pairs or triplets whose positive is not the anchor's copy in the memory."""
    anchors, positives, *rest = indices
    is_other = slots[anchors] != positives
    return anchors[is_other], positives[is_other], *(rest if len(indices) == 4 else [rest[0][is_other]])
