"""pytorch-metric-learning's losses in shards: each rank evaluates its local anchors, 1/W of the work.

A loss of that library makes many losses, one for each pair, triplet or anchor, and a reducer makes one number of them.
So each rank makes those of its own anchors, with the library's own code, and numerators and counts are added over ranks.
Three things do not come by themselves:

- an anchor is no positive of itself. The library sees that only where anchors and columns are one tensor, so pairs are
  chosen here, and miners are asked in a way that leaves the anchor out;
- the library leaves early where a batch has no positives, or no negatives. What a batch has is not what a rank has: a
  rank without any evaluates a padding row and drops its losses, so that it takes the same branch as the whole batch;
- a loss whose anchors need more than columns (a mean over all pairs, another anchor's negatives) gets it by a message.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from pytorch_metric_learning import distances, losses, miners, reducers
from pytorch_metric_learning.utils import common_functions as c_f
from pytorch_metric_learning.utils import loss_and_miner_utils as lmu
from torch import Tensor, nn

from contrastive_zoo.adapters.pml_members import members
from contrastive_zoo.collectives import all_gather, gather_rows, replicated, sum_over_ranks
from contrastive_zoo.masks import panel_masks
from contrastive_zoo.randomness import one_stream
from contrastive_zoo.world import Shards, World

Indices = tuple[Tensor, ...]
"""(anchors, positives, negatives) or (anchors, positives, anchors, negatives).

