"""From what was measured to what is wrong, in plain words, with the mend.

A mistake leaves a signature: by which factor the gradients of the encoder and of the loss's own parameters are off, and
whether in direction too; whether ranks return the same number, and whether it is right on even shards only. Where a
mistake amounts to computing the one-process loss of the wrong rows (own rows only, own rank first, views misread,
labels not gathered), it is not guessed: the loss is computed of just these rows and compared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from contrastive_zoo.testing import laws
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.measurement import Case, Gradients, Plan, whole_batch
from contrastive_zoo.testing.trial import Trial, value_of
from contrastive_zoo.testing.worlds import RankError, Worlds

CLOSE = 1e-6
"""How near a measured ratio is to the one that a mistake would give; mistakes are off by much more."""


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong and how to mend it.

    Args:
        mistake: a short name.
        why: what the loss does, in plain words.
        mend: what to do, in a line.
    """

    mistake: str
    why: str
    mend: str

    def __str__(self) -> str:
        return f"{self.mistake}: {self.why} Mend: {self.mend}"


_WRAP = "wrap the one-process loss: DistributedLoss(loss)."

DIAGNOSES = {
    x.mistake: x
    for x in (
        Diagnosis(
            "hang",
            "a rank leaves before a collective that the others have entered, as when it has no rows or no valid pair.",
            "let every rank run the same collectives, with a zero that hangs in the graph where it has nothing to say.",
        ),
        Diagnosis(
            "uneven shards",
            "it works on equal shards and raises on unequal ones.",
            "gather with contrastive_zoo.all_gather, which takes any number of rows per rank; or " + _WRAP,
        ),
        Diagnosis(
            "raises",
            "what one process computes raises on several.",
            _WRAP,
        ),
        Diagnosis(
            "own slice",
            "the backward pass of the gather keeps this rank's slice only, so that a trainer which averages divides the "
            "encoder's gradient by W; the loss's own parameters are right.",
            "gather with contrastive_zoo.all_gather, whose backward sums over ranks; not loss × W, which also scales the "
            "value and the loss's own parameters.",
        ),
        Diagnosis(
            "statistic without gradient",
            "a statistic is all-reduced without gradient: its value is right, but each rank differentiates its own term "
            "only, and the average divides the encoder's gradient by W.",
            "reduce it with contrastive_zoo.all_reduce, which is differentiable.",
        ),
        Diagnosis(
            "times W",
            "the loss is multiplied by W to make up for the trainer's average; the logged value and the gradient of the "
            "loss's own parameters come out W times too large.",
            "leave the value alone and scale the gradient of the gathered rows only, as DistributedLoss does.",
        ),
        Diagnosis(
            "detached",
            "gathered rows carry no gradient at all: the encoder learns nothing from this loss.",
            "gather with contrastive_zoo.all_gather.",
        ),
        Diagnosis(
            "detached columns",
            "local rows are compared with detached columns: what other ranks' anchors pull on these rows is lost, and "
            "the gradient points elsewhere.",
            "gather with a gradient (contrastive_zoo.all_gather), or " + _WRAP,
        ),
        Diagnosis(
            "wrong direction",
            "value right, gradient in another direction: the backward pass of some collective is not its adjoint.",
            "use contrastive_zoo.collectives, where each adjoint stands beside its collective.",
        ),
        Diagnosis(
            "counted W times",
            "every rank holds the complete gradient already, and the backward pass of the gather sums it once more.",
            "say all_gather(rows, gradient='complete') where every rank computes the same loss.",
        ),
        Diagnosis(
            "local loss",
            "each rank returns the mean over its own anchors: gradients are right on even shards, the number is one "
            "rank's, and on uneven shards samples of small shards weigh more.",
            "return global sum / global count on every rank, as DistributedLoss does.",
        ),
        Diagnosis(
            "mean of means",
            "ranks' means are averaged: on uneven shards samples of small shards weigh more.",
            "divide the global sum by the global count.",
        ),
        Diagnosis(
            "local negatives",
            "each rank compares its own rows only, as if the others did not exist.",
            _WRAP,
        ),
        Diagnosis(
            "mask without offset",
            "local rows against gathered columns, but positives (or the anchor itself) are looked for as if this rank's "
            "rows stood first.",
            "add the number of rows on lower ranks, or use contrastive_zoo.pair_masks.",
        ),
        Diagnosis(
            "views misread",
            "rows of several views are gathered at once and cut in the wrong places: ranks' blocks P N P N … read as "
            "P P … N N ….",
            "gather each view by itself.",
        ),
        Diagnosis(
            "labels by position",
            "ids mean different samples on different ranks (arange(n) on each), so that strangers become positives.",
            "use contrastive_zoo.sample_ids, which counts over ranks.",
        ),
        Diagnosis(
            "labels not gathered",
            "embeddings of all ranks meet the labels of one.",
            "gather labels with the embeddings (contrastive_zoo.all_gather takes integers), or " + _WRAP,
        ),
        Diagnosis(
            "own rank first",
            "each rank puts its own rows first, so that whatever reads the order (miners, queues, ties) differs.",
            "keep rank order, as contrastive_zoo.all_gather does.",
        ),
        Diagnosis(
            "local parameters",
            "each rank holds another gradient of the loss's own parameters before the trainer's reduction; if they are "
            "not inside the wrapped model the ranks drift apart.",
            "put the parameter through contrastive_zoo.replicated before it is used, or " + _WRAP,
        ),
        Diagnosis(
            "parameters scaled",
            "the encoder's gradient is right, that of the loss's own parameters is off by a factor.",
            "do not scale the loss; scale the gradient of the rows.",
        ),
        Diagnosis(
            "trainer sums",
            "made for a trainer that averages gradients, run under one that sums: everything is W times too large.",
            "DistributedLoss(loss, grad_reduction='sum').",
        ),
        Diagnosis(
            "trainer averages",
            "made for a trainer that sums gradients, run under one that averages: everything is W times too small.",
            "DistributedLoss(loss, grad_reduction='mean').",
        ),
        Diagnosis(
            "ignored grad_output",
            "a hand-written backward returns its gradient whatever comes in: loss weights and gradient scalers do nothing.",
            "multiply by grad_output in backward.",
        ),
        Diagnosis(
            "one slot for two batches",
            "what a hand-written backward needs is kept in one place, and the second forward pass overwrites it.",
            "keep it in ctx.save_for_backward.",
        ),
        Diagnosis(
            "state",
            "a queue, centre or running statistic is fed with this rank's rows only, so that ranks drift apart.",
            "feed it with the gathered rows, in rank order.",
        ),
        Diagnosis(
            "overflow",
            "exponentials are summed over ranks without their common maximum taken out.",
            "all-reduce the maximum first, subtract it, then all-reduce the sums.",
        ),
        Diagnosis(
            "later steps",
            "the first call is right and a later one is not: what a rank remembers of earlier calls does not fit this one.",
            "decide from what all ranks have told each other in this step; keep nothing of sizes, paths or buffers.",
        ),
        Diagnosis(
            "own draws",
            "each rank draws random numbers from a stream of its own, so that ranks compute different losses.",
            "draw on rank 0 and send it to all ranks; or " + _WRAP,
        ),
        Diagnosis(
            "sharded parameters",
            "the gradient of parameters of which each rank keeps its part is scaled for a reduction that nobody does.",
            "leave it as it is: it is complete on the rank that keeps the part.",
        ),
        Diagnosis(
            "settings",
            "ranks with different settings train on, each on another loss.",
            "compare a digest of all settings before rows are gathered; or " + _WRAP,
        ),
        Diagnosis(
            "unequal parameters",
            "ranks whose loss parameters differ train on: proxies drawn from a seed per rank go unnoticed.",
            "compare a digest of the parameters at the first step and now and again; or " + _WRAP,
        ),
        Diagnosis(
            "missing argument",
            "a rank that lacks an argument raises or gathers less, while the others wait for it.",
            "tell each other which arguments came before anything is gathered; or " + _WRAP,
        ),
        Diagnosis(
            "messages differ",
            "a rank calls another sequence of collectives than the others.",
            "decide from what all ranks have told each other whether a message is sent, and how large it is.",
        ),
        Diagnosis(
            "unknown",
            "value or gradients depend on the number of processes in a way that none of the known mistakes explains.",
            _WRAP,
        ),
    )
}
"""By short name."""


