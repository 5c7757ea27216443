"""Audit a running training of Lightning, one step in n."""

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from contrastive_zoo.testing.auditing.running import OnlineAudit


class AuditCallback(Callback):
    """Audit the first of every n steps of a running training; see :class:`contrastive_zoo.testing.OnlineAudit`.

    Lightning has no hook around a step. For the time of a training the callback takes the place of
    ``trainer.fit_loop.epoch_loop.automatic_optimization.run``, which runs ``training_step``, the backward pass, clipping and
    the optimizer. ``report`` is that of the last audited step. In one process ``trainer.world_size`` is still W: a loss that
    is multiplied by it shows as a weight, and ``contrastive-zoo audit`` names it.

    Args:
        every: n, the number of steps of which the first is audited; the same on all ranks.
        loss: a loss, or its class, that is not one of contrastive_zoo, pytorch-metric-learning or sentence-transformers.

    Raises:
        ValueError: ``every`` is less than 1; at the start of a training, it accumulates gradients or optimizes manually.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> callback = AuditCallback(every=1000)
        >>> trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[callback])
        >>> callback.report is None
        True
    """

    def __init__(self, *, every: int = 1000, loss: Any = None) -> None:
        self._audit = OnlineAudit(lambda batch: None, every=every, loss=loss)

    @property
    def report(self) -> Any:
        return self._audit.report

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.accumulate_grad_batches != 1 or not pl_module.automatic_optimization:
            raise ValueError(
                "AuditCallback: a step must be one batch of automatic optimization, got accumulate_grad_batches="
                f"{trainer.accumulate_grad_batches} and automatic_optimization={pl_module.automatic_optimization}. "
                "Audit the script instead: contrastive-zoo audit train.py."
            )
        loop = trainer.fit_loop.epoch_loop
        run, audit = loop.automatic_optimization.run, self._audit

        def audited(optimizer: Optimizer, batch_idx: int, kwargs: OrderedDict[str, Any]) -> Any:
            batch = {"batch": kwargs["batch"]}
            with audit.watch(batch, lambda x: run(optimizer, batch_idx, OrderedDict(kwargs, **x))):
                return run(optimizer, batch_idx, kwargs)

        results = [] if loop._results is None else [loop._results]
        audit.state = (*_progress(loop.automatic_optimization.optim_progress), *results)
        loop.automatic_optimization.run = audited  # type: ignore[method-assign]  # until the training ends

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_exception(trainer, pl_module)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException | None = None
    ) -> None:
        """Give Lightning its function back."""
        vars(trainer.fit_loop.epoch_loop.automatic_optimization).pop("run", None)


def _progress(x: Any) -> Iterator[Any]:
    """Yield a count of Lightning's progress, and those inside of it."""
    yield x
    for y in vars(x).values():
        if dataclasses.is_dataclass(y):
            yield from _progress(y)


__all__ = ["AuditCallback"]
