"""Trainings of DeepSpeed's engine that the audit must name rightly, at every stage of ZeRO."""

from typing import Any, NamedTuple
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from examples.digits import EncoderWithLoss, make_loss


class Zero(NamedTuple):
    """What a training does: the mistake of the audit's report, and how it is planted."""

    stage: int
    mistake: str | None = None
    is_local: bool = False
    times_world: bool = False
    divisor: float = 1.0
    accumulate: int = 1
    grad_reduction: str = "mean"


KINDS: dict[str, dict[str, Any]] = {
    "": {},
    ", accumulation": {"accumulate": 2},
    ", a local loss": {"mistake": "local negatives", "is_local": True},
    ", loss × W": {"mistake": "times W", "times_world": True},
    ", divided by W once too often": {"mistake": "trainer averages", "grad_reduction": "sum"},
    ", accumulation divided twice": {"mistake": "accumulation divided twice", "divisor": 2.0, "accumulate": 2},
}
TRAININGS = {f"ZeRO stage {stage}{kind}": Zero(stage, **x) for kind, x in KINDS.items() for stage in range(4)}
"""Trainings by name."""


def run(name: str) -> None:
    """Run a training by its name, on this rank."""
    from examples import deepspeed_engine

    zero = TRAININGS[name]

    class Planted(EncoderWithLoss):
        def __init__(self, loss_fn: Any) -> None:
            super().__init__(make_loss() if zero.is_local else loss_fn)

        def forward(self, *batch: Tensor) -> Tensor:
            factor = dist.get_world_size() if zero.times_world else 1
            loss: Tensor = super().forward(*batch)
            return factor * loss / zero.divisor

    with patch.object(deepspeed_engine, "EncoderWithLoss", Planted):
        deepspeed_engine.train(zero.stage, zero.accumulate, zero.grad_reduction)  # type: ignore[arg-type]  # a literal
