"""Compare the steps of all ranks with those of one process, and name what is wrong."""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from contrastive_zoo.testing.auditing.records import Record
from contrastive_zoo.testing.auditing.rerun import SAME_BATCHES, Setting
from contrastive_zoo.testing.auditing.step_evidence import RunAgain, StepEvidence, worst
from contrastive_zoo.testing.evidence import ROUNDING_FACTOR, flat
from contrastive_zoo.testing.mistakes import NOT_RECOGNISED, Diagnosis, diagnose
from contrastive_zoo.testing.report import Quantity, WorldReport

FACTOR_TOLERANCE = 1e-3  # relative difference of equal factors; those of a reduced precision are powers of two
# Mistakes that are inferred, and are no mistake of a training that is the same on one process: a sum over micro-batches
# may be wanted, a factor may be undone later
INFERRED = {"accumulation not divided", "accumulation divided twice", "times W", "divided by W", "gathered first"}
# Mistakes that explain wrong gradients, from which no other one is then inferred
EXPLAINED_BY = {
    *("no process group", "different numbers of steps", "unequal parameters", "gathered first", "detached"),
    *("unequal state", "unequal settings"),
}
Found = Iterator[tuple[str, str]]  # mistakes, and what was measured


def assemble(records: Sequence[Record], run: RunAgain) -> WorldReport:
    """Return the report of the records of all ranks; run the training again in one process to compare with it."""
    report = WorldReport(len(records), min(x.finished for x in records), records[0].losses)
    report.problem = next((x.problem for x in records if x.problem), "")
    if report.problem:
        return report
    run = functools.cache(run)
    steps = _steps(records, run)
    if steps and run(Setting()).is_unsure and any(_differing(steps)):
        steps = min([_steps(records, run, True), steps, _steps(records, run, False)], key=_differing)
    differing = (i + 1 for i, x in enumerate(steps[: report.steps]) if any(y.differs for y in x.quantities))
    compared = steps[: next(differing, report.steps)]  # later steps start from another state than one process
    report.quantities = _largest([x.quantities for x in compared])
    measurements = [*_of_process(records), *_of_samples(records, run(Setting()) if steps else Record())]
    measurements += [x for probe in PROBES for step in steps for x in probe(step)]
    mistakes = [Diagnosis(mistake, measured) for mistake, measured in measurements]
    if not EXPLAINED_BY & {x.mistake for x in mistakes}:
        mistakes += _of_gradients(steps, compared)
    findings = list({x.mistake: x for x in reversed(mistakes)}.values())[::-1]  # each once
    is_noted = not any(x.differs for x in report.quantities)
    report.findings = [x for x in findings if not (is_noted and x.mistake in INFERRED)]
    report.notes = [str(x).rstrip(".") for x in findings if x not in report.findings]
    report.notes += dict.fromkeys(x for step in compared for x in _notes(step))
    errors = [f"rank {x.rank} raised {x.error}" for x in records if x.error]
    if not errors and not report.steps:
        errors.append("no step of an optimizer was finished on all ranks")
    errors += [f"--loss {name}: no module of such a class was called" for name in sorted(records[0].unknown_losses)]
    report.problem = "; ".join(errors)
    off = [f"{x.name} {x.ratio.error:.1%} off" for x in report.quantities if x.differs and x.ratio]
    if off and not report.findings:
        report.findings = [Diagnosis(NOT_RECOGNISED, "; ".join(off))]
    return report


def _steps(records: Sequence[Record], run: RunAgain, by_view: bool | None = None) -> list[StepEvidence]:
    def run_in_order(setting: Setting) -> Record:
        return run(setting._replace(by_view=by_view))

    return [StepEvidence(index, records, run_in_order) for index in range(min(len(x.steps) for x in records))]


def _differing(steps: Sequence[StepEvidence]) -> list[int]:
    """Return how many quantities of each step are not those of one process, or not compared."""
    return [sum(not (x.ok or x.is_noted) for x in step.quantities) for step in steps]


def _largest(steps: Sequence[Sequence[Quantity]]) -> list[Quantity]:
    """Return every quantity at the step where its error is largest; one that was once not compared was not compared."""
    largest: dict[str, Quantity] = {}

    def severity(x: Quantity) -> tuple[bool, bool, float]:
        error = 0.0 if x.ratio is None else x.ratio.error
        return x.ok is False, x.ratio is None, error if math.isfinite(error) else math.inf

    for index, quantities in enumerate(steps):
        for quantity in quantities:
            quantity.step = index
            largest[quantity.name] = max(largest.get(quantity.name, quantity), quantity, key=severity)
    return list(largest.values())


def _of_process(records: Sequence[Record]) -> Found:
    if any(x.skipped for x in records) and not any(x.initialized or x.error for x in records):
        yield "no process group", "no group was initialised"
    begun = [len(x.steps) for x in records]
    if any(count < max(begun) and not x.error for count, x in zip(begun, records, strict=True)):
        yield "different numbers of steps", f"ranks 0 … {len(records) - 1} began {', '.join(map(str, begun))} steps"


