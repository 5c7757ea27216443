"""The diagnosis: a table of known mistakes, and what each predicts of the evidence of a check or of an audit.

A mistake is a row of ``mistakes.md``: its name, what it does wrong, its fix, and what can find it. Its predictions say what
the evidence of it is: the factor and the direction of the error in the gradients of the encoder and of the loss's own
parameters; whether ranks return the same value; what happens when the samples of some ranks change. The first mistake all of
whose predictions hold is named. Where none is, the diagnosis says what was measured, and what speaks against the closest.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from contrastive_zoo.testing.evidence import Comparison, Evidence, Factor, Stage, factor_of

NOT_RECOGNISED = "not recognised"
"""Name of the diagnosis of evidence that fits no known mistake."""

FALLBACK = "gathers by itself"
"""The mistake that is tried where no other one fits."""


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
    confirmed: tuple[str, ...] = ()  # what the mistake predicts, and is so
    competing: tuple[str, ...] = ()  # the other mistakes that come closest, each with what speaks against it
    place: str = ""  # where the ranks and one process part, if no mistake is recognised

    @property
    def why(self) -> str:
        return MISTAKES[self.mistake].why

    @property
    def fix(self) -> str:
        return MISTAKES[self.mistake].fix

    def details(self) -> dict[str, str]:
        """Return what supports the diagnosis, by title, without what is empty."""
        named = {"Measured": self.measured, "Parts": self.place}
        named |= {"Because": "; ".join(self.confirmed), "Instead of": "; ".join(self.competing)}
        return {title: text for title, text in named.items() if text}

    def as_dict(self) -> dict[str, Any]:
        lists = {"confirmed": list(self.confirmed), "competing": list(self.competing), "place": self.place}
        return {"mistake": self.mistake, "why": self.why, "measured": self.measured, "fix": self.fix, **lists}

    def __str__(self) -> str:
        details = "".join(f"{title}: {text}. " for title, text in self.details().items())
        return f"{self.mistake}: {self.why} {details}Fix: {self.fix}"


class Prediction(NamedTuple):
    """What a mistake predicts of the evidence, in words, and whether it is so."""

    says: str
    holds: Callable[[Evidence], bool]


class Explanation(NamedTuple):
    """How far the predictions of a mistake hold: those before the first that does not, and that one."""

    mistake: str
    held: tuple[str, ...]
    against: str  # empty if all hold
    share: float  # of the predictions that hold


def explanations(evidence: Evidence) -> Iterator[Explanation]:
    """Yield an explanation for every mistake of the stages of the evidence, in the order of the table."""
    fits = False
    for stage in evidence.stages:
        for name, predictions in SIGNATURES[stage].items():
            if MISTAKES[name].of_training >= evidence.is_training and not (fits and name == FALLBACK):
                held: list[str] = []
                against = ""
                for x in predictions:
                    if not x.holds(evidence):
                        against = x.says
                        break
                    held.append(x.says)
                fits = fits or not against
                yield Explanation(name, tuple(held), against, len(held) / len(predictions))


COMPETING = 2
"""Explanations that are shown besides the best one."""


def diagnose(evidence: Evidence) -> Diagnosis:
    """Return the first mistake all of whose predictions hold, and the ones that come closest."""
    best, *others = sorted(explanations(evidence), key=lambda x: -x.share) or [Explanation("", (), "no evidence", 0)]
    fits = not best.against
    close = [x for x in (others if fits else [best, *others]) if x.held][:COMPETING]
    competing = tuple(f"{x.mistake} (not so: {x.against})" if x.against else x.mistake for x in close)
    if not fits:
        return Diagnosis(NOT_RECOGNISED, str(evidence), (), competing, evidence.place())
    place = evidence.place() if best.mistake == FALLBACK else ""
    return Diagnosis(best.mistake, str(evidence) if evidence.is_training else "", best.held, competing, place)


def table() -> str:
    """Return the mistakes that an audit names as a table in Markdown, which the documentation shows."""
    rows = [f"| {name} | {x.why} | {x.fix} |" for name, x in MISTAKES.items() if x.of_training]
    return "\n".join(["| diagnosis | what happens | fix |", "| --- | --- | --- |", *rows])


# --- predictions of more than a line ---------------------------------------------------------------------------------


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


def _lacks_parameter_reduction(e: Evidence) -> bool:
    """Return whether a step reduces the encoder's gradient but not that of the loss's parameters."""

    def is_local(x: Comparison) -> bool:
        right = x.encoder is None or x.encoder.is_scaled(1.0)
        return right and x.parameters is not None and x.parameters.lack_reduction

    # of a loss for a sum trainer each rank holds 1/W of the gradient
    return e.is_step and (e.every(is_local) or (e.option == "sum" and _has_scaled_parameters(e, "1/W")))


def _has_scaled_parameters(e: Evidence, factor: Factor) -> bool:
    return e.has_parameters and e.is_scaled("1", factor)


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
    """Return whether the ranks' values, weighted by their numbers of samples, give the value of one process."""
    x = e.uneven
    assert x is not None
    weights = x.values.new_tensor(x.shards) / sum(x.shards)
    return x.near(weights @ x.values, x.expected)


