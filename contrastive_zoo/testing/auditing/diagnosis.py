"""Compare the steps of all ranks with those of one process, and name what is wrong."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from contrastive_zoo.testing.auditing.records import Record, Step
from contrastive_zoo.testing.auditing.rerun import Setting
from contrastive_zoo.testing.evidence import (
    NOISE_FACTOR,
    ROUNDING_FACTOR,
    Comparison,
    Evidence,
    Gradients,
    Ratio,
    flat,
    tolerance,
)
from contrastive_zoo.testing.mistakes import NOT_RECOGNISED, Diagnosis, diagnose
from contrastive_zoo.testing.report import Quantity, WorldReport

# Under autocast all parameters change by up to half a unit of the 16 bits, as much as all that is rounded to these
LOW_NOISE_FACTOR = 3.0
REPETITIONS = 2  # reruns with changes of up to half a unit of rounding, from which the tolerance is derived
LARGEST_TOLERANCE = 0.3  # a quantity that reruns change by more is not compared
CLIPPED = "gradient after clipping"  # name of what the optimizer receives
Vector = Callable[[Step], Tensor]  # returns a quantity of a step as one vector
RunAgain = Callable[[Setting], Record]  # runs the training in one process; the same setting gives the same record


class StepEvidence(Evidence):
    """One step of all ranks, and the same step of one process.

    As the evidence of a mistake it is without stale gradients, and divided by the factor that the script gives the loss.
    """

    is_training = True
    stages = ("value", "gradient")

    def __init__(self, index: int, records: Sequence[Record], run: RunAgain) -> None:
        self.index, self.records, self.run = index, records, run
        self.ranks = [x.steps[index] for x in records]
        self.world_size, self.eps = len(records), records[0].eps or torch.finfo(torch.float32).eps
        self.unit = max(x.low for record in records for x in record.steps)  # of the rounding of an autocast
        alone, self.reason = run(Setting()), ""  # why nothing is compared
        self.one = self.of(Setting())
        if not alone.steps:
            why = f"the script raises {alone.error}" if alone.error else "nothing is trained"
            self.reason = f"in one process {why}"
        elif self.one is None:
            self.reason = "the run in one process ended before this step"
        elif len({len(x.values) for x in self._all}) > 1:
            self.one, self.reason = None, "the ranks and one process computed different numbers of losses in one step"
        self.problem = alone.problem if self.one is not None else ""  # why a difference may be one of random numbers
        called = sorted({call.module for call in self.ranks[0].losses})
        self.option = next(filter(None, (records[0].losses[x].option for x in called)), None)

    def of(self, setting: Setting) -> Step | None:
        """Return this step of a rerun, None if that ended before."""
        steps = self.run(setting).steps
        return steps[self.index] if self.index < len(steps) else None

    @property
    def _all(self) -> list[Step]:
        return [*self.ranks, *([self.one] if self.one is not None else [])]

    def values(self, step: Step) -> Tensor:
        return torch.tensor(step.values, dtype=torch.float64)

    def names(self, group: str) -> list[str]:
        trained = {name for x in self._all for name in (*x.gradients, *x.optimized)}
        return sorted(name for name, x in self.records[0].groups.items() if x == group and name in trained)

    @property
    def other_parameters(self) -> list[str]:
        """The parameters that no optimizer trains, as those of a teacher."""
        trained = {*self.names("encoder"), *self.names("loss")}
        kinds = self.records[0].kinds.items()
        return sorted(name for name, kind in kinds if kind == "parameter" and name not in trained)

    @property
    def differing_tensors(self) -> list[str]:
        """The buffers and other tensors of modules that are not equal on all ranks after the step."""
        first, *others = (x.after for x in self.ranks)
        kinds = self.records[0].kinds.items()
        names = [x for x, kind in kinds if kind != "parameter" and all(x in after for after in (first, *others))]
        return [x for x in names if not all(torch.equal(first[x], after[x]) for after in others)]

    def gradient(self, names: Sequence[str]) -> Vector:
        """Return gradients before clipping; after it where only one process clips by a function that is watched."""
        if len({bool(x.clips) for x in self._all}) > 1:
            return lambda step: flat(step.received, names)
        return lambda step: flat(step.gradients, names)

    @cached_property
    def quantities(self) -> list[Quantity]:
        """What is compared with one process, and what must be equal on all ranks."""
        value = self._judged("value of the loss", self.values)
        value.is_noted = value.ok is False and self.is_local_mean
        names_of = {group: names for group in ("encoder", "loss") if (names := self.names(group))}
        result = [value, *(self._judged(f"gradient of the {x}", self.gradient(y)) for x, y in names_of.items())]
        if any(x.clips for x in self.ranks):
            names = sorted({name for x in self.ranks for name in x.received})
            result.append(self._judged(CLIPPED, lambda x: flat(x.received, names)))
        result += [self._moved(f"{group} after the step", x) for group, x in names_of.items()]
        if (others := self.other_parameters) and self.one is not None:
            result.append(self._moved_without_optimizer("other parameters after the step", others))
        return [*result, *(self.equality(group, names) for group, names in names_of.items())]

    @property
    def are_gradients_right(self) -> bool:
        """Whether values and gradients before clipping are those of one process, as far as they were compared."""
        return not any(x.differs for x in self.quantities if x.name.startswith(("value", "gradient of")))

    def equality(self, group: str, names: Sequence[str]) -> Quantity:
        after = [flat(x.after, names) for x in self.ranks]
        return Quantity(f"{group} equal on all ranks", worst(after, after[0]), ROUNDING_FACTOR * self.eps)

    def tolerance(self, vector: Vector, floor: float = 0.0) -> float:
        """Return the largest relative error of a right result, from reruns with other roundings."""
        assert self.one is not None
        noisy = [self.of(Setting(noise=seed, unit=self.unit)) for seed in range(REPETITIONS)]
        differences = [Ratio.between(vector(x), vector(self.one)).error for x in noisy if x is not None]
        factor = LOW_NOISE_FACTOR if self.unit else NOISE_FACTOR
        return tolerance(differences, self.eps, noise_factor=factor, floor=floor)

    def _judged(self, name: str, vector: Vector, floor: float = 0.0) -> Quantity:
        """Compare a quantity of all ranks with one process; noise is measured where they differ by more than rounding."""
        if self.one is None:
            return Quantity(name, reason=self.reason)
        ratio, bound = worst(map(vector, self.ranks), vector(self.one)), floor + ROUNDING_FACTOR * self.eps
        if not ratio.error <= bound:
            bound = self.tolerance(vector, floor)
        if bound > LARGEST_TOLERANCE or math.isnan(bound):
            return Quantity(name, reason=f"reruns in one process differ: the tolerance would be {bound:.1e}")
        if not ratio.error <= bound and self.problem:
            return Quantity(name, reason=self.problem)
        return Quantity(name, ratio, bound)

    def _moved(self, name: str, names: Sequence[str]) -> Quantity:
        """Compare what the optimizer adds, weighted by the gradient: Adam moves elements without gradient at random."""
        names = [x for x in names if x in self.ranks[0].optimized]
        if self.one is None or not names:
            return Quantity(name, reason=self.reason if names else "no optimizer holds the parameters")

        def norm(x: Step, of: int) -> float:
            return math.hypot(*(x.norms.get(y, (0.0, 0.0))[of] for y in names))

        def vector(x: Step) -> Tensor:
            return flat(x.moved, names) / (norm(x, 0) or 1.0)

        moved = float(flat(self.one.moved, names).norm())
        return self._judged(name, vector, self.eps * norm(self.one, 1) / max(moved, 1e-300))

    def _moved_without_optimizer(self, name: str, names: Sequence[str]) -> Quantity:
        assert self.one is not None
        start = flat(self.records[0].start, names)
        moved = float((flat(self.one.after, names) - start).norm())
        rounding = 10 * self.eps * float(start.norm()) / moved if moved else 0.0
        return self._judged(name, lambda x: flat(x.after, names) - start, rounding)

    @cached_property
    def is_local_mean(self) -> bool:
        """Whether the mean of the ranks' values is that of one process, whatever each is."""
        if self.one is None:
            return False
        bound = self.tolerance(self.values)
        return torch.allclose(torch.stack([*map(self.values, self.ranks)]).mean(0), self.values(self.one), bound, bound)

    @property
    def factor(self) -> float:
        ranks, one = self.ranks[0].factor, self.one.factor if self.one is not None else None
        return ranks / one if ranks and one else 1.0

    @cached_property
    def comparison(self) -> Comparison:
        return self._compared(self.one)

    def _compared(self, one: Step | None) -> Comparison:
        assert one is not None
        return Comparison(
            values=torch.stack([self.values(x) for x in self.ranks]),
            expected=self.values(one),
            encoder=self._gradients("encoder", one),
            parameters=self._gradients("loss", one),
            tolerance=max(self.tolerance(self.values), 1e-12),
        )

    def _gradients(self, group: str, one: Step) -> Gradients | None:
        names = [x for x in self.names(group) if x in one.gradients or x in self.ranks[0].gradients]
        if not names:
            return None
        of = self.gradient(names)
        ranks = [(of(x) - flat(x.stale, names)) / self.factor for x in self.ranks]
        return Gradients.between(ranks, of(one) - flat(one.stale, names), self.tolerance(of))

    def confirms(self, mistake: str) -> bool:
        x = self.comparison
        if mistake == "group of the loss" or (mistake == "local negatives" and not self.option):
            groups = [x.group for x in self.records[0].losses] if mistake == "group of the loss" else [(0,)]
            return self.index == 0 and any(self._has_value_of(y) for y in groups if len(y) < self.world_size)
        by_shard = self.of(Setting(by_shard=True)) if mistake == "batch statistics" else None
        result = x if by_shard is None else self._compared(by_shard)
        return not x.is_scaled(1.0, 1.0) and result.has_values(1.0) and result.is_scaled(1.0, 1.0)

    def _has_value_of(self, ranks: Sequence[int]) -> bool:
        """Return whether rank 0 has the value of a training on the samples of some ranks only."""
        alone, x = self.of(Setting(ranks=tuple(ranks))), self.comparison
        return alone is not None and not x.has_values(1.0) and x.near(x.values[0], self.values(alone))

    def calls(self, name: str) -> bool:
        """Return whether the script gathers, which it must where the loss does not."""
        return name == "gather" and self.option is None


