"""Audit a running training within the processes that run it: a whole one, or one step in n."""

import gc
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from contrastive_zoo.ranks.compat import default_group
from contrastive_zoo.ranks.one_process import this_process
from contrastive_zoo.testing.auditing.diagnosis import assemble
from contrastive_zoo.testing.auditing.recorder import Recorder
from contrastive_zoo.testing.auditing.records import Record, snapshot, tensors_of
from contrastive_zoo.testing.auditing.rerun import Rerun, Setting
from contrastive_zoo.testing.auditing.tensors import is_engine
from contrastive_zoo.testing.report import AuditReport, WorldReport

logger = logging.getLogger("contrastive_zoo.audit")
"""Gets one line for every audited step, on rank 0: a warning unless the step is the same as on one process."""

STATEFUL = (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler)
"""Classes whose objects a step changes; all of the process are put back."""

DEPTH = 4
"""Levels of containers in an attribute that are copied: an optimizer's state has three."""


def audit(train: Callable[[], object], *, loss: Any = None, steps: int = 3, name: str = "the training") -> AuditReport:
    """Audit a training: is it the same on W processes as on one?

    Call it on every rank. Every rank calls ``train`` and records its first steps of the optimizer; then rank 0 calls it
    again, in a process group of its own, with the batches of all ranks, and compares: value, gradients, parameters after
    the step. Every rank gets the report.

    ``train`` builds model, loss, optimizer and DataLoader, and trains; it may also use those that exist. One process gets
    the state that they had on rank 0 before the first step, and afterwards they are left as its steps leave them.

    The samples are compared by their contents, within a step. The samplers are not listed, as
    ``contrastive-zoo audit`` does, because listing an epoch would draw from them.

    Args:
        train: a training of at least ``steps`` steps, without arguments.
        loss: a loss, or its class, that is not one of contrastive_zoo, pytorch-metric-learning or sentence-transformers:
            the factor by which the training multiplies it is then checked, too.
        steps: number of steps to compare.
        name: of the training in the report.

    Raises:
        ValueError: ``train`` cannot be called; ``loss`` is not a module or a class of modules; ``steps`` is less than 1.

    Examples:
        >>> import torch, contrastive_zoo as cz
        >>> def train():
        ...     model, loss_fn = nn.Linear(3, 2), cz.DistributedLoss(cz.NTXent())
        ...     optimizer = torch.optim.SGD(model.parameters(), 0.1)
        ...     loss_fn(model(torch.eye(3)), model(-torch.eye(3))).backward()
        ...     optimizer.step()
        >>> report = audit(train, steps=1)
        >>> report.ok, [x.name for x in report.worlds[0].quantities][:2]
        (True, ['value of the loss', 'gradient of the encoder'])
    """
    if not callable(train):
        raise ValueError(f"audit: train is a function that trains, got {train!r}.")
    if steps < 1:
        raise ValueError(f"audit: steps is the number of steps to compare, at least 1, got {steps}.")
    recorder = Recorder(known_losses("audit", loss), steps, needs_group=False)
    start = time.monotonic()
    with recorder.watching():
        train()
    world = compared(recorder, lambda _: train())
    world.seconds = time.monotonic() - start
    return AuditReport(name, [world])


def known_losses(caller: str, loss: Any) -> list[str]:
    """Return the names of the losses that a user gives, a module, a class or None."""
    if loss is None:
        return []
    of = loss if isinstance(loss, type) else type(loss)
    if not issubclass(of, nn.Module):
        raise ValueError(
            f"{caller}: loss is a torch.nn.Module or its class, got {loss!r}. Its calls are found by their module: make a "
            "module of a function, or leave it out: what the training starts its backward pass at is compared anyway."
        )
    return [f"{of.__module__}:{of.__qualname__}"]


def compared(recorder: Recorder, train: Callable[[Recorder], object]) -> WorldReport:
    """Gather the records of all ranks, run the training again on rank 0, and send its report to all."""
    record, alone = recorder.record, None
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        record.rank = dist.get_rank()
        if any(map(is_engine, recorder.tensors.modules)):
            record.problem = "DeepSpeed keeps the group of all ranks: audit the script, which runs again as a whole"
        alone = this_process(dist.distributed_c10d._get_default_group())
    else:
        record.initialized = True  # one process needs no group
    records: list[Record] = [record] if alone is None else _of_all_ranks(record)

    def run_again(setting: Setting) -> Record:
        again = Recorder(recorder.loss_names, recorder.steps, needs_group=False, rerun=Rerun(records, setting))
        try:
            with nullcontext() if alone is None else default_group(alone), again.watching():
                train(again)
        except Exception as error:
            again.record.error = f"{type(error).__name__}: {error}"
        return again.record

    result = [assemble(records, run_again) if record.rank == 0 else None]
    if alone is not None:
        dist.broadcast_object_list(result, src=0)
    assert result[0] is not None
    return result[0]


