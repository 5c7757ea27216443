"""The diagnosis: a table of known mistakes, and the signature of each in the evidence of a check or of an audit.

A mistake is a row of ``mistakes.md``: its name, what it does wrong, its fix, and what can find it. Its signatures say what
the evidence of it is: the factor and the direction of the error in the gradients of the encoder and of the loss's own
parameters; whether ranks return the same value; what happens when the samples of some ranks change. Evidence that fits none
is not recognised, and the diagnosis says what was measured.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from contrastive_zoo.testing.evidence import Comparison, Evidence, Factor, Stage

Signature = Callable[[Evidence], bool]

NOT_RECOGNISED = "not recognised"
"""Name of the diagnosis of evidence that fits no known mistake."""


class Mistake(NamedTuple):
    """What a loss or a training does wrong, in a sentence; what to do, in a line; whether an audit can name it."""

    why: str
    fix: str
    of_training: bool


def _read_table() -> dict[str, Mistake]:
    lines = Path(__file__).with_suffix(".md").read_text(encoding="utf-8").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines[2:]]
    return {name: Mistake(why, fix, "audit" in found_by) for name, why, fix, found_by in rows}


MISTAKES = _read_table()
"""All mistakes by name."""


@dataclass(frozen=True)
class Diagnosis:
    """A mistake, and what was measured relative to one process, in words; empty if that adds nothing."""

    mistake: str
    measured: str = ""

    @property
    def why(self) -> str:
        return MISTAKES[self.mistake].why

    @property
    def fix(self) -> str:
        return MISTAKES[self.mistake].fix

    def as_dict(self) -> dict[str, str]:
        return {"mistake": self.mistake, "why": self.why, "measured": self.measured, "fix": self.fix}

    def __str__(self) -> str:
        measured = f"Measured: {self.measured}. " if self.measured else ""
        return f"{self.mistake}: {self.why} {measured}Fix: {self.fix}"


def diagnose(evidence: Evidence) -> Diagnosis:
    for stage in evidence.stages:
        for name, fits in SIGNATURES[stage].items():
            if MISTAKES[name].of_training >= evidence.is_training and fits(evidence):
                return Diagnosis(name, str(evidence) if evidence.is_training else "")
    return Diagnosis(NOT_RECOGNISED, str(evidence))


def table() -> str:
    """Return the mistakes that an audit names as a table in Markdown, which the documentation shows."""
    rows = [f"| {name} | {x.why} | {x.fix} |" for name, x in MISTAKES.items() if x.of_training]
    return "\n".join(["| diagnosis | what happens | fix |", "| --- | --- | --- |", *rows])


# --- signatures of more than a line ---------------------------------------------------------------------------------


def _is_gathered_first(e: Evidence) -> bool:
    return e.option is not None and e.every(lambda x: x.gathered)


def _is_summed(e: Evidence) -> bool:
    """Return whether a trainer sums gradients of a loss that expects a mean."""
    if not e.is_step:
        return e.trainer == "sum" and e.is_scaled("W", "W")
    reduced = e.is_scaled("W", "W") or e.is_scaled("W", "1")
    return e.has_encoder and reduced and e.passes_on("W")


def _is_averaged(e: Evidence) -> bool:
    """Return whether a trainer averages gradients of a loss that expects a sum."""
    is_known = e.option == "sum" or (e.has_parameters and not e.is_training)
    return is_known and e.is_scaled("1/W", "1/W") and e.passes_on("1")


def _keeps_own_slice(e: Evidence) -> bool:
    return e.has_encoder and e.is_scaled("1/W", "1") and e.passes_on("1")


def _lacks_parameter_reduction(e: Evidence) -> bool:
    """Return whether a step reduces the encoder's gradient but not that of the loss's parameters."""

    def is_local(x: Comparison) -> bool:
        right = x.encoder is None or x.encoder.is_scaled(1.0)
        return right and x.parameters is not None and x.parameters.lack_reduction

    # of a loss for a sum trainer each rank holds 1/W of the gradient
    return e.is_step and (e.every(is_local) or (e.option == "sum" and _has_scaled_parameters(e, "1/W")))


def _has_scaled_parameters(e: Evidence, factor: Factor) -> bool:
    return e.has_parameters and e.is_scaled("1", factor)


def _averages_means(e: Evidence) -> bool:
    """Return whether every rank returns the mean of the ranks' means: half the value if one of two ranks has no samples."""
    assert e.uneven is not None
    x = e.one_sided
    return e.uneven.equal_values and (x is None or x.has_values(0.5) or bool(x.values.isnan().all()))