def worst(vectors: Iterable[Tensor], expected: Tensor) -> Ratio:
    ratios = [Ratio.between(x, expected) for x in vectors]
    return max(ratios, key=lambda x: math.inf if math.isnan(x.error) else x.error)


FACTOR_TOLERANCE = 1e-3  # relative difference of equal factors; those of a reduced precision are powers of two
# Mistakes that explain wrong gradients, from which no other one is then inferred
EXPLAINED_BY = {
    *("no process group", "different numbers of steps", "unequal parameters", "gathered first", "detached"),
    *("group of the loss", "unequal state", "clipped per rank"),
}
Found = Iterator[tuple[str, str]]  # mistakes, and what was measured


def assemble(records: Sequence[Record], run: RunAgain) -> WorldReport:
    """Return the report of the records of all ranks; run the training again in one process to compare with it."""
    report = WorldReport(len(records), min(x.finished for x in records), [x.name for x in records[0].losses])
    report.problem = next((x.problem for x in records if x.problem), "")
    if report.problem:
        return report
    run = functools.cache(run)
    steps = [StepEvidence(index, records, run) for index in range(min(len(x.steps) for x in records))]
    differing = (i + 1 for i, x in enumerate(steps[: report.steps]) if any(y.differs for y in x.quantities))
    compared = steps[: next(differing, report.steps)]  # later steps start from another state than one process
    report.quantities = _largest([x.quantities for x in compared])
    measurements = [*_of_process(records), *_of_samples(records)]
    measurements += [x for probe in PROBES for step in steps for x in probe(step)]
    measurements += [x for step in compared for x in _of_clipping(step)]
    mistakes = [Diagnosis(mistake, measured) for mistake, measured in measurements]
    if not EXPLAINED_BY & {x.mistake for x in mistakes}:
        mistakes += _of_gradients(steps, compared)
    report.findings = list({x.mistake: x for x in reversed(mistakes)}.values())[::-1]  # each once
    report.notes = list(dict.fromkeys(x for step in compared for x in _notes(step)))
    errors = [f"rank {x.rank} raised {x.error}" for x in records if x.error]
    if not errors and not report.steps:
        errors.append("no step of an optimizer was finished on all ranks")
    errors += [f"--loss {name}: no module of such a class was called" for name in sorted(records[0].unknown_losses)]
    report.problem = "; ".join(errors)
    off = [f"{x.name} {x.ratio.error:.1%} off" for x in report.quantities if x.differs and x.ratio]
    if off and not report.findings:
        report.findings = [Diagnosis(NOT_RECOGNISED, "; ".join(off))]
    return report


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
    if not any(x.initialized or x.error for x in records):
        yield "no process group", "no group was initialised"
    begun = [len(x.steps) for x in records]
    if any(count < max(begun) and not x.error for count, x in zip(begun, records, strict=True)):
        yield "different numbers of steps", f"ranks 0 … {len(records) - 1} began {', '.join(map(str, begun))} steps"


