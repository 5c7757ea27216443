"""The diagnosis: the first mistake of ``mistakes.md`` all of whose predictions in ``signatures.md`` hold of the evidence."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from contrastive_zoo.testing.evidence import Comparison, Evidence, is_scaled

NOT_RECOGNISED = "not recognised"  # name of the diagnosis of evidence that fits no known mistake

# Invariants by each of which one mistake is known
OUTSIDE_THE_CONTRACT = (
    *("scales_with_grad_output", "gradients_accumulate", "finite_at_extremes", "same_random_numbers"),
    *("same_at_later_steps", "same_sharded_gradient", "same_messages", "same_value_in_any_order"),
)
COMPETING = 2  # explanations that are shown besides the best one


class Mistake(NamedTuple):
    """What a loss or a training does wrong, in a sentence; what to do, in a line; whether an audit can name it."""

    why: str
    fix: str
    of_training: bool


def _rows(table: str) -> list[list[str]]:
    lines = Path(__file__).with_name(table).read_text(encoding="utf-8").splitlines()
    return [line.strip("| ").split(" | ") for line in lines[2:]]


MISTAKES = {name: Mistake(why, fix, "audit" in found_by) for name, why, fix, found_by in _rows("mistakes.md")}
# By stage, the mistakes in the order in which they are tried, and the facts that each predicts
SIGNATURES: dict[str, dict[str, tuple[str, ...]]] = {}
for _stage, _name, _facts in _rows("signatures.md"):
    SIGNATURES.setdefault(_stage, {})[_name] = tuple(_facts.split("; "))


@dataclass(frozen=True)
class Diagnosis:
    """A mistake, and what was measured relative to one process, in words; empty if that adds nothing."""

    mistake: str
    measured: str = ""
    confirmed: tuple[str, ...] = ()  # what the mistake predicts, and is so
    competing: tuple[str, ...] = ()  # the other mistakes that come closest, each with what speaks against it

    @property
    def why(self) -> str:
        return MISTAKES[self.mistake].why

    @property
    def fix(self) -> str:
        return MISTAKES[self.mistake].fix

    def as_dict(self) -> dict[str, Any]:
        return vars(self) | {"why": self.why, "fix": self.fix}

    def __str__(self) -> str:
        named = {"Measured": self.measured, "Because": "; ".join(self.confirmed)}
        named |= {"Also considered": ". Also considered: ".join(self.competing)}
        details = "".join(f"\n{title}: {text}." for title, text in named.items() if text)
        return f"{self.mistake}: {self.why}{details}\nFix: {self.fix}"


class Explanation(NamedTuple):
    """How far the predictions of a mistake hold: those before the first that does not, and that one."""

    mistake: str
    held: tuple[str, ...] = ()
    against: str = ""  # empty if all hold
    share: float = 0.0  # of the predictions that hold


def diagnose(evidence: Evidence) -> Diagnosis:
    """Return the first mistake all of whose predictions hold, and the ones that come closest."""
    explanations: list[Explanation] = []
    for name, predicted in (x for stage in evidence.stages for x in SIGNATURES[stage].items()):
        if MISTAKES[name].of_training >= evidence.is_training:
            against = next((x for x in predicted if not FACTS[x](evidence)), "")
            held = predicted[: predicted.index(against)] if against else predicted
            explanations.append(Explanation(name, held, against, len(held) / len(predicted)))
    explanations.sort(key=lambda x: -x.share)
    best = next((x for x in explanations[:1] if not x.against), Explanation(NOT_RECOGNISED))
    close = [x for x in explanations if x is not best and x.held][:COMPETING]
    competing = tuple(x.mistake + (f". Excluded: {negated(x.against)}" if x.against else "") for x in close)
    is_measured = evidence.is_training or best.mistake == NOT_RECOGNISED
    return Diagnosis(best.mistake, str(evidence) if is_measured else "", best.held, competing)


# Patterns of a fact, the first of which that it has is replaced by what says the opposite
NEGATIONS = (
    ("is 0 times the right one", "is not 0"),
    (r"^no rank (\w+)s\b", r"ranks \1"),
    (r"^(ranks|the embeddings) (?!that)", r"\1 do not "),
    ("changes nothing", "changes something"),
    (r"(change|depend)s", r"does not \1"),
    (r" has an? | has (?=param)", " has no "),
    (r" (is|are) ", r" \1 not "),
)


def negated(fact: str) -> str:
    """Return what is so of evidence that lacks a fact, in words."""
    pattern, opposite = next(x for x in NEGATIONS if re.search(x[0], fact))
    return re.sub(pattern, opposite, fact, count=1)


Fact = Callable[[Evidence], bool]

# The power of W by which a value or a gradient is larger than it should be; None: it is zero
POWERS = {"0 times": None, "exactly": 0, "W times": 1, "W² times": 2, "1/W times": -1, "1/√W times": -0.5}


def _of_factor(holds: Callable[[Comparison, float], bool], power: float | None) -> Fact:
    return lambda e: e.every(lambda x: holds(x, 0.0 if power is None else x.world_size**power))


def _is_summed(e: Evidence) -> bool:
    if not e.is_training:
        return e.trainer == "sum" and e.every(lambda x: x.is_scaled(x.world_size, x.world_size))
    has_factor = e.every(lambda x: x.encoder is not None and is_scaled(x.encoder, x.world_size))
    return has_factor and e.every(lambda x: any(is_scaled(x.parameters, w) for w in (1, x.world_size)))


def _is_averaged(e: Evidence) -> bool:
    is_known = e.option == "sum" or (e.has_parameters and not e.is_training)
    return is_known and e.every(lambda x: x.is_scaled(1 / x.world_size, 1 / x.world_size))


def _lacks_parameter_reduction(e: Evidence) -> bool:
    is_local = e.every(lambda x: is_scaled(x.encoder, 1) and x.parameters is not None and x.parameters.lack_reduction)
    # of a loss for a sum trainer each rank holds 1/W of the gradient
    is_of_sum = e.option == "sum" and e.has_parameters and e.every(lambda x: x.is_scaled(1, 1 / x.world_size))
    return e.is_training and (is_local or is_of_sum)


def _counts_local_samples(e: Evidence) -> bool:
    """Return whether the ranks' values, divided or multiplied by their numbers of samples, are the same."""
    x = e.uneven
    assert x is not None
    counts = x.values.new_tensor(x.shards)[:, None]
    candidates = (x.values / counts, x.values * counts)
    return not x.equal_values and any(x.near(y, y[0]) for y in candidates)