# --- the words of a prediction -----------------------------------------------------------------------------------------


def _values(factor: Factor) -> Prediction:
    says = f"every rank returns {_times(factor)} the value of one process"
    return Prediction(says, lambda e: e.every(lambda x: x.has_values(factor_of(factor, x.world_size))))


def _mean(factor: Factor) -> Prediction:
    return Prediction(
        f"the mean of the ranks' values is {_times(factor)} the value of one process", lambda e: e.has_mean(factor)
    )


def _gradients(encoder: Factor, parameters: Factor) -> Prediction:
    says = f"the encoder's gradient is {_times(encoder)} the right one"
    says += f", that of the loss's own parameters {_times(parameters)}" if parameters != encoder else ""
    return Prediction(says, lambda e: e.is_scaled(encoder, parameters))


def _times(factor: Factor) -> str:
    return "exactly" if factor == "1" else f"{factor} times"


def _changes(edit: str, says: str) -> Prediction:
    return Prediction(f"{says} changes the value", lambda e: e.changes(edit) is True)


def _ignores(edit: str, says: str) -> Prediction:
    return Prediction(f"{says} changes nothing", lambda e: e.changes(edit) is False)


def _confirmed(mistake: str, says: str) -> Prediction:
    return Prediction(says, lambda e: e.confirms(mistake))


def _broken(name: str) -> Prediction:
    return Prediction(f"{name} is broken", lambda e: name in e.broken)


_OTHER_SAMPLES = _changes("other samples", "a change of other ranks' samples")
_OWN_SAMPLES = _ignores("other samples", "a change of other ranks' samples")
_BY_POSITION = _changes("last shard reversed", "another order of the last rank's samples")
_EQUAL_SAMPLES = Prediction(
    "ranks that hold copies of the same samples return the value of one process",
    lambda e: e.right_after("equal shards"),
)
_HAS_ENCODER = Prediction("the encoder has a gradient", lambda e: e.has_encoder)
_GATHERS = Prediction("ranks gather", lambda e: e.calls("gather"))
_REDUCES = Prediction("ranks reduce", lambda e: e.calls("reduce"))
_NO_BACKWARD = Prediction("no rank communicates in the backward pass", lambda e: not e.calls_in_backward)
_BACKWARD = Prediction("ranks communicate in the backward pass", lambda e: e.calls_in_backward)
_DIRECTION = Prediction("the direction of the encoder's gradient is wrong", lambda e: not e.has_direction)
_STEP = Prediction("it is a training step", lambda e: e.is_step)
_PASSES_ON_1 = Prediction("the embeddings get the right gradient", lambda e: e.passes_on("1"))
_PASSES_ON_W2 = Prediction("the embeddings get W² times the right gradient", lambda e: e.passes_on("W²"))
_LATER = "same_at_later_steps"
_RIGHT_WHEN_WRAPPED = _confirmed(FALLBACK, "ranks communicate, and in DistributedLoss the loss is right")
_UNEQUAL = Prediction("parameters differ between ranks before the first step", lambda e: True)
_GATHERED_FIRST = Prediction("a loss that gathers receives the samples of all ranks", _is_gathered_first)
_NOT_REDUCED = Prediction(
    "the parameters' gradient is right only after a mean over ranks, the encoder's before", _lacks_parameter_reduction
)


def _failure(kind: str) -> tuple[Prediction]:
    return (Prediction(f"ranks fail: {kind}", lambda e: e.failure == kind),)


# --- the predictions of each mistake, by the stage at which it shows, in the order in which they are tried --------------