def _of_samples(records: Sequence[Record]) -> Found:
    digests = [[step.samples for step in record.steps] for record in records]
    together = [list(ranks) for ranks in zip(*digests, strict=False)]
    if len(records) > 1 and not records[0].shares_samples:
        if equal := [i for i, x in enumerate(together) if x[0] and all(y == x[0] for y in x)]:
            count = len(together[equal[0]][0])
            yield "same shard", f"all ranks have the same {count} samples at step {equal[0] + 1}"
            return
        yield from _in_an_epoch(records, together)
    if any(epoch.shuffles for epoch in records[0].samplers) and records[0].steps:
        epochs = [step.epoch for step in records[0].steps]
        for i in range(1, len(together)):  # the first step of every later epoch
            if epochs[i] > epochs[i - 1] and together[i] == together[0] and any(together[i]):
                yield "no set_epoch", f"step {i + 1} begins an epoch with the samples of step 1, in the same order"
                return


def _in_an_epoch(records: Sequence[Record], together: Sequence[Sequence[list[bytes]]]) -> Found:
    """Compare the indices of the ranks' loaders; without these, the contents of the samples of each step."""
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
    first = step.ranks[0]
    missing = [x for x in step.names("loss") if x not in first.optimized and x in first.gradients]
    if first.optimized and missing:
        yield "not optimized", f"parameters with a gradient in no optimizer: {len(missing)}, such as {missing[0]}"
    if stale := [x for x in first.stale if x in first.optimized]:
        yield "never zeroed", f"{len(stale)} gradients, such as that of {stale[0]}, are not zero when a step begins"


