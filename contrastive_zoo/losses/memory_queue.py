"""A ring buffer of the last embeddings of all ranks, and the momentum encoder that computes such keys."""

import copy
from collections.abc import Mapping, Sequence
from itertools import starmap
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from contrastive_zoo.engine.precision import concatenated
from contrastive_zoo.loss_base.loss_modules import without_ddp
from contrastive_zoo.loss_base.settings import Bounds, Settings, Size, field
from contrastive_zoo.loss_base.shapes import ROWS, shapes_of, shapes_problem
from contrastive_zoo.loss_base.state import Stateful, computed_again_problem, move_towards
from contrastive_zoo.ranks.compiling import uncompiled
from contrastive_zoo.ranks.devices import is_fsdp, is_in_fsdp, values_problem
from contrastive_zoo.ranks.row_checks import array_in_one_line, described, tensor_problem, word_problem
from contrastive_zoo.ranks.session import agree, refuse
from contrastive_zoo.ranks.transport import gather_rows
from contrastive_zoo.ranks.world import Processes, Shards, World

NO_RING_OF_A_MEMORY = "every rank holds the memory that it compares with, so a ring would save nothing"


class MemoryQueue(Settings, Stateful):
    """Store the last ``size`` embeddings of all ranks with a label each: a ring buffer, the same bytes on every rank.

    Embeddings enter in rank order, one by one, and overwrite the oldest, so the content does not depend on how they were
    split into batches and shards. A ``state_dict`` restores them bit by bit, also on another number of processes.

    Args:
        size: number of embeddings that fit.
        embedding_size: width d of an embedding.
        dtype: of the stored embeddings; None is torch's default. ``module.double()`` changes it, as of any buffer.

    Raises:
        ValueError: a size or width below 1, or a dtype that is not floating.
        RuntimeError: a ``state_dict`` of another shape or with impossible values, such as more embeddings than fit; the
            memory then does not change.

    Examples:
        >>> memory = MemoryQueue(3, embedding_size=1)
        >>> memory.enqueue(torch.tensor([[1.0], [2.0], [3.0], [4.0]]))   # row 3 overwrites row 0
        tensor([-1,  1,  2,  0])
        >>> memory.rows.T, len(memory)
        (tensor([[4., 2., 3.]]), 3)

    Source: He et al. 2020, §3.2, https://arxiv.org/abs/1911.05722
    """

    size: Size = field(kw_only=False)
    embedding_size: Size = field(kw_only=False)
    dtype: torch.dtype | None = None

    embeddings: Float[Tensor, "size d"] = field(init=False)
    ids: Int[Tensor, " size"] = field(init=False)
    pointer: Int[Tensor, ""] = field(init=False)
    filled: Int[Tensor, ""] = field(init=False)

    def settings_problem(self) -> str | None:
        dtype = self.dtype
        fits = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1)
        problem = None if fits else f"dtype is a floating one of 16 bits or more, got {dtype}."
        return super().settings_problem() or problem

    def __post_init__(self) -> None:
        self.embeddings = nn.Buffer(torch.zeros(self.size, self.embedding_size, dtype=self.dtype))
        self.ids = nn.Buffer(torch.zeros(self.size, dtype=torch.int64))
        self.pointer, self.filled = (nn.Buffer(torch.zeros((), dtype=torch.int64)) for _ in range(2))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load all buffers or none: embeddings with another ring's pointer would be overwritten in the wrong order."""
        *_, missing_keys, _, error_messages = args
        saved = {name: state_dict.get(prefix + name) for name in self._buffers}
        missing = [prefix + name for name, x in saved.items() if x is None]
        missing_keys.extend(missing)
        problem = None if missing else self._ring_problem(saved)
        if problem is not None:
            error_messages.append(f"{type(self).__name__}: {problem} It stays as it was.")
        elif not missing:
            super()._load_from_state_dict(state_dict, prefix, *args)

    def _ring_problem(self, saved: Mapping[str, Any]) -> str | None:
        """Return which saved buffers are those of no ring of this size, in words, or None."""
        for name, x in saved.items():
            if x.shape != getattr(self, name).shape:
                return f"{name} are {described(getattr(self, name))} here, the state dict holds {described(x)}."
        pointer, filled = int(saved["pointer"]), int(saved["filled"])
        if not 0 <= filled <= self.size or not 0 <= pointer < self.size or (filled < self.size and pointer != filled):
            return f"a ring of {self.size} slots has no pointer={pointer} with filled={filled}."
        return None

    def __len__(self) -> int:
        """Return the number of stored embeddings."""
        return int(self.filled)

    @property
    def rows(self) -> Float[Tensor, "m d"]:
        """Return the stored embeddings by slot: a copy, since slots are overwritten while a graph may still need them."""
        return self.embeddings[: len(self)].clone()

    @property
    def labels(self) -> Int[Tensor, " m"]:
        """Return the labels of :attr:`rows`; 0 where none were given."""
        return self.ids[: len(self)].clone()

    def shards(self, world: World) -> Shards:
        """Return a split of :attr:`rows` over the ranks, as even as possible."""
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
        """Store the embeddings of all ranks. Every rank must call it.

        Args:
            rows: [n, d] of this rank, n may differ between ranks. They are stored without gradient.
            labels: one integer per embedding.
            enqueue_mask: which of this rank's embeddings to store; None is all.
            process_group: the ranks.

        Returns:
            The slot of each of this rank's embeddings; −1 for one that is not stored.

        Raises:
            ValueError: on every rank: embeddings of another width, or NaN or infinite ones, labels or a mask that are not
                one per embedding, or ranks that differ in dtype or arguments.
        """
        world = World.of(process_group, "MemoryQueue")
        if problem := values_problem(self) or computed_again_problem(self) or tensor_problem("rows", rows):
            refuse("MemoryQueue", problem, world=world)
        rows = rows.detach()
        arguments = {"rows": rows, "labels": labels, "enqueue_mask": enqueue_mask}
        present = {name: x for name, x in arguments.items() if x is not None}
        problem = next(filter(None, starmap(tensor_problem, present.items())), None)
        problem = problem or shapes_problem(arguments, _SHAPES) or self.width_problem(rows)
        state = self.compared_state()
        (shards, *_) = agree("MemoryQueue", present, world=world, problem=problem, settings=state).shards
        return self.write(rows, labels, enqueue_mask, shards, world)[shards.local]

    @torch.no_grad()
    def write(
        self, rows: Tensor, labels: Tensor | None, mask: Tensor | None, shards: Shards, world: World
    ) -> Int[Tensor, " N"]:
        """Store the embeddings without checks or handshake; return the slots of all ranks' embeddings."""
        before = sum(len(x) for x, _ in self.recorded)
        entering, slots = self.entering(rows, labels, mask, shards, world, before)
        self.record(entering)
        return slots

    @torch.no_grad()
    def holding(self, entering: tuple[Tensor, Tensor]) -> "MemoryQueue":
        """Return a memory that holds these embeddings and labels, too; this one does not change."""
        held = copy.copy(self)
        held._buffers = {name: x if x is None else x.clone() for name, x in self._buffers.items()}
        held.move([entering])
        return held

    @torch.no_grad()
    def entering(
        self, rows: Tensor, labels: Tensor | None, mask: Tensor | None, shards: Shards, world: World, before: int = 0
    ) -> tuple[tuple[Tensor, Tensor], Int[Tensor, " N"]]:
        """Return all ranks' embeddings and labels that enter, and the slots of all, if ``before`` others enter first."""
        device = self.embeddings.device
        rows = gather_rows(rows, shards, world).to(device)
        labels = self.ids.new_zeros(len(rows)) if labels is None else gather_rows(labels, shards, world).to(self.ids)
        mask = None if mask is None else gather_rows(mask, shards, world).to(device)
        entering = torch.arange(len(rows), device=device) if mask is None else mask.nonzero().flatten()
        slots = torch.full_like(labels, -1)
        slots[entering[-self.size :]] = self._next_slots(len(entering), before)
        return (rows[entering], labels[entering]), slots

    def _next_slots(self, count: int, before: int = 0) -> Int[Tensor, " stored"]:
        order = torch.arange(before, before + count, device=self.pointer.device)
        return ((self.pointer + order) % self.size)[-self.size :]

    def move(self, calls: Sequence[tuple[Tensor, Tensor]]) -> None:
        rows, labels = (concatenated(*x) for x in zip(*calls, strict=True))
        slots = self._next_slots(len(rows))
        self.embeddings[slots] = rows[-self.size :].to(self.embeddings.dtype)
        self.ids[slots] = labels[-self.size :]
        self.pointer.add_(len(rows)).remainder_(self.size)
        self.filled.add_(len(rows)).clamp_(max=self.size)

    def compared_state(self) -> dict[str, Any]:
        """Return the state that must be equal on every rank; with a digest at about every 64th call."""
        pointer = int(self.pointer)
        state: dict[str, Any] = {"the memory's size": self.size, "the memory's pointer": pointer, "its fill": len(self)}
        if pointer * _MIXER % 2**32 < 2**26:
            rows = (x.contiguous().view(torch.uint8).cpu().numpy() for x in (self.rows, self.labels))
            state["its content"] = " and ".join(map(array_in_one_line, rows))
        return state

    def width_problem(self, rows: Tensor) -> str | None:
        held, width = self.embeddings.shape[1], rows.shape[1]
        if width == held:
            return None
        return f"the memory holds rows of width {held}, got {described(rows)}. Pass embedding_size={width}."


