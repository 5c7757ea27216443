"""The batch that a loss is computed from: its embeddings by name, their split over ranks, and the step's settings."""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from contrastive_zoo.engine.plan import ALONE, Plan
from contrastive_zoo.engine.precision import at_least_float32, concatenated, is_16_bit, matmul, sum_dtype, unit_rows
from contrastive_zoo.ranks.adjoints import Gradient, all_reduced, scale_gradient
from contrastive_zoo.ranks.collectives import all_gather, replicated
from contrastive_zoo.ranks.devices import ValueCheck
from contrastive_zoo.ranks.differences import failing_together
from contrastive_zoo.ranks.session import Session
from contrastive_zoo.ranks.suggestions import first_time, warn_once
from contrastive_zoo.ranks.transport import gather_rows, reduced_everywhere
from contrastive_zoo.ranks.world import ONE_PROCESS, Shards, World

Reduction = Literal["mean", "sum", "none"]


def mean_divisor(count: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """Return the divisor of a mean: the count, at least 1, or infinity if nothing counts."""
    return count.clamp(min=1).where(count > _NEGLIGIBLE_COUNT, torch.inf)


_NEGLIGIBLE_COUNT = 2.0**-100  # of 2²⁶ anchors that each count 2⁻¹²⁶ times, float32's smallest normal number


@dataclass(frozen=True)
class Part:
    """A member's view of the batch of a sum of losses: in ``names`` the batch's name of each of its tensors."""

    names: Mapping[str, str]
    parts: Sequence["Part"] = ()
    host: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    whole: Collection[str] = ()  # of its tensors, those that are no embeddings of the trained model


class SharedRows(NamedTuple):
    """Local rows that several losses of a sum compare, and a function that gathers them once for all of these."""

    local: Tensor
    gathered: Callable[[], Tensor]

    def prefix(self, local: Tensor) -> "SharedRows":
        """Return the first features of these rows, of which the local ones are given."""
        return SharedRows(local, lambda: self.gathered()[..., : local.shape[-1]])


@dataclass(frozen=True)
class Batch:
    """What all ranks have agreed to compute a loss from; its methods are all that a formula needs of other ranks.

    ``rows`` are the local tensors by name, or those of all ranks where every process computes all of the loss. Then
    ``local_slice`` says which are this rank's; the others need no gradient. ``host`` is what the host has read of them.
    """

    rows: Mapping[str, Tensor]
    shards: Mapping[str, Shards]
    settings: SimpleNamespace = field(default_factory=SimpleNamespace)
    world: World = ONE_PROCESS
    plan: Plan = ALONE
    local_slice: slice | None = None
    parts: Sequence[Part] = ()
    host: Mapping[str, Any] = field(default_factory=dict)
    name: str = "Loss"
    shared_rows: Mapping[str, SharedRows] = field(default_factory=dict)

    @property
    def first(self) -> Tensor:
        return next(iter(self.rows.values()))

    @property
    def samples(self) -> Shards:
        """The split of the first of the tensors over the ranks."""
        return next(iter(self.shards.values()))

    @property
    def total(self) -> int:
        """The number of samples of all ranks: rows of the first of the tensors."""
        return self.samples.total

    def member(self, index: int) -> "Batch":
        part = self.parts[index]
        rows = {name: self.rows[merged] for name, merged in part.names.items()}
        shards = {name: self.shards[merged] for name, merged in part.names.items()}
        shared = {name: self.shared_rows[merged] for name, merged in part.names.items() if merged in self.shared_rows}
        return replace(
            self, rows=rows, shards=shards, settings=self.settings.members[index], plan=self.plan.members[index],
            parts=part.parts, host=part.host, name=part.name, shared_rows=shared,
        )  # fmt: skip

    def with_shared_rows(self) -> "Batch":
        """Return the batch of a sum of losses, which gathers each tensor once; a ring gathers none."""
        if self.shared_rows or self.plan.work != "own anchors" or self.plan.movement == "ring":
            return self
        # labels.long() of a loss is then the tensor that all share
        rows = {name: x.long() if x.dtype in _SHORT_INTEGERS else x for name, x in self.rows.items()}

        def gathered(name: str) -> Tensor:
            return gather_rows(self.rows[name].detach(), self.shards[name], self.world).to(rows[name].dtype)

        shared = {name: SharedRows(x, functools.cache(functools.partial(gathered, name))) for name, x in rows.items()}
        return replace(self, rows=rows, shared_rows=shared)

    def prepared(self, rows: Tensor, *, normalize: bool) -> Tensor:
        """Return embeddings in at least float32, of unit length if asked; zeros stay zeros."""
        wide = at_least_float32(rows)
        return unit_rows(wide) if normalize else wide

    def candidates(self, *names: str, normalize: bool) -> "Candidates":
        """Return the prepared embeddings of these names, concatenated, [n, d]."""
        local = concatenated(*(self.prepared(self.rows[name], normalize=normalize) for name in names))
        shards = functools.reduce(Shards.plus, (self.shards[name] for name in names))
        gathered = functools.partial(self.gather_shared, *names, normalize=normalize)
        return Candidates(local.flatten(0, -2), shards, gathered)

    def gather_shared(self, *names: str, normalize: bool | None) -> Tensor | None:
        """Return what :meth:`candidates` makes of all ranks' rows, or these as they came, if losses of a sum share them."""
        shared = [self.shared_rows.get(name) for name in names]
        if any(x is None or x.local is not self.rows[name] for name, x in zip(names, shared, strict=True)):
            return None
        with torch.no_grad():
            gathered = [x.gathered() for x in shared if x]
            rows = gathered if normalize is None else [self.prepared(x, normalize=normalize) for x in gathered]
            parts = (x.split(self.shards[name].sizes) for name, x in zip(names, rows, strict=True))
            return concatenated(*chain.from_iterable(zip(*parts, strict=True))).flatten(0, -2)

    def factors(self, rows: Sequence[Tensor]) -> list[Tensor] | None:
        """Return embeddings of 16 bits, which matmuls take and ranks send as they came: unit ones would be rounded."""
        return None if self.plan.is_plain or not is_16_bit(rows[0].dtype) else [*rows]

    def prefix(self, width: int, whole: Collection[str]) -> "Batch":
        """Return the batch with the first features of each embedding only; ``whole`` are no embeddings."""
        rows = prefixes(self.rows, width, whole)
        shared = {name: x if rows[name] is x.local else x.prefix(rows[name]) for name, x in self.shared_rows.items()}
        return replace(self, rows=rows, shared_rows=shared)

    def indices(self, name: str | None = None, *, times: int = 1) -> Tensor:
        """Return the indices of the local samples among those of all ranks, ``times`` one after the other."""
        shards = self.samples if name is None else self.shards[name]
        return torch.arange(shards.start, shards.start + shards.size, device=self.first.device).repeat(times)

    def gather_detached(self, rows: Tensor, shards: Shards | None = None) -> Tensor:
        """Return the rows of all ranks, without gradient; do not write to them, as losses of a sum may share them."""
        for x in self.shared_rows.values():
            if x.local is rows:
                return x.gathered()
        return gather_rows(rows, self.samples if shards is None else shards, self.world)

    def failing_together(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return what ``compute`` returns, or raise on every rank: one without samples may not see what others refuse."""
        return failing_together(self.name, compute, self.world if 0 in self.samples.sizes else ONE_PROCESS)

    def note_labels(self, labels: Tensor) -> None:
        """Let the wrapper see the labels of all ranks: it looks whether any two samples share one."""
        if isinstance(self.world, Session):
            self.world.findings.labels = labels

    def note_ids(self, ids: Tensor, warning: str) -> None:
        """Warn, at the wrapper's next call, if a rank's first ids of samples are all among those of other ranks."""
        local = self.samples.local if self.local_slice is None else self.local_slice
        later = self.world.findings.later if isinstance(self.world, Session) else None
        if later is None or len(ids[local]) < _LEAST_IDS or not first_time(f"{self.name}'s ids"):
            return

        def warn(is_repeated: Sequence[Any]) -> None:
            if is_repeated[0]:
                warn_once(f"{self.name}: {warning}")

        others = torch.cat([ids[: local.start], ids[local.stop :]])
        later.append(ValueCheck(torch.isin(ids[local], others).all()[None], warn))

    def gather_with_gradient(self, rows: Tensor) -> Tensor:
        """Return the embeddings of all ranks, from which every rank computes the same: each gets the gradient of its own."""
        return all_gather(rows, gradient="complete", shards=self.samples, process_group=self.world)

    def products(self, kind: str, *, normalize: bool) -> Float[Tensor, "n M"]:
        """Return dot products of local embeddings, the first whose name ends so, and all ranks' of the other such names."""
        names = [name for name in self.rows if name.endswith(kind)]
        first, *others = (self.prepared(self.rows[name], normalize=normalize) for name in names)
        shards = (self.shards[name] for name in names[1:])
        gathered = [all_gather(x, shards=of, process_group=self.world) for x, of in zip(others, shards, strict=True)]
        return matmul(first, torch.cat(gathered).T)

    def sum(self, x: Tensor, *, gradient: Gradient) -> Tensor:
        """Return the sum of ``x`` over ranks: ``"complete"`` if all of them compute the same from it, else ``"partial"``."""
        return all_reduced(x, "sum", gradient, self.world)

    def maximum(self, x: Tensor) -> Tensor:
        """Return the largest ``x`` of all ranks, element by element, without gradient."""
        return reduced_everywhere(x, "max", self.world)

    def log_sum_exp(self, x: Tensor, *, gradient: Gradient) -> Tensor:
        """Return the elementwise ``logsumexp`` of ``x`` over ranks; it may be −inf on some of them, but not on all."""
        top = self.maximum(x.detach())
        return top + self.sum((x - top).exp(), gradient=gradient).log()

    def shared(self, x: Tensor) -> Tensor:
        """Return a parameter for use with local embeddings: its gradient is summed over ranks."""
        return replicated(x, process_group=self.world)

    @functools.cached_property
    def shared_settings(self) -> SimpleNamespace:
        """The settings for use with local embeddings: the gradients of learnt ones are summed over ranks."""
        learnt = {name: self.shared(x) for name, x in vars(self.settings).items() if isinstance(x, Tensor)}
        return SimpleNamespace(**{**vars(self.settings), **learnt})

    def sharded(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return a parameter of which each rank holds another part: no trainer adds up its gradients."""
        factor = self.world.sharded_factor if isinstance(self.world, Session) else 1.0
        return scale_gradient(x, factor)

    def scale(self, temperature: float | Tensor) -> float | Tensor:
        """Return 1 / temperature; a tensor gets the gradient of all ranks, each of which uses it for its own."""
        return 1 / at_least_float32(self.shared(temperature)) if isinstance(temperature, Tensor) else 1 / temperature

    def reduce(
        self,
        losses: Float[Tensor, " n"] | Float[Tensor, "n k"],
        valid: Shaped[Tensor, " n"] | Shaped[Tensor, "n k"] | None = None,
        *,
        reduction: Reduction = "mean",
    ) -> Float[Tensor, "..."]:
        """Return Σ losses / Σ valid over all ranks' anchors (``"mean"``), their sum, or the local losses (``"none"``).

        An anchor that is not valid does not count and gets no gradient. Without a valid anchor the result is a zero that
        is connected to the graph, so that every rank takes part in the collectives of the backward pass. ``valid`` may
        also count the pairs of an anchor whose loss is a sum over pairs: the mean is then one over pairs. A count may be
        tiny, to add the anchor's loss to the sum only; a mean over such anchors alone is 0. Columns are separate terms:
        the result is the sum of their means.
        """
        if valid is not None:
            losses = losses.where(valid > 0, 0)
        if reduction == "none":
            return losses if losses.ndim == 1 else losses.sum(1)
        total = losses.sum(0, dtype=sum_dtype(losses))
        count = torch.full_like(total, len(losses)) if valid is None else valid.sum(0, dtype=sum_dtype(losses))
        # every rank derives the same value from the sum, so the gradient on each rank is already complete
        total, count = self.sum(torch.stack([total, count]), gradient="complete").unbind()
        return (total if reduction == "sum" else total / mean_divisor(count.detach())).sum().to(losses.dtype)


_SHORT_INTEGERS = torch.int8, torch.uint8, torch.int16, torch.int32

_LEAST_IDS = 8  # of a rank: a small data set repeats fewer by chance, a sampler a few in its last batch


class Candidates(NamedTuple):
    """Prepared embeddings of this rank, their split over ranks, and what returns shared ones of all ranks."""

    local: Tensor
    shards: Shards
    gathered: Callable[[], Tensor | None]


def is_embedding(x: Tensor) -> bool:
    """Return whether a tensor holds features, in its last dimension."""
    return x.is_floating_point() and x.ndim > 1


def prefixes(rows: Mapping[str, Tensor], width: int | None, whole: Collection[str]) -> dict[str, Tensor]:
    """Return the first features of all embeddings, and other tensors as they are."""
    return {name: x if name in whole or not is_embedding(x) else x[..., :width] for name, x in rows.items()}
