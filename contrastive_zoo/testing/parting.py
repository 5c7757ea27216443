"""Where W ranks and one process part: the first tensor of a rank of which one process computes no row and no column."""

import os
import sys
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import contrastive_zoo
from contrastive_zoo.testing._outcome import is_user_code
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.measurement import Case, Plan, Subject, local_shard
from contrastive_zoo.testing.trial import Trial
from contrastive_zoo.testing.worlds import RankError

DIGITS = 9
"""Significant digits in which a number is the same."""


_FOLDERS = ("ranks", "engine", "loss_base", "losses", "wrapper")
_LIBRARY = tuple(os.path.join(contrastive_zoo.__path__[0], folder) for folder in _FOLDERS)

Lines = frozenset[tuple[str, ...]]


class Made(NamedTuple):
    """A tensor of a forward pass: where it was made, its rows, and its columns."""

    place: str
    rows: Lines
    columns: Lines

    def is_part_of(self, lines: Lines) -> bool:
        return self.rows <= lines or self.columns <= lines


class Trace(TorchDispatchMode):
    """Records the floating tensors that operations inside the context return."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Made] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        if func.namespace == "aten" and not name.startswith(("empty", "new_empty", "detach", "lift")):
            for x in tree_leaves(result):
                if isinstance(x, Tensor) and x.is_floating_point() and x.numel() and (where := _place()):
                    self.made.append(Made(f"{where}: {name} of shape {list(x.shape)}", *_numbers(x)))
        return result


def _numbers(x: Tensor) -> tuple[Lines, Lines]:
    rows = x.detach().reshape(len(x), -1) if x.ndim > 1 else x.detach().reshape(-1, 1)
    rounded = [[f"{number:.{DIGITS}g}" for number in row] for row in rows.tolist()]
    return frozenset(map(tuple, rounded)), frozenset(zip(*rounded, strict=True))


def _place() -> str:
    """Return module, file, line and function of the user's code that calls an operation."""
    frame: Any = sys._getframe(2)
    while frame is not None and not is_user_code(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_LIBRARY):
        return ""  # of this library, not of the loss under test
    owner = frame.f_locals.get("self")
    module = f" of {type(owner).__name__}" if isinstance(owner, torch.nn.Module) else ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}{module}"


def trace(case: Case, batch: GlobalBatch, whole: bool) -> list[Made]:
    """Record the forward pass of a loss on this rank."""
    subject = Subject(case, batch.d)
    arguments = subject.model.embed(local_shard(case, batch, Plan(whole=whole)))
    with Trace() as recorded:
        subject.loss(*arguments)
    return recorded.made


def parting(trial: Trial) -> str:
    """Return where the first rank parts from one process, in words; empty if it does not, or fails."""
    if trial.case.step:
        return ""
    try:
        (alone,) = trial.worlds.run(1, trace, trial.case, trial.batch, True)
        by_rank = trial.worlds.run(trial.world_size, trace, trial.case, trial.batch, False)
    except RankError:
        return ""
    lines = Lines().union(*(x.rows | x.columns for x in alone))
    for of_ranks in zip_longest(*by_rank):
        for rank, made in enumerate(of_ranks):
            if made is not None and not made.is_part_of(lines):
                return f"first on rank {rank} at {made.place}, of which one process computes no part"
    return ""