def _of_all_ranks(x: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, x)
    return gathered


class OnlineAudit:
    """Audit the first of every n steps of a running training: are they the same on W processes as on one?

    ``step(*batch)`` is one step of the optimizer: clear gradients, forward, backward, reduce gradients, clip, step. Call the
    audit in its place, on every rank; it returns what ``step`` returns. Steps 1, 1 + n, 1 + 2n, … are audited: while all
    ranks run the step it is recorded; then rank 0 runs it again, in a process group of its own, with the batches of all
    ranks, and compares value, gradients and parameters after the step. Modules, optimizers, schedulers, GradScalers and
    random numbers are put back bit for bit, so that the training goes on as without the audit. Rank 0 logs one line to
    ``contrastive_zoo.audit``: information, or a warning with the mistake and its fix.

    An audited step takes the time of about 3 + W steps where all is right, as one process runs W steps' samples, and three
    times that where something differs. Rank 0 keeps two copies of the training's state on its CPU. What ``step`` does
    besides training, such as printing, is done again.

    Args:
        step: a step of the optimizer, a function of the batch; a batch of micro-batches is a list of them.
        every: n, the number of steps of which the first is audited; the same on all ranks.
        loss: a loss, or its class, that is not one of contrastive_zoo, pytorch-metric-learning or sentence-transformers.
        state: further objects whose attributes ``step`` changes, such as a running mean of the loss.
        name: of the training in the log.

    Raises:
        ValueError: ``step`` cannot be called; ``every`` is less than 1; ``loss`` is not a module or a class of modules; at
            the first step, on every rank, ``every`` differs between ranks.

    Examples:
        >>> import torch, contrastive_zoo as cz
        >>> model, loss_fn = torch.nn.Linear(3, 2), cz.DistributedLoss(cz.NTXent())
        >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
        >>> def step(view1, view2):
        ...     optimizer.zero_grad()
        ...     loss_fn(model(view1), model(view2)).backward()
        ...     optimizer.step()
        >>> audited = OnlineAudit(step, every=100)
        >>> for _ in range(3):
        ...     audited(torch.eye(3), -torch.eye(3))
        >>> audited.steps, audited.report.ok
        (3, True)
    """

    def __init__(
        self,
        step: Callable[..., Any],
        *,
        every: int = 1000,
        loss: Any = None,
        state: tuple[Any, ...] = (),
        name: str = "the training",
    ) -> None:
        if not callable(step):
            raise ValueError(f"OnlineAudit: step is a function of a batch, got {step!r}.")
        if every < 1:
            raise ValueError(f"OnlineAudit: every is a number of steps, at least 1, got {every}.")
        self.step, self.every, self.state, self.name = step, every, state, name
        self.losses = known_losses("OnlineAudit", loss)
        self.steps = 0
        """Number of steps that were called."""
        self.report: AuditReport | None = None
        """The report of the last audited step; every rank has it."""
        self._ended: float | None = None  # the time at which the last audited step ended

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return ``step(*args, **kwargs)``; audit it if its number says so."""

        def repeat(batch: dict[Any, Any]) -> None:
            self.step(*(batch[i] for i in range(len(args))), **{key: batch[key] for key in kwargs})

        with self.watch(dict(enumerate(args)) | kwargs, repeat):
            return self.step(*args, **kwargs)

    @contextmanager
    def watch(self, batch: dict[Any, Any], repeat: Callable[[dict[Any, Any]], object]) -> Iterator[None]:
        """Audit the step that runs within it, if its number says so; ``repeat`` runs it with the batch of all ranks.

        Raises:
            ValueError: at the first step, on every rank, ``every`` differs between ranks.
        """
        if not self.steps and dist.is_available() and dist.is_initialized():
            every = _of_all_ranks(self.every)
            if len(set(every)) > 1:
                raise ValueError(f"OnlineAudit: every must be the same on all ranks, got {every} of ranks 0, 1, …")
        self.steps += 1
        if (self.steps - 1) % self.every:
            yield
            return
        begin = time.monotonic()
        repeats = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
        before = TrainingState(self.state) if repeats else None
        recorder = Recorder(self.losses, 1, needs_group=False)
        with recorder.watching():
            next(recorder.batches(iter([batch])))
            yield

        def again(rerun: Recorder) -> None:
            assert before is not None
            before.put_back()
            merged = next(rerun.batches(iter(())))
            devices = {key: next((y.device for y in tensors_of(x)), "cpu") for key, x in batch.items()}
            repeat({key: snapshot(x, devices[key]) for key, x in merged.items()})

        recorder.record.problem = recorder.record.problem or _unrepeatable(recorder)
        after = TrainingState(self.state) if repeats else None
        try:
            world = compared(recorder, again)
        finally:
            if after is not None:
                after.put_back()
        self._log(world, begin, repeats)

    def _log(self, world: WorldReport, begin: float, is_first_rank: bool) -> None:
        now = time.monotonic()
        world.seconds = now - begin
        self.report = AuditReport(f"{self.name}, step {self.steps}", [world])
        if is_first_rank:
            share = (
                "" if self._ended is None else f", {world.seconds / (now - self._ended):.1%} of the time since the last"
            )
            level = logging.INFO if world.ok else logging.WARNING
            logger.log(level, "%s: step %d is %s (%.2f s%s)", self.name, self.steps, _line(world), world.seconds, share)
        self._ended = now


def _line(world: WorldReport) -> str:
    """Return the report of a step in a line."""
    errors = [x.ratio.error for x in world.quantities if x.ratio is not None]
    if world.ok:
        return f"the same on {world.world_size} processes as on one, largest error {max(errors):.0e}"
    if world.findings:
        return f"not the same as on one process: {' '.join(map(str, world.findings))}"
    return f"not compared: {'; '.join(filter(None, [*world.not_compared, world.problem]))}"


def _unrepeatable(recorder: Recorder) -> str:
    """Return why one process cannot run a step again while the others wait; empty if it can."""
    parts = [x for module in recorder.tensors.modules for x in module.modules()]
    held = [*recorder.tensors.parameters()]
    is_split = bool(recorder.tensors.groups) or any(hasattr(x, "device_mesh") for x in held)
    if is_split or any(hasattr(x, "consolidate_state_dict") for x in recorder.tensors.optimizers):
        return "parameters or optimizer are split over ranks: audit the script, which runs again as a whole"
    if not all(map(is_plain, held)):
        return "parameters are tensors with a dispatch of their own: audit the script"
    if any(getattr(x, "static_graph", False) or getattr(x, "find_unused_parameters", False) for x in parts):
        return (
            "DDP counts which parameters a backward pass uses (static_graph, find_unused_parameters): audit the script"
        )
    return ""


# --- the state of a training -------------------------------------------------------------------------------------------


def is_plain(x: Tensor) -> bool:
    """Return whether operators of a tensor are torch's: a class with a dispatch of its own may hold no numbers."""
    return not any("__torch_dispatch__" in vars(cls) for cls in type(x).__mro__ if cls not in Tensor.__mro__)