@dataclass(frozen=True)
class _Probe:
    """One batch measured on W processes and on one."""

    values: list[float]
    alone: float
    encoder: tuple[float, float]
    """Ratio of norms and cosine, after the trainer's reduction, to one process."""
    parameters: tuple[float, float] | None
    collectives: frozenset[str]
    batch: GlobalBatch

    @property
    def agreed(self) -> bool:
        return all(_near(value, self.values[0]) for value in self.values)

    @property
    def right(self) -> bool:
        return all(_near(value, self.alone) for value in self.values)

    def scaled(self, of: tuple[float, float] | None, factor: float) -> bool:
        """Right in direction, off by this factor; holds of parameters that are not there."""
        return of is None or (_near(of[0], factor) and (factor == 0 or _near(of[1], 1.0)))


def diagnose(case: Case, broken: Sequence[str], worlds: Worlds, *, width: int = 3) -> Diagnosis:
    """Name the mistake.

    Args:
        case: the loss.
        broken: names of the laws that do not hold.
        worlds: where to run.
        width: of the embeddings to measure with.

    Example:
        >>> from contrastive_zoo.testing.gallery import GALLERY
        >>> with Worlds() as worlds:
        ...     diagnose(GALLERY["own slice"].case, ["same_encoder_gradient"], worlds).mistake
        'own slice'
    """
    return DIAGNOSES[_mistake(case, set(broken), worlds, width)]


