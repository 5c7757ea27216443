"""The momentum encoder, which computes the keys of a memory."""

import copy
from typing import Any, Literal

import torch
from torch import nn

from contrastive_zoo.loaded_state import loading_problem, own_tensors
from contrastive_zoo.row_checks import described


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
        ValueError: a momentum outside [0, 1], unknown ``buffers``; at an update, an encoder with other parameters.
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

    def __init__(self, encoder: nn.Module, *, momentum: float = 0.999, buffers: Literal["own", "copy"] = "own") -> None:
        super().__init__()
        if not isinstance(encoder, nn.Module):
            raise ValueError(f"MomentumEncoder: the encoder is a torch.nn.Module, got {described(encoder)}.")
        is_share = isinstance(momentum, (int, float)) and 0 <= momentum <= 1
        if not is_share or not isinstance(buffers, str) or buffers not in ("own", "copy"):
            raise ValueError(
                "MomentumEncoder: momentum is in [0, 1] and buffers 'own' or 'copy', got "
                f"momentum={momentum}, buffers={buffers!r}. MoCo's momentum is 0.999."
            )
        self.encoder = copy.deepcopy(_without_ddp(encoder)).requires_grad_(False)
        self.momentum = momentum
        self.buffers_from = buffers

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Check the whole encoder before any part of it is loaded.

        Raises:
            RuntimeError: saved tensors of other shapes, or with NaN or infinite values; the encoder stays as it was.
        """
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
        """Move the parameters towards those of ``encoder``; call it after each optimizer step.

        Args:
            encoder: the encoder that was copied.
        """
        if not isinstance(encoder, nn.Module):
            raise ValueError(f"MomentumEncoder: update takes the encoder that was copied, got {described(encoder)}.")
        source, target = _without_ddp(encoder), self.encoder
        new, old = dict(source.named_parameters()), dict(target.named_parameters())
        if {k: x.shape for k, x in new.items()} != {k: x.shape for k, x in old.items()}:
            other = next(iter(new.keys() ^ old.keys()), None) or next(
                name for name in old if old[name].shape != new[name].shape
            )
            raise ValueError(
                f"MomentumEncoder: update takes the encoder that was copied, got one that differs in {other!r}."
            )
        for name, parameter in old.items():
            parameter.lerp_(new[name].to(parameter), 1 - self.momentum)
        if self.buffers_from == "copy":
            for buffer, new_buffer in zip(target.buffers(), source.buffers(), strict=True):
                buffer.copy_(new_buffer)

    def extra_repr(self) -> str:
        return f"momentum={self.momentum}, buffers={self.buffers_from!r}"


def _without_ddp(module: nn.Module) -> nn.Module:
    """Return the module inside of DDP, or the module itself."""
    return module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
