"""The construction of a loss or a training step on a rank; in a module of its own, since ranks need not import a check."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from contrastive_zoo.testing.measurement import Call, call_form


def constructed_form(make_loss: Callable[[], Any], level: str) -> tuple[Call | None, str]:
    """Construct a loss or a training step on this rank; return its call form, or None and the problem.

    Examples:
        >>> constructed_form(lambda: nn.SoftMarginLoss(), "loss")
        ('labels', '')
        >>> constructed_form(lambda: None, "loss")
        (None, 'the function returns a loss, which is callable, got NoneType.')
    """
    made = make_loss()
    if level == "training_step":
        if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1]):
            return call_form(made[1]), ""
        return None, f"at level training_step the function returns (model, step), got {type(made).__name__}."
    if callable(made):
        return call_form(made), ""
    hint = " For (model, step) pass level training_step." if isinstance(made, tuple) else ""
    hint = " It looks like a loss: pass a function that returns the loss." if isinstance(made, Tensor) else hint
    return None, f"the function returns a loss, which is callable, got {type(made).__name__}.{hint}"
