"""Any loss that is a sum over anchors, from a function that says what one panel of anchors loses.

The function sees the panel's anchors, the columns of all ranks, and which columns are positive and negative; it is
plain torch. Panels are c × N, so memory is linear in N. The outer sum is linear, hence its gradient can be taken panel
by panel already in the forward pass, and only divided by the global count afterwards:

    dq, dZ, dφ = ∂(Σ valid losses of the panel) / ∂(anchors, columns, φ)
    dq is complete; dZ, my anchors' pull on everybody's rows, is summed back to their owners; dφ is summed over ranks
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from contrastive_zoo.collectives import all_gather, gather_rows, reduce_scatter_rows, replicated, sum_over_ranks
from contrastive_zoo.compiling import Function
from contrastive_zoo.engine import tiling
from contrastive_zoo.engine.dense_mode import is_dense
from contrastive_zoo.engine.derivatives import inner_graph, once
from contrastive_zoo.engine.malloc import keep_freed_memory
from contrastive_zoo.engine.passes import shared_by_panels
from contrastive_zoo.engine.precision import without_autocast
from contrastive_zoo.engine.reduction import Reduction, divisor, reduce_anchors
from contrastive_zoo.engine.similarity_budget import budget
from contrastive_zoo.engine.tiling import TILE_BYTES
from contrastive_zoo.session import Replicate, Session
from contrastive_zoo.world import Shards, World


@dataclass(frozen=True)
class Panel:
    """c of this rank's anchors, and the N columns of all ranks."""

    anchors: Float[Tensor, "c d"]
    columns: Float[Tensor, "N d"]
    positive: Bool[Tensor, "c N"]
    """The column has the anchor's id, and is not the anchor itself."""
    negative: Bool[Tensor, "c N"]
    """The column has another id."""
    ids: Int[Tensor, " c"]
    """Of the anchors."""
    column_ids: Int[Tensor, " N"]
    companions: tuple[tuple[Tensor, Tensor], ...] = ()
    """Further facts without gradient, each for the anchors and for the columns, such as a guide's embeddings."""


PanelLoss = Callable[[Panel], tuple[Tensor, Tensor]]
"""A panel to (loss [c], whether it counts, or how many times, [c]) of its anchors; row by row.

A loss whose mean is taken over pairs or triplets gives its anchors' sums and their numbers of pairs. One that adds up
several means has them as columns, [c, k] both, and says k in its attribute ``terms``.
"""


def sum_over_anchors(
    loss: nn.Module,
    z: Float[Tensor, "n d"],
    ids: Int[Tensor, " n"],
    *,
    shards: Shards,
    world: World,
    columns: Float[Tensor, "m d"] | None = None,
    column_ids: Int[Tensor, " m"] | None = None,
    column_shards: Shards | None = None,
    companions: Sequence[tuple[Tensor, Tensor]] = (),
    reduction: Reduction = "mean",
) -> Float[Tensor, "..."]:
    """What ``loss.on_panel`` says of every anchor, reduced over the valid ones of all ranks.

    Equal to ``reduce(*loss.on_panel(Panel(Z, columns, …)))`` with the rows of all ranks at once.

    Args:
        loss: a module whose method ``on_panel(panel)`` returns a loss and a validity or a count per anchor, of each of
            ``loss.terms`` means (1 if it does not say). Its parameters get their complete gradient on every rank.
        z: my anchors.
        ids: of my anchors; columns with an equal id are their positives.
        shards: where everybody's anchors are.
        world: who holds them.
        columns: my columns; None if anchors and columns are the same rows, and then no row is its own positive.
        column_ids: of my columns.
        column_shards: where everybody's columns are.
        companions: pairs of [n, …] for my anchors and [m, …] for my columns, without gradient.
        reduction: ``"mean"``, ``"sum"``, or ``"none"`` for my anchors' losses.

    Example:
        >>> class Nearest(nn.Module):
        ...     def on_panel(self, panel):
        ...         s = panel.anchors @ panel.columns.T
        ...         return s.masked_fill(~panel.negative, -9.0).amax(1), panel.negative.any(1)
        >>> from contrastive_zoo.world import ALONE
        >>> sum_over_anchors(Nearest(), torch.eye(2), torch.arange(2), shards=Shards((2,)), world=ALONE)
        tensor(0.)
    """
    one_tower = columns is None
    layout = _Layout(
        ids,
        gather_rows(ids if column_ids is None else column_ids, column_shards or shards, world),
        tuple((mine, gather_rows(theirs, column_shards or shards, world)) for mine, theirs in companions),
        column_shards or shards,
        world,
        shards.start if one_tower else None,
    )
    names, parameters = _parameters(loss)
    if is_dense():
        return _dense(
            loss, z, z if columns is None else columns, layout, dict(zip(names, parameters, strict=True)), reduction
        )
    terms, learns = getattr(loss, "terms", 1), torch.is_grad_enabled()
    return _SumOverAnchors.apply(loss.on_panel, terms, reduction, layout, learns, z, columns, *parameters)