def _mistake(case: Case, broken: set[str], worlds: Worlds, width: int) -> str:
    try:
        even = [_probe(case, GlobalBatch(shards, d=width, seed=7), worlds) for shards in ((3, 3), (2, 2, 2))]
    except RankError as error:
        return "hang" if error.stuck else "raises"
    uneven, fails = None, "hang" if laws.runs_on_every_split.name in broken else None
    try:
        uneven = _probe(case, GlobalBatch((2, 4), d=width, seed=7), worlds)
        _probe(case, GlobalBatch((0, 3, 1), d=width, seed=7), worlds)
    except RankError as error:
        fails = "hang" if error.stuck else "uneven shards"
    broken = broken - {laws.runs_on_every_split.name}
    by_law = _by_hand_written_backward(broken) if broken else None
    found = by_law or _by_value(case, even, uneven, worlds) or _by_gradient(case, even, broken)
    return fails if fails and found == "unknown" else found  # what is wrong on equal shards is to be mended first


def _by_hand_written_backward(broken: set[str]) -> str | None:
    """Laws of which none but one kind of mistake is guilty when the contract itself holds."""
    if broken & {law.name for law in laws.CONTRACT}:
        return "overflow" if broken and broken <= {laws.finite_at_extremes.name} else None
    for law, mistake in (
        (laws.honours_grad_output, "ignored grad_output"),
        (laws.accumulates, "one slot for two batches"),
        (laws.same_state, "state"),
        (laws.finite_at_extremes, "overflow"),
        (laws.draws_are_shared, "own draws"),
        (laws.same_sharded_gradient, "sharded parameters"),
        (laws.same_at_later_steps, "later steps"),
        (laws.settings_agree, "settings"),
        (laws.parameters_agree, "unequal parameters"),
        (laws.arguments_agree, "missing argument"),
        (laws.same_messages, "messages differ"),
    ):
        if law.name in broken:
            return mistake
    return None


def _by_value(case: Case, even: Sequence[_Probe], uneven: _Probe | None, worlds: Worlds) -> str | None:
    """What the returned numbers give away."""
    first = even[0]
    if all(probe.right for probe in even):
        if uneven is None or uneven.right:
            return None
        return "mean of means" if uneven.agreed else "local loss"
    if all(_near(value, len(probe.values) * probe.alone) for probe in even for value in probe.values):
        return "times W"
    for mistake, rows in _WRONG_ROWS.items():
        if all(_computes(case, probe, rows, worlds) for probe in even):
            return mistake
    if first.agreed:
        return "labels by position"
    if all(_near(sum(probe.values) / len(probe.values), probe.alone) for probe in even):
        exact = all(probe.scaled(probe.encoder, 1.0) for probe in even)
        return "local loss" if exact else "detached columns"
    return "mask without offset" if first.collectives else "local negatives"