class TrainingState:
    """A copy of what a step changes: modules, optimizers, schedulers and GradScalers of the process, random numbers.

    Of an object, the attributes are copied, with their lists, dictionaries and tensors, and the gradients of these. Copies
    of tensors are on the CPU. Tensors that are not plain, as those of a tracer, are left out.
    """

    def __init__(self, further: Sequence[Any] = ()) -> None:
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: dict[Tensor, Tensor] = {}
        self._gradients: dict[Tensor, Tensor | None] = {}
        gc.collect()  # what nothing refers to is not part of the training
        objects = [x for x in gc.get_objects() if issubclass(type(x), STATEFUL)]
        for x in (*objects, *further):
            self._add(vars(x), DEPTH)
        self._of_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._random = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def _add(self, x: Any, depth: int) -> None:
        if isinstance(x, Tensor):
            self._add_tensor(x)
        elif depth and isinstance(x, dict | list | deque | set | tuple):
            if not isinstance(x, tuple):
                self._containers.append((x, dict(x) if isinstance(x, dict) else list(x)))
            for y in x.values() if isinstance(x, dict) else x:
                self._add(y, depth - 1)

    def _add_tensor(self, x: Tensor) -> None:
        if not is_plain(x) or x in self._tensors or x.grad_fn is not None:
            return
        self._tensors[x] = x.detach().to("cpu", copy=True)
        if x.requires_grad:
            self._gradients[x] = x.grad
            if x.grad is not None:
                self._tensors[x.grad] = x.grad.detach().to("cpu", copy=True)

    @torch.no_grad()
    def put_back(self) -> None:
        for container, items in self._containers:
            if isinstance(container, dict):
                for key in container.keys() - items.keys():
                    del container[key]
                container.update(items)
            elif isinstance(container, list):
                container[:] = items
            else:
                container.clear()
                container.extend(items) if isinstance(container, deque) else container.update(items)
        for x, gradient in self._gradients.items():
            x.grad = gradient
        for x, value in self._tensors.items():
            x.copy_(value)
        if self._of_devices:
            torch.cuda.set_rng_state_all(self._of_devices)
        torch.set_rng_state(self._random[0])
        random.setstate(self._random[1])
        np.random.set_state(self._random[2])
