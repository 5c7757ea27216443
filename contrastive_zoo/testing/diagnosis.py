"""Infer the mistake in a loss from measurements, and name its fix.

Each mistake has a signature: the factor and the direction of the error in the gradients of the encoder and of the loss's
own parameters; whether ranks return the same value; whether the value is right on even shards only. Some mistakes amount
to computing the one-process loss of the wrong samples (local samples only, own rank first, views split wrongly, labels not
gathered). For these the diagnosis computes the loss of exactly those samples and compares.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from contrastive_zoo.testing import invariants
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.measurement import Case, Gradients, Plan, whole_batch
from contrastive_zoo.testing.mistakes import DIAGNOSES, Diagnosis
from contrastive_zoo.testing.trial import Trial, value_of
from contrastive_zoo.testing.worlds import RankError, Worlds
from contrastive_zoo.testing.wrong_samples import SELECTIONS, Selection

CLOSE = 1e-6
"""Largest relative difference between a measured ratio and the one that a mistake predicts; other mistakes differ more."""


@dataclass(frozen=True)
class _Probe:
    """The measurements of one batch on W ranks, compared with one process.

    Attributes:
        values: each rank's returned value.
        expected: the value of one process.
        encoder: ratio of norms and cosine to the gradient of one process, after the gradient all-reduce.
        parameters: the same for the loss's own parameters; None if it has none.
        collectives: names of the collectives called in the forward pass.
        batch: the global batch.
    """

    values: list[float]
    expected: float
    encoder: tuple[float, float]
    parameters: tuple[float, float] | None
    collectives: frozenset[str]
    batch: GlobalBatch

    @property
    def world_size(self) -> int:
        return len(self.values)

    @property
    def equal_on_ranks(self) -> bool:
        return all(is_near(value, self.values[0]) for value in self.values)

    @property
    def right(self) -> bool:
        return all(is_near(value, self.expected) for value in self.values)


def _is_scaled(gradient: tuple[float, float] | None, factor: float) -> bool:
    """Return whether a gradient has the right direction and this factor; True for a loss without parameters."""
    return gradient is None or (is_near(gradient[0], factor) and (factor == 0 or is_near(gradient[1], 1.0)))


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
    uneven, failure = None, "hang" if invariants.runs_on_every_split.name in broken else None
    try:
        uneven = _probe(case, GlobalBatch((2, 4), d=width, seed=7), worlds)
        _probe(case, GlobalBatch((0, 3, 1), d=width, seed=7), worlds)
    except RankError as error:
        failure = "hang" if error.stuck else "uneven shards"
    broken = broken - {invariants.runs_on_every_split.name}
    by_invariant = _outside_contract(broken) if broken else None
    found = by_invariant or _by_value(case, even, uneven, worlds) or _by_gradient(case, even, broken)
    return failure if failure and found == "unknown" else found  # a mistake on equal shards takes precedence


def _outside_contract(broken: set[str]) -> str | None:
    """Return the mistake that breaks an invariant outside the contract; None if the contract itself is broken."""
    if broken & {invariant.name for invariant in invariants.CONTRACT}:
        return "overflow" if broken and broken <= {invariants.finite_at_extremes.name} else None
    for invariant, mistake in (
        (invariants.scales_with_grad_output, "ignored grad_output"),
        (invariants.gradients_accumulate, "overwritten tensors"),
        (invariants.same_state, "state"),
        (invariants.finite_at_extremes, "overflow"),
        (invariants.same_random_numbers, "different random numbers"),
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
        return "mean of means" if uneven.equal_on_ranks else "local loss"
    if all(is_near(value, probe.world_size * probe.expected) for probe in even for value in probe.values):
        return "times W"
    for mistake, selections in SELECTIONS[case.call].items():
        if all(any(_computes(case, probe, select, worlds) for select in selections) for probe in even):
            return mistake
    if first.equal_on_ranks:
        return "labels by position"
    if all(is_near(sum(probe.values) / probe.world_size, probe.expected) for probe in even):
        exact = all(_is_scaled(probe.encoder, 1.0) for probe in even)
        return "local loss" if exact else "detached candidates"
    return "mask without offset" if first.collectives else "local negatives"


def _by_gradient(case: Case, even: Sequence[_Probe], broken: set[str]) -> str:
    """Infer the mistake from the gradients, where all values are right."""

    def scaled(encoder: Callable[[int], float], parameters: Callable[[int], float]) -> bool:
        return all(
            _is_scaled(probe.encoder, encoder(probe.world_size))
            and _is_scaled(probe.parameters, parameters(probe.world_size))
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
    if all(_is_scaled(probe.encoder, 1.0) for probe in even):
        if invariants.same_parameter_gradient.name in broken:
            return "parameters scaled"
        return "local parameters" if invariants.same_parameter_gradient_on_every_rank.name in broken else "unknown"
    return "wrong direction"


def _computes(case: Case, probe: _Probe, select: Selection, worlds: Worlds) -> bool:
    """Return whether every rank returned the one-process loss of the selected samples."""
    samples, shards, d = whole_batch(case, probe.batch), probe.batch.shards, probe.batch.d
    return all(
        is_near(value_of(case, select(samples, shards, rank), d, worlds), value)
        for rank, value in enumerate(probe.values)
    )


def _probe(case: Case, batch: GlobalBatch, worlds: Worlds) -> _Probe:
    trial = Trial(case, batch, worlds)
    plan = Plan(record_collectives=True)
    expected, by_rank = trial.on_one_process(), trial.on_ranks(plan)
    parameters = compare(trial.reduced("parameters", plan), expected.parameters) if expected.parameters else None
    encoder = compare(trial.reduced("encoder", plan), expected.encoder)
    return _Probe([x.value for x in by_rank], expected.value, encoder, parameters, by_rank[0].collectives, batch)


def compare(found: Gradients, expected: Gradients) -> tuple[float, float]:
    """Return the ratio of norms and the cosine of two gradients.

    Example:
        >>> compare({"w": torch.tensor([2.0, 0.0])}, {"w": torch.tensor([1.0, 0.0])})
        (2.0, 1.0)
    """
    x = torch.cat([found[name].flatten() for name in expected])
    y = torch.cat([gradient.flatten() for gradient in expected.values()])
    if not y.norm() > 0:
        return 1.0, 1.0
    return (x.norm() / y.norm()).item(), torch.cosine_similarity(x, y, 0).item()


def is_near(found: float, expected: float) -> bool:
    """Return whether two ratios are equal up to :data:`CLOSE`."""
    return abs(found - expected) <= CLOSE * max(1.0, abs(expected))
