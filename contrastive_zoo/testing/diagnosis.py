"""Infer the mistake in a loss or a training step from measurements, and name its fix.

Each mistake has a signature: the factor and the direction of the error in the gradients of the encoder and of the loss's
own parameters; whether ranks return the same value; what happens when the samples of some ranks change. The signatures are
tried in the order of :data:`SIGNATURES`. The probes are the same in every run. A loss that fits no signature is not
recognised, and the report says what was measured.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isnan, sqrt

from contrastive_zoo.testing import invariants
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.evidence import Evidence
from contrastive_zoo.testing.measurement import Case
from contrastive_zoo.testing.mistakes import DIAGNOSES, NOT_RECOGNISED, Diagnosis
from contrastive_zoo.testing.probe import is_near
from contrastive_zoo.testing.worlds import Worlds, WorldTimeout


def diagnose(
    case: Case, broken: Sequence[str], worlds: Worlds, *, width: int = 3, failing: GlobalBatch | None = None
) -> Diagnosis:
    """Infer the mistake that a loss or a training step makes.

    Args:
        case: the loss or the training step.
        broken: names of the broken invariants.
        worlds: the process groups to run on.
        width: width of the embeddings in the measurements.
        failing: a batch on which some rank failed.

    Examples:
        >>> from contrastive_zoo.testing.gallery import GALLERY
        >>> with Worlds() as worlds:
        ...     diagnose(GALLERY["own slice"].case, ["same_encoder_gradient"], worlds).mistake
        'own slice'
    """
    evidence = Evidence(case, broken, worlds, width, failing)
    mistake = infer(evidence)
    if mistake is not None:
        return DIAGNOSES[mistake]
    unknown = DIAGNOSES[NOT_RECOGNISED]
    return replace(unknown, why=f"{unknown.why} Measured, relative to one process: {evidence.signature()}.")


def infer(found: Evidence) -> str | None:
    """Return the mistake that explains the evidence; None if no known one does."""
    if found.starts_unequal:
        return "unequal parameters"
    if "even" in found.errors:
        return "hang" if isinstance(found.errors["even"], WorldTimeout) else "raises"
    if not found.every(lambda x: x.right):
        return _first(BY_VALUE, found)
    if not found.is_scaled(lambda w: 1, lambda w: 1):
        return _first(BY_GRADIENT, found)
    if found.uneven is not None and not (found.uneven.right and found.uneven.is_scaled(1, 1)):
        return _first(BY_UNEVEN_SHARDS, found)
    if not found.every(lambda x: x.equal_parameters):
        return _first(BY_GRADIENT, found)
    return found.failure or _outside_contract(found.broken)


Signature = Callable[[Evidence], bool]


def _first(signatures: dict[str, Signature], found: Evidence) -> str | None:
    return next((mistake for mistake, fits in signatures.items() if fits(found)), None)


# --- values are wrong on equal shards ---------------------------------------------------------------------------------


def _has_mean(found: Evidence, factor: Callable[[int], float]) -> bool:
    """Return whether the mean of the ranks' values is ``factor`` times the value of one process."""
    return found.every(lambda x: is_near(x.mean, factor(x.world_size)))


def _is_gathered_first(found: Evidence) -> bool:
    return found.option is not None and found.every(lambda x: x.gathered)


def _lacks_labels(found: Evidence) -> bool:
    return (
        found.case.call == "labels"
        and found.changes("other samples") is True
        and found.changes("other labels") is False
    )


def _lacks_offset(found: Evidence) -> bool:
    return (
        not found.every(lambda x: x.equal_values)
        and found.right_on_equal_samples
        and found.changes("other samples") is True
        and found.changes("last shard reversed") is True
    )


def _uses_positions(found: Evidence) -> bool:
    return (
        found.case.call == "views"
        and found.changes("last shard reversed") is True
        and found.changes("all shards reversed") is False
        and not found.right_on_equal_samples
    )


BY_VALUE: dict[str, Signature] = {
    "gathered first": _is_gathered_first,
    "times W": lambda x: x.every(lambda p: p.has_values(p.world_size)),
    "local negatives": lambda x: x.selection == "local negatives",
    "own rank first": lambda x: x.selection == "own rank first",
    "labels not gathered": lambda x: x.selection == "labels not gathered" or _lacks_labels(x),
    "views split wrongly": lambda x: x.selection == "views split wrongly",
    "local loss × W": lambda x: _has_mean(x, lambda w: w) and x.is_scaled(lambda w: w, lambda w: w),
    "local loss": lambda x: _has_mean(x, lambda w: 1) and x.is_scaled(lambda w: 1, lambda w: 1),
    "parameters not reduced": lambda x: _has_mean(x, lambda w: 1) and _lacks_parameter_reduction(x),
    "detached candidates": lambda x: (
        _has_mean(x, lambda w: 1) and x.calls("gather") and not x.calls_in_backward and not _has_direction(x)
    ),
    "mask without offset": _lacks_offset,
    "labels by position": _uses_positions,
}
"""Signatures of mistakes that change the value on equal shards, in the order in which they are tried."""


