"""The comparison of a wrapped loss on several ranks with the same loss on one process, over steps of a training."""

import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from contrastive_zoo.loss_base.loss_modules import LossModules
from contrastive_zoo.ranks.world import World
from contrastive_zoo.testing.measurement import Encoder, GradReduction
from contrastive_zoo.testing.worlds import Worlds
from contrastive_zoo.wrapper.distributed import DistributedLoss

Wrap = Callable[..., Any]


@dataclass(frozen=True)
class Batch:
    """The samples of all ranks at a step, of which this rank passes some."""

    step: int
    shards: tuple[int, ...]
    rank: int
    encoder: Encoder

    @property
    def total(self) -> int:
        return sum(self.shards)

    def local(self, whole: Tensor) -> Tensor:
        return whole.split(self.shards)[self.rank]

    def normal(self, seed: int, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self.step + seed)
        return self.local(torch.randn(self.total, *shape, dtype=torch.float64, generator=generator))


class Subject(Protocol):
    @property
    def width(self) -> int: ...

    def start(self, wrap: Wrap | None, **options: Any) -> tuple[nn.Module, Callable[[Batch], Any]]:
        """Return what learns, and the loss of a batch: wrapped with these options, or bare on one process."""


S = TypeVar("S", bound=Subject)


class Run(NamedTuple):
    """The shard sizes of each step, and what the trainer does with gradients."""

    steps: tuple[tuple[int, ...], ...]
    grad_reduction: GradReduction = "mean"

    def alone(self) -> "Run":
        return Run(tuple((sum(shards),) for shards in self.steps))


Results = dict[str, Tensor]


def train(subject: Subject, run: Run, wrap: Wrap | None = None) -> Results | str:
    """Train for a few steps; return values, gradients and buffers, or the error; runs on every rank."""
    with warnings.catch_warnings(), redirect_stdout(StringIO()):  # what the libraries say
        warnings.simplefilter("ignore")
        try:
            return dict(_results(subject, run, wrap))
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def _results(subject: Subject, run: Run, wrap: Wrap | None) -> Iterator[tuple[str, Tensor]]:
    rank, size = World.of().rank, len(run.steps[0])
    learnt, loss = subject.start(wrap, **({} if wrap is None else {"grad_reduction": run.grad_reduction}))
    encoder = Encoder(subject.width)
    for step, shards in enumerate(run.steps):
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(step + 100 * rank)  # ranks draw other random numbers, which must not change the result
        values = [x for x in tree_leaves(loss(Batch(step, shards, rank, encoder))) if isinstance(x, Tensor)]
        yield f"value {step}", torch.cat([x.detach().double().flatten() for x in values])
        if learns := [x.sum() for x in values if x.requires_grad]:
            torch.stack(learns).sum().backward()
        parameters = {f"parameter {name}": x for name, x in learnt.named_parameters()}
        for name, x in ({"encoder": encoder.weight} | parameters).items():
            gradient = torch.zeros_like(x) if x.grad is None else x.grad
            if name == "encoder" and size > 1:
                dist.all_reduce(gradient)
                gradient = gradient / size if run.grad_reduction == "mean" else gradient
            elif run.grad_reduction == "sum":  # each rank holds 1/W of the gradient, which the trainer sums
                gradient = gradient * size
            yield f"{name} {step}", gradient.clone()
            x.data -= 0.01 * gradient
            x.grad = None
    yield from ((f"buffer {name}", x.detach().double()) for name, x in LossModules(learnt).shared_state().items())


@dataclass(frozen=True)
class Compared:
    """The largest differences of a loss on several ranks from one process, by group; None where nothing is compared."""

    differences: Mapping[str, float]
    words: str | None = None
    unsupported: str | None = None

    def wrong(self, tolerance: float) -> str | None:
        """Return in words what differs by more; None if nothing does."""
        differs = (f"{x} differs by {y:.1e}" for x, y in self.differences.items() if not y <= tolerance)
        return self.words or next(differs, None)


def compare(found: Results | str, expected: Results | str) -> Compared:
    """Return how the results of a rank differ from those of one process."""
    if isinstance(expected, str):
        return Compared({}, None if found == expected else f"one process raises {expected}", expected)
    if isinstance(found, str):
        return Compared({}, found)
    shapes = ({name: x.shape for name, x in of.items()}.items() for of in (found, expected))
    if differ := set.symmetric_difference(*map(set, shapes)):
        return Compared({}, f"differs in {sorted({name for name, _ in differ})}")
    differences: dict[str, float] = {}
    for name, x in expected.items():
        group, scale = name.partition(" ")[0], x.abs().nan_to_num().amax().clamp(min=1) if x.numel() else 1
        difference = ((found[name] - x).abs().nan_to_num() / scale).amax().item() if x.numel() else 0.0
        difference = difference if torch.equal(found[name].isnan(), x.isnan()) else torch.inf
        differences[group] = max(differences.get(group, 0.0), difference)
    return Compared(differences)


def measure(
    worlds: Worlds, subjects: Iterable[S], runs: Callable[[S], Sequence[Run]], wrap: Wrap = DistributedLoss
) -> list[tuple[S, dict[Run, Compared]]]:
    chosen = [(subject, list(runs(subject))) for subject in subjects]
    alone = [{run.alone() for run in of} for _, of in chosen]

    def trained(size: int, tasks: list[tuple[int, Run]], wrap: Wrap | None) -> list[list[Results | str]]:
        of_subjects = [(chosen[index][0], run) for index, run in tasks]
        by_rank = worlds.run(size, _train_all, of_subjects, wrap, timeout=60.0 + len(tasks)) if tasks else []
        return [list(x) for x in zip(*by_rank, strict=True)]

    tasks = [(index, run) for index, of in enumerate(alone) for run in sorted(of)]
    expected = {task: of[0] for task, of in zip(tasks, trained(1, tasks, None), strict=True)}
    compared: list[dict[Run, Compared]] = [{} for _ in chosen]
    for size in sorted({len(run.steps[0]) for _, of in chosen for run in of}):
        tasks = [(index, run) for index, (_, of) in enumerate(chosen) for run in of if len(run.steps[0]) == size]
        for (index, run), found in zip(tasks, trained(size, tasks, wrap), strict=True):
            compared[index][run] = worst([compare(x, expected[index, run.alone()]) for x in found])
    return [(subject, of) for (subject, _), of in zip(chosen, compared, strict=True)]


def _train_all(tasks: Iterable[tuple[Subject, Run]], wrap: Wrap | None) -> list[Results | str]:
    torch.set_default_dtype(torch.float64)  # the next job begins with float32
    return [train(subject, run, wrap) for subject, run in tasks]


def worst(compared: Sequence[Compared]) -> Compared:
    failed = next((x for x in compared if x.words or x.unsupported), None)
    groups = dict.fromkeys(group for x in compared for group in x.differences)
    return failed or Compared({group: max(x.differences.get(group, 0.0) for x in compared) for group in groups})