def _by_gradient(case: Case, even: Sequence[_Probe], broken: set[str]) -> str:
    """What the gradients give away where all values are right."""

    def off_by(encoder: Callable[[int], float], parameters: Callable[[int], float]) -> bool:
        return all(
            probe.scaled(probe.encoder, encoder(len(probe.values)))
            and probe.scaled(probe.parameters, parameters(len(probe.values)))
            for probe in even
        )

    has_parameters = even[0].parameters is not None
    if off_by(lambda w: 0.0, lambda w: 1.0):
        return "detached"
    if off_by(lambda w: w, lambda w: w) and case.grad_reduction == "sum":
        return "trainer sums"
    if off_by(lambda w: 1 / w, lambda w: 1 / w) and has_parameters:
        return "trainer averages"
    if off_by(lambda w: 1 / w, lambda w: 1.0):
        return "own slice" if any("gather" in name for name in even[0].collectives) else "statistic without gradient"
    if off_by(lambda w: w, lambda w: 1.0):
        return "counted W times"
    if all(probe.scaled(probe.encoder, 1.0) for probe in even):
        if laws.same_parameter_gradient.name in broken:
            return "parameters scaled"
        return "local parameters" if laws.parameters_in_step.name in broken else "unknown"
    return "wrong direction"


# ------------------------------------------------------------------------------------ the loss of the wrong rows


def _own_rows(rows: list[Tensor], shards: Sequence[int], rank: int) -> list[Tensor]:
    return [x.split(list(shards))[rank] for x in rows]


def _own_rank_first(rows: list[Tensor], shards: Sequence[int], rank: int) -> list[Tensor]:
    order = [rank, *(other for other in range(len(shards)) if other != rank)]
    return [torch.cat([x.split(list(shards))[r] for r in order]) for x in rows]


def _own_labels(rows: list[Tensor], shards: Sequence[int], rank: int) -> list[Tensor]:
    embeddings, labels = rows
    if embeddings.shape == labels.shape:
        return rows
    return [embeddings, labels.split(list(shards))[rank].repeat(len(shards))]


def _blocks_as_views(rows: list[Tensor], shards: Sequence[int], rank: int) -> list[Tensor]:
    blocks = torch.cat([block for parts in zip(*(x.split(list(shards)) for x in rows), strict=True) for block in parts])
    return list(blocks.chunk(len(rows)))


def _interleaved(rows: list[Tensor], shards: Sequence[int], rank: int) -> list[Tensor]:
    position = [index for n in shards for index in range(n)]
    order = torch.tensor(sorted(range(len(position)), key=lambda row: position[row]))
    return [rows[0], *(x[order] for x in rows[1:])]


_WRONG_ROWS: dict[str, Callable[[list[Tensor], Sequence[int], int], list[Tensor]]] = {
    "local negatives": _own_rows,
    "own rank first": _own_rank_first,
    "labels not gathered": _own_labels,
    "views misread": _blocks_as_views,
}


def _computes(
    case: Case, probe: _Probe, rows: Callable[[list[Tensor], Sequence[int], int], list[Tensor]], worlds: Worlds
) -> bool:
    """Whether every rank's number is the one-process loss of these rows."""
    shards = probe.batch.shards
    ways = (rows, _interleaved) if rows is _blocks_as_views else (rows,)
    return any(
        all(
            _near(value_of(case, way(whole_batch(case, probe.batch), shards, rank), probe.batch.d, worlds), value)
            for rank, value in enumerate(probe.values)
        )
        for way in ways
        if case.call == "views" or way in (_own_rows, _own_rank_first, _own_labels)
        if not (case.call == "views" and way is _own_labels)
    )


def _probe(case: Case, batch: GlobalBatch, worlds: Worlds) -> _Probe:
    trial = Trial(case, batch, worlds)
    listening = Plan(listening=True)
    alone, together = trial.alone(), trial.together(listening)
    parameters = compare(trial.reduced("parameters", listening), alone.parameters) if alone.parameters else None
    encoder = compare(trial.reduced("encoder", listening), alone.encoder)
    return _Probe([x.value for x in together], alone.value, encoder, parameters, together[0].collectives, batch)


def compare(found: Gradients, expected: Gradients) -> tuple[float, float]:
    """Ratio of norms, and cosine.

    Example:
        >>> compare({"w": torch.tensor([2.0, 0.0])}, {"w": torch.tensor([1.0, 0.0])})
        (2.0, 1.0)
    """
    ours = torch.cat([found[name].flatten() for name in expected])
    theirs = torch.cat([x.flatten() for x in expected.values()])
    if not theirs.norm() > 0:
        return 1.0, 1.0
    return (ours.norm() / theirs.norm()).item(), torch.cosine_similarity(ours, theirs, 0).item()


def _near(found: float, expected: float) -> bool:
    return abs(found - expected) <= CLOSE * max(1.0, abs(expected))