def _averages_means(e: Evidence) -> bool:
    """Return whether every rank returns the mean of the ranks' means: half the value if one of two ranks has no samples."""
    assert e.uneven is not None
    x = e.one_sided
    return e.uneven.equal_values and (x is None or x.has_values(0.5) or bool(x.values.isnan().all()))


def _returns_local_means(e: Evidence) -> bool:
    x = e.uneven
    assert x is not None
    return x.near(x.values.new_tensor(x.shards) @ x.values / sum(x.shards), x.expected)


# What the evidence answers to a question: the name of its method, and the argument
ANSWERS: dict[str, tuple[str, str, bool]] = {
    "ranks gather": ("calls", "gather", True),
    "no rank gathers": ("calls", "gather", False),
    "ranks reduce": ("calls", "reduce", True),
    "with the same random numbers on every rank the value is right": ("right_after", "same draws", True),
    "ranks that hold copies of the same samples return the value of one process": ("right_after", "equal shards", True),
    "ranks that hold copies of the same samples are wrong": ("right_after", "equal shards", False),
    "a change of other ranks' samples changes the value": ("changes", "other samples", True),
    "a change of other ranks' samples changes nothing": ("changes", "other samples", False),
    "a constant that is added to other ranks' samples changes nothing": ("changes", "other samples shifted", False),
    "a change of other ranks' labels changes the value": ("changes", "other labels", True),
    "another order of the last rank's samples changes the value": ("changes", "last shard reversed", True),
    "the same other order on every rank changes nothing": ("changes", "all shards reversed", False),
    "an encoder that computes each shard apart gives the same results": ("confirms", "batch statistics", True),
    "a rank returns the loss of its samples alone, or their mean": ("confirms", "local negatives", True),
    "a rank returns the loss of all samples, its own before those of other ranks": ("confirms", "own rank first", True),
    "a rank returns the loss of all samples with its own labels repeated": ("confirms", "labels not gathered", True),
    "a rank returns the loss of shards that are cut, or padded with zeros, to one size": ("confirms", "one size", True),
    "a rank returns the loss of views that are cut from the ranks' blocks": ("confirms", "views split wrongly", True),
}
FAILURES = ("hang", "no answer", "raises", "uneven shards")
WITH_FACTOR: dict[str, Callable[[Comparison, float], bool]] = {
    "every rank returns {} the value of one process": Comparison.has_values,
    "the mean of the ranks' values is {} the value of one process": Comparison.has_mean,
    "the encoder's gradient is {} the right one": lambda x, factor: is_scaled(x.encoder, factor),
    "the gradient of the loss's own parameters is {} the right one": lambda x, factor: is_scaled(x.parameters, factor),
}
# What may be so of evidence, in words
FACTS: dict[str, Fact] = {
    **{says.format(x): _of_factor(holds, w) for says, holds in WITH_FACTOR.items() for x, w in POWERS.items()},
    **{fact: partial(lambda asks, x, yes, e: getattr(e, asks)(x) is yes, *of) for fact, of in ANSWERS.items()},
    **{f"ranks fail: {x}": partial(lambda x, e: e.failure == x, x) for x in FAILURES},
    **{f"{x} is broken": partial(lambda x, e: x in e.broken, x) for x in OUTSIDE_THE_CONTRACT},
    "parameters differ between ranks before the first step": lambda e: not e.equal_parameters,
    "other tensors of the loss differ between ranks before the first step": lambda e: not e.equal_tensors,
    "the encoder has a gradient": lambda e: e.every(lambda x: x.encoder is not None),
    "the loss has parameters of its own": lambda e: e.has_parameters,
    "the encoder's gradient is right only after a mean over ranks": lambda e: e.every(
        lambda x: x.encoder is not None and x.encoder.lack_reduction
    ),
    "the parameters' gradient is right only after a mean over ranks, the encoder's before": _lacks_parameter_reduction,
    "the gradient of the loss's own parameters is W or 1/W times the right one": lambda e: (
        e.every(lambda x: is_scaled(x.parameters, x.world_size))
        or e.every(lambda x: is_scaled(x.parameters, 1 / x.world_size))
    ),
    "the direction of the encoder's gradient is wrong": lambda e: (
        not e.every(lambda x: x.encoder is not None and x.encoder.has_direction)
    ),
    "it is a training": lambda e: e.is_training,
    "the trainer sums the right gradients": _is_summed,
    "the trainer averages gradients that should be summed": _is_averaged,
    "ranks communicate in the backward pass": lambda e: e.calls_in_backward,
    "no rank communicates in the backward pass": lambda e: not e.calls_in_backward,
    "ranks draw random numbers": lambda e: e.draws,
    "the mean of the ranks' values is not that of one process": lambda e: not e.every(lambda x: x.has_mean(1)),
    "the value is right where positives, or the nearest negatives, are on the anchor's rank": lambda e: (
        e.right_after("classes by rank") or e.right_after("ranks apart")
    ),
    "every rank returns the mean of the ranks' means": _averages_means,
    "the ranks' values are scaled by their numbers of samples": _counts_local_samples,
    "the ranks' values, weighted by numbers of samples, are right": _returns_local_means,
    "the state of a step, or a later step, is wrong": lambda e: bool({"same_state", "same_at_later_steps"} & e.broken),
    "a later value depends on earlier samples": lambda e: "same_state" in e.broken or e.confirms("state"),
}
