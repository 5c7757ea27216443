"""Tables of measurements: times beside the model, implementations side by side, and targets."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from gpu_suite.implementations import IMPLEMENTATIONS, NORMALISED, OURS, PUBLIC
from gpu_suite.measure import Ceilings, Measurement

LARGE, MILLION = (65_536, 768), (1_048_576, 512)
SMALL = (256, 512, 1024, 2048)


class NotMeasured(Exception):
    """A figure that a target needs is not there; the message says why."""


@dataclass(frozen=True)
class Results:
    all: Sequence[Measurement]

    def of(self, loss: str, implementation: str, size: tuple[int, int]) -> Measurement:
        for x in self.all:
            if (x.loss, x.implementation, (x.n, x.d)) == (loss, implementation, size):
                if x.ms is None:
                    raise NotMeasured(f"{implementation}: {x.reason}")
                return x
        raise NotMeasured(f"{loss} by {implementation} with {size[0]:,} rows was not run")

    def ms(self, loss: str, implementation: str, size: tuple[int, int]) -> float:
        return self.of(loss, implementation, size).ms or 0.0

    def best_peer(self, loss: str, size: tuple[int, int]) -> Measurement:
        found, reasons = [], []
        for name, implementation in IMPLEMENTATIONS[loss].items():
            if implementation.kind == "peer":
                try:
                    found.append(self.of(loss, name, size))
                except NotMeasured as why:
                    reasons.append(str(why))
        if not found:
            raise NotMeasured("; ".join(reasons))
        return min(found, key=lambda x: x.ms or 0.0)


def times(results: Results, ceilings: Mapping[str, Ceilings]) -> Iterator[str]:
    """Return a table of this library's kernels and of the model at the rates measured before each loss."""
    yield "| loss | B | d | kernel ms | model ms | model / kernel | MB beyond inputs |"
    yield "|---|---|---|---|---|---|---|"
    for x in results.all:
        if x.implementation == OURS:
            model = ceilings[x.loss].model_ms(x.loss, x.n, x.d)
            found = f"{x.reason} | {model:.3g} | – | –"
            if x.ms is not None and x.mb is not None:
                found = f"{x.ms:.3g} | {model:.3g} | {model / x.ms:.0%} | {x.mb:,.0f}"
            yield f"| {x.loss} | {x.n:,} | {x.d} | {found} |"


def side_by_side(results: Results) -> Iterator[str]:
    """Return a table of all implementations at the sizes at which more than this library's was measured."""
    yield "| loss | B | d | implementation | ms | ms / ours | MB beyond inputs | relative error |"
    yield "|---|---|---|---|---|---|---|---|"
    shared = {(x.loss, x.n, x.d): None for x in results.all if x.implementation != OURS}
    for loss, n, d in shared:
        for x in results.all:
            if (x.loss, x.n, x.d) == (loss, n, d):
                yield f"| {loss} | {n:,} | {d} | {x.implementation} | {figures(results, x)} |"


def figures(results: Results, x: Measurement) -> str:
    error = "–" if x.error is None else f"{x.error:.1e}"
    if x.ms is None or x.mb is None:
        return f"{x.reason} | – | – | {error}"
    try:
        ratio = f"{x.ms / results.ms(x.loss, OURS, (x.n, x.d)):.2f}"
    except NotMeasured:
        ratio = "–"
    return f"{x.ms:.3g} | {ratio} | {x.mb:,.0f} | {error}"


def notes(results: Results) -> Iterator[str]:
    """Return how implementations differ from the dense formula, or from the same work."""
    for loss, name in {(x.loss, x.implementation): None for x in results.all}:
        if note := IMPLEMENTATIONS[loss][name].note:
            yield f"- {loss} by {name}: {note}."


# ------------------------------------------------------------------------------------------------------------ targets


@dataclass(frozen=True)
class Target:
    text: str
    limit: float
    figure: Callable[[Results], tuple[float, str]]  # returns the figure, and what it was taken from
    at_least: bool = False

    def row(self, results: Results) -> str:
        try:
            figure, source = self.figure(results)
        except NotMeasured as why:
            return f"| {self.text} | – | not measured: {why} |"
        met = figure >= self.limit if self.at_least else figure <= self.limit
        return f"| {self.text} | {source} | {'met' if met else 'missed'} |"


def time_of(loss: str, results: Results) -> tuple[float, str]:
    ms = results.ms(loss, OURS, LARGE)
    return ms, f"{ms:.1f} ms"


def memory_of_clip(results: Results) -> tuple[float, str]:
    gb = (results.of("CLIP", OURS, LARGE).mb or 0.0) / 1e3
    return gb, f"{gb:.3f} GB, gradients included"


def against_best_peer(loss: str, results: Results) -> tuple[float, str]:
    peer, ms = results.best_peer(loss, LARGE), results.ms(loss, OURS, LARGE)
    of_peer = peer.ms or 0.0
    return of_peer / ms, f"{of_peer / ms:.2f} × ({peer.implementation} {of_peer:.1f} ms, ours {ms:.1f} ms)"


def one_tower_against_two(results: Results) -> tuple[float, str]:
    two, one = (results.ms(loss, OURS, LARGE) for loss in ("CLIP", "NT-Xent"))
    return two / one, f"{two / one:.2f} × ({two:.1f} ms, {one:.1f} ms)"


def million_rows(results: Results) -> tuple[float, str]:
    seconds = [results.ms(loss, OURS, MILLION) / 1e3 for loss in ("CLIP", "SigLIP", "NT-Xent")]
    return max(seconds), f"{min(seconds):.1f}–{max(seconds):.1f} s"


def small_batches(results: Results) -> tuple[float, str]:
    sizes = [(loss, (n, 768)) for loss in ("CLIP", "SigLIP", "NT-Xent") for n in SMALL]
    ratios = [results.ms(loss, PUBLIC, size) / results.ms(loss, NORMALISED, size) for loss, size in sizes]
    return max(ratios), f"{min(ratios):.2f}–{max(ratios):.2f} of its time"


_SIGLIP_BY_PEERS = "SigLIP faster than the best public kernel (its authors: 46.9 ms on a GH200)"
TARGETS = (
    Target("CLIP ≤ 45 ms", 45, partial(time_of, "CLIP")),
    Target("CLIP ≤ 1 GB beyond inputs", 1, memory_of_clip),
    Target("CLIP ≥ 2 × faster than the best public kernel", 2, partial(against_best_peer, "CLIP"), at_least=True),
    Target("InfoNCE ≥ 2 × faster than the best public kernel", 2, partial(against_best_peer, "InfoNCE"), at_least=True),
    Target("SigLIP ≤ 34 ms", 34, partial(time_of, "SigLIP")),
    Target(_SIGLIP_BY_PEERS, 1, partial(against_best_peer, "SigLIP"), at_least=True),
    Target("NT-Xent ≥ 1.6 × faster than two towers of as many rows", 1.6, one_tower_against_two, at_least=True),
    Target("B = 1,048,576, d = 512 runs", float("inf"), million_rows),
    Target("n = 256 … 2,048, with normalisation: not slower than the compiled dense formula", 1, small_batches),
)


def summary(results: Results) -> Iterator[str]:
    yield "| target at B = 65,536, d = 768 | found | |"
    yield "|---|---|---|"
    yield from (target.row(results) for target in TARGETS)
