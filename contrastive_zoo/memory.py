"""A memory of earlier batches: the ring of rows, any loss against it, and the slowly moving encoder that fills it."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from contrastive_zoo.collectives import all_gather, gather_rows
from contrastive_zoo.compiling import uncompiled
from contrastive_zoo.engine.rows import Panel, sum_over_anchors
from contrastive_zoo.handshake import kind
from contrastive_zoo.losses.base import (
    Loss,
    begin,
    instance_problem,
    is_number,
    labelled_problem,
    prepared,
    rows_problem,
)
from contrastive_zoo.losses.panelwise import PanelLoss
from contrastive_zoo.losses.row_loss import RowLoss
from contrastive_zoo.masks import labels_problem
from contrastive_zoo.randomness import one_stream
from contrastive_zoo.session import meet
from contrastive_zoo.world import Processes, Shards, World


class MemoryQueue(nn.Module):
    """The last ``size`` rows of all ranks, and a label beside each: a ring, the same bytes on every rank.

    Rows enter in rank order, as one process that holds all of them would enter them one by one: the oldest row is
    overwritten first, a batch larger than the ring leaves its last ``size`` rows, and how rows were cut into batches
    and shards cannot be seen afterwards. Rows, labels, the place of the next row and the number of rows are buffers: a
    ``state_dict`` continues bit by bit, on another number of processes, too.

    Args:
        size: rows that are remembered.
        embedding_size: width d of a row.
        dtype: in which rows are kept; None is torch's default. As of any buffer, ``module.double()`` changes it.

    Raises:
        ValueError: a size or width below 1, or a dtype that is not floating. RuntimeError, as of any module: a
            ``state_dict`` that does not fit or makes no sense (more rows than fit, a pointer outside of the ring, NaN or
            infinite rows); the memory then stays as it was.

    Example:
        >>> memory = MemoryQueue(3, embedding_size=1)
        >>> memory.enqueue(torch.tensor([[1.0], [2.0], [3.0], [4.0]]))   # row 0 did not stay
        tensor([-1,  1,  2,  0])
        >>> memory.rows.T, len(memory)
        (tensor([[4., 2., 3.]]), 3)
    """

    embeddings: Float[Tensor, "size d"]
    ids: Int[Tensor, " size"]
    pointer: Int[Tensor, ""]
    filled: Int[Tensor, ""]

    def __init__(self, size: int, embedding_size: int, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        dtype = dtype or torch.get_default_dtype()
        sizes_fit = is_number(size, low=1, whole=True) and is_number(embedding_size, low=1, whole=True)
        if not sizes_fit or not dtype.is_floating_point:
            raise ValueError(
                "MemoryQueue: size and embedding_size are at least 1 and dtype is a floating one, got "
                f"size={size}, embedding_size={embedding_size}, dtype={dtype}."
            )
        self.register_buffer("embeddings", torch.zeros(size, embedding_size, dtype=dtype))
        self.register_buffer("ids", torch.zeros(size, dtype=torch.int64))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64))

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """All of the ring or nothing: rows under another's pointer would be overwritten out of turn."""
        names = [prefix + name for name in ("embeddings", "ids", "pointer", "filled")]
        if missing := [name for name in names if name not in state_dict]:
            missing_keys.extend(missing)
        elif problem := self._state_problem(*(state_dict[name] for name in names)):
            error_msgs.append(f"MemoryQueue: {problem} The memory stays as it was.")
        else:
            rest = (local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
            super()._load_from_state_dict(state_dict, prefix, *rest)

    def _state_problem(self, embeddings: Tensor, ids: Tensor, pointer: Tensor, filled: Tensor) -> str | None:
        """What is wrong with a saved ring, in words; None if nothing is, or if it holds no numbers yet (meta)."""
        for name, saved in (("embeddings", embeddings), ("ids", ids), ("pointer", pointer), ("filled", filled)):
            own = getattr(self, name)
            if saved.shape != own.shape or saved.is_floating_point() != own.is_floating_point():
                return f"{name} are {kind(own)} here, the state dict holds {kind(saved)}. Build it with the same sizes."
        if any(x.is_meta for x in (embeddings, pointer, filled)):
            return None
        if not 0 <= int(filled) <= self.size:
            return f"filled is 0 … {self.size}, the number of rows that fit, got {int(filled)}."
        if not 0 <= int(pointer) < self.size or (filled < self.size and pointer != filled):
            return (
                f"the pointer is the slot of the next row, 0 … {self.size - 1}, and that after the last row until all "
                f"slots are filled, got {int(pointer)} with filled={int(filled)}."
            )
        if not embeddings.isfinite().all():
            bad = (~embeddings.isfinite()).any(1).nonzero().flatten().tolist()
            return f"embeddings hold NaN or infinite values in {len(bad)} of {self.size} rows (row {bad[0]} first)."
        return None

    @property
    def size(self) -> int:
        """Rows that fit."""
        return len(self.embeddings)

    def __len__(self) -> int:
        """Rows that are there."""
        return int(self.filled)

    @property
    def rows(self) -> Float[Tensor, "m d"]:
        """What is remembered, by slot: a copy, since slots are overwritten while a graph may still need them."""
        return self.embeddings[: len(self)].clone()

    @property
    def labels(self) -> Int[Tensor, " m"]:
        """The labels of :attr:`rows`; 0 where none were given."""
        return self.ids[: len(self)].clone()

    def share(self, world: World) -> Shards:
        """A split of :attr:`rows` over the ranks: together they bring each row once.

        Example:
            >>> memory = MemoryQueue(5, embedding_size=1)
            >>> _ = memory.enqueue(torch.ones(5, 1))
            >>> memory.share(World(rank=1, size=2)).mine
            slice(3, 5, None)
        """
        return Shards(tuple((len(self) + rank) // world.size for rank in reversed(range(world.size))), world.rank)

    @uncompiled
    def enqueue(
        self,
        rows: Float[Tensor, "n d"],
        labels: Int[Tensor, " n"] | None = None,
        *,
        enqueue_mask: Bool[Tensor, " n"] | None = None,
        process_group: Processes = None,
    ) -> Int[Tensor, " n"]:
        """Remember my rows and those of all other ranks. Every rank must call it.

        Args:
            rows: [n, d], n may differ between ranks. No gradient is remembered.
            labels: one integer a row.
            enqueue_mask: which of my rows to remember; None is all.
            process_group: whose ranks.

        Returns:
            The slot of each of my rows; −1 if it is not there.

        Raises:
            ValueError: on every rank alike: rows of another width, labels or a mask that are not one per row, NaN or
                infinite rows, or ranks that bring different kinds of rows.
        """
        world = World.of(process_group)
        rows = rows.detach()
        named = {"rows": rows} | _given(labels=labels, enqueue_mask=enqueue_mask)
        problem = self.problem(rows, labels, enqueue_mask)
        (shards, *_) = meet("MemoryQueue", named, world=world, problem=problem, settings=self.place())
        return self.write(rows, labels, enqueue_mask, shards, world)[shards.mine]

    @torch.no_grad()
    def write(
        self, rows: Tensor, labels: Tensor | None, mask: Tensor | None, shards: Shards, world: World
    ) -> Int[Tensor, " N"]:
        """:meth:`enqueue` for those who have met already; the slots of all ranks' rows."""
        kept = self.embeddings.device
        rows = gather_rows(rows, shards, world).to(kept)
        labels = self.ids.new_zeros(len(rows)) if labels is None else gather_rows(labels, shards, world).to(self.ids)
        mask = torch.ones_like(labels).bool() if mask is None else gather_rows(mask, shards, world).to(kept)
        arriving = mask.nonzero().flatten()
        turns = torch.arange(len(arriving), device=kept)
        staying = arriving[-self.size :]
        slots = torch.full_like(labels, -1)
        slots[staying] = ((self.pointer + turns) % self.size)[-self.size :]
        self.embeddings[slots[staying]] = rows[staying].to(self.embeddings.dtype)
        self.ids[slots[staying]] = labels[staying]
        self.pointer.add_(len(arriving)).remainder_(self.size)
        self.filled.add_(len(arriving)).clamp_(max=self.size)
        return slots

    def place(self) -> dict[str, Any]:
        """What must be the same on every rank before rows enter."""
        return {"the memory's size": self.size, "the memory's pointer": int(self.pointer), "its fill": len(self)}

    def problem(
        self, rows: Tensor, labels: Tensor | None = None, enqueue_mask: Tensor | None = None, name: str = "rows"
    ) -> str | None:
        """Why these cannot enter, in words; None if they can."""
        width = self.embeddings.shape[1]
        if found := rows_problem(name, rows):
            return found
        if rows.shape[1] != width:
            return (
                f"the memory holds rows of width {width}, got {name} {kind(rows)}. Pass embedding_size={rows.shape[1]}."
            )
        if enqueue_mask is not None and (enqueue_mask.dtype != torch.bool or enqueue_mask.shape != rows.shape[:1]):
            return f"enqueue_mask is one bool per row, got {kind(enqueue_mask)} for {len(rows)} rows."
        return None if labels is None else labels_problem("labels", labels, len(rows))

    def extra_repr(self) -> str:
        return f"size={self.size}, embedding_size={self.embeddings.shape[1]}, dtype={self.embeddings.dtype}"


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
        self.takes = _takes(loss)
        if miner is not None and self.takes != "references":
            raise ValueError(
                f"CrossBatchMemory: {_name(loss)} takes no miner's indices. Leave the miner out, or pass a loss that "
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
        named = dict(zip(names, (rows, partners), strict=True)) | _given(enqueue_mask=enqueue_mask)
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
            problem = problem or f"{_name(self.loss)}: {of_loss}"
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
        panels = loss.panelwise() if isinstance(loss, PanelLoss) else loss
        normalize = getattr(loss, "normalize", True)  # of a loss that has no choice rows are unit rows
        share = self.memory.share(world)
        columns = self._remembered(rows)[share.mine]
        numbers = torch.arange(share.total, device=rows.device)[share.mine]
        return sum_over_anchors(
            _NotItsOwnCopy(panels),
            prepared(rows, normalize=normalize, world=world),
            labels,
            shards=shards,
            world=world,
            columns=prepared(columns, normalize=normalize, world=world),
            column_ids=self.memory.labels.to(labels)[share.mine],
            column_shards=share,
            companions=[(slots[shards.mine].to(rows.device), numbers)],
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


class MomentumEncoder(nn.Module):
    """A slowly moving copy of an encoder, which makes a memory's keys consistent over many steps.

        θ_k ← m θ_k + (1 − m) θ_q        at every update

    It needs no gradient and carries none. Its ``state_dict`` holds its parameters and buffers.

    Args:
        encoder: what is copied, now; DDP around it is taken off. The copy does not hold on to it.
        momentum: m in [0, 1]. An attribute, for schedules.
        buffers: ``"own"``, as in MoCo: the copy's buffers are moved by its own forward passes, so that BatchNorm keeps
            the statistics of the keys. ``"copy"``: taken over from the encoder at every update.

    Raises:
        ValueError: a momentum outside [0, 1], unknown ``buffers``; at an update, an encoder with other parameters.

    Example:
        >>> encoder = nn.Linear(1, 1, bias=False)
        >>> keys = MomentumEncoder(encoder, momentum=0.9)
        >>> _ = nn.init.ones_(encoder.weight), nn.init.zeros_(keys.encoder.weight)
        >>> keys.update(encoder)
        >>> keys(torch.ones(1, 1))
        tensor([[0.1000]])

    Source: He et al. 2020, eq. 2, https://arxiv.org/abs/1911.05722
    """

    def __init__(self, encoder: nn.Module, *, momentum: float = 0.999, buffers: Literal["own", "copy"] = "own") -> None:
        super().__init__()
        if not 0 <= momentum <= 1 or buffers not in ("own", "copy"):
            raise ValueError(
                "MomentumEncoder: momentum is in [0, 1] and buffers 'own' or 'copy', got "
                f"momentum={momentum}, buffers={buffers!r}. MoCo's momentum is 0.999."
            )
        self.encoder = copy.deepcopy(_inner(encoder)).requires_grad_(False)
        self.momentum = momentum
        self.buffers_from = buffers

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the copy makes of it, without gradient."""
        return self.encoder(*args, **kwargs)

    @torch.no_grad()
    def update(self, encoder: nn.Module) -> None:
        """Move towards ``encoder``; call it after each optimiser step.

        Args:
            encoder: the one that was copied, as it is now.
        """
        theirs = dict(_inner(encoder).named_parameters())
        ours = dict(self.encoder.named_parameters())
        if {k: x.shape for k, x in theirs.items()} != {k: x.shape for k, x in ours.items()}:
            other = next(iter(theirs.keys() ^ ours.keys()), None) or next(
                name for name in ours if ours[name].shape != theirs[name].shape
            )
            raise ValueError(
                f"MomentumEncoder: update takes the encoder that was copied, got one that differs in {other!r}."
            )
        for name, parameter in ours.items():
            parameter.lerp_(theirs[name].to(parameter), 1 - self.momentum)
        if self.buffers_from == "copy":
            for buffer, theirs_now in zip(self.encoder.buffers(), _inner(encoder).buffers(), strict=True):
                buffer.copy_(theirs_now)

    def extra_repr(self) -> str:
        return f"momentum={self.momentum}, buffers={self.buffers_from!r}"


# ------------------------------------------------------------------------------------------------- how a loss is used

Takes = Literal["panels", "own negatives", "references", "negatives"]


def _takes(loss: Any) -> Takes:
    """What a loss compares rows with besides the batch."""
    if problem := instance_problem(loss):
        raise ValueError(f"CrossBatchMemory: {problem}")
    if not callable(loss):
        raise ValueError(f"CrossBatchMemory: a loss can be called, got {type(loss).__name__}, which cannot.")
    if isinstance(loss, PanelLoss) or (isinstance(loss, RowLoss) and type(loss).forward is RowLoss.forward):
        return "panels"
    parameters = _parameters(loss)
    needed = [name for name, x in parameters.items() if x.default is x.empty and name != "negatives"]
    if "negatives" in parameters and len(needed) == 2:
        return "own negatives" if isinstance(loss, Loss) else "negatives"
    if not isinstance(loss, Loss) and {"indices_tuple", "ref_emb", "ref_labels"} <= parameters.keys():
        return "references"
    raise ValueError(
        f"CrossBatchMemory: {_name(loss)} compares a batch with itself only. Pass SupCon, SINCERE, NCA, TupletMargin, "
        "SupSigmoid, a RowLoss, InfoNCE, a loss that takes ref_emb and ref_labels (pytorch-metric-learning's pair and "
        "triplet losses), or a function of (queries, keys, negatives)."
    )


def _parameters(loss: Any) -> Mapping[str, inspect.Parameter]:
    function = getattr(type(loss), "function", None) if isinstance(loss, Loss) else None
    try:
        return inspect.signature(function or (loss.forward if isinstance(loss, nn.Module) else loss)).parameters
    except ValueError:  # a built-in
        return {}


def _name(loss: Any) -> str:
    return getattr(loss, "__name__", type(loss).__name__)


def _inner(module: nn.Module) -> nn.Module:
    """What is inside DDP."""
    return module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module


def _given(**tensors: Tensor | None) -> dict[str, Tensor]:
    return {name: x for name, x in tensors.items() if x is not None}


class _NotItsOwnCopy(nn.Module):
    """A loss by panels whose panels leave out the column that is a copy of the anchor; companions say which it is."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss, self.terms = loss, getattr(loss, "terms", 1)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Those of the loss, which may be none of ``nn.Module``'s own."""
        return ((f"loss.{name}", x) for name, x in self.loss.named_parameters())

    def on_panel(self, panel: Panel) -> tuple[Tensor, Tensor]:
        ((slots, numbers),) = panel.companions
        others = slots[:, None] != numbers
        loss: Any = self.loss
        return loss.on_panel(replace(panel, positive=panel.positive & others, companions=()))


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
