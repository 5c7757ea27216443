"""Name what is wrong: factors, samples, differences between ranks, and gradients relative to one process."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from contrastive_zoo.testing.auditing.evidence import CLIPPED, StepEvidence, undisturbed, worst
from contrastive_zoo.testing.auditing.records import Record
from contrastive_zoo.testing.auditing.rerun import Setting
from contrastive_zoo.testing.auditing.sampling import of_samples
from contrastive_zoo.testing.evidence import flat
from contrastive_zoo.testing.mistakes import NOT_RECOGNISED, Diagnosis, diagnose

Probe = Callable[[Sequence[Record], Sequence[StepEvidence]], Iterator[Diagnosis]]
"""Yields the mistakes that it finds."""

FACTOR_TOLERANCE = 1e-3
"""Relative difference below which a factor equals an expected one; factors of a reduced precision are powers of two."""


def mistakes(records: Sequence[Record], steps: Sequence[StepEvidence]) -> list[Diagnosis]:
    """Return the mistakes of a training, each once, from the records of all ranks and the steps that were compared."""
    result = [x for probe in PROBES for x in probe(records, steps)]
    return list({x.mistake: x for x in reversed(result)}.values())[::-1]


def _of_process(records: Sequence[Record], steps: Sequence[StepEvidence]) -> Iterator[Diagnosis]:
    if not any(x.initialized or x.error for x in records):
        yield Diagnosis("no process group", "no group was initialised")
    begun = [len(x.steps) for x in records]
    if any(count < max(begun) and not x.error for count, x in zip(begun, records, strict=True)):
        yield Diagnosis(
            "different numbers of steps", f"ranks 0 … {len(records) - 1} began {', '.join(map(str, begun))} steps"
        )


def _of_start(records: Sequence[Record], steps: Sequence[StepEvidence]) -> Iterator[Diagnosis]:
    """Compare the trained parameters of all ranks before the first step."""
    for first in steps[:1]:
        for group in ("loss", "encoder"):
            names = [x for x in first.names(group) if all(x in y.start for y in records)]
            starts = [flat(x.start, names) for x in records]
            error = worst(starts, starts[0]).error
            if error > 100 * first.eps:
                yield Diagnosis(
                    "unequal parameters", f"those of the {group} differ by {error:.1%} before the first step"
                )


def _of_optimizer(records: Sequence[Record], steps: Sequence[StepEvidence]) -> Iterator[Diagnosis]:
    for step in steps:
        first = step.ranks[0]
        if not first.optimized:
            continue
        if missing := [x for x in step.names("loss") if x not in first.optimized and x in first.gradients]:
            yield Diagnosis(
                "not optimized", f"parameters with a gradient in no optimizer: {len(missing)}, such as {missing[0]}"
            )
        if stale := [x for x in first.stale if x in first.optimized]:
            yield Diagnosis(
                "never zeroed", f"{len(stale)} gradients, such as that of {stale[0]}, are not zero when a step begins"
            )


def _of_factor(records: Sequence[Record], steps: Sequence[StepEvidence]) -> Iterator[Diagnosis]:
    """Compare the factor of the loss with that of one process, and that of one process with one over the micro-batches."""
    for step in steps:
        count, scale = step.ranks[0].micro_batches, step.factor
        alone = step.one.factor if step.one is not None else None
        # of a mean over micro-batches it is 1, whatever W is
        accumulated = "" if alone is None or count == 1 else _named(alone, {count: "not", 1 / count: "twice"})
        by_world = _named(scale, {step.world_size: "times W", 1 / step.world_size: "divided by W", 1.0: ""})
        names = [by_world, f"accumulation {accumulated} divided" if accumulated == "not" else ""]
        if name := ", ".join(filter(None, names)):
            batches = f"{count} micro-batch{'es' if count > 1 else ''} on {step.world_size} ranks"
            start = step.ranks[0].factor
            relative = f", {scale:.4g} times what it is in one process" if by_world else ""
            yield Diagnosis(
                name, f"the backward pass starts with {(start or scale) / count:.4g} at the loss{relative}, {batches}"
            )
        if alone is not None and accumulated == "twice":
            yield Diagnosis(
                "accumulation divided twice", f"a loss has the factor {alone / count:.4g}, of {count} micro-batches"
            )


def _named(factor: float, names: Mapping[float, str]) -> str:
    return next((name for x, name in names.items() if math.isclose(factor, x, rel_tol=FACTOR_TOLERANCE)), "")


def _of_gathering(records: Sequence[Record], steps: Sequence[StepEvidence]) -> Iterator[Diagnosis]:
    """Look for a loss that gathers by itself and receives as many samples on each rank as in one process."""
    for step in steps:
        if _is_gathered(step):
            yield Diagnosis("gathered first", "each rank gives the loss as many samples as there are on all ranks")


def _is_gathered(step: StepEvidence) -> bool:
    one = step.run(Setting()).steps
    if step.index >= len(one) or step.world_size == 1:
        return False
    for calls in zip(one[step.index].losses, *(x.losses for x in step.ranks), strict=False):
        if step.records[0].options[calls[1].module] and calls[0].samples > 1:
            inputs = [len(x.samples) / x.micro_batches for x in step.ranks]
            return all(x.samples == calls[0].samples > n for x, n in zip(calls[1:], inputs, strict=True))
    return False


def _of_graph(records: Sequence[Record], steps: Sequence[StepEvidence]) -> Iterator[Diagnosis]:
    """Look for a step in which no parameter of the encoder gets a gradient, though the loss is not zero."""
    for step in steps:
        names = [x for x in step.names("encoder") if x in step.ranks[0].optimized]
        has_value = all(x and math.isfinite(x) for rank in step.ranks for x in rank.values)
        if names and has_value and not any(bool(flat(x.gradients, names).any()) for x in step.ranks):
            yield Diagnosis("detached", f"the gradients of all {len(names)} parameters of the encoder are zero")
            return


def _of_group(records: Sequence[Record], steps: Sequence[StepEvidence]) -> Iterator[Diagnosis]:
    """Look for ranks that share their samples, as those of a tensor-parallel group do, in the group of a loss."""
    for step in steps if records[0].shares_samples else ():
        for option, group in zip(records[0].options, records[0].loss_groups, strict=True):
            samples = [step.ranks[rank].samples for rank in group]
            if option and any(x == y for x, y in itertools.combinations(samples, 2)):
                yield Diagnosis(
                    "group of the loss",
                    f"ranks {list(group)} form the group of the loss, some of which have equal samples",
                )
                return


def _of_clipping(records: Sequence[Record], steps: Sequence[StepEvidence]) -> Iterator[Diagnosis]:
    """Compare the gradients before clipping, and those after it."""
    for step in _finished(steps):
        clipped = next((x for x in step.quantities if x.name == CLIPPED and x.ok is False), None)
        if clipped is not None and step.are_gradients_right and all(x.clips for x in step.ranks):
            assert clipped.ratio is not None
            error = f"{clipped.ratio.error:.1%}"
            yield Diagnosis("clipped per rank", f"gradients are right before clipping and {error} off after it")
            return


def _of_state(records: Sequence[Record], steps: Sequence[StepEvidence]) -> Iterator[Diagnosis]:
    """Compare parameters outside of all optimizers after each step, such as those of a teacher."""
    for step in steps:
        names = [x for x in step.other_parameters if all(x in y.after for y in step.ranks)]
        equality = step.equality("other parameters", names)
        if not equality.ok:
            start, after = flat(records[0].start, names), [flat(x.after, names) for x in step.ranks]
            moved = [rank for rank, x in enumerate(after) if not torch.equal(x, start)]
            which = f"; only ranks {moved} changed them" if len(moved) < len(after) else ""
            assert equality.ratio is not None
            differ = f"differ by {equality.ratio.error:.1e}"
            yield Diagnosis("unequal state", f"{len(names)} parameters, such as {names[0]}, {differ}{which}")
            return


def _of_gradients(records: Sequence[Record], steps: Sequence[StepEvidence]) -> Iterator[Diagnosis]:
    """Infer a mistake from the first step whose gradients are not right, after the explained factors."""
    explained = (_of_process, _of_gathering, _of_graph, _of_group, _of_clipping, _of_start, _of_state)
    if any(True for probe in explained for _ in probe(records, steps)):
        return
    for step in _finished(steps):
        is_right = step.are_gradients_right and _named(step.factor, {1.0: "right"})
        if step.one is not None and not step.problem and step.ranks[0].gradients and not is_right:
            x = step.comparison
            # every value may be that of one process, or only the ranks' mean
            if not (x.is_scaled(1.0, 1.0) and (x.has_values(1.0) or x.has_mean(1.0))):
                yield _inferred(step, [x for x in steps if x.index == step.index - 1])
                return


def _finished(steps: Sequence[StepEvidence]) -> Iterator[StepEvidence]:
    """Yield the steps that all ranks finished, up to the first that differs from one process."""
    return undisturbed(steps[: min((x.finished for step in steps[:1] for x in step.records), default=0)])


def _inferred(step: StepEvidence, before: Sequence[StepEvidence]) -> Diagnosis:
    """Return the diagnosis of a step; state that differed after the step before explains what nothing else does."""
    step.comparisons = [step.comparison]
    result = diagnose(step)
    if result.mistake == NOT_RECOGNISED and before and (names := before[0].differing_tensors):
        what = f"{len(names)} buffers or tensors of modules, such as {names[0]}, differ between ranks after step"
        measured = f"{what} {before[0].index + 1}. {result.measured}"
        return replace(result, mistake="unequal state", measured=measured)
    return result


PROBES: tuple[Probe, ...] = (
    _of_process,
    of_samples,
    _of_start,
    _of_optimizer,
    _of_factor,
    _of_gathering,
    _of_graph,
    _of_group,
    _of_clipping,
    _of_state,
    _of_gradients,
)
"""The probes, in the order in which their findings are reported."""
