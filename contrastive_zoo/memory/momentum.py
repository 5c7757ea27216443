"""The slowly moving copy of an encoder that fills a memory."""

import copy
from typing import Any, Literal

import torch
from torch import nn


class MomentumEncoder(nn.Module):
    """A slowly moving copy of an encoder, which makes a memory's keys consistent over many steps.

        θ_k ← m θ_k + (1 − m) θ_q        at every update

    It needs no gradient and carries none. Its ``state_dict`` holds its parameters and buffers.

    Args:
        encoder: what is copied, now; DDP around it is taken off. The copy does not hold on to it.
        momentum: m in [0, 1]. An attribute, for schedules.
        buffers: ``"own"``, as in MoCo: the copy's buffers are moved by its own forward passes, so that BatchNorm keeps
            the statistics of the keys. ``"copy"``: taken over from the encoder at every update.

    Raises:
        ValueError: a momentum outside [0, 1], unknown ``buffers``; at an update, an encoder with other parameters.

    Example:
        >>> encoder = nn.Linear(1, 1, bias=False)
        >>> keys = MomentumEncoder(encoder, momentum=0.9)
        >>> _ = nn.init.ones_(encoder.weight), nn.init.zeros_(keys.encoder.weight)
        >>> keys.update(encoder)
        >>> keys(torch.ones(1, 1))
        tensor([[0.1000]])

    Source: He et al. 2020, eq. 2, https://arxiv.org/abs/1911.05722
    """

    def __init__(self, encoder: nn.Module, *, momentum: float = 0.999, buffers: Literal["own", "copy"] = "own") -> None:
        super().__init__()
        if not 0 <= momentum <= 1 or buffers not in ("own", "copy"):
            raise ValueError(
                "MomentumEncoder: momentum is in [0, 1] and buffers 'own' or 'copy', got "
                f"momentum={momentum}, buffers={buffers!r}. MoCo's momentum is 0.999."
            )
        self.encoder = copy.deepcopy(_inner(encoder)).requires_grad_(False)
        self.momentum = momentum
        self.buffers_from = buffers

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the copy makes of it, without gradient."""
        return self.encoder(*args, **kwargs)

    @torch.no_grad()
    def update(self, encoder: nn.Module) -> None:
        """Move towards ``encoder``; call it after each optimiser step.

        Args:
            encoder: the one that was copied, as it is now.
        """
        theirs = dict(_inner(encoder).named_parameters())
        ours = dict(self.encoder.named_parameters())
        if {k: x.shape for k, x in theirs.items()} != {k: x.shape for k, x in ours.items()}:
            other = next(iter(theirs.keys() ^ ours.keys()), None) or next(
                name for name in ours if ours[name].shape != theirs[name].shape
            )
            raise ValueError(
                f"MomentumEncoder: update takes the encoder that was copied, got one that differs in {other!r}."
            )
        for name, parameter in ours.items():
            parameter.lerp_(theirs[name].to(parameter), 1 - self.momentum)
        if self.buffers_from == "copy":
            for buffer, theirs_now in zip(self.encoder.buffers(), _inner(encoder).buffers(), strict=True):
                buffer.copy_(theirs_now)

    def extra_repr(self) -> str:
        return f"momentum={self.momentum}, buffers={self.buffers_from!r}"


def _inner(module: nn.Module) -> nn.Module:
    """What is inside DDP."""
    return module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
