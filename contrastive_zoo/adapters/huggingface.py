"""The Hugging Face Trainer with a loss whose value is a mean over the global batch."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from contrastive_zoo.ranks.suggestions import needed

with needed("contrastive_zoo.adapters.huggingface", "transformers[torch]>=4.50"):
    from transformers import TrainerCallback

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer  # the mixin uses the attributes and methods of the Trainer after it
else:
    _Trainer = object


class ContrastiveTrainerMixin(_Trainer):
    """Train with a loss of the global batch, in every configuration of the Hugging Face Trainer.

    The Trainer expects a sum over tokens. For batches with ``labels`` it may multiply the loss by the number of processes
    (``average_tokens_across_devices=True``), and not divide it by the number of accumulation steps. Both are wrong for a
    mean. With the mixin the Trainer never counts tokens.

    If ``compute_loss_func`` is a ``nn.Module``, it moves to the Trainer's device, and its parameters join the optimizer that
    the Trainer creates, without weight decay. ``max_grad_norm`` and checkpoints know the parameters of the model only; a
    loss inside the model has neither limit.

    Place the mixin before the Trainer among the base classes. A method ``compute_loss`` of your own works as well. Models of
    Hugging Face take no empty batch: if a rank may have no samples, call ``GradCache(encoder, chunk_size)`` instead.

    Raises:
        ValueError: ``optimizers`` contains an optimizer without the parameters of ``compute_loss_func``.

    Examples:
        >>> from transformers import Trainer
        >>> class ContrastiveTrainer(ContrastiveTrainerMixin, Trainer):
        ...     "A Trainer for losses of the global batch."
        >>> [x.__name__ for x in ContrastiveTrainer.__mro__[:3]]
        ['ContrastiveTrainer', 'ContrastiveTrainerMixin', 'Trainer']
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # without compute_loss_func, and without a number of items, the Trainer divides by the accumulation steps
        self.loss_function, self.compute_loss_func = getattr(self, "compute_loss_func", None), None
        if isinstance(self.loss_function, nn.Module):
            self.loss_function.to(self.args.device)
        self.add_callback(_ClearGradients())

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Return the Trainer's optimizer, to which the parameters of ``compute_loss_func`` are added."""
        is_given = self.optimizer is not None
        self.optimizer: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)
        of_loss = self.loss_function.parameters() if isinstance(self.loss_function, nn.Module) else ()
        known = {x for group in self.optimizer.param_groups for x in group["params"]}
        missing = [x for x in of_loss if x.requires_grad and x not in known]
        if missing and is_given:
            raise ValueError(
                f"{type(self).__name__}: the optimizer lacks {len(missing)} parameters of compute_loss_func. Create it "
                "with [*model.parameters(), *compute_loss_func.parameters()], or let the Trainer create it."
            )
        if missing:
            self.optimizer.add_param_group({"params": missing, "weight_decay": 0.0})
        return self.optimizer

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> Tensor:
        """Run forward and backward; the number of items in the batch is not used."""
        return super().training_step(model, inputs)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor | tuple[Tensor, Any]:
        """Return the loss of the model or of ``compute_loss_func``, as it is; ``num_items_in_batch`` is not used."""
        if self.loss_function is None:
            return super().compute_loss(model, inputs, return_outputs=return_outputs)
        labels = inputs.pop("labels", None)
        outputs = model(**inputs)
        loss = self.loss_function(outputs, labels, num_items_in_batch=None)
        return (loss, outputs) if return_outputs else loss


class _ClearGradients(TrainerCallback):
    """Clear all gradients of the optimizer, also those of parameters outside the model."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["optimizer"].zero_grad()

    on_train_begin = on_step_end
