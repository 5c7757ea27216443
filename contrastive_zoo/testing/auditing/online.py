"""Audit one step in n of a running training, which goes on as without the audit."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from contrastive_zoo.testing.auditing.context import compared, known_losses
from contrastive_zoo.testing.auditing.merging import snapshot, tensors_of
from contrastive_zoo.testing.auditing.recorder import Recorder
from contrastive_zoo.testing.auditing.state import TrainingState, is_plain
from contrastive_zoo.testing.report import AuditReport, WorldReport

logger = logging.getLogger("contrastive_zoo.audit")
"""Gets one line for every audited step, on rank 0: a warning unless the step is the same as on one process."""


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
        """Audit the step that runs within it, if its number says so; ``repeat`` runs it with the batch of all ranks."""
        if not self.steps:
            self._require_equal()
        self.steps += 1
        if (self.steps - 1) % self.every:
            yield
            return
        begin = time.monotonic()
        repeats = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
        before = TrainingState(self.state) if repeats else None
        recorder = Recorder(self.losses, 1, needs_group=False)
        recorder.start()
        try:
            next(recorder.batches(iter([batch])))
            yield
        finally:
            recorder.stop()

        def again(rerun: Recorder) -> None:
            assert before is not None
            before.put_back()
            merged = next(rerun.batches(iter(())))
            repeat({key: snapshot(x, _device(batch[key])) for key, x in merged.items()})

        recorder.record.unrepeatable = recorder.record.unrepeatable or _unrepeatable(recorder)
        after = TrainingState(self.state) if repeats else None
        try:
            world = compared(recorder, self.losses, again)
        finally:
            if after is not None:
                after.put_back()
        self._log(world, begin, repeats)

    def _require_equal(self) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            return
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, self.every)
        if len(set(gathered)) > 1:
            raise ValueError(f"OnlineAudit: every must be the same on all ranks, got {gathered} of ranks 0, 1, …")

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


def _device(x: Any) -> torch.device | str:
    """Return the device of an argument of a step."""
    return next((y.device for y in tensors_of(x)), "cpu")
