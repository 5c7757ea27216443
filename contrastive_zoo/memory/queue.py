"""The last rows of all ranks: a ring."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from contrastive_zoo.collectives import gather_rows
from contrastive_zoo.compiling import uncompiled
from contrastive_zoo.handshake import kind
from contrastive_zoo.loss_base.checks import is_number, rows_problem
from contrastive_zoo.masks import labels_problem
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
        named = {"rows": rows} | given(labels=labels, enqueue_mask=enqueue_mask)
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


def given(**tensors: Tensor | None) -> dict[str, Tensor]:
    return {name: x for name, x in tensors.items() if x is not None}