def _of_factor(step: StepEvidence) -> Found:
    """Compare the factor of the loss with that of one process, and that of one process with one over the micro-batches."""
    count, scale, start = step.ranks[0].micro_batches, step.factor, step.ranks[0].factor
    alone = step.one.factor if step.one is not None else None
    # of a mean over micro-batches it is 1, whatever W is
    accumulated = "" if alone is None or count == 1 else _named(alone, {count: "not", 1 / count: "twice"})
    by_world = _named(scale, {step.world_size: "times W", 1 / step.world_size: "divided by W", 1.0: ""})
    names = [by_world, f"accumulation {accumulated} divided" if accumulated == "not" else ""]
    if name := ", ".join(filter(None, names)):
        batches = f"{count} micro-batch{'es' if count > 1 else ''} on {step.world_size} ranks"
        relative = f", {scale:.4g} times what it is in one process" if by_world else ""
        begin = f"the backward pass starts with {(start or scale) / count:.4g} at the loss"
        yield name, f"{begin}{relative}, {batches}"
    if alone is not None and accumulated == "twice":
        yield "accumulation divided twice", f"a loss has the factor {alone / count:.4g}, of {count} micro-batches"


def _named(factor: float, names: Mapping[float, str]) -> str:
    return next((name for x, name in names.items() if math.isclose(factor, x, rel_tol=FACTOR_TOLERANCE)), "")