Anchors index local rows, positives and negatives index the gathered candidates.
"""
R = TypeVar("R")
Info = dict[str, Any]
"""What the library says of one sub-loss: ``losses``, ``indices``, ``reduction_type``, perhaps a ``divisor``."""


def sharded(
    loss: nn.Module,
    miner: Callable[..., Indices] | None,
    arguments: Mapping[str, Any],
    shards: Mapping[str, Shards],
    world: World,
) -> Tensor:
    """The loss of all ranks' rows, of which each rank evaluates its own anchors only.

    Equal to ``loss(Z, labels, miner(Z, labels))`` with the rows of all ranks: the value on every rank, ∂L/∂z of the
    local rows (other ranks' anchors included), and ∂L/∂φ of the loss's parameters. If no anchor counts, the value is 0.

    Args:
        loss: one for which :func:`refusal` returns None.
        miner: called on the local anchors and all candidates if it treats each anchor separately (TripletMarginMiner,
            BatchHardMiner, MultiSimilarityMiner, PairMarginMiner, AngularMiner); otherwise on all rows, on every rank.
        arguments: the local ``embeddings`` and ``labels``, optionally ``ref_emb`` and ``ref_labels``, as agreed by the
            handshake; an ``indices_tuple`` refers to all rows and is equal on all ranks.
        shards: the shard sizes of each argument.
        world: the ranks of the process group.

    Raises:
        ValueError: on every rank alike: what :func:`refusal` says, missing labels, reference rows or indices for a loss
            that takes none.

    Example:
        >>> from contrastive_zoo.world import ALONE
        >>> z, labels, shard = torch.eye(2).repeat(2, 1), torch.tensor([0, 1, 0, 1]), Shards((4,))
        >>> rows = {"embeddings": z, "labels": labels}
        >>> sharded(losses.ContrastiveLoss(), None, rows, {"embeddings": shard, "labels": shard}, ALONE)
        tensor(0.)
    """
    if problem := refusal(loss, miner) or _arguments_problem(loss, miner, arguments):
        raise ValueError(f"{type(loss).__name__} cannot be evaluated in shards: {problem} Leave mode='sharded' out.")
    return _value(loss, miner, arguments, shards, world)


def _value(loss: Any, miner: Any, arguments: Mapping[str, Any], shards: Mapping[str, Shards], world: World) -> Tensor:
    if type(loss) is losses.MultipleLosses:
        values = [weight * sharded(x, own or miner, arguments, shards, world) for x, own, weight in members(loss)]
        return torch.stack(values).sum()
    if type(loss) is losses.SelfSupervisedLoss:
        arguments, shards = _labelled_views(arguments, shards, symmetric=loss.symmetric)
        return sharded(loss.loss, miner, arguments, shards, world)
    part = _Part.of(arguments, shards, world)
    if hasattr(loss, "cast_types"):  # before the weights are lent: it replaces their data
        loss.cast_types(part.rows.dtype, part.rows.device)
    elif type(loss) is losses.P2SGradLoss:
        loss.weight.data = loss.weight.data.renorm(2, 1, 1e-5).mul(1e5).to(part.rows)  # in their order: norms round
    loss.reset_stats()
    indices = _part_of(arguments.get("indices_tuple"), part) if miner is None else _mined(miner, part)
    shared = {f"loss.{name}": replicated(x, process_group=world) for name, x in loss.named_parameters()}
    found: dict[str, Info] = torch.func.functional_call(_Evaluation(loss), shared, (part, indices))
    return _reduced(loss.reducer, found, part, connected=[part.rows, part.columns, *shared.values()])


def refusal(loss: nn.Module, miner: Callable[..., Indices] | None = None) -> str | None:
    """Why a loss cannot be evaluated in shards, in words; None if it can.

    Args:
        loss: of pytorch-metric-learning.
        miner: that would go with it.

    Example:
        >>> refusal(losses.ContrastiveLoss())
        >>> refusal(losses.VICRegLoss())
        'its variances and covariances are of all rows.'
    """
    return _refusal(loss, miner)


def _refusal(loss: Any, miner: Any) -> str | None:
    kind = type(loss)
    if kind is losses.MultipleLosses:
        if miner is not None and loss.miners:
            return "it has miners of its own."
        found = ((x, refusal(x, own or miner)) for x, own, _ in members(loss))
        return next((f"{type(x).__name__}: {why}" for x, why in found if why), None)
    if kind is losses.SelfSupervisedLoss:
        return refusal(loss.loss, miner)
    if isinstance(loss, nn.parallel.DistributedDataParallel):
        return "its parameters' gradient is complete on every rank already. Pass loss.module."
    if kind not in EVALUATED:
        return REFUSED.get(kind, "it is none of the losses that are known to be sums over anchors.")
    if kind in _TRIPLETS and miner is None and loss.triplets_per_anchor != "all":
        return f"it draws {loss.triplets_per_anchor} triplets an anchor. Pass triplets_per_anchor='all', or a miner."
    if getattr(loss, "swap", False):
        return "swap compares positives with negatives, which are other ranks' anchors."
    if type(loss.distance) not in _DISTANCES:
        return f"{type(loss.distance).__name__} is not known to look at two rows at a time."
    return _reducer_refusal(loss.reducer, kind)


def _reducer_refusal(reducer: Any, kind: type[nn.Module]) -> str | None:
    if type(reducer) is reducers.MultipleReducers:
        inside = [*reducer.reducers.values(), reducer.default_reducer]
        return next((why for x in inside if (why := _reducer_refusal(x, kind))), None)
    if type(reducer) is reducers.DoNothingReducer:
        return "DoNothingReducer hands out every pair's loss, and a rank has those of its own anchors only."
    if type(reducer) not in _REDUCERS:
        return f"{type(reducer).__name__} is not known to be a sum over a count."
    if type(reducer) is reducers.DivisorReducer and kind is not losses.MarginLoss:
        return "DivisorReducer asks for a divisor, and this loss gives none."
    if type(reducer) is reducers.PerAnchorReducer:
        if kind in _TRIPLETS:
            return "PerAnchorReducer takes no triplets."
        if reducer.aggregation_func is not reducers.per_anchor_reducer.aggregation_func:
            return "PerAnchorReducer has an aggregation_func of its own, which may look at several anchors at once."
        if type(reducer.reducer) is reducers.DivisorReducer:
            return "DivisorReducer asks for a divisor, and anchors have none."
        return _reducer_refusal(reducer.reducer, kind)
    return None


def _arguments_problem(loss: Any, miner: Any, arguments: Mapping[str, Any]) -> str | None:
    if type(loss) is losses.MultipleLosses and loss.miners and arguments.get("indices_tuple") is not None:
        return "it has miners of its own, and takes no indices_tuple. Leave one of them out."
    for name, of, dimensions in (("embeddings", "[n, d]", 2), ("ref_emb", "[n, d]", 2), ("labels", "[n]", 1)):
        x = arguments.get(name)
        if isinstance(x, Tensor) and x.ndim != dimensions:  # the same on every rank, which have met on it
            return f"{name} are {of}, got {x.ndim} dimensions."
    if type(loss) in (losses.MultipleLosses, losses.SelfSupervisedLoss):
        return None
    if arguments.get("labels") is None:
        mined = ", also with indices_tuple" if arguments.get("indices_tuple") is not None else ""
        return f"labels are missing: call loss(embeddings, labels){mined}."
    if arguments.get("ref_emb") is not None and type(loss) not in _TAKE_REFERENCES:
        return "it takes no ref_emb."
    if type(loss) in _TAKE_NO_INDICES and not (miner is None and arguments.get("indices_tuple") is None):
        return "it takes no indices_tuple."
    return None


# ------------------------------------------------------------------------------------------------ what a rank looks at


@dataclass(frozen=True)
class _Part:
    """The local anchors, and the gathered candidates."""

    rows: Tensor
    labels: Tensor
    columns: Tensor
    column_labels: Tensor
    shards: Shards
    """Of the anchors."""
    references: bool
    """Whether columns are other rows than anchors."""
    world: World

    @classmethod
    def of(cls, arguments: Mapping[str, Any], shards: Mapping[str, Shards], world: World) -> "_Part":
        rows = arguments["embeddings"]
        references = arguments.get("ref_emb") is not None
        names = ("ref_emb", "ref_labels") if references else ("embeddings", "labels")
        here = [arguments[name].to(rows.device) for name in names]  # labels may have been left on the CPU
        columns, column_labels = (
            all_gather(x, shards=shards[name], process_group=world) for name, x in zip(names, here, strict=True)
        )
        labels = arguments["labels"].to(rows.device)
        return cls(rows, labels, columns, column_labels, shards["embeddings"], references, world)

    def all_anchors(self) -> tuple[Tensor, Tensor]:
        """All ranks' anchors and their labels."""
        if not self.references:
            return self.columns, self.column_labels
        shards, world = self.shards, self.world
        return all_gather(self.rows, shards=shards, process_group=world), gather_rows(self.labels, shards, world)

    def masks(self) -> tuple[Tensor, Tensor]:
        """Which columns are an anchor's positives, and which its negatives."""
        if self.references:
            alike = self.labels[:, None] == self.column_labels
            return alike, ~alike
        _, positive, negative = panel_masks(self.labels, self.column_labels, self.shards.start)
        return positive, negative

    def pairs(self, indices: Indices | None) -> list[Indices]:
        """The (anchor, positive) and the (anchor, negative) pairs that were mined, or all."""
        if indices is None:
            positive, negative = self.masks()
            return [torch.where(positive), torch.where(negative)]
        a1, p, a2, n = lmu.convert_to_pairs(indices, self.labels)
        return [(a1, p), (a2, n)]

    def triplets(self, indices: Indices | None) -> list[Indices]:
        """The triplets that were mined, or all."""
        if indices is not None:
            return [lmu.convert_to_triplets(indices, self.labels)]
        (a, p), negative = torch.where(self.masks()[0]), self.masks()[1]
        of_anchor = negative.sum(1)
        times, first = of_anchor[a], (of_anchor.cumsum(0) - of_anchor)[a]
        pair = torch.arange(len(a), device=a.device).repeat_interleave(times)
        nth = torch.arange(len(pair), device=a.device) - (times.cumsum(0) - times)[pair]
        return [(a[pair], p[pair], torch.where(negative)[1][first[pair] + nth])]

    def with_padding(self, count: int) -> "_Part":
        """With rows after local that are nobody's, so that there is something to evaluate."""
        if count == 0:
            return self
        filler = torch.arange(1, self.rows.shape[1] + 1, dtype=self.rows.dtype, device=self.rows.device)
        labels = torch.cat([self.labels, self.column_labels[:1].expand(count)])
        return replace(self, rows=torch.cat([self.rows, filler.expand(count, -1)]), labels=labels)

    def jointly(self, caller: nn.Module, function: Callable[[], R]) -> R:
        """What ``function`` of this rank's rows returns, if no rank's raises: the others would wait in the next message.

        Raises:
            ValueError: on every rank alike, what any of them raised, by rank; on one process the exception itself.
        """
        if self.world.size == 1:
            return function()
        found, error = None, None
        try:
            found = function()
        except Exception as raised:
            error = raised
        if any(failed for (failed,) in self.world.exchange([error is not None])):
            texts = self.world.exchange_text("" if error is None else f"{type(error).__name__}: {error}")
            said = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
            raise ValueError(f"{type(caller).__name__}: it raised {said}") from error
        return cast("R", found)

    def totals(self, *local: int) -> list[int]:
        """Sums over ranks."""
        return [sum(counts) for counts in zip(*self.world.exchange(local), strict=True)]


class _Evaluation(nn.Module):
    """The evaluation of a loss as a forward, so that functional_call can lend it shared parameters."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, part: _Part, indices: Indices | None) -> dict[str, Info]:
        loss: Any = self.loss
        found = EVALUATED[type(loss)](loss, part, indices)
        if loss.embedding_regularizer is not None:
            loss.add_embedding_regularization_to_loss_dict(found, part.all_anchors()[0])
        return found


# --------------------------------------------------------------------------------------------------------------- miners


def _mined(miner: Any, part: _Part) -> Indices | None:
    """What the miner chooses of all rows, restricted to the local anchors."""
    with torch.no_grad():
        if type(miner) in _MINERS and type(miner.distance) in _DISTANCES:
            chosen = part.jointly(miner, lambda: _MINERS[type(miner)](miner, part))
            miner.output_assertion(chosen)  # which counts them, for those who log it
            return chosen
        anchors = part.all_anchors()
        with one_stream(part.world, part.rows.device):
            references = (part.columns, part.column_labels) if part.references else ()
            found = part.jointly(miner, lambda: miner(*anchors, *references))
    return _part_of(found, part)


def _part_of(indices: Indices | None, part: _Part) -> Indices | None:
    """Of indices of all rows, those of the local anchors, which are counted from the first local one."""
    if indices is None:
        return None
    start, stop = part.shards.start, part.shards.start + part.shards.size
    groups = [indices] if len(indices) == 3 else [indices[:2], indices[2:]]
    kept = [[x[(group[0] >= start) & (group[0] < stop)] for x in group] for group in groups]
    return tuple(x for anchors, *others in kept for x in (anchors - start, *others))


def _each_by_itself(miner: Any, part: _Part) -> Indices:
    """A miner that looks at one pair or triplet at a time: those that pair an anchor with itself are taken out."""
    found = miner(part.rows, part.labels, part.columns, part.column_labels)
    if part.references:
        return found
    anchors, positives, *negatives = found
    other = positives != anchors + part.shards.start
    if len(found) == 3:
        return tuple(x[other] for x in found)
    return (anchors[other], positives[other], *negatives)


def _batch_hard(miner: Any, part: _Part) -> Indices:
    miner.reset_stats()
    distance = miner.distance(part.rows, part.columns)
    positives, negatives = part.pairs(None)
    if distance.numel() == 0:
        return (positives[0],) * 3
    (_, p), some_positive = miner.get_positives(distance, *positives)
    (_, n), some_negative = miner.get_negatives(distance, *negatives)
    a = torch.where(some_positive & some_negative)[0]
    return a, p[a], n[a]


def _multi_similarity(miner: Any, part: _Part) -> Indices:
    """Positives less similar than the most similar negative, negatives more similar than the least similar positive."""
    miner.reset_stats()
    similar = miner.distance(part.rows, part.columns)
    if not miner.distance.is_inverted:
        similar = -similar
    positive, negative = part.masks()
    if similar.numel() == 0:
        return (*torch.where(positive), *torch.where(negative))
    least = similar.masked_fill(~positive, torch.inf).amin(1, keepdim=True)
    most = similar.masked_fill(~negative, -torch.inf).amax(1, keepdim=True)
    hard = positive & (similar - miner.epsilon < most), negative & (similar + miner.epsilon > least)
    return (*torch.where(hard[0]), *torch.where(hard[1]))


_MINERS: dict[type, Callable[[Any, _Part], Indices]] = {
    miners.TripletMarginMiner: _each_by_itself,
    miners.PairMarginMiner: _each_by_itself,
    miners.AngularMiner: _each_by_itself,
    miners.BatchHardMiner: _batch_hard,
    miners.MultiSimilarityMiner: _multi_similarity,
}


def _weights(part: _Part, indices: Indices | None, *, anchors_only: bool) -> Tensor:
    """How often the miner chose each local row, relative to the row that it chose most often."""
    if indices is None:
        return part.rows.new_ones(len(part.rows))
    start, total = part.shards.start, part.shards.total
    parts = [indices] if len(indices) == 3 else [indices[:2], indices[2:]]
    chosen = [x for anchors, *others in parts for x in (anchors + start, *([] if anchors_only else others))]
    counts = torch.bincount(torch.cat(chosen), minlength=total)
    counts = sum_over_ranks(counts, gradient="complete", world=part.world)
    if part.totals(sum(map(len, indices))) == [0]:
        return part.rows.new_ones(len(part.rows))
    return (counts.to(part.rows.dtype) / counts.max())[part.shards.mine]


# ----------------------------------------------------------------------------------------------------------- evaluations


def _of_pairs(loss: Any, part: _Part, indices: Indices | None) -> dict[str, Info]:
    return _by_the_library(loss, part, part.pairs(indices), enough=2)


def _of_triplets(loss: Any, part: _Part, indices: Indices | None) -> dict[str, Info]:
    return _by_the_library(loss, part, part.triplets(indices), enough=1)


def _by_the_library(loss: Any, part: _Part, groups: Sequence[Indices], *, enough: int) -> dict[str, Info]:
    """``compute_loss`` of the local anchors; padded where the local shard has too few pairs to show what the batch has."""
    local = [len(group[0]) for group in groups]
    missing = _padding_needed(local, part.totals(*local), enough)
    both = part.with_padding(sum(missing))
    padding = torch.arange(len(part.rows), len(both.rows), device=part.rows.device).split(missing)
    indices = [
        torch.cat([x, some if nth == 0 else torch.zeros_like(some)])
        for group, some in zip(groups, padding, strict=True)
        for nth, x in enumerate(group)
    ]
    evaluate = functools.partial(loss.compute_loss, both.rows, both.labels, tuple(indices))
    found = part.jointly(loss, lambda: evaluate(part.columns, part.column_labels))
    return {name: _own(info, len(part.rows), any(local)) for name, info in found.items()}


def _padding_needed(local: Sequence[int], totals: Sequence[int], enough: int) -> list[int]:
    """How many more pairs of each kind show what the batch has; more than ``enough`` make no difference."""
    return [max(0, min(enough, total) - x) for total, x in zip(totals, local, strict=True)]


def _own(info: Info, rows: int, some: bool) -> Info:
    """Without what padding lose."""
    values, indices, divisor = info["losses"], info["indices"], info.get("divisor")
    if isinstance(values, Tensor) and indices is not None:
        own = (indices if isinstance(indices, Tensor) else indices[0]) < rows
        values, indices = values[own], indices[own] if isinstance(indices, Tensor) else tuple(x[own] for x in indices)
    info = {**info, "losses": values, "indices": indices}
    return info if divisor is None else {**info, "divisor": divisor if some else 0 * divisor}


def _of_rows(loss: Any, part: _Part, indices: Indices | None) -> dict[str, Info]:
    """A classifier's: each row against the weights of classes."""
    weights = _weights(part, indices, anchors_only=type(loss) is losses.ProxyNCALoss)
    both = part.with_padding(int(len(part.rows) == 0))
    found = part.jointly(loss, lambda: loss.compute_loss(both.rows, both.labels, None, both.rows, both.labels))
    found["loss"] = own = _own(found["loss"], len(part.rows), True)
    own["losses"] = own["losses"] * weights[own["indices"]]
    return found


def _lifted_structure(loss: Any, part: _Part, indices: Indices | None) -> dict[str, Info]:
    """Each positive pair against the negatives of both of its rows: a row's own are one number, which is gathered."""
    (a, p), (a2, n) = part.pairs(indices)
    if 0 in (totals := part.totals(len(a), len(a2))) or max(totals) < 2:
        return {}
    distance = loss.distance(part.rows, part.columns)
    near = loss.distance.margin(loss.neg_margin, distance[a2, n])
    top = torch.full_like(distance[:, 0], -torch.inf).scatter_reduce(0, a2, near.detach(), "amax")
    base = top.clamp(min=c_f.neg_inf(distance.dtype))
    crowding = torch.zeros_like(top).index_add(0, a2, (near - base[a2]).exp())
    crowding = crowding.where(top.isfinite(), 1).log().where(top.isfinite(), -torch.inf) + base.where(top.isfinite(), 0)
    all_crowding = all_gather(crowding, shards=part.shards, process_group=part.world)
    both = torch.stack([crowding[a], all_crowding[p]])
    none = both.isneginf().all(0)
    crowded = both.where(~none, 0).logsumexp(0).where(~none, 0)
    values = (crowded + loss.distance.margin(distance[a, p], loss.pos_margin)).relu().square() / 2
    return {"loss": {"losses": values, "indices": (a, p), "reduction_type": "pos_pair"}}


def _intra_pair_variance(loss: Any, part: _Part, indices: Indices | None) -> dict[str, Info]:
    """Each pair against the mean of all pairs."""
    pairs = part.pairs(indices)
    totals = part.totals(*(len(a) for a, _ in pairs))
    if max(totals) < 2:
        return {}
    distance = loss.distance(part.rows, part.columns)
    local = [distance[pair] for pair in pairs]
    sums = sum_over_ranks(torch.stack([x.sum() for x in local]), gradient="partial", world=part.world)
    found = {}
    for nth, (sign, eps) in enumerate({"pos": loss.pos_eps, "neg": loss.neg_eps}.items()):
        inverted = loss.distance.is_inverted == (sign == "pos")
        spread = loss.variance_with_eps(local[nth], sums[nth] / max(1, totals[nth]), eps, inverted)
        found[f"{sign}_loss"] = {
            "losses": spread.relu().square(), "indices": pairs[nth], "reduction_type": f"{sign}_pair"
        }  # fmt: skip
    return found


def _nca(loss: Any, part: _Part, indices: Indices | None) -> dict[str, Info]:
    weights = _weights(part, indices, anchors_only=part.references)
    if part.shards.total < 2:
        return {}
    near = loss.distance(part.rows, part.columns)
    near = near if loss.distance.is_inverted else -near
    positive, negative = part.masks()
    near = near.masked_fill(~(positive | negative), c_f.neg_inf(near.dtype))
    chance = (loss.softmax_scale * near).softmax(1).where(positive, 0).sum(1)
    (some,) = torch.where(chance != 0)
    return {"loss": {"losses": -chance[some].log() * weights[some], "indices": some, "reduction_type": "element"}}


def _fast_ap(loss: Any, part: _Part, indices: Indices | None) -> dict[str, Info]:
    weights = _weights(part, indices, anchors_only=False)
    farthest = 2**loss.distance.power
    edges = torch.linspace(0, farthest, loss.num_edges, dtype=part.rows.dtype, device=part.rows.device)
    apart = loss.distance(part.rows, part.columns) - edges[:, None, None]
    share = (1 - apart.abs() * loss.num_bins / farthest).relu()
    positive, negative = part.masks()
    found, others = ((share * mask).sum(2).T for mask in (positive, negative))
    ranked = (found + others).cumsum(1)
    precision = (found * found.cumsum(1) / ranked.where(ranked > 0, 1)).sum(1) / positive.sum(1).clamp(min=1)
    (some,) = torch.where(positive.any(1))
    return {"loss": {"losses": ((1 - precision) * weights)[some], "indices": some, "reduction_type": "element"}}


def _instance(loss: Any, part: _Part, indices: Indices | None) -> dict[str, Info]:
    """Cross-entropy over the batch's rows, where the nth class is the nth row, as the library has it."""
    _, nth = part.column_labels.unique(return_inverse=True)
    values = F.cross_entropy(
        loss.distance(part.rows, part.columns) * loss.gamma, nth[part.shards.mine], reduction="none"
    )
    anchors = torch.arange(len(part.rows), device=part.rows.device)
    return {"loss": {"losses": values, "indices": anchors, "reduction_type": "element"}}


def _n_pairs(loss: Any, part: _Part, indices: Indices | None) -> dict[str, Info]:
    """The first pair of each class, in rank order: an anchor must find its positive among all of those."""
    a, p = part.pairs(indices)[0]
    local = _first_of_each(torch.stack([part.labels[a], a + part.shards.start, p], 1))
    every = _first_of_each(gather_rows(local, part.world.shards(len(local)), part.world))
    loss.num_pairs = len(every)
    own = torch.where((every[:, 1] >= part.shards.start) & (every[:, 1] < part.shards.start + part.shards.size))[0]
    anchors = every[own, 1] - part.shards.start
    if len(every) == 0:
        return {}
    similar = loss.distance(part.rows[anchors], part.columns[every[:, 2]])
    values = F.cross_entropy(similar if loss.distance.is_inverted else -similar, own, reduction="none")
    return {"loss": {"losses": values, "indices": anchors, "reduction_type": "element"}}


def _first_of_each(pairs: Tensor) -> Tensor:
    """Of [label, anchor, positive], the first of each label."""
    _, first = np.unique(pairs[:, 0].cpu().numpy(), return_index=True)
    return pairs[torch.from_numpy(first).to(pairs.device)]


def _threshold_consistent(loss: Any, part: _Part, indices: Indices | None) -> dict[str, Info]:
    found = {}
    for name, pair, sign in zip(("plus", "minus"), part.pairs(indices), (-1, 1), strict=True):
        beyond = sign * (
            F.cosine_similarity(part.rows[pair[0]], part.columns[pair[1]]) - getattr(loss, f"margin_{name}")
        )
        counted = beyond[beyond >= 0]
        found[name] = _averaged(getattr(loss, f"lambda_{name}") * counted, len(counted))
    return found


def _pnp(loss: Any, part: _Part, indices: Indices | None) -> dict[str, Info]:
    """How many negatives come before each positive, and before the anchor itself, in the anchor's ranking."""
    similar, (positive, negative) = loss.distance(part.rows, part.columns), part.masks()
    ranked = ~negative & positive.any(1, keepdim=True)
    a, p = torch.where(ranked)
    before = loss.sigmoid(similar[a] - similar[a, p][:, None], temp=loss.anneal).where(negative[a], 0).sum(1)
    penalty = {
        "Ds": lambda x: (1 + x).log(),
        "Dq": lambda x: 1 - (1 + x) ** -loss.alpha,
        "Iu": lambda x: (1 + x) * (1 + x).log(),
        "Ib": lambda x: (loss.b * x - (1 + loss.b * x).log()) / loss.b**2,
        "O": lambda x: x,
    }[loss.variant](before)
    values = similar.new_zeros(len(similar)).index_add(0, a, penalty) / ranked.sum(1).clamp(min=1)
    return {"loss": _averaged(values, int(positive.any(1).sum()))}


def _ranked_list(loss: Any, part: _Part, indices: Indices | None) -> dict[str, Info]:
    distance, (positive, negative) = loss.distance(part.rows, part.columns), part.masks()
    radius = loss.alpha - loss.margin

    def weighted(hinge: Tensor, where: Tensor, temperature: float) -> Tensor:
        weights = (temperature * hinge.where(where, 0)).exp().where(where, 0)
        return (weights * hinge).sum(1) / (weights + 1e-5).sum(1)

    pull = weighted(distance - radius, positive & (distance > max(radius, 0)), loss.Tp)
    push = weighted(loss.alpha - distance, negative & (distance > 0) & (distance < loss.alpha), loss.Tn)
    anchors = torch.arange(len(distance), device=distance.device)
    values = (1 - loss.imbalance) * pull + loss.imbalance * push
    return {"loss": {"losses": values, "indices": anchors, "reduction_type": "element"}}


def _p2s_grad(loss: Any, part: _Part, indices: Indices | None) -> dict[str, Info]:
    """The mean over classes of (cos − [own class])², with weights that are unit columns already."""

    def squared_errors() -> Tensor:
        cosines = (part.rows @ loss.weight / part.rows.square().sum(1).sqrt()[:, None]).clamp(-1, 1)
        own = torch.zeros_like(cosines).scatter_(1, part.labels[:, None], 1)
        return (cosines - own).square().mean(1)

    return {"loss": _averaged(part.jointly(loss, squared_errors), len(part.rows))}


def _averaged(values: Tensor, count: int) -> Info:
    """A sub-loss that no reducer sees, as it is a mean: the local part of the sum, and of what it is divided by."""
    return {"losses": values, "indices": None, "reduction_type": "already_reduced", "count": count}


_TRIPLETS = (losses.TripletMarginLoss, losses.MarginLoss)
_PAIRS = (
    losses.ContrastiveLoss, losses.SignalToNoiseRatioContrastiveLoss, losses.MultiSimilarityLoss, losses.CircleLoss,
    losses.NTXentLoss, losses.SupConLoss, losses.GeneralizedLiftedStructureLoss, losses.TupletMarginLoss,
    losses.AngularLoss,
)  # fmt: skip
_CLASSIFIERS = (
    losses.ArcFaceLoss, losses.CosFaceLoss, losses.LargeMarginSoftmaxLoss, losses.NormalizedSoftmaxLoss,
    losses.ProxyNCALoss, losses.SoftTripleLoss, losses.SphereFaceLoss, losses.SubCenterArcFaceLoss,
)  # fmt: skip
_TAKE_NO_INDICES = (losses.InstanceLoss, losses.P2SGradLoss, losses.PNPLoss, losses.RankedListLoss)
_TAKE_REFERENCES = (*_PAIRS, *_TRIPLETS, losses.NCALoss, losses.IntraPairVarianceLoss)

EVALUATED: dict[type[nn.Module], Callable[[Any, _Part, Indices | None], dict[str, Info]]] = {
    **dict.fromkeys(_PAIRS, _of_pairs),
    **dict.fromkeys(_TRIPLETS, _of_triplets),
    **dict.fromkeys(_CLASSIFIERS, _of_rows),
    losses.FastAPLoss: _fast_ap,
    losses.InstanceLoss: _instance,
    losses.IntraPairVarianceLoss: _intra_pair_variance,
    losses.LiftedStructureLoss: _lifted_structure,
    losses.NCALoss: _nca,
    losses.NPairsLoss: _n_pairs,
    losses.P2SGradLoss: _p2s_grad,
    losses.PNPLoss: _pnp,
    losses.RankedListLoss: _ranked_list,
    losses.ThresholdConsistentMarginLoss: _threshold_consistent,
}
"""Losses, and what makes the losses of the local anchors; besides, MultipleLosses and SelfSupervisedLoss of these."""

REFUSED: dict[type[nn.Module], str] = {
    losses.CrossBatchMemory: "its queue holds rows without gradient, whose owners it does not know.",
    losses.DynamicSoftMarginLoss: "its histogram of all pairs is kept from call to call.",
    losses.HistogramLoss: "its histograms are of all pairs.",
    losses.ManifoldLoss: "its random walk goes over all rows.",
    losses.ProxyAnchorLoss: "its anchors are proxies, and a proxy's sums are over all rows.",
    losses.SmoothAPLoss: "it takes blocks of equal classes.",
    losses.VICRegLoss: "its variances and covariances are of all rows.",
}
"""Losses that are not sums over anchors, or are none as the library has written them, and why."""

_DISTANCES = (
    distances.CosineSimilarity,
    distances.DotProductSimilarity,
    distances.LpDistance,
    distances.SNRDistance,
)


def _labelled_views(
    arguments: Mapping[str, Any], shards: Mapping[str, Shards], *, symmetric: bool
) -> tuple[dict[str, Any], dict[str, Shards]]:
    """Views of the same samples as rows whose labels are the samples' numbers."""
    view1, view2, shard = arguments["embeddings"], arguments["ref_emb"], shards["embeddings"]
    labels = torch.arange(shard.start, shard.start + shard.size, device=view1.device)
    if symmetric:
        both = shard.times(2)
        rows = {"embeddings": torch.cat([view1, view2]), "labels": labels.repeat(2)}
        return rows, {"embeddings": both, "labels": both}
    rows = {"embeddings": view1, "labels": labels, "ref_emb": view2, "ref_labels": labels.clone()}
    return rows, dict.fromkeys(rows, shard)


# ------------------------------------------------------------------------------------------------------------- reducers


def _reduced(reducer: Any, found: Mapping[str, Info], part: _Part, *, connected: Sequence[Tensor]) -> Tensor:
    """What the reducer makes of all ranks' losses: a sum over a count for each sub-loss, and their sum."""
    # no rank falls out of the backward pass, whether or not its anchors looked at anything
    nothing = torch.stack([x.flatten()[:0].sum(dtype=torch.float64) for x in connected]).sum()
    terms = [
        _term(reducer, name, info, part) if isinstance(info["losses"], Tensor) else (nothing, nothing.detach())
        for name, info in found.items()
    ]
    sums, counts = (torch.stack(x) for x in zip((nothing, nothing.detach()), *terms, strict=True))
    sums = sum_over_ranks(sums, gradient="complete", world=part.world)
    counts = sum_over_ranks(counts, gradient="complete", world=part.world)
    return (sums / counts.clamp(min=1)).where(counts > 0, 0).sum().to(part.rows.dtype)


def _term(reducer: Any, name: str, info: Info, part: _Part) -> tuple[Tensor, Tensor]:
    """The local part of a sub-loss's sum, and of what it is divided by."""
    if info["reduction_type"] == "already_reduced":
        value = info["losses"].sum(dtype=torch.float64)
        if "count" in info:
            return value, value.new_tensor(info["count"])
        once = part.world.rank == 0  # every rank has the same number
        return value * once, value.new_tensor(once)
    if type(reducer) is reducers.MultipleReducers:
        reducer = dict(reducer.reducers).get(name, reducer.default_reducer)
    values, count = _REDUCERS[type(reducer)](reducer, info, part)
    return values.sum(dtype=torch.float64), torch.as_tensor(count, dtype=torch.float64, device=values.device)


def _mean(reducer: Any, info: Info, part: _Part) -> tuple[Tensor, Any]:
    return info["losses"], len(info["losses"])


def _sum(reducer: Any, info: Info, part: _Part) -> tuple[Tensor, Any]:
    return info["losses"], part.world.rank == 0


def _within(reducer: Any, info: Info, part: _Part) -> tuple[Tensor, Any]:
    values = info["losses"]
    for bound, past in ((reducer.low, torch.gt), (reducer.high, torch.lt)):
        values = values if bound is None else values[past(values, bound)]
    return values, len(values)


def _by_class(reducer: Any, info: Info, part: _Part) -> tuple[Tensor, Any]:
    values, anchors = info["losses"], info["indices"]
    of_class = reducer.weights.to(values)
    anchors = anchors if isinstance(anchors, Tensor) else anchors[0]
    return part.jointly(reducer, lambda: values * of_class[part.labels[anchors]]), len(values)


def _by_divisor(reducer: Any, info: Info, part: _Part) -> tuple[Tensor, Any]:
    return info["losses"], info["divisor"]


def _per_anchor(reducer: Any, info: Info, part: _Part) -> tuple[Tensor, Any]:
    if info["reduction_type"] != "element":
        there = torch.zeros(len(part.rows), len(part.columns), dtype=torch.bool, device=part.rows.device)
        there[info["indices"]] = True
        values = torch.zeros_like(there, dtype=info["losses"].dtype).index_put(info["indices"], info["losses"])
        anchors = torch.arange(len(part.rows), device=part.rows.device)
        info = {"losses": values.sum(1) / there.sum(1).clamp(min=1), "indices": anchors, "reduction_type": "element"}
    return _REDUCERS[type(reducer.reducer)](reducer.reducer, info, part)


_REDUCERS: dict[type[nn.Module], Callable[[Any, Info, _Part], tuple[Tensor, Any]]] = {
    reducers.AvgNonZeroReducer: _within,
    reducers.ClassWeightedReducer: _by_class,
    reducers.DivisorReducer: _by_divisor,
    reducers.MeanReducer: _mean,
    reducers.PerAnchorReducer: _per_anchor,
    reducers.SumReducer: _sum,
    reducers.ThresholdReducer: _within,
}
