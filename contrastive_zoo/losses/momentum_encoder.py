"""The momentum encoder, which computes the keys of a memory."""

import copy
from typing import Any, Literal

import torch
from torch import Tensor, nn

from contrastive_zoo.loss_base.loss_modules import without_ddp
from contrastive_zoo.loss_base.numbers import move_towards, word_problem
from contrastive_zoo.loss_base.settings import Bounds
from contrastive_zoo.loss_base.state import loading_problem, own_tensors
from contrastive_zoo.ranks.row_checks import described

Buffers = Literal["own", "copy"]


class MomentumEncoder(nn.Module):
    """A moving average of an encoder's parameters, whose keys change little over many steps.

        θ_k ← m θ_k + (1 − m) θ_q        at every update

    Its outputs carry no gradient. Its ``state_dict`` holds its parameters and buffers.

    Args:
        encoder: copied at construction, without DDP around it.
        momentum: m in [0, 1]. An attribute, for schedules.
        buffers: ``"own"``, as in MoCo: the copy's own forward passes update its buffers, so BatchNorm has the statistics of
            the keys. ``"copy"``: every update copies the encoder's buffers.

    Raises:
        ValueError: a momentum outside [0, 1], unknown ``buffers``; at an update, an encoder with other parameters or
            buffers.
        RuntimeError: a ``state_dict`` of other shapes, or with NaN or infinite values; nothing is loaded then.

    Examples:
        >>> encoder = nn.Linear(1, 1, bias=False)
        >>> keys = MomentumEncoder(encoder, momentum=0.9)
        >>> _ = nn.init.ones_(encoder.weight), nn.init.zeros_(keys.encoder.weight)
        >>> keys.update(encoder)
        >>> keys(torch.ones(1, 1))
        tensor([[0.1000]])

    Source: He et al. 2020, eq. 2, https://arxiv.org/abs/1911.05722
    """

    def __init__(self, encoder: nn.Module, *, momentum: float = 0.999, buffers: Buffers = "own") -> None:
        super().__init__()
        if not isinstance(encoder, nn.Module):
            raise ValueError(f"MomentumEncoder: the encoder is a torch.nn.Module, got {described(encoder)}.")
        if problem := _momentum_problem(momentum) or word_problem("buffers", buffers, Buffers):
            raise ValueError(f"MomentumEncoder: {problem}")
        self.encoder = copy.deepcopy(without_ddp(encoder)).requires_grad_(False)
        self.momentum = momentum
        self.buffers_from = buffers

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Check the whole encoder before any part of it is loaded."""
        for path, module in self.encoder.named_modules(prefix="encoder"):
            if problem := loading_problem(own_tensors(module), state_dict, f"{prefix}{path}."):
                raise RuntimeError(f"MomentumEncoder: {path}: {problem} It stays as it was.")
        super()._load_from_state_dict(state_dict, prefix, *args)

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the copy's output, without gradient."""
        return self.encoder(*args, **kwargs)

    @torch.no_grad()
    def update(self, encoder: nn.Module) -> None:
        """Move the parameters towards those of ``encoder``, which was copied; call it after each optimizer step.

        Raises:
            ValueError: a momentum outside [0, 1], or an encoder with other parameters or buffers; nothing is moved then.
        """
        if not isinstance(encoder, nn.Module):
            raise ValueError(f"MomentumEncoder: update takes the encoder that was copied, got {described(encoder)}.")
        new, old = self._tensors(without_ddp(encoder)), self._tensors(self.encoder)
        shapes = [{name: x.shape for name, x in tensors.items()} for tensors in (old, new)]
        if differ := [name for name in old.keys() | new.keys() if shapes[0].get(name) != shapes[1].get(name)]:
            raise ValueError(
                f"MomentumEncoder: update takes the encoder that was copied, got one that differs in {min(differ)!r}."
            )
        if problem := _momentum_problem(self.momentum):
            raise ValueError(f"MomentumEncoder: {problem}")
        for name, x in old.items():
            if isinstance(x, nn.Parameter):
                move_towards(x, new[name], 1 - self.momentum)
            else:
                x.copy_(new[name])

    def _tensors(self, encoder: nn.Module) -> dict[str, Tensor]:
        """Return what an update reads: the parameters by name, and the buffers if they are copied."""
        buffers = encoder.named_buffers() if self.buffers_from == "copy" else ()
        return {**dict(encoder.named_parameters()), **dict(buffers)}

    def extra_repr(self) -> str:
        return f"momentum={self.momentum}, buffers={self.buffers_from!r}"


def _momentum_problem(momentum: object) -> str | None:
    return Bounds("momentum is in [0, 1]", "MoCo's is 0.999.", low=0, high=1).problem("momentum", momentum)
