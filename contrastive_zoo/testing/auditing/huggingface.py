"""Audit a running training of the Hugging Face Trainer, one step in n."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from accelerate.state import AcceleratorState, PartialState
from transformers import TrainerCallback

from contrastive_zoo.testing.auditing.running import OnlineAudit

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer  # the mixin uses the attributes and methods of the Trainer after it
else:
    _Trainer = object


class AuditedTrainerMixin(_Trainer):
    """Audit the first of every n steps of a running training; see :class:`contrastive_zoo.testing.OnlineAudit`.

    A step is repeated as the Trainer takes it: ``training_step`` for each micro-batch, clipping, ``optimizer.step``, in a
    process that is alone, also for Accelerate. ``online_audit.report`` is the report of the last audited step.

    Place the mixin before the Trainer, and before ``ContrastiveTrainerMixin``, among the base classes.

    Args:
        audit_every: n, the number of steps of which the first is audited; the same on all ranks.

    Raises:
        ValueError: ``audit_every`` is less than 1.

    Examples:
        >>> from transformers import Trainer
        >>> from contrastive_zoo.adapters.huggingface import ContrastiveTrainerMixin
        >>> class AuditedTrainer(AuditedTrainerMixin, ContrastiveTrainerMixin, Trainer):
        ...     "A Trainer for losses of the global batch that is audited."
        >>> [x.__name__ for x in AuditedTrainer.__mro__[:3]]
        ['AuditedTrainer', 'AuditedTrainerMixin', 'ContrastiveTrainerMixin']
    """

    def __init__(self, *args: Any, audit_every: int = 1000, **kwargs: Any) -> None:
        self.online_audit = OnlineAudit(self._repeat, every=audit_every)
        self._watched = ExitStack()  # of the step that runs
        super().__init__(*args, **kwargs)
        self.online_audit.state = PartialState(), AcceleratorState(), self.accelerator.gradient_state
        self.add_callback(_EndOfStep(self._watched))

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Return the micro-batches of a step, with which the step begins."""
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        if batches:
            self._watched.enter_context(self.online_audit.watch({"batches": batches}, self._repeat))
        return batches, count

    def _repeat(self, batch: dict[str, Any]) -> None:
        """Take the step that ``Trainer.train`` took, in one process."""
        for x in (PartialState(), AcceleratorState()):
            x.num_processes, x.process_index = 1, 0
        batches, count = super().get_batch_samples(iter(batch["batches"]), len(batch["batches"]), self.args.device)
        for index, inputs in enumerate(batches):
            self.accelerator.gradient_state._set_sync_gradients(index + 1 == len(batches))
            self.training_step(self.model_wrapped, inputs, count)
        if self.args.max_grad_norm > 0:
            self.accelerator.clip_grad_norm_(self.model_wrapped.parameters(), self.args.max_grad_norm)
        assert self.optimizer is not None
        self.optimizer.step()


class _EndOfStep(TrainerCallback):
    """Compare the step that ends, before the Trainer logs and evaluates."""

    def __init__(self, watched: ExitStack) -> None:
        self._watched = watched

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._watched.close()


__all__ = ["AuditedTrainerMixin"]