_SHAPES = {
    "rows": ROWS, "labels": shapes_of(Int[Tensor, " n"]), "enqueue_mask": shapes_of(Bool[Tensor, " n"])
}  # fmt: skip

_MIXER = 2654435761  # Knuth's multiplier, which spreads pointers that are multiples of the batch size evenly over 2³²


Buffers = Literal["own", "copy"]


class MomentumEncoder(Stateful):
    """A moving average of an encoder's parameters, whose keys change little over many steps.

        θ_k ← m θ_k + (1 − m) θ_q        at every update

    Its outputs carry no gradient.

    Args:
        encoder: copied at construction, without DDP around it.
        momentum: m in [0, 1]. An attribute, for schedules.
        buffers: ``"own"``, as in MoCo: the copy's own forward passes update its buffers, so BatchNorm has the statistics of
            the keys. ``"copy"``: every update copies the encoder's buffers.

    Raises:
        ValueError: a momentum outside [0, 1], unknown ``buffers``, an encoder that FSDP has sharded; at an update, an
            encoder with other parameters or buffers, one not sharded as the copy is, or in a forward pass of FSDP.

    Examples:
        >>> encoder = nn.Linear(1, 1, bias=False)
        >>> keys = MomentumEncoder(encoder, momentum=0.9)
        >>> _ = nn.init.ones_(encoder.weight), nn.init.zeros_(keys.encoder.weight)
        >>> keys.update(encoder)
        >>> keys(torch.ones(1, 1))
        tensor([[0.1000]])

    Source: He et al. 2020, eq. 2, https://arxiv.org/abs/1911.05722
    """

    def __init__(self, encoder: nn.Module, *, momentum: float = 0.999, buffers: Buffers = "own") -> None:
        super().__init__()
        if not isinstance(encoder, nn.Module):
            raise ValueError(f"MomentumEncoder: the encoder is a torch.nn.Module, got {described(encoder)}.")
        if problem := _momentum_problem(momentum) or word_problem("buffers", buffers, Buffers):
            raise ValueError(f"MomentumEncoder: {problem}")
        bare = without_ddp(encoder)
        if any(map(is_fsdp, bare.modules())):
            raise ValueError(
                "MomentumEncoder: the encoder is sharded, and FSDP does not let it be copied. First make "
                "keys = MomentumEncoder(encoder), then call fully_shard(encoder) and fully_shard(keys.encoder)."
            )
        self.encoder = copy.deepcopy(bare).requires_grad_(False)
        self.momentum = momentum
        self.buffers_from = buffers

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the copy's output, without gradient."""
        return self.encoder(*args, **kwargs)

    @torch.no_grad()
    def update(self, encoder: nn.Module) -> None:
        """Move the parameters towards those of ``encoder``, which was copied; call it after each optimizer step.

        Raises:
            ValueError: as the class documents; nothing is moved then.
        """
        if not isinstance(encoder, nn.Module):
            raise ValueError(f"MomentumEncoder: update takes the encoder that was copied, got {described(encoder)}.")
        new, old = self._tensors(without_ddp(encoder)), self._tensors(self.encoder)
        kind = "shape", "device_mesh", "placements"
        layouts = [{name: [getattr(x, of, None) for of in kind] for name, x in of.items()} for of in (old, new)]
        problem = _momentum_problem(self.momentum)
        flat = [x for x in self.encoder.modules() if type(x).__name__ == "FullyShardedDataParallel"]  # of FSDP1
        if any(x.sharding_strategy.name != "NO_SHARD" for x in flat):
            problem = "FSDP1 drops what moves. Shard both encoders by fully_shard, or use ShardingStrategy.NO_SHARD."
        elif any(map(_is_gathered, (*encoder.modules(), *self.encoder.modules()))):
            problem = "FSDP has gathered parameters and will drop what moves now. Call update after optimizer.step()."
        elif differ := [name for name in old.keys() | new.keys() if layouts[0].get(name) != layouts[1].get(name)]:
            problem = f"update takes the encoder that was copied, got one that differs in {min(differ)!r}."
            problem += " If you shard one of the two, shard both: fully_shard(encoder), fully_shard(keys.encoder)."
        if problem:
            raise ValueError(f"MomentumEncoder: {problem}")
        self.record(new)

    def move(self, calls: Sequence[Mapping[str, Tensor]]) -> None:
        new = calls[-1]
        for name, x in self._tensors(self.encoder).items():
            if isinstance(x, nn.Parameter):
                move_towards(x, new[name], 1 - self.momentum)
            else:
                x.copy_(new[name])

    def _tensors(self, encoder: nn.Module) -> dict[str, Tensor]:
        """Return what an update reads: the parameters by name, and the buffers if they are copied."""
        for module in filter(is_fsdp, encoder.modules()):
            # FSDP keeps the parameters of the root whole from a forward pass to its backward pass
            module.reshard()  # type: ignore[operator]  # a method of FSDPModule
        buffers = encoder.named_buffers() if self.buffers_from == "copy" else ()
        return {**dict(encoder.named_parameters()), **dict(buffers)}

    def extra_repr(self) -> str:
        return f"momentum={self.momentum}, buffers={self.buffers_from!r}"


def _is_gathered(module: nn.Module) -> bool:
    """Return whether a forward pass of a module around this one, which ``fully_shard`` got, has gathered its parameters."""
    parameters = [x for x in module._parameters.values() if x is not None and is_in_fsdp(module)]
    marks = "device_mesh", "_fsdp_flattened"  # of fully_shard, of FSDP1
    is_split = any(hasattr(x, mark) for x in parameters for mark in marks)
    return bool(parameters) and not is_split


def _momentum_problem(momentum: object) -> str | None:
    return Bounds("momentum is in [0, 1]", "MoCo's is 0.999.", low=0, high=1).problem("momentum", momentum)
