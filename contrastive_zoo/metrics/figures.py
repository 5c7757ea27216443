"""One measurement: embeddings are found among the arguments, compared block by block, and added up over ranks."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from contrastive_zoo.engine.precision import in_float64, without_autocast
from contrastive_zoo.loss_base.loss_modules import LossModules
from contrastive_zoo.metrics.exact import norms, scores_of
from contrastive_zoo.metrics.rounds import rounds
from contrastive_zoo.ranks.adjoints import all_reduced
from contrastive_zoo.ranks.transport import gather_rows
from contrastive_zoo.ranks.world import Shards, World

BINS = 2048  # of similarities between −1 and 1: 2^-10 wide, so that a quantile, a bin's centre, is at most 2^-11 off
CANDIDATES = 2048  # embeddings of all ranks that are compared at once with a block of this rank's
_BLOCK = 2**20  # similarities of a block; 8 MiB in float64, of which about ten are alive
WIDTH = 64  # numbers of a sketch; the estimated distance has a relative standard deviation of √(2 / 64) = 18 %
_SKETCHED_ROWS = 2**12  # of WIDTH numbers, that are converted to float64 at once
_POSITIVE, _NEGATIVE, _ITSELF = range(3)
_QUANTILES = (0.05, 0.5, 0.95)  # of the similarities
_OF_PAIRS = re.compile("label|score|target|^y$")  # names of arguments that say which pairs belong together, or how much
Totals = Mapping[str, Tensor]  # sums over all ranks by name, in float64


@dataclass(frozen=True)
class Samples:
    """The embeddings of this rank in one call, in float64 and of unit length."""

    encoders: Mapping[str, Sequence[Tensor]]  # by name the embeddings of each encoder, one tensor [n, d] for each view
    shards: Mapping[str, Shards]  # how the samples of each encoder are split over the ranks
    # classes [n] of each encoder's embeddings; none: the same index is positive; None: the loss is told otherwise
    labels: Sequence[Tensor] | None = ()

    @classmethod
    def of(cls, rows: Mapping[str, Tensor], shards: Sequence[Shards]) -> "Samples":
        """Find the embeddings of a call by the rules of :class:`Monitor`; all ranks find the same, as they have agreed."""
        assert samples_problem(rows) is None
        ((name, first), *others), of = rows.items(), shards[0]
        views = [first] if first.ndim == 2 else list(first.unbind(1))
        labels: Sequence[Tensor] | None = ()
        if others:
            other, second = others[0]
            is_real = second.is_floating_point()
            if second.ndim == 1 and not is_real and not second.is_complex() and shards[1].sizes == of.sizes:
                stacked = unit(torch.cat([x.detach() for x in views]))
                classes = second.to(stacked.device).repeat(len(views))
                return cls({"embeddings": [stacked]}, {"embeddings": of.times(len(views))}, [classes])
            labels = None if any(x.ndim == 1 and _OF_PAIRS.search(key) for key, x in others[1:]) else ()
            if first.ndim == 2 and name.startswith("view"):
                views += [x for key, x in others if key.startswith("view") and x.shape[1:] == first.shape[1:]]
            elif first.ndim == 2 and is_real and second.shape[1:] == first.shape[1:]:
                if (ids := rows.get("ids")) is not None:
                    of_second = next((rows[key] for key in ("key_ids", "text_ids") if key in rows), ids)
                    labels = [x.to(first.device) for x in (ids, of_second)] if ids.ndim == 1 else None
                return cls({name: [unit(first)], other: [unit(second)]}, {name: of, other: shards[1]}, labels)
        return cls({"embeddings": [unit(x) for x in views]}, {"embeddings": of}, labels)

    def pairs(self) -> list[tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None, Shards]]:
        """Return anchors, candidates, their classes and the candidates' shards; nothing where indices do not pair."""
        views, shards = [*itertools.chain.from_iterable(self.encoders.values())], [*self.shards.values()]
        if self.labels:  # of two encoders both ways
            sides = [*zip(views, self.labels, shards, strict=True)]
            return [(x, y, (a, b), of) for (x, a, _), (y, b, of) in zip(sides, reversed(sides), strict=True)]
        if self.labels is None or len({of.sizes for of in shards}) > 1:
            return []
        return [(x, y, None, shards[0]) for x, y in itertools.combinations(views, 2)]


def samples_problem(rows: Mapping[str, Tensor]) -> str | None:
    first = next(iter(rows.values()), None)
    if first is not None and first.is_floating_point() and first.ndim in (2, 3):
        return None
    kinds = ", ".join(f"{name} of {x.ndim} dimensions" for name, x in rows.items()) or "no tensor"
    return (
        f"for its monitor the first argument of the loss holds embeddings, [n, d] or [n, views, d], got {kinds}. Monitor a "
        "loss of embeddings, or call monitor.remove()."
    )