SIGNATURES: dict[Stage, dict[str, tuple[Prediction, ...]]] = {
    "start": {"unequal parameters": (_UNEQUAL,)},
    "failure": {kind: _failure(kind) for kind in ("hang", "raises", "uneven shards", FALLBACK)},
    "value": {
        "batch statistics": (
            _confirmed("batch statistics", "an encoder that computes each shard apart gives the same results"),
        ),
        "gathered first": (_GATHERED_FIRST,),
        "group of the loss": (
            _confirmed("group of the loss", "a rank returns the loss of the samples of some ranks only"),
        ),
        "times W": (_values("W"),),
        "divided by W": (_values("1/W"),),
        "result thrown away": (
            Prediction("the mean of the ranks' values is not that of one process", lambda e: not e.has_mean("1")),
            _REDUCES,
            _OWN_SAMPLES,
        ),
        "local negatives": (
            _confirmed(
                "local negatives", "a rank returns the loss of its samples alone, or the mean over ranks of these"
            ),
        ),
        "local normalisation": (
            _OTHER_SAMPLES,
            _ignores("other samples shifted", "a constant that is added to other ranks' samples"),
        ),
        "own rank first": (
            _confirmed("own rank first", "a rank returns the loss of all samples, its own before those of other ranks"),
        ),
        "labels not gathered": (
            _confirmed("labels not gathered", "a rank returns the loss of all samples with its own labels repeated"),
        ),
        "views split wrongly": (
            _confirmed("views split wrongly", "a rank returns the loss of views that are cut from the ranks' blocks"),
        ),
        "different random numbers": (
            Prediction("ranks draw random numbers", lambda e: e.draws),
            Prediction(
                "with the same random numbers on every rank the value is right", lambda e: e.right_with_same_draws
            ),
        ),
        "local loss × W": (_mean("W"), _gradients("W", "W")),
        "local loss": (_mean("1"), _gradients("1", "1")),
        "parameters not reduced": (_mean("1"), _NOT_REDUCED),
        "detached candidates": (_mean("1"), _GATHERS, _NO_BACKWARD, _DIRECTION),
        "local mining": (
            _OTHER_SAMPLES,
            _changes("other labels", "a change of other ranks' labels"),
            Prediction(
                "the value is right where positives, or the nearest negatives, are on the anchor's rank",
                lambda e: e.right_after("classes by rank") or e.right_after("ranks apart"),
            ),
        ),
        "mask without offset": (_EQUAL_SAMPLES, _OTHER_SAMPLES, _BY_POSITION),
        "labels by position": (
            _BY_POSITION,
            _ignores("all shards reversed", "the same other order on every rank"),
            Prediction(
                "ranks that hold copies of the same samples are wrong", lambda e: not e.right_after("equal shards")
            ),
        ),
        FALLBACK: (_RIGHT_WHEN_WRAPPED,),
    },
    "gradient": {
        "gathered first": (_GATHERED_FIRST,),
        "detached": (_HAS_ENCODER, _gradients("0", "1")),
        "not reduced": (
            Prediction(
                "the encoder's gradient is right only after a mean over ranks",
                lambda e: e.every(lambda x: x.encoder is not None and x.encoder.lack_reduction),
            ),
        ),
        "trainer sums": (Prediction("the trainer sums the right gradients", _is_summed),),
        "times W": (_STEP, _gradients("W", "W"), _PASSES_ON_W2),
        "trainer averages": (Prediction("the trainer averages gradients that should be summed", _is_averaged),),
        "own slice": (_HAS_ENCODER, _gradients("1/W", "1"), _PASSES_ON_1, _NO_BACKWARD, _GATHERS),
        "statistic without gradient": (
            *(_HAS_ENCODER, _gradients("1/W", "1"), _PASSES_ON_1, _REDUCES),
            Prediction("no rank gathers", lambda e: not e.calls("gather")),
        ),
        "counted W times": (_gradients("W", "1"), _PASSES_ON_W2),
        "rescaled by batch size": (_gradients("1/√W", "1"),),
        "parameters not reduced": (_NOT_REDUCED,),
        "parameters scaled": (
            Prediction("the loss has parameters of its own", lambda e: e.has_parameters),
            Prediction(
                "the encoder's gradient is right, that of the loss's own parameters is W or 1/W times the right one",
                lambda e: e.is_scaled("1", "W") or e.is_scaled("1", "1/W"),
            ),
        ),
        "local parameters": (
            Prediction("the loss has parameters of its own", lambda e: e.has_parameters),
            _gradients("1", "1"),
        ),
        "wrong direction": (_BACKWARD, _DIRECTION),
        FALLBACK: (_RIGHT_WHEN_WRAPPED,),
    },
    "uneven": {
        "mean of means": (Prediction("every rank returns the mean of the ranks' means", _averages_means),),
        "scaled by local count": (
            Prediction("the ranks' values are scaled by their numbers of samples", _counts_local_samples),
        ),
        "local loss": (
            Prediction("the ranks' values, weighted by numbers of samples, are right", _returns_local_means),
        ),
        "mask without offset": (_BY_POSITION, _OTHER_SAMPLES),
        FALLBACK: (_RIGHT_WHEN_WRAPPED,),
    },
    "other": {
        "ignored grad_output": (_broken("scales_with_grad_output"),),
        "overwritten tensors": (_broken("gradients_accumulate"),),
        "overflow": (_broken("finite_at_extremes"),),
        "state": (
            Prediction(
                "the state after a step, or a later step, is wrong", lambda e: bool(e.broken & {"same_state", _LATER})
            ),
            Prediction("a later value depends on earlier samples", lambda e: "same_state" in e.broken or e.remembers),
        ),
        "different random numbers": (_broken("same_random_numbers"),),
        "later steps": (_broken(_LATER),),
        "sharded parameters": (_broken("same_sharded_gradient"),),
        "messages differ": (_broken("same_messages"),),
    },
}
"""By stage, the mistakes and what they predict."""
