"""Audit a training of a notebook or a test, within the processes that run it."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn

from contrastive_zoo.ranks.compat import default_group
from contrastive_zoo.ranks.one_process import this_process
from contrastive_zoo.testing.auditing.assemble import assemble
from contrastive_zoo.testing.auditing.recorder import Recorder
from contrastive_zoo.testing.auditing.records import Record
from contrastive_zoo.testing.auditing.rerun import Rerun, Setting
from contrastive_zoo.testing.auditing.zero import is_engine
from contrastive_zoo.testing.report import AuditReport, WorldReport

Train = Callable[[Recorder], object]
"""Trains while a recorder watches, which may replace the batches."""


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
    losses = known_losses("audit", loss)
    recorder = Recorder(losses, steps, needs_group=False)
    recorded(recorder, lambda _: train())
    return AuditReport(name, [compared(recorder, losses, lambda _: train())])


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


def recorded(recorder: Recorder, train: Train) -> Any:
    """Return what a training returns while a recorder watches it."""
    recorder.start()
    try:
        return train(recorder)
    finally:
        recorder.stop()


def compared(recorder: Recorder, losses: Sequence[str], train: Train) -> WorldReport:
    """Gather the records of all ranks, run the training again on rank 0, and send its report to all."""
    record = recorder.record
    gathered = [record]
    rank, world_size, alone = 0, 1, None
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        record.rank, gathered = rank, [record] * world_size
        if any(map(is_engine, recorder.tensors.modules)):
            record.unrepeatable = (
                "DeepSpeed keeps the group of all ranks: audit the script, which runs again as a whole"
            )
        alone = this_process(dist.distributed_c10d._get_default_group())
        dist.all_gather_object(gathered, record)
    else:
        record.initialized = True  # one process needs no group

    def run_again(setting: Setting) -> Record:
        again = Recorder(losses, recorder.steps, needs_group=False, rerun=Rerun(gathered, setting))
        try:
            with nullcontext() if alone is None else default_group(alone):
                recorded(again, train)
        except Exception as error:
            again.record.error = f"{type(error).__name__}: {error}"
        return again.record

    result = [assemble(gathered, run_again) if rank == 0 else None]
    if world_size > 1:
        dist.broadcast_object_list(result, src=0)
    assert result[0] is not None
    return result[0]