def _returns_local_means(e: Evidence) -> bool:
    """Return whether the ranks' values, weighted by their numbers of samples, give the value of one process."""
    x = e.uneven
    assert x is not None
    weights = x.values.new_tensor(x.shards) / sum(x.shards)
    return x.near(weights @ x.values, x.expected)


def _counts_local_samples(e: Evidence) -> bool:
    """Return whether the ranks' values are proportional to their numbers of samples."""
    x = e.uneven
    assert x is not None
    per_sample = x.values / x.values.new_tensor(x.shards)[:, None]
    return not x.equal_values and x.near(per_sample, per_sample[0])


# --- the signatures of each stage, in the order in which they are tried ----------------------------------------------

_INVARIANTS = {
    "ignored grad_output": "scales_with_grad_output",
    "overwritten tensors": "gradients_accumulate",
    "state": "same_state",
    "overflow": "finite_at_extremes",
    "different random numbers": "same_random_numbers",
    "sharded parameters": "same_sharded_gradient",
    "later steps": "same_at_later_steps",
    "settings": "settings_agree",
    "unequal parameters": "parameters_agree",
    "missing argument": "arguments_agree",
    "messages differ": "same_messages",
}
"""Mistakes against a promise outside of the contract: the invariant that each breaks."""

SIGNATURES: dict[Stage, dict[str, Signature]] = {
    "start": {"unequal parameters": lambda e: True},
    "failure": {
        "gathers by itself": lambda e: e.failure == "gathers by itself",
        "hang": lambda e: e.failure == "hang",
        "raises": lambda e: e.failure == "raises",
        "uneven shards": lambda e: e.failure == "uneven shards",
    },
    "value": {
        "batch statistics": lambda e: e.confirms("batch statistics"),
        "gathered first": _is_gathered_first,
        "times W": lambda e: e.every(lambda x: x.has_values(x.world_size)),
        "result thrown away": lambda e: not e.has_mean("1") and e.confirms("result thrown away"),
        "local normalisation": lambda e: e.confirms("local normalisation"),
        "local negatives": lambda e: e.confirms("local negatives"),
        "own rank first": lambda e: e.confirms("own rank first"),
        "labels not gathered": lambda e: e.confirms("labels not gathered"),
        "views split wrongly": lambda e: e.confirms("views split wrongly"),
        "local loss × W": lambda e: e.has_mean("W") and e.is_scaled("W", "W"),
        "local loss": lambda e: e.has_mean("1") and e.is_scaled("1", "1"),
        "parameters not reduced": lambda e: e.has_mean("1") and _lacks_parameter_reduction(e),
        "detached candidates": lambda e: (
            e.has_mean("1") and e.calls("gather") and not e.calls_in_backward and not e.has_direction
        ),
        "mask without offset": lambda e: e.confirms("mask without offset"),
        "labels by position": lambda e: e.confirms("labels by position"),
        "gathers by itself": lambda e: e.confirms("gathers by itself"),
    },
    "gradient": {
        "gathered first": _is_gathered_first,
        "detached": lambda e: e.has_encoder and e.is_scaled("0", "1"),
        "not reduced": lambda e: e.every(lambda x: x.encoder is not None and x.encoder.lack_reduction),
        "trainer sums": _is_summed,
        "times W": lambda e: e.is_step and e.is_scaled("W", "W") and e.passes_on("W²"),
        "trainer averages": _is_averaged,
        "own slice": lambda e: _keeps_own_slice(e) and e.calls("gather") and not e.calls_in_backward,
        "statistic without gradient": lambda e: _keeps_own_slice(e) and e.calls("reduce") and not e.calls("gather"),
        "counted W times": lambda e: e.is_scaled("W", "1") and e.passes_on("W²"),
        "rescaled by batch size": lambda e: e.is_scaled("1/√W", "1"),
        "parameters not reduced": _lacks_parameter_reduction,
        "parameters scaled": lambda e: _has_scaled_parameters(e, "W") or _has_scaled_parameters(e, "1/W"),
        "local parameters": lambda e: _has_scaled_parameters(e, "1"),
        "wrong direction": lambda e: e.calls_in_backward and not e.has_direction,
        "gathers by itself": lambda e: e.confirms("gathers by itself"),
    },
    "uneven": {
        "mean of means": _averages_means,
        "local loss": _returns_local_means,
        "scaled by local count": _counts_local_samples,
        "gathers by itself": lambda e: e.confirms("gathers by itself"),
    },
    "other": {name: lambda e, x=x: x in e.broken for name, x in _INVARIANTS.items()},  # type: ignore[misc]  # a default
}
