"""Sweep over local anchors while candidates pass from rank to rank: memory does not grow with the number of ranks.

A block function that yields statistics of rows (:mod:`contrastive_zoo.engine.row_statistics`) sees one rank's candidates
at a time. With k yields, the candidates come k times in the forward pass; each time the statistics of one yield are
merged. The loss follows from the merged values, and its gradient with respect to them is known. Then the candidates come
again for each yield that has a gradient, last yield first, and the gradients with respect to them return to their ranks:

    dS = Σ_t  ∂loss/∂t · ∂t/∂t_block · ∂t_block/∂S         t: a statistic, t_block: its part of the visiting candidates
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from contrastive_zoo.engine.anchor_block import AnchorBlock, BatchLayout, RowwiseSweep, add_gradient, anchor_slices
from contrastive_zoo.engine.exchange import GatherExchange, Ring, start_exchange
from contrastive_zoo.engine.pairwise import share_across_blocks
from contrastive_zoo.engine.precision import without_autocast
from contrastive_zoo.engine.row_statistics import State, Statistic, run
from contrastive_zoo.engine.tiling import keep_freed_memory
from contrastive_zoo.ranks.collectives import sum_over_ranks
from contrastive_zoo.ranks.compiling import inner_graph

Values = tuple[Tensor, ...]  # the statistics that one yield receives


@dataclass
class Stage:
    """The statistics of one ``yield``: their states, merged over all candidates seen so far, and a gradient each."""

    kinds: Sequence[Statistic]  # statistics of no candidates
    states: list[State]
    learns: list[bool]
    gradients: list[Tensor | None]

    @property
    def values(self) -> Values:
        return tuple(kind.whole(state) for kind, state in zip(self.kinds, self.states, strict=True))

    def leaves(self, rows: slice) -> list[Tensor]:
        """Return the values of some anchors, as leaves where they have a gradient."""
        values = [x[rows].detach() for x in self.values]
        return [x.requires_grad_(learns) for x, learns in zip(values, self.learns, strict=True)]


class RingSweep(RowwiseSweep):
    """Call a block function, which yields statistics, on local anchors and one rank's candidates after the other's."""

    stages: list[Stage] | None = None
    """The merged statistics, a few numbers for each local anchor, once they are computed."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.sent, self.candidates = self.candidates, self.layout.restore(self.candidates)

    def _exchange(self, rows: Tensor) -> GatherExchange | Ring:
        shards = self.layout.candidate_shards
        return start_exchange(rows, shards, shards, self.layout.world)

    def _visits(self, exchange: GatherExchange | Ring) -> Iterator[tuple[BatchLayout, Tensor]]:
        """Yield the candidates of each rank, the local ones first, and the layout of their blocks."""
        of_candidates = [of for _, of in self.layout.companions]
        others = [self._exchange(x) for x in (self.layout.candidate_ids, *of_candidates)]
        visits = zip(exchange.blocks, exchange, *others, strict=True)
        for index, (block, candidates, ids, *companions) in enumerate(visits):
            first, copies = sum(self.layout.candidate_shards.sizes[: block.ahead]), self.layout.own_candidates
            layout = self._layout(ids, companions, None if copies is None else copies - first)
            yield layout, self.candidates if index == 0 else layout.restore(candidates)

    def _layout(self, candidate_ids: Tensor, companions: Sequence[Tensor], copies: Tensor | None) -> BatchLayout:
        """Return the layout of blocks of some candidates; companions are the candidates' own."""
        pairs = tuple((of_anchors, of) for (of_anchors, _), of in zip(self.layout.companions, companions, strict=True))
        return replace(self.layout, candidate_ids=candidate_ids, companions=pairs, own_candidates=copies)

    def _step(self, block: AnchorBlock, values: Sequence[Any]) -> tuple[Sequence[Statistic] | None, Any]:
        """Return the statistics that follow the values of earlier stages, or losses and counts."""
        rows: Any = self.on_block(block)
        results, result = run(rows, None)
        for x in values:
            results, result = run(rows, x)
        return results, result

    def _without_candidates(self, values: Sequence[Any], anchors: Tensor) -> tuple[Sequence[Statistic] | None, Any]:
        nothing = slice(0, 0)
        layout = self._layout(self.layout.candidate_ids[nothing], [y[nothing] for _, y in self.layout.companions], None)
        return self._step(layout.block(slice(0, len(anchors)), anchors, self.candidates[nothing]), values)

    def _merged(self) -> list[Stage]:
        if self.stages is not None:
            return self.stages
        stages: list[Stage] = []
        while True:
            with inner_graph():
                leaves = [tuple(stage.leaves(slice(None))) for stage in stages]
                results, _ = self._without_candidates(leaves, self.anchors.clone().requires_grad_())
                if results is None:
                    self.stages = stages
                    return stages
                parts = [x.partial() for x in results]
            states = [tuple(s.clone() for s in x.state(part)) for x, part in zip(results, parts, strict=True)]
            learns = [x.requires_grad for x in parts]
            stage = Stage([_forgotten(x) for x in results], states, learns, [None] * len(states))
            self._merge(stage, [x.values for x in stages])
            stages.append(stage)

    @torch.no_grad()
    def _merge(self, stage: Stage, values: Sequence[Values]) -> None:
        for layout, visitors in self._visits(self._exchange(self.sent)):
            candidates = share_across_blocks(visitors)
            for rows in anchor_slices(self.anchors, len(candidates)):
                earlier = [tuple(x[rows] for x in of_stage) for of_stage in values]
                results, _ = self._step(layout.block(rows, self.anchors[rows], candidates), earlier)
                assert results is not None, "the number of yields depends on data"
                for kind, state, x in zip(stage.kinds, stage.states, results, strict=True):
                    merged = kind.merge(tuple(s[rows] for s in state), x.state(x.partial()))
                    for total, part in zip(state, merged, strict=True):
                        total[rows] = part

    def _result(self, stages: Sequence[Stage], anchors: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
        """Return the stages' values as leaves, and losses and counts, [n, terms]; losses that do not count are zero."""
        leaves = [stage.leaves(slice(None)) for stage in stages]
        _, result = self._without_candidates([tuple(x) for x in leaves], anchors)
        losses, counts = (x.reshape(-1, self.terms) for x in result)
        return [x for of_stage in leaves for x in of_stage], losses.where(counts > 0, 0), counts

    def losses(self) -> tuple[Tensor, Tensor]:
        stages = self._merged()
        with torch.no_grad():
            _, losses, counts = self._result(stages, self.anchors)
        return losses, counts.to(losses.dtype)

    @without_autocast
    def gradients(self, weights: Tensor | None = None) -> list[Tensor]:
        keep_freed_memory(self.anchors)
        stages = self._merged()
        with inner_graph():
            anchors = self.anchors.clone().requires_grad_()
            leaves, losses, counts = self._result(stages, anchors)
        danchors, *rest = _derivatives([losses], [weights], (anchors, *self.parameters, *leaves))
        dparameters, gradients = rest[: len(self.parameters)], iter(rest[len(self.parameters) :])
        for stage in stages:
            stage.gradients = [next(gradients) for _ in stage.kinds]
        dcandidates = torch.zeros_like(self.candidates)
        for index in reversed(range(len(stages))):
            if any(stages[index].learns):
                exchange = self._exchange(self.sent)
                parts = self._parts(exchange, stages[: index + 1], dcandidates, (danchors, *dparameters))
                exchange.return_gradients(dcandidates, parts)
        dparameters = [sum_over_ranks(x, gradient="partial", world=self.layout.world) for x in dparameters]
        return [losses.detach(), counts.detach().to(losses.dtype), danchors, dcandidates, *dparameters]

    def _parts(
        self, exchange: GatherExchange | Ring, stages: Sequence[Stage], dlocal: Tensor, totals: Sequence[Tensor]
    ) -> Iterator[Tensor]:
        """Yield the last stage's gradients with respect to other ranks' candidates; add the others to their totals."""
        for index, (layout, visitors) in enumerate(self._visits(exchange)):
            total = dlocal if index == 0 else torch.zeros_like(visitors)
            candidates = share_across_blocks(visitors)
            for rows in anchor_slices(self.anchors, len(visitors)):
                self._differentiate(layout, rows, candidates, stages, (total, *totals))
            if index > 0:
                yield total

    def _differentiate(
        self, layout: BatchLayout, rows: slice, candidates: Tensor, stages: Sequence[Stage], totals: Sequence[Tensor]
    ) -> None:
        """Add the gradients of the last stage's statistics of one block."""
        (*earlier, last), (dcandidates, danchors, *dparameters) = stages, totals
        with inner_graph():
            anchors = self.anchors[rows].requires_grad_()
            leaves = [stage.leaves(rows) for stage in earlier]
            results, _ = self._step(layout.block(rows, anchors, candidates), [tuple(x) for x in leaves])
            assert results is not None
            parts = [x.partial() for x in results]
        weights: list[Tensor | None] = []
        for x, part, state, gradient in zip(results, parts, last.states, last.gradients, strict=True):
            if part.requires_grad:
                assert gradient is not None
                derivative = x.derivative(x.state(part), tuple(s[rows] for s in state))
                weights.append(gradient[rows] if derivative is None else gradient[rows] * derivative)
        inputs = anchors, candidates, *self.parameters, *(leaf for of_stage in leaves for leaf in of_stage)
        by_anchors, by_candidates, *rest = _derivatives([x for x in parts if x.requires_grad], weights, inputs)
        danchors[rows] += by_anchors
        add_gradient(dcandidates, by_candidates)
        for total, part in zip(dparameters, rest, strict=False):
            total += part
        gradients = iter(rest[len(dparameters) :])
        for stage in earlier:
            for of_values, learns in zip(stage.gradients, stage.learns, strict=True):
                of_block = next(gradients)
                if learns:
                    assert of_values is not None
                    of_values[rows] += of_block


def _derivatives(outputs: Sequence[Tensor], weights: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of Σ weight · output; zeros where an input has no influence."""
    pairs = [(x, torch.ones_like(x) if w is None else w.to(x.dtype)) for x, w in zip(outputs, weights, strict=True)]
    pairs = [(x, w) for x, w in pairs if x.requires_grad]
    learning = [x for x in inputs if x.requires_grad]
    results: Sequence[Tensor | None] = [None] * len(learning)
    if pairs and learning:
        results = torch.autograd.grad([x for x, _ in pairs], learning, [w for _, w in pairs], allow_unused=True)
    by_input = iter(results)
    gradients = [next(by_input) if x.requires_grad else None for x in inputs]
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, gradients, strict=True)]


def _forgotten(x: Statistic) -> Statistic:
    fields: dict[str, Any] = {name: y.detach() if isinstance(y, Tensor) else y for name, y in vars(x).items()}
    return replace(x, **fields)  # type: ignore[type-var]  # each is a dataclass