@dataclass(frozen=True)
class _Layout:
    """Who is whose positive, and where columns live."""

    ids: Tensor
    column_ids: Tensor
    companions: tuple[tuple[Tensor, Tensor], ...]
    column_shards: Shards
    world: World
    own_from: int | None
    """The column at which my first anchor stands, where anchors are columns too."""

    @cached_property
    def _numbered(self) -> tuple[Tensor, Tensor]:
        """Ids of anchors and columns as numbers 0, 1, … that floats hold."""
        numbers = torch.cat([self.ids, self.column_ids]).unique(return_inverse=True)[1]
        mine, everybody = numbers.to(torch.float32 if len(numbers) < 2**24 else torch.float64).split(
            [len(self.ids), len(self.column_ids)]
        )
        return mine, everybody

    def _same(self, rows: slice) -> Tensor:
        if self.ids.device.type != "cpu":
            return self.ids[rows, None] == self.column_ids
        # a processor compares floats with floats several numbers at a time, and anything with booleans one by one
        mine, everybody = self._numbered
        return torch.eq(mine[rows, None], everybody, out=mine.new_empty(len(mine[rows]), len(everybody))).bool()

    def panel(self, rows: slice, anchors: Tensor, columns: Tensor) -> Panel:
        ids = self.ids[rows]
        positive = self._same(rows)
        negative = ~positive
        if self.own_from is not None:
            positive.diagonal(self.own_from + rows.start).fill_(False)
        companions = tuple((mine[rows], everybody) for mine, everybody in self.companions)
        return Panel(anchors, columns, positive, negative, ids, self.column_ids, companions)


def _parameters(loss: nn.Module) -> tuple[list[str], list[Tensor]]:
    learnable = {f"loss.{name}": x for name, x in loss.named_parameters() if x.requires_grad}
    return list(learnable), list(learnable.values())


@without_autocast
def _dense(
    loss: nn.Module, z: Tensor, columns: Tensor, layout: _Layout, parameters: dict[str, Tensor], reduction: Reduction
) -> Tensor:
    """The definition: one panel of all my anchors, plain autograd."""
    everybody = all_gather(columns, shards=layout.column_shards, process_group=layout.world)
    panel = layout.panel(slice(0, len(z)), z, everybody)
    shared = {name: replicated(x, process_group=layout.world) for name, x in parameters.items()}
    losses, valid = torch.func.functional_call(_OnPanel(loss), shared, (panel,))
    return reduce_anchors(losses, valid, reduction=reduction, world=layout.world)


class _OnPanel(nn.Module):
    """``loss.on_panel`` as a forward, so that functional_call can lend it other parameters."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, panel: Panel) -> tuple[Tensor, Tensor]:
        on_panel: PanelLoss = self.loss.on_panel  # type: ignore[assignment]  # nn.Module types attributes as tensors
        return on_panel(panel)


class _SumOverAnchors(Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        on_panel: PanelLoss,
        terms: int,
        reduction: Reduction,
        layout: _Layout,
        learns: bool,
        z: Tensor,
        columns: Tensor | None,
        *parameters: Tensor,
    ) -> Tensor:
        """``learns``: whether anybody may ask for gradients; a leaf says that it needs one under ``no_grad``, too."""
        everybody = gather_rows(z if columns is None else columns, layout.column_shards, layout.world)
        sweep = _Sweep(on_panel, terms, layout, z, everybody, parameters)
        ctx.sweep_of, ctx.reduction, ctx.one_tower = (on_panel, terms, layout), reduction, columns is None
        inputs = [z, *([] if columns is None else [columns]), *parameters]
        ctx.count_inputs, ctx.has_gradients = len(inputs), False
        ctx.save_for_backward(*inputs, everybody)  # saved tensors, unlike attributes, go with the graph
        watched = layout.world.progress.changes if isinstance(layout.world, Session) else None
        if reduction == "none":  # each anchor's weight is known in the backward pass only
            of_anchors = sweep.losses()[0].sum(1)
            if watched and sum_over_ranks(torch.tensor(float(watched())), gradient="complete", world=layout.world) > 0:
                raise ValueError(_DRAWS)
            return of_anchors
        if learns and any(ctx.needs_input_grad) and (terms == 1 or reduction == "sum"):
            losses, counts, *gradients = sweep.gradients()
            ctx.has_gradients = True
            ctx.save_for_backward(*inputs, *gradients)
        else:  # each term has its own weight, which is known after the whole sweep
            losses, counts = sweep.losses()
        sums = [x.sum(0, dtype=torch.float64) for x in (losses, counts)]
        if watched:
            sums.append(torch.full_like(sums[0], watched()))
        total, count, *changed = sum_over_ranks(torch.stack(sums), gradient="complete", world=layout.world).unbind()
        if any(bool(x.any()) for x in changed):  # on some rank, as all of them now know
            raise Replicate
        ctx.count = divisor(count) if reduction == "mean" else torch.ones_like(count)
        return (total / ctx.count).sum().to(z.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: a checkpoint computes them again at the first look, and refuses a second
        inputs, rest = saved[: ctx.count_inputs], saved[ctx.count_inputs :]
        if not ctx.has_gradients:
            on_panel, terms, layout = ctx.sweep_of
            parameters = inputs[1 if ctx.one_tower else 2 :]
            sweep = _Sweep(on_panel, terms, layout, inputs[0], rest[0], parameters)
            weights = grad_output[:, None] if ctx.reduction == "none" else grad_output / ctx.count
            with torch.no_grad():
                gradients = sweep.gradients(weights=weights.expand(len(inputs[0]), terms))[2:]
        else:
            weight = (grad_output / ctx.count[0]).to(grad_output.dtype)
            gradients = [weight * gradient for gradient in rest]
        dz, dcolumns, *dparameters = gradients
        of_rows = [dz + dcolumns, None] if ctx.one_tower else [dz, dcolumns]
        return None, None, None, None, None, *(once(gradient, *inputs) for gradient in [*of_rows, *dparameters])


_DRAWS = (
    "reduction='none': the loss draws random numbers or changes a buffer as it is computed, so every rank must compute it "
    "from the rows of all ranks, and none has its own anchors' losses. Use reduction='mean' or 'sum'."
)

_MATRICES, _AT_LEAST = 16, 4
"""That a loss makes out of a panel: as many as Circle does, and how many a simple one."""

_LOW = 64
"""Rows of a panel whose own cost, a pass over all columns' gradients, would be felt."""