# --- values are right on equal shards, gradients are not --------------------------------------------------------------


def _has_direction(found: Evidence) -> bool:
    return found.every(lambda x: is_near(x.encoder.cosine, 1.0))


def _lacks_reduction(found: Evidence) -> bool:
    return not found.every(lambda x: x.equal_encoder) and found.every(lambda x: x.encoder_mean.is_scaled(1.0))


def _lacks_parameter_reduction(found: Evidence) -> bool:
    """Return whether a step reduces the encoder's gradient but not that of the loss's parameters."""
    if not found.case.step or not found.has_parameters or not found.every(lambda x: x.encoder.is_scaled(1.0)):
        return False
    if found.every(lambda x: x.equal_parameters):  # a loss for a sum trainer: each rank holds 1/W of the gradient
        return found.option == "sum" and found.is_scaled(lambda w: 1, lambda w: 1 / w)
    return found.every(lambda x: bool(x.parameters_mean and x.parameters_mean.is_scaled(1.0)))


def _is_summed(found: Evidence) -> bool:
    """Return whether a trainer sums gradients of a loss that expects a mean."""
    if not found.case.step:
        return found.case.grad_reduction == "sum" and found.is_scaled(lambda w: w, lambda w: w)
    reduced = found.is_scaled(lambda w: w, lambda w: w) or found.is_scaled(lambda w: w, lambda w: 1)
    return reduced and found.passes_on(lambda w: w)


def _is_averaged(found: Evidence) -> bool:
    """Return whether a trainer averages gradients of a loss that expects a sum."""
    known = found.has_parameters or found.option == "sum"
    return known and found.is_scaled(lambda w: 1 / w, lambda w: 1 / w) and found.passes_on(lambda w: 1)


def _keeps_own_slice(found: Evidence) -> bool:
    return (
        found.is_scaled(lambda w: 1 / w, lambda w: 1) and found.passes_on(lambda w: 1) and not found.calls_in_backward
    )


def _has_wrong_parameters(found: Evidence, factor: Callable[[int], float]) -> bool:
    return found.has_parameters and found.is_scaled(lambda w: 1, factor)


BY_GRADIENT: dict[str, Signature] = {
    "gathered first": _is_gathered_first,
    "detached": lambda x: x.is_scaled(lambda w: 0, lambda w: 1),
    "not reduced": _lacks_reduction,
    "trainer sums": _is_summed,
    "times W": lambda x: x.case.step and x.is_scaled(lambda w: w, lambda w: w) and x.passes_on(lambda w: w * w),
    "trainer averages": _is_averaged,
    "own slice": lambda x: _keeps_own_slice(x) and x.calls("gather"),
    "statistic without gradient": lambda x: _keeps_own_slice(x) and x.calls("reduce") and not x.calls("gather"),
    "counted W times": lambda x: x.is_scaled(lambda w: w, lambda w: 1) and x.passes_on(lambda w: w * w),
    "rescaled by batch size": lambda x: x.is_scaled(lambda w: 1 / sqrt(w), lambda w: 1),
    "parameters not reduced": _lacks_parameter_reduction,
    "parameters scaled": lambda x: _has_wrong_parameters(x, lambda w: w) or _has_wrong_parameters(x, lambda w: 1 / w),
    "local parameters": lambda x: _has_wrong_parameters(x, lambda w: 1),
    "wrong direction": lambda x: x.calls_in_backward and not _has_direction(x),
}
"""Signatures of mistakes that change only gradients on equal shards, in the order in which they are tried."""


# --- everything is right on equal shards ------------------------------------------------------------------------------


def _averages_means(found: Evidence) -> bool:
    """Return whether every rank returns the mean of the ranks' means: half the value if one of two ranks has no samples."""
    assert found.uneven is not None
    x = found.one_sided
    return found.uneven.equal_values and (x is None or x.has_values(0.5) or all(isnan(value) for value in x.values))


def _returns_local_means(found: Evidence) -> bool:
    """Return whether the ranks' values, weighted by their numbers of samples, give the value of one process."""
    assert found.uneven is not None
    shards = found.uneven.batch.shards
    weighted = sum(n * value for n, value in zip(shards, found.uneven.values, strict=True))
    return is_near(weighted / sum(shards), found.uneven.expected)


BY_UNEVEN_SHARDS: dict[str, Signature] = {"mean of means": _averages_means, "local loss": _returns_local_means}
"""Signatures of mistakes that have no effect on equal shards."""


# --- everything is right on every split -------------------------------------------------------------------------------


def _outside_contract(broken: set[str]) -> str | None:
    """Return the mistake that breaks an invariant outside the contract; None if the contract itself is broken."""
    if broken & {invariant.name for invariant in invariants.CONTRACT}:
        return None
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