def _of_samples(records: Sequence[Record], alone: Record) -> Found:
    digests = [[step.samples for step in record.steps] for record in records]
    together = [list(ranks) for ranks in zip(*digests, strict=False)]
    if len(records) > 1 and not records[0].shares_samples:
        if equal := [i for i, x in enumerate(together) if x[0] and all(y == x[0] for y in x)]:
            count = len(together[equal[0]][0])
            yield "same shard", f"all ranks have the same {count} samples at step {equal[0] + 1}"
            return
        yield from _in_an_epoch(records, together, alone)
    if any(epoch.shuffles for epoch in records[0].samplers) and records[0].steps:
        epochs = [step.epoch for step in records[0].steps]
        for i in range(1, len(together)):  # the first step of every later epoch
            if epochs[i] > epochs[i - 1] and together[i] == together[0] and any(together[i]):
                yield "no set_epoch", f"step {i + 1} begins an epoch with the samples of step 1, in the same order"
                return


def _in_an_epoch(records: Sequence[Record], together: Sequence[Sequence[list[bytes]]], alone: Record) -> Found:
    """Compare the indices of the ranks' loaders; without these, the contents of the samples of each step."""
    if alone.problem == SAME_BATCHES:
        yield "same shard", SAME_BATCHES
        return
    loaders = [
        epochs
        for epochs in zip(*(record.samplers for record in records), strict=False)
        if epochs[0].first and len({(x.first, x.size) for x in epochs}) == 1  # over the same dataset
    ]
    for epochs in loaders:
        each = [[i for batch in epoch.batches for i in batch] for epoch in epochs]
        total, distinct, size = sum(map(len, each)), len(set().union(*each)), epochs[0].size
        if len(seeds := {x.seed for x in epochs if isinstance(x.seed, int)}) > 1 and total > distinct:
            yield "sampler seeded per rank", f"the seeds of {epochs[0].sampler} are {sorted(seeds)}"
        elif total and all(x == each[0] for x in each):  # right where each rank takes a part of the batch
            if alone.takes_all:
                yield "same shard", f"the {epochs[0].sampler} of every rank yields the same {distinct} samples"
        elif all(epoch.complete and len(set(x)) == size for epoch, x in zip(epochs, each, strict=True)):
            yield "not sharded", f"the {epochs[0].sampler} of every rank yields all {size} samples in an epoch"
        elif 0 < total - distinct < total * (1 - 1 / len(records)) / 2:
            repeated = f"{total - distinct} of {total} samples of an epoch are repeated"
            yield "repeated samples", f"{repeated} ({epochs[0].sampler}, {size} samples in the dataset)"
    for i, ranks in enumerate(together if not loaders else ()):
        total = sum(map(len, ranks))
        if shared := total - len(set().union(*ranks)):
            yield "repeated samples", f"{shared} of {total} samples of step {i + 1} are repeated"
            return


def _of_start(step: StepEvidence) -> Found:
    for group in ("loss", "encoder") if step.index == 0 else ():
        names = [x for x in step.names(group) if all(x in y.start for y in step.records)]
        starts = [flat(x.start, names) for x in step.records]
        error = worst(starts, starts[0]).error
        if error > 100 * step.eps:
            yield "unequal parameters", f"those of the {group} differ by {error:.1%} before the first step"


def _of_optimizer(step: StepEvidence) -> Found:
    first, optimized = step.ranks[0], set().union(*(x.optimized for x in step.records[0].steps))
    missing = [x for x in step.names("loss") if x not in optimized and x in first.gradients]
    if first.optimized and missing:
        yield "not optimized", f"parameters with a gradient in no optimizer: {len(missing)}, such as {missing[0]}"
    if stale := [x for x in first.stale if x in first.optimized]:
        yield "never zeroed", f"{len(stale)} gradients, such as that of {stale[0]}, are not zero when a step begins"


def _of_factor(step: StepEvidence) -> Found:
    """Compare the factor of the loss with that of one process, and that of one process with one over the micro-batches."""
    count, scale, start = step.ranks[0].micro_batches, step.factor, step.ranks[0].factor
    alone = step.one.factor if step.one is not None else None
    batches = f"{count} micro-batch{'es' if count > 1 else ''} on {step.world_size} ranks"
    begin = f"the backward pass starts with {(start or scale) / count:.4g} at the loss"
    if name := _named(scale, {step.world_size: "times W", 1 / step.world_size: "divided by W", 1.0: ""}):
        yield name, f"{begin}, {scale:.4g} times what it is in one process, {batches}"
    # of a mean over micro-batches it is 1, whatever W is
    if count > 1 and alone is not None and (name := _named(alone, {count: "not divided", 1 / count: "divided twice"})):
        yield f"accumulation {name}", f"{begin}, {batches}"


def _named(factor: float, names: Mapping[float, str]) -> str:
    return next((name for x, name in names.items() if math.isclose(factor, x, rel_tol=FACTOR_TOLERANCE)), "")


