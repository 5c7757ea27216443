"""The probes of a diagnosis: fixed global batches, measured on W ranks and compared with one process."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.measurement import Case, Gradients, Measurement, Plan
from contrastive_zoo.testing.trial import Trial
from contrastive_zoo.testing.worlds import Worlds

CLOSE = 1e-6
"""Largest relative difference between a measured ratio and the one that a mistake predicts; other mistakes differ more."""


class Ratio(NamedTuple):
    """Ratio of the norms of two gradients, and their cosine."""

    norms: float
    cosine: float

    def is_scaled(self, factor: float) -> bool:
        """Return whether the direction is right and the length is ``factor`` times the right one."""
        return is_near(self.norms, factor) and (factor == 0 or is_near(self.cosine, 1.0))

    def __str__(self) -> str:
        return f"×{self.norms:.3g}, cosine {self.cosine:.3g}"


@dataclass(frozen=True)
class Probe:
    """The measurements of one batch on W ranks, compared with one process.

    Attributes:
        batch: the global batch.
        values: each rank's returned value.
        expected: the value of one process.
        encoder: the encoder's gradient, after the gradient all-reduce.
        parameters: the gradient of the loss's own parameters, after the gradient all-reduce; None if it has none.
        encoder_mean: the mean over ranks of the encoder's gradients that a training step leaves.
        parameters_mean: the same for the loss's own parameters.
        embeddings: the gradient at the inputs of the loss, before the gradient all-reduce; None if not known.
        equal_encoder: whether all ranks hold the same gradient of the encoder; True for a loss.
        equal_parameters: whether all ranks hold the same gradient of the loss's own parameters.
        equal_start: whether the loss's own parameters were equal on all ranks before the step.
        gathered: whether the loss receives as many samples on each rank as on one process.
        measured: the measurement of rank 0.
    """

    batch: GlobalBatch
    values: tuple[float, ...]
    expected: float
    encoder: Ratio
    parameters: Ratio | None
    encoder_mean: Ratio
    parameters_mean: Ratio | None
    embeddings: Ratio | None
    equal_encoder: bool
    equal_parameters: bool
    equal_start: bool
    gathered: bool
    measured: Measurement

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return len(self.values)

    @property
    def equal_values(self) -> bool:
        """Return whether all ranks returned the same value."""
        return all(is_near(value, self.values[0]) for value in self.values)

    @property
    def right(self) -> bool:
        """Return whether all ranks returned the value of one process."""
        return self.has_values(1.0)

    @property
    def mean(self) -> float:
        """Return the mean of the ranks' values, relative to one process."""
        return sum(self.values) / self.world_size / self.expected if self.expected else float("nan")

    def has_values(self, factor: float) -> bool:
        """Return whether all ranks returned ``factor`` times the value of one process."""
        return all(is_near(value, factor * self.expected) for value in self.values)

    def is_scaled(self, encoder: float, parameters: float) -> bool:
        """Return whether both gradients have these factors; a loss without parameters has every factor."""
        of_parameters = self.parameters is None or self.parameters.is_scaled(parameters)
        return self.encoder.is_scaled(encoder) and of_parameters

    def __str__(self) -> str:
        values = ", ".join(
            f"×{value / self.expected:.3g}" if self.expected else f"{value:.3g}" for value in self.values
        )
        parts = [f"values {values}", f"encoder gradient {self.encoder}"]
        parts += [f"gradient of the loss's own parameters {self.parameters}"] if self.parameters else []
        return f"on W={self.world_size}, shards {list(self.batch.shards)}: {'; '.join(parts)}"


def probe(case: Case, batch: GlobalBatch, worlds: Worlds) -> Probe:
    """Measure one batch.

    Raises:
        RankError: a rank raised, died or never answered.
    """
    trial, plan = Trial(case, batch, worlds), Plan(record_collectives=True)
    one, ranks = trial.on_one_process(), trial.on_ranks(plan)
    has_parameters = bool(one.parameters)
    return Probe(
        batch=batch,
        values=tuple(result.value for result in ranks),
        expected=one.value,
        encoder=compare(trial.reduced("encoder", plan), one.encoder),
        parameters=compare(trial.reduced("parameters", plan), one.parameters) if has_parameters else None,
        encoder_mean=compare(_mean([result.encoder for result in ranks]), one.encoder),
        parameters_mean=compare(_mean([result.parameters for result in ranks]), one.parameters)
        if has_parameters
        else None,
        embeddings=_compare_embeddings(ranks, one),
        equal_encoder=not case.step or _are_equal([result.encoder for result in ranks]),
        equal_parameters=_are_equal([result.parameters for result in ranks]),
        equal_start=_are_equal([result.start for result in ranks]),
        gathered=bool(one.embeddings) and all(_lengths(result) == _lengths(one) for result in ranks),
        measured=ranks[0],
    )


def compare(found: Gradients, expected: Gradients) -> Ratio:
    """Return the ratio of norms and the cosine of two gradients.

    Examples:
        >>> tuple(compare({"w": torch.tensor([2.0, 0.0])}, {"w": torch.tensor([1.0, 0.0])}))
        (2.0, 1.0)
    """
    return _ratio([found[name] for name in expected if name in found], list(expected.values()))


def is_near(found: float, expected: float) -> bool:
    """Return whether two ratios are equal up to :data:`CLOSE`."""
    return abs(found - expected) <= CLOSE * max(1.0, abs(expected))


def _ratio(found: Sequence[Tensor], expected: Sequence[Tensor]) -> Ratio:
    x, y = (torch.cat([part.double().flatten() for part in parts]) for parts in (found, expected))
    if x.shape != y.shape:
        return Ratio(float("nan"), float("nan"))
    if not y.norm() > 0:
        return Ratio(1.0, 1.0)
    return Ratio((x.norm() / y.norm()).item(), torch.cosine_similarity(x, y, 0).item())


def _compare_embeddings(ranks: Sequence[Measurement], one: Measurement) -> Ratio | None:
    if not one.embeddings or any(len(result.embeddings) != len(one.embeddings) for result in ranks):
        return None
    by_input = zip(*(result.embeddings for result in ranks), strict=True)
    return _ratio([x for shards in by_input for x in shards], one.embeddings)


def _lengths(found: Measurement) -> list[int]:
    return [len(x) for x in found.embeddings]


def _mean(by_rank: Sequence[Gradients]) -> Gradients:
    names = set.intersection(*map(set, by_rank))
    return {name: torch.stack([result[name] for result in by_rank]).mean(0) for name in by_rank[0] if name in names}


def _are_equal(by_rank: Sequence[Gradients]) -> bool:
    first, *others = by_rank
    return all(
        result.keys() == first.keys() and all(torch.allclose(result[name], first[name]) for name in first)
        for result in others
    )