def unit(rows: Tensor) -> Tensor:
    """Return embeddings of unit length in float64, each a function of itself alone; one of zeros stays as it is."""
    rows = in_float64(rows.detach())
    lengths = norms(rows)
    return rows / lengths.masked_fill(lengths == 0, 1.0)


def _blocks(anchors: int, rows: Tensor, shards: Shards, world: World) -> Iterator[tuple[slice, int, Tensor, Tensor]]:
    """Yield local anchors, the first candidate's index, candidates, and where both have one index."""
    for index, of_round in enumerate(rounds(shards, world, size=CANDIDATES)):
        local_rows = rows[of_round.local].to(world.device).contiguous()
        gathered = gather_rows(local_rows, of_round.shards, world).to(rows.device)
        first = index * CANDIDATES
        columns = torch.arange(first, first + len(gathered), device=rows.device)
        height = max(1, _BLOCK // len(gathered))
        for start in range(0, anchors, height):
            some = slice(start, min(start + height, anchors))
            indices = torch.arange(some.start, some.stop, device=rows.device) + shards.start
            yield some, first, gathered, indices[:, None] == columns


def pair_sums(
    anchors: Tensor,
    candidates: Tensor,
    labels: tuple[Tensor, Tensor] | None,
    shards: Shards,
    world: World,
    *,
    among_themselves: bool = True,
    bins: int = BINS,
) -> dict[str, Tensor]:
    """Return this rank's sums over the pairs of its unit anchors with the unit candidates of all ranks, in float64.

    Positive candidates have the anchor's label, or without labels its index. ``counts`` [2, bins] and ``sums`` [2] are of
    positive and negative similarities, ``squares`` is Σ ‖x‖² + ‖y‖² of positives; ``hits`` are anchors whose best positive
    is more similar than every negative; ``beaten`` [N], without labels: whether an anchor here is at least as similar to a
    candidate as its partner is.
    """
    if labels is None:  # the bits of a block's, as both are functions of the two embeddings alone
        shared = scores_of(anchors[:, None], candidates[:, None], normalize=True).flatten(1)
    else:  # the bits of an int64, gathered with the embeddings
        shared = labels[1].long()[:, None].view(torch.float64)
    counts, sums, squares = anchors.new_zeros(3 * bins), anchors.new_zeros(2), anchors.new_zeros(())
    best = anchors.new_full((2, len(anchors)), -torch.inf)
    beaten = torch.zeros(shards.total if labels is None else 0, dtype=torch.bool, device=anchors.device)
    for some, first, gathered, itself in _blocks(len(anchors), torch.cat([candidates, shared], 1), shards, world):
        rows, of_candidates = gathered[:, :-1], gathered[:, -1]
        result = scores_of(anchors[some], rows, normalize=True)
        if labels is None:
            kind = torch.where(itself, _POSITIVE, _NEGATIVE)
            beaten[first : first + len(gathered)] |= ((result >= of_candidates) & ~itself).any(0)
        else:
            of_candidates = of_candidates.contiguous().view(torch.int64)
            kind = torch.where(labels[0][some, None] == of_candidates, _POSITIVE, _NEGATIVE)
            kind = kind.masked_fill_(itself, _ITSELF) if among_themselves else kind
        bin_of = ((result + 1) * (bins / 2)).long().clamp_(0, bins - 1).add_(kind, alpha=bins)
        counts += torch.bincount(bin_of.flatten(), minlength=3 * bins)
        for of_kind in (_POSITIVE, _NEGATIVE):
            is_kind = kind == of_kind
            sums[of_kind] += result.where(is_kind, 0.0).sum()
            nearest = result.where(is_kind, -torch.inf).amax(1)
            best[of_kind, some] = torch.maximum(best[of_kind, some], nearest)
        for x, dim in ((anchors[some], 1), (rows, 0)):
            squares += ((kind == _POSITIVE).sum(dim) * x.square().sum(1)).sum()
    has_positive = best[_POSITIVE] > -torch.inf
    return {
        "counts": counts[: 2 * bins],
        "sums": sums,
        "squares": squares,
        "hits": ((best[_POSITIVE] > best[_NEGATIVE]) & has_positive).sum().double(),
        "with_positive": has_positive.sum().double(),
        "anchors": sums.new_tensor(len(anchors)),
        "beaten": beaten.double(),
    }


def count_sketch(x: Tensor, generator: torch.Generator, weight: Tensor | None = None) -> Tensor:
    """Return the count sketch of a tensor, or of it times the magnitudes of ``weight``, [WIDTH] in float64.

    Source: Charikar et al. 2002, https://doi.org/10.1016/S0304-3975(03)00400-6
    """
    result = torch.zeros(WIDTH, dtype=torch.float64, device="cpu")
    flat = [y.detach().reshape(-1) for y in (x, weight) if y is not None]
    rows = [nn.functional.pad(y, (0, -len(y) % WIDTH)).view(-1, WIDTH).split(_SKETCHED_ROWS) for y in flat]
    for part, *weights in zip(*rows, strict=True):
        values = math.prod((in_float64(y).abs() for y in weights), start=in_float64(part))
        signs = torch.randint(0, 2, (len(part),), generator=generator, device="cpu").mul_(2).sub_(1)
        result += (signs.to(values) @ values).cpu()
    return result


def sketch(module: nn.Module | None) -> Tensor:
    """Return a sketch of all parameters that are not sharded; two differ by about the distance of the parameters."""
    generator = torch.Generator().manual_seed(0)  # its own, so that training draws what it draws without a monitor
    shared = () if module is None else LossModules(module).shared_state().values()
    parts = [count_sketch(x, generator) for x in shared if isinstance(x, nn.Parameter) and not x.is_meta]
    return sum(parts, torch.zeros(WIDTH, dtype=torch.float64, device="cpu"))


def totals(samples: Samples, encoder: Tensor, temperature: float, world: World) -> Totals:
    """Return the sums over all ranks, in one message; the temperature is NaN if this rank's loss has none."""
    local = _local_sums(next(x for views in samples.encoders.values() for x in views), samples, world)
    local["sketches"] = encoder.new_zeros(world.size, WIDTH)
    local["sketches"][world.rank] = encoder
    local["temperature"] = encoder.new_tensor(temperature / world.size)
    if world.size == 1:
        return local
    flat = torch.cat([x.flatten().to(world.device) for x in local.values()])
    summed = all_reduced(flat, "sum", "complete", world).split([x.numel() for x in local.values()])
    return {name: x.view(part.shape) for (name, part), x in zip(local.items(), summed, strict=True)}


@without_autocast
def _local_sums(like: Tensor, samples: Samples, world: World) -> dict[str, Tensor]:
    """Return this rank's part of all sums of embeddings; autocast is disabled on the device of ``like``, one of them."""
    result: dict[str, Tensor] = {}
    if pairs := samples.pairs():
        parts = [pair_sums(x, y, labels, of, world, among_themselves=x is y) for x, y, labels, of in pairs]
        result = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
        result |= {name: result[name].sum(0) for name in ("counts", "sums", "squares")}
    for name, views in samples.encoders.items():
        rows, shards = torch.cat(list(views)), samples.shards[name]
        result[f"{name} sum"], result[f"{name} moments"] = rows.sum(0), rows.mT @ rows
        potential = rows.new_zeros(())  # Σ exp(−2 ‖x − y‖²) over pairs of this rank's with all others of their view
        for x in views:
            squares = x.square().sum(1)  # 1, or 0 of an embedding of zeros
            for some, _, y, itself in _blocks(len(x), x, shards, world):
                distances = (x[some] @ y.T).mul_(-2).add_(squares[some, None]).add_(y.square().sum(1))
                potential += distances.mul_(-2).exp_().masked_fill_(itself, 0.0).sum()
        result[f"{name} potential"] = potential
        result[f"{name} rows"] = rows.new_tensor(len(rows))
        result[f"{name} ordered pairs"] = rows.new_tensor(len(views) * shards.size * (shards.total - 1))
    return result


@dataclass(frozen=True)
class Measurement:
    """The sums of one call, and the figures that follow from them; see :class:`contrastive_zoo.Monitor`.

    Examples:
        >>> import contrastive_zoo as cz
        >>> loss_fn = cz.DistributedLoss(cz.NTXent())
        >>> monitor, value = cz.Monitor(loss_fn), loss_fn(torch.eye(2), torch.eye(2))
        >>> monitor.measurement.spectrum("embeddings")   # of ZᵀZ / N = I / 2
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """

    call: int  # counted from 0
    encoders: Sequence[str]  # their names
    totals: Totals

    @cached_property
    def figures(self) -> dict[str, float]:
        """Every figure as a plain float, NaN where it is not defined."""
        return {**self._of_pairs(), **self._of_encoders(), **self._of_parameters()}

    def __str__(self) -> str:
        """Return the figures, one a line."""
        rows = [(f"call {self.call}", "value"), *((name, f"{value:.4g}") for name, value in self.figures.items())]
        first, second = (max(map(len, column)) for column in zip(*rows, strict=True))
        return "\n".join(f"{name:<{first}}  {value:>{second}}" for name, value in rows)

    def counts(self) -> Tensor:
        """Return the numbers of positive and of negative pairs in each of the 2,048 bins between −1 and 1, [2, 2048]."""
        return self.totals.get("counts", self.totals["temperature"].new_zeros(2 * BINS)).view(2, BINS).cpu()

    def spectrum(self, encoder: str) -> Tensor:
        """Return the eigenvalues of ZᵀZ / N in descending order, [d] on the CPU; NaN if some embedding is not finite."""
        moments = (self.totals[f"{encoder} moments"] / self.totals[f"{encoder} rows"]).cpu()
        if not bool(moments.isfinite().all()):
            return torch.full_like(moments[0], math.nan)
        return torch.linalg.eigvalsh(moments).clamp(min=0).flip(0)

    def variance(self, encoder: str) -> Tensor:
        """Return the variance of each dimension of the unit embeddings, [d] on the CPU."""
        count = self.totals[f"{encoder} rows"]
        mean = self.totals[f"{encoder} sum"] / count
        return (self.totals[f"{encoder} moments"].diagonal() / count - mean**2).clamp(min=0).cpu()

    def _of_pairs(self) -> dict[str, float]:
        if "counts" not in self.totals:
            return {}
        result: dict[str, float] = {}
        counts = self.counts()
        means = (self.totals["sums"].cpu() / counts.sum(1)).tolist()
        for kind, of_kind, mean in zip(("positive", "negative"), counts, means, strict=True):
            result[f"{kind}_similarity"] = mean
            for q in _QUANTILES:
                index = _quantile_bin(of_kind, q)
                result[f"{kind}_similarity_q{100 * q:g}"] = math.nan if index is None else (index + 0.5) * 2 / BINS - 1
        anchors, valid, beaten = (self.totals[name] for name in ("anchors", "with_positive", "beaten"))
        top1 = self.totals["hits"] / valid  # of each comparison
        result["top1_forward"], result["top1_backward"] = top1[0].item(), top1[-1].item()
        if beaten.numel():
            result["top1_forward"], result["top1_backward"] = top1.mean().item(), (beaten == 0).double().mean().item()
        result["anchors_without_positive"] = ((anchors - valid) / anchors)[0].item()
        bound = _quantile_bin(counts[0], 0.5)
        above = math.nan if bound is None else counts[1][bound:].sum()
        result["likely_false_negatives"] = (above / counts[1].sum()).item()
        result["alignment"] = (self.totals["squares"].cpu() / counts[0].sum()).item() - 2 * means[0]
        return result

    def _of_encoders(self) -> dict[str, float]:
        result: dict[str, float] = {}
        for encoder in self.encoders:
            prefix = f"{encoder}/" if len(self.encoders) > 1 else ""
            mean = self.totals[f"{encoder} potential"] / self.totals[f"{encoder} ordered pairs"]
            result[f"{prefix}uniformity"] = mean.log().item()
            result[f"{prefix}effective_rank"] = effective_rank(self.spectrum(encoder))
            variance = self.variance(encoder)
            for name, x in (("min", variance.min()), ("mean", variance.mean()), ("max", variance.max())):
                result[f"{prefix}variance_{name}"] = x.item()
        return result

    def _of_parameters(self) -> dict[str, float]:
        temperature = self.totals["temperature"].item()
        result = {} if math.isnan(temperature) else {"temperature": temperature}
        if bool((sketches := self.totals["sketches"].cpu()).any()):
            distance, norm = vector_norm(sketches - sketches[0], dim=1).max(), vector_norm(sketches[0])
            result["encoder_drift"] = distance.item() / norm.clamp(min=1e-300).item()
        return result


def effective_rank(eigenvalues: Tensor) -> float:
    """Return exp(−Σ pᵢ log pᵢ) with p the eigenvalues divided by their sum; NaN without a positive one."""
    total = eigenvalues.sum().item()
    return torch.special.entr(eigenvalues / total).sum().exp().item() if total > 0 else math.nan


def _quantile_bin(counts: Tensor, q: float) -> int | None:
    """Return the bin of the smallest similarity that at least a share q of all does not exceed; None without any."""
    total = counts.sum().item()
    wanted = max(1, math.ceil(q * total - 1e-9))  # 0.05 · 20 is a little more than 1 in binary
    return int(torch.searchsorted(counts.cumsum(0), wanted).item()) if total else None