def _of_gathering(step: StepEvidence) -> Found:
    """Look for a loss that gathers by itself and receives as many samples on each rank as in one process."""
    if (alone := step.of(Setting())) is None or step.world_size == 1 or step.problem == SAME_BATCHES:
        return
    for one, *calls in zip(alone.losses, *(x.losses for x in step.ranks), strict=False):
        if calls[0].option and one.samples > 1:
            count = len({y for x in step.ranks for y in x.samples})
            if all(x.samples == one.samples for x in calls) and all(len(x.samples) < count for x in step.ranks):
                yield "gathered first", "each rank gives the loss as many samples as there are on all ranks"
            return


def _of_graph(step: StepEvidence) -> Found:
    """Look for a step in which no parameter of the encoder gets a gradient, though the loss is not zero."""
    names = [x for x in step.names("encoder") if x in step.ranks[0].optimized]
    has_value = all(x and math.isfinite(x) for rank in step.ranks for x in rank.values)
    if names and has_value and not any(bool(flat(x.gradients, names).any()) for x in step.ranks):
        yield "detached", f"the gradients of all {len(names)} parameters of the encoder are zero"


def _of_state(step: StepEvidence) -> Found:
    """Compare parameters outside of all optimizers after each step, such as those of a teacher."""
    names = [x for x in step.other_parameters if all(x in y.after for y in step.ranks)]
    equality = step.equality("other parameters", names)
    if not equality.ok:
        start, after = flat(step.records[0].start, names), [flat(x.after, names) for x in step.ranks]
        moved = [rank for rank, x in enumerate(after) if not torch.equal(x, start)]
        which = f"; only ranks {moved} changed them" if len(moved) < len(after) else ""
        assert equality.ratio is not None
        differ = f"differ by {equality.ratio.error:.1e}"
        yield "unequal state", f"{len(names)} parameters, such as {names[0]}, {differ}{which}"


def _of_settings(step: StepEvidence) -> Found:
    """Look for a setting of an optimizer, or a limit of clipping, that another rank has in another step."""
    first = step.ranks[0]
    for rank, x in enumerate(step.ranks if any(y.differs for y in step.quantities) else ()):
        pairs = [("clipping", {"limit": first.clips}, {"limit": x.clips})]
        for i, groups in first.settings.items():
            pairs += [("optimizer", y, z) for y, z in zip(groups, x.settings.get(i, ()), strict=False)]
        for what, y, z in pairs:
            for name in (name for name in y if name in z and str(y[name]) != str(z[name])):
                measured = f"the {name} of the {what} is {y[name]} on rank 0 and {z[name]} on rank {rank}"
                yield "unequal settings", measured


# The probes of every step, in the order in which their findings are reported
PROBES = (_of_start, _of_optimizer, _of_factor, _of_gathering, _of_graph, _of_state, _of_settings)


def _of_gradients(steps: Sequence[StepEvidence], compared: Sequence[StepEvidence]) -> Iterator[Diagnosis]:
    """Infer a mistake from the first step whose gradients are not right, after the explained factors."""
    for step in compared:
        is_right = step.are_gradients_right and _named(step.factor, {1.0: "right"})
        if step.one is not None and not step.problem and step.ranks[0].gradients and not is_right:
            x = step.comparison
            # every value may be that of one process, or only the ranks' mean
            if not (x.is_scaled(1.0, 1.0) and (x.has_values(1.0) or x.has_mean(1.0))):
                step.comparisons = [x]
                result, before = diagnose(step), steps[: step.index][-1:]
                # state that differed after the step before explains what nothing else does
                if result.mistake == NOT_RECOGNISED and before and (names := before[0].differing_tensors):
                    what = f"{len(names)} buffers or tensors of modules, such as {names[0]}, differ between ranks"
                    measured = f"{what} after step {step.index}. {result.measured}"
                    result = replace(result, mistake="unequal state", measured=measured)
                yield result
                return


def _notes(step: StepEvidence) -> Iterator[str]:
    first, rounding = step.ranks[0], ROUNDING_FACTOR * step.eps
    if not any(x.losses for x in step.ranks):
        yield (
            "the script calls no loss that the audit knows: the value is where the script starts its backward pass; a "
            "factor of accumulation is not checked unless you name the loss with --loss module:Class"
        )
    alone = step.one.factor if step.one is not None else None
    of_batches = {1.0: "a mean", first.micro_batches: "a sum", 1 / first.micro_batches: "divided twice"}
    if first.factor and alone and not _named(alone, of_batches):
        yield f"the script multiplies the loss by {alone:.4g}, also in one process: a weight"
    if worst(map(step.values, step.ranks), step.values(first)).error > rounding and step.is_local_mean:
        yield "each rank returns the loss of its own anchors; their mean is the value of one process: log that mean"
    if names := [x for x in step.names("loss") if x in first.decayed]:
        yield (
            f"weight decay moves {names[0]} of the loss towards 0, a learnt temperature towards 1: give the optimizer "
            "contrastive_zoo.parameter_groups(model, loss, weight_decay=…)"
        )
    if first.has_dropout:
        yield "dropout was switched off, on the ranks and in one process: each rank draws masks of its own"
    if names := step.differing_tensors:
        yield f"{len(names)} buffers or tensors of modules differ between ranks after a step, such as {names[0]}"