def _of_gathering(step: StepEvidence) -> Found:
    """Look for a loss that gathers by itself and receives as many samples on each rank as in one process."""
    if (alone := step.of(Setting())) is None or step.world_size == 1:
        return
    for one, *calls in zip(alone.losses, *(x.losses for x in step.ranks), strict=False):
        if step.records[0].losses[calls[0].module].option and one.samples > 1:
            inputs = [len(x.samples) / x.micro_batches for x in step.ranks]
            if all(x.samples == one.samples > n for x, n in zip(calls, inputs, strict=True)):
                yield "gathered first", "each rank gives the loss as many samples as there are on all ranks"
            return


def _of_graph(step: StepEvidence) -> Found:
    """Look for a step in which no parameter of the encoder gets a gradient, though the loss is not zero."""
    names = [x for x in step.names("encoder") if x in step.ranks[0].optimized]
    has_value = all(x and math.isfinite(x) for rank in step.ranks for x in rank.values)
    if names and has_value and not any(bool(flat(x.gradients, names).any()) for x in step.ranks):
        yield "detached", f"the gradients of all {len(names)} parameters of the encoder are zero"


def _of_group(step: StepEvidence) -> Found:
    """Look for ranks that share their samples, as those of a tensor-parallel group do, in the group of a loss."""
    for loss in step.records[0].losses if step.records[0].shares_samples else ():
        samples = [step.ranks[rank].samples for rank in loss.group]
        if loss.option and any(x == y for x, y in itertools.combinations(samples, 2)):
            group = f"ranks {list(loss.group)} form the group of the loss"
            yield "group of the loss", f"{group}, some of which have equal samples"


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


# The probes of every step, in the order in which their findings are reported
PROBES = (_of_start, _of_optimizer, _of_factor, _of_gathering, _of_graph, _of_group, _of_state)


def _of_clipping(step: StepEvidence) -> Found:
    clipped = next((x for x in step.quantities if x.name == CLIPPED and x.ok is False), None)
    if clipped is not None and step.are_gradients_right and all(x.clips for x in step.ranks):
        assert clipped.ratio is not None
        yield "clipped per rank", f"gradients are right before clipping and {clipped.ratio.error:.1%} off after it"


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
    if first.micro_batches > 1:
        yield f"gradient accumulation of {first.micro_batches} micro-batches"
    if first.is_scaled:
        yield "GradScaler: gradients were compared after unscaling"
    for clip in dict.fromkeys(first.clips):
        yield f"{clip}: gradients were compared before clipping and after it"
    if not any(x.losses for x in step.ranks):
        yield (
            "the script calls no loss that the audit knows: the value is where the script starts its backward pass; a "
            "factor of accumulation is not checked unless you name the loss with --loss module:Class"
        )
    alone = step.one.factor if step.one is not None else None
    of_batches = {1.0: "a mean", first.micro_batches: "a sum", 1 / first.micro_batches: "divided twice"}
    if first.factor and alone and not _named(alone, of_batches):
        yield f"the script multiplies the loss by {alone:.4g}, also in one process: a weight"
    is_equal = all(torch.allclose(step.values(x), step.values(first), rounding, rounding) for x in step.ranks)
    if not is_equal and step.is_local_mean:
        yield (
            "each rank returns the loss of its own anchors; the mean of the ranks is the value of one process: log that "
            "mean"
        )
    if first.has_dropout:
        yield "dropout was switched off, on the ranks and in one process: each rank draws masks of its own"
    if names := step.differing_tensors:
        yield f"{len(names)} buffers or tensors of modules differ between ranks after a step, such as {names[0]}"
