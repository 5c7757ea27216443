"""Infer the mistake in a loss from measurements, and name its fix.

Each mistake has a signature: the factor and the direction of the error in the gradients of the encoder and of the loss's
own parameters; whether ranks return the same value; whether the value is right on even shards only. Some mistakes amount
to computing the one-process loss of the wrong samples (local samples only, own rank first, views misread, labels not
gathered). For these the diagnosis computes the loss of exactly those samples and compares.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from contrastive_zoo.testing import invariants
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.measurement import Case, Gradients, Plan, whole_batch
from contrastive_zoo.testing.trial import Trial, value_of
from contrastive_zoo.testing.worlds import RankError, Worlds

CLOSE = 1e-6
"""Largest relative difference between a measured ratio and the one that a mistake predicts; other mistakes differ more."""


@dataclass(frozen=True)
class Diagnosis:
    """A mistake and its fix.

    Args:
        mistake: a short name.
        why: what the loss does wrong, in a sentence.
        fix: what to do, in a line.
    """

    mistake: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.mistake}: {self.why} Fix: {self.fix}"


_WRAP = "wrap the one-process loss: DistributedLoss(loss)."

DIAGNOSES = {
    x.mistake: x
    for x in (
        Diagnosis(
            "hang",
            "a rank does not enter a collective that the others wait in, for example because it has no samples or no valid "
            "pair.",
            "run the same collectives on every rank; a rank without a valid pair contributes a zero that is still "
            "connected to the graph.",
        ),
        Diagnosis(
            "uneven shards",
            "the loss works on equal shards and raises on unequal ones.",
            "gather with contrastive_zoo.all_gather, which accepts any number of samples per rank; or " + _WRAP,
        ),
        Diagnosis(
            "raises",
            "the loss works on one process and raises on several.",
            _WRAP,
        ),
        Diagnosis(
            "own slice",
            "the backward pass of the gather keeps only the local slice, so the gradient average of DDP divides the "
            "encoder's gradient by W; the gradient of the loss's own parameters is right.",
            "gather with contrastive_zoo.all_gather, whose backward pass sums over ranks; do not multiply the loss by W, "
            "which also scales the value and the gradient of the loss's own parameters.",
        ),
        Diagnosis(
            "statistic without gradient",
            "a statistic is all-reduced without gradient: its value is right, but each rank differentiates only its local "
            "term, and the gradient average of DDP divides the encoder's gradient by W.",
            "reduce the statistic with contrastive_zoo.all_reduce, which is differentiable.",
        ),
        Diagnosis(
            "times W",
            "the loss is multiplied by W to cancel the gradient average of DDP; the logged value and the gradient of the "
            "loss's own parameters are W times too large.",
            "do not scale the value; scale only the gradient of the gathered embeddings, as DistributedLoss does.",
        ),
        Diagnosis(
            "detached",
            "the gathered embeddings carry no gradient: the encoder learns nothing from this loss.",
            "gather with contrastive_zoo.all_gather.",
        ),
        Diagnosis(
            "detached columns",
            "local anchors are compared with detached candidates: the gradient of other ranks' anchors with respect to the "
            "local embeddings is lost, and the direction of the gradient is wrong.",
            "gather with a gradient (contrastive_zoo.all_gather), or " + _WRAP,
        ),
        Diagnosis(
            "wrong direction",
            "the value is right and the direction of the gradient is wrong: the backward pass of a collective is not its "
            "adjoint.",
            "use the collectives of contrastive_zoo, whose backward passes are their adjoints.",
        ),
        Diagnosis(
            "counted W times",
            "every rank already holds the complete gradient, and the backward pass of the gather sums it over ranks again.",
            "pass all_gather(rows, gradient='complete') where every rank computes the same loss.",
        ),
        Diagnosis(
            "local loss",
            "each rank returns the mean over its local anchors: gradients are right on even shards, the value is that of "
            "one rank, and on uneven shards samples of small shards have a larger weight.",
            "return global sum / global count on every rank, as DistributedLoss does.",
        ),
        Diagnosis(
            "mean of means",
            "the means of the ranks are averaged: on uneven shards samples of small shards have a larger weight.",
            "divide the global sum by the global count.",
        ),
        Diagnosis(
            "local negatives",
            "each rank compares only its local samples; those of other ranks are ignored.",
            _WRAP,
        ),
        Diagnosis(
            "mask without offset",
            "local anchors are compared with gathered candidates, but the index of the positive (or of the anchor itself) "
            "lacks the offset of the local shard.",
            "add the number of samples on lower ranks to the index, or use contrastive_zoo.pair_masks.",
        ),
        Diagnosis(
            "views misread",
            "several views are gathered in one tensor and split in the wrong places: the blocks of the ranks are "
            "P N P N … and are read as P P … N N ….",
            "gather each view separately.",
        ),
        Diagnosis(
            "labels by position",
            "the same id denotes different samples on different ranks (arange(n) on each), so unrelated samples become "
            "positives.",
            "use contrastive_zoo.sample_ids, which numbers samples over all ranks.",
        ),
        Diagnosis(
            "labels not gathered",
            "the embeddings of all ranks are combined with the labels of one rank.",
            "gather labels with the embeddings (contrastive_zoo.all_gather takes integers), or " + _WRAP,
        ),
        Diagnosis(
            "own rank first",
            "each rank puts its local samples first, so results that depend on the order (miners, queues, ties) differ.",
            "keep rank order, as contrastive_zoo.all_gather does.",
        ),
        Diagnosis(
            "local parameters",
            "the gradient of the loss's own parameters differs between ranks before the gradient all-reduce; parameters "
            "outside the DDP model then diverge.",
            "pass the parameter through contrastive_zoo.replicated before it is used, or " + _WRAP,
        ),
        Diagnosis(
            "parameters scaled",
            "the encoder's gradient is right; the gradient of the loss's own parameters is wrong by a factor.",
            "do not scale the loss; scale the gradient of the embeddings.",
        ),
        Diagnosis(
            "trainer sums",
            "the loss assumes a trainer that averages gradients and runs under one that sums: all gradients are W times too "
            "large.",
            "DistributedLoss(loss, grad_reduction='sum').",
        ),
        Diagnosis(
            "trainer averages",
            "the loss assumes a trainer that sums gradients and runs under one that averages: all gradients are W times too "
            "small.",
            "DistributedLoss(loss, grad_reduction='mean').",
        ),
        Diagnosis(
            "ignored grad_output",
            "a hand-written backward pass ignores grad_output: loss weights and gradient scalers have no effect.",
            "multiply by grad_output in backward.",
        ),
        Diagnosis(
            "one slot for two batches",
            "a hand-written backward pass keeps its tensors in one place, and a second forward pass overwrites them.",
            "save them with ctx.save_for_backward.",
        ),
        Diagnosis(
            "state",
            "a queue, centre or running statistic is updated with local samples only, so that ranks diverge.",
            "update it with the gathered samples, in rank order.",
        ),
        Diagnosis(
            "overflow",
            "exponentials are summed over ranks without subtracting their common maximum.",
            "all-reduce the maximum first, subtract it, then all-reduce the sums.",
        ),
        Diagnosis(
            "later steps",
            "the first call is right and a later one is not: a rank reuses sizes, buffers or a path of an earlier call.",
            "decide from values that all ranks have exchanged in this step; do not reuse sizes, paths or buffers.",
        ),
        Diagnosis(
            "own draws",
            "each rank draws different random numbers, so that ranks compute different losses.",
            "draw on rank 0 and broadcast; or " + _WRAP,
        ),
        Diagnosis(
            "sharded parameters",
            "the gradient of sharded parameters is scaled for an all-reduce that does not take place.",
            "do not scale it: the gradient of a shard is complete on the rank that holds the shard.",
        ),
        Diagnosis(
            "settings",
            "ranks with different settings continue to train, each with another loss.",
            "compare a digest of all settings before gathering; or " + _WRAP,
        ),
        Diagnosis(
            "unequal parameters",
            "ranks whose loss parameters differ continue to train: proxies initialised with another seed on each rank stay "
            "undetected.",
            "compare a digest of the parameters at the first step and at intervals; or " + _WRAP,
        ),
        Diagnosis(
            "missing argument",
            "a rank that lacks an argument raises or gathers less, while the other ranks wait.",
            "exchange which arguments are present before gathering; or " + _WRAP,
        ),
        Diagnosis(
            "messages differ",
            "a rank calls another sequence of collectives than the others.",
            "decide from exchanged values whether a message is sent, and how large it is.",
        ),
        Diagnosis(
            "unknown",
            "value or gradients depend on the number of processes; no known mistake explains how.",
            _WRAP,
        ),
    )
}
"""By short name."""


@dataclass(frozen=True)
class _Probe:
    """The measurements of one batch on W processes and on one."""

    values: list[float]
    alone: float
    encoder: tuple[float, float]
    """Ratio of norms and cosine to the gradient of one process, after the gradient all-reduce."""
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
        """Whether the gradient has the right direction and this factor; True for a loss without parameters."""
        return of is None or (_near(of[0], factor) and (factor == 0 or _near(of[1], 1.0)))


def diagnose(case: Case, broken: Sequence[str], worlds: Worlds, *, width: int = 3) -> Diagnosis:
    """Infer the mistake that a loss makes.

    Args:
        case: the loss.
        broken: names of the broken invariants.
        worlds: the process groups to run on.
        width: width of the embeddings in the measurements.

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
    uneven, fails = None, "hang" if invariants.runs_on_every_split.name in broken else None
    try:
        uneven = _probe(case, GlobalBatch((2, 4), d=width, seed=7), worlds)
        _probe(case, GlobalBatch((0, 3, 1), d=width, seed=7), worlds)
    except RankError as error:
        fails = "hang" if error.stuck else "uneven shards"
    broken = broken - {invariants.runs_on_every_split.name}
    by_invariant = _by_hand_written_backward(broken) if broken else None
    found = by_invariant or _by_value(case, even, uneven, worlds) or _by_gradient(case, even, broken)
    return fails if fails and found == "unknown" else found  # a mistake on equal shards takes precedence