class _Sweep:
    """One pass over my anchors, panel by panel."""

    def __init__(
        self,
        on_panel: PanelLoss,
        terms: int,
        layout: _Layout,
        z: Tensor,
        everybody: Tensor,
        parameters: Sequence[Tensor],
    ) -> None:
        self.on_panel, self.terms, self.layout, self.parameters = on_panel, terms, layout, parameters
        self.z, self.everybody = z.detach(), everybody.detach()

    def _panels(self) -> Iterator[slice]:
        row = max(1, len(self.everybody)) * self.z.dtype.itemsize
        room = max(TILE_BYTES, budget())
        if self.z.device.type == "cpu":  # beyond its cache every pass takes longer
            room = min(room, tiling.PANEL_BYTES)
        # a low one may have more than its share
        height = max(1, room // (_MATRICES * row), min(_LOW, room // (_AT_LEAST * row)))
        return (slice(top, min(top + height, len(self.z))) for top in range(0, len(self.z), height))

    def _of(self, rows: slice, anchors: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Losses and counts of a panel's anchors, [c, terms]; what does not count is zero."""
        losses, counts = (x.reshape(-1, self.terms) for x in self.on_panel(self.layout.panel(rows, anchors, columns)))
        return losses.where(counts > 0, 0), counts

    def losses(self) -> tuple[Tensor, Tensor]:
        """Losses and counts of my anchors."""
        losses, counts = self.z.new_zeros(2, len(self.z), self.terms)
        with torch.no_grad():
            for rows in self._panels():
                losses[rows], counts[rows] = self._of(rows, self.z[rows], self.everybody)
        return losses, counts

    @without_autocast
    def gradients(self, weights: Tensor | None = None) -> list[Tensor]:
        """Losses and counts of my anchors; the gradient of their weighted sum by anchors, columns and parameters."""
        keep_freed_memory(self.z)
        dz, dcolumns = torch.zeros_like(self.z), torch.zeros_like(self.everybody)
        dparameters = [torch.zeros_like(parameter) for parameter in self.parameters]
        losses, counts = self.z.new_zeros(2, len(self.z), self.terms)  # nothing small stays behind between panels
        columns = shared_by_panels(self.everybody)
        for rows in self._panels():
            with inner_graph():
                anchors = self.z[rows].requires_grad_()
                of_panel, counts[rows] = self._of(rows, anchors, columns)
            losses[rows] = of_panel.detach()
            if not of_panel.requires_grad:
                continue
            weight = torch.ones_like(of_panel) if weights is None else weights[rows].to(of_panel.dtype)
            dz[rows], by_columns, *by_parameters = torch.autograd.grad(
                of_panel, (anchors, columns, *self.parameters), weight, allow_unused=True, materialize_grads=True
            )
            if by_columns.is_sparse:
                dcolumns.index_add_(0, by_columns._indices()[0], by_columns._values())
            else:
                dcolumns += by_columns
            for total, part in zip(dparameters, by_parameters, strict=True):
                total += part
        dcolumns = reduce_scatter_rows(dcolumns, self.layout.column_shards, self.layout.world)
        dparameters = [sum_over_ranks(x, gradient="partial", world=self.layout.world) for x in dparameters]
        return [losses, counts, dz, dcolumns, *dparameters]
