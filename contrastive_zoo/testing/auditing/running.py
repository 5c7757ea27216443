"""Audit a training that is a function, within the processes that run it."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn

from contrastive_zoo.ranks.compat import default_group
from contrastive_zoo.ranks.one_process import this_process
from contrastive_zoo.testing.auditing.diagnosis import assemble
from contrastive_zoo.testing.auditing.recorder import Recorder
from contrastive_zoo.testing.auditing.records import Record
from contrastive_zoo.testing.auditing.rerun import Rerun, Setting
from contrastive_zoo.testing.report import AuditReport, WorldReport


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
    recorder = Recorder(_loss_names(loss), steps, needs_group=False)
    start = time.monotonic()
    with recorder.watching():
        train()
    world = _compared(recorder, train)
    world.seconds = time.monotonic() - start
    return AuditReport(name, [world])


def _loss_names(loss: Any) -> list[str]:
    """Return the names of the losses that a user gives, a module, a class or None."""
    if loss is None:
        return []
    of = loss if isinstance(loss, type) else type(loss)
    if not issubclass(of, nn.Module):
        raise ValueError(
            f"audit: loss is a torch.nn.Module or its class, got {loss!r}. Its calls are found by their module: make a "
            "module of a function, or leave it out: what the training starts its backward pass at is compared anyway."
        )
    return [f"{of.__module__}:{of.__qualname__}"]


def _compared(recorder: Recorder, train: Callable[[], object]) -> WorldReport:
    """Gather the records of all ranks, run the training again on rank 0, and send its report to all."""
    record, alone = recorder.record, None
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        record.rank = dist.get_rank()
        alone = this_process(dist.distributed_c10d._get_default_group())
    else:
        record.initialized = True  # one process needs no group
    records = [record]
    if alone is not None:
        records *= dist.get_world_size()
        dist.all_gather_object(records, record)

    def run_again(setting: Setting) -> Record:
        again = Recorder(recorder.loss_names, recorder.steps, needs_group=False, rerun=Rerun(records, setting))
        try:
            with nullcontext() if alone is None else default_group(alone), again.watching():
                train()
        except Exception as error:
            again.record.error = f"{type(error).__name__}: {error}"
        return again.record

    result = [assemble(records, run_again) if record.rank == 0 else None]
    if alone is not None:
        dist.broadcast_object_list(result, src=0)
    assert result[0] is not None
    return result[0]
