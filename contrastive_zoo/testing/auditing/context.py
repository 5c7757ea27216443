"""Audit the training of a notebook or a test, within the processes that run it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from contrastive_zoo.testing.auditing.assemble import assemble
from contrastive_zoo.testing.auditing.recorder import Recorder
from contrastive_zoo.testing.auditing.records import Record
from contrastive_zoo.testing.report import AuditReport, WorldReport


@contextmanager
def audit(*, loss: Any = None, steps: int = 3, name: str = "the training") -> Iterator[AuditReport]:
    """Audit the training that runs in the context: is it the same on W processes as on one?

    Record the first steps of the optimizer on every rank. At the end rank 0 repeats them in its process, on copies of the
    modules, and compares: value, gradients, parameters after the step. Every rank gets the report. Enter and leave the
    context on every rank. The training itself is not changed, and continues after the recorded steps.

    The samples are compared by their contents, within a step. The samplers are not listed, as
    ``contrastive-zoo audit`` does, because listing an epoch would draw from them.

    Args:
        loss: a loss, or its class, that is not one of contrastive_zoo, pytorch-metric-learning or sentence-transformers.
        steps: number of steps to compare.
        name: of the training in the report.

    Yields:
        The report, which is filled when the context ends.

    Raises:
        ValueError: ``loss`` is not a module or a class of modules; ``steps`` is less than 1.

    Examples:
        >>> import torch, contrastive_zoo as cz
        >>> model, loss_fn = nn.Linear(3, 2), cz.DistributedLoss(cz.NTXent())
        >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
        >>> with audit(steps=1) as report:
        ...     loss_fn(model(torch.eye(3)), model(-torch.eye(3))).backward()
        ...     optimizer.step()
        >>> report.ok, [x.name for x in report.worlds[0].quantities][:2]
        (True, ['value of the loss', 'gradient of the encoder'])
    """
    is_module = isinstance(loss, nn.Module) or (isinstance(loss, type) and issubclass(loss, nn.Module))
    if loss is not None and not is_module:
        raise ValueError(
            f"audit: loss is a torch.nn.Module or its class, got {loss!r}. Its calls are found by a hook of modules: make a "
            "module of a function, or leave it out where a loss of contrastive_zoo is called."
        )
    if steps < 1:
        raise ValueError(f"audit: steps is the number of steps to compare, at least 1, got {steps}.")
    report, recorder = AuditReport(name), Recorder([] if loss is None else [loss], steps, needs_group=False)
    recorder.start()
    try:
        yield report
    finally:
        record = recorder.stop()
    report.worlds.append(_report_on_every_rank(record, recorder))


def _report_on_every_rank(record: Record, recorder: Recorder) -> WorldReport:
    """Gather all records on every rank, compare on rank 0, and send its report to all."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        record.initialized = True  # one process needs no group
        return assemble([record], recorder)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    record.rank = rank
    records: list[Any] = [None] * world_size
    dist.all_gather_object(records, record)
    result = [assemble(records, recorder) if rank == 0 else None]
    dist.broadcast_object_list(result, src=0)
    assert result[0] is not None
    return result[0]