def _by_hand_written_backward(broken: set[str]) -> str | None:
    """Return the mistake that breaks an invariant outside the contract; None if the contract itself is broken."""
    if broken & {invariant.name for invariant in invariants.CONTRACT}:
        return "overflow" if broken and broken <= {invariants.finite_at_extremes.name} else None
    for invariant, mistake in (
        (invariants.honours_grad_output, "ignored grad_output"),
        (invariants.accumulates, "one slot for two batches"),
        (invariants.same_state, "state"),
        (invariants.finite_at_extremes, "overflow"),
        (invariants.draws_are_shared, "own draws"),
        (invariants.same_sharded_gradient, "sharded parameters"),
        (invariants.same_at_later_steps, "later steps"),
        (invariants.settings_agree, "settings"),
        (invariants.parameters_agree, "unequal parameters"),
        (invariants.arguments_agree, "missing argument"),
        (invariants.same_messages, "messages differ"),
    ):
        if invariant.name in broken:
            return mistake
    return None


def _by_value(case: Case, even: Sequence[_Probe], uneven: _Probe | None, worlds: Worlds) -> str | None:
    """Infer the mistake from the returned values; None if they are right."""
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
    """Infer the mistake from the gradients, where all values are right."""

    def scaled(encoder: Callable[[int], float], parameters: Callable[[int], float]) -> bool:
        return all(
            probe.scaled(probe.encoder, encoder(len(probe.values)))
            and probe.scaled(probe.parameters, parameters(len(probe.values)))
            for probe in even
        )

    has_parameters = even[0].parameters is not None
    if scaled(lambda w: 0.0, lambda w: 1.0):
        return "detached"
    if scaled(lambda w: w, lambda w: w) and case.grad_reduction == "sum":
        return "trainer sums"
    if scaled(lambda w: 1 / w, lambda w: 1 / w) and has_parameters:
        return "trainer averages"
    if scaled(lambda w: 1 / w, lambda w: 1.0):
        return "own slice" if any("gather" in name for name in even[0].collectives) else "statistic without gradient"
    if scaled(lambda w: w, lambda w: 1.0):
        return "counted W times"
    if all(probe.scaled(probe.encoder, 1.0) for probe in even):
        if invariants.same_parameter_gradient.name in broken:
            return "parameters scaled"
        return "local parameters" if invariants.same_parameter_gradient_on_every_rank.name in broken else "unknown"
    return "wrong direction"


# --------------------------------------------------------------------------------- the loss of the wrong samples


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
    """Whether the value of every rank is the one-process loss of these samples."""
    shards = probe.batch.shards
    candidates = (rows, _interleaved) if rows is _blocks_as_views else (rows,)
    return any(
        all(
            _near(value_of(case, select(whole_batch(case, probe.batch), shards, rank), probe.batch.d, worlds), value)
            for rank, value in enumerate(probe.values)
        )
        for select in candidates
        if case.call == "views" or select in (_own_rows, _own_rank_first, _own_labels)
        if not (case.call == "views" and select is _own_labels)
    )


def _probe(case: Case, batch: GlobalBatch, worlds: Worlds) -> _Probe:
    trial = Trial(case, batch, worlds)
    recording = Plan(recording=True)
    alone, together = trial.alone(), trial.together(recording)
    parameters = compare(trial.reduced("parameters", recording), alone.parameters) if alone.parameters else None
    encoder = compare(trial.reduced("encoder", recording), alone.encoder)
    return _Probe([x.value for x in together], alone.value, encoder, parameters, together[0].collectives, batch)


def compare(found: Gradients, expected: Gradients) -> tuple[float, float]:
    """Return the ratio of norms and the cosine of two gradients.

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
