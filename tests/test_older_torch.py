"""What torch 2.6, the oldest that this library supports, has not: the ways around it, with it taken away."""

import pytest
import torch

import contrastive_zoo as cz
from contrastive_zoo.loss_base.graph_operator import loss_and_gradients
from contrastive_zoo.ranks import compat


def test_a_graph_break_without_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_TORCH", (2, 6))
    torch._dynamo.reset()
    rows, loss = torch.randn(2, 5, 3), cz.NTXent(reduction="none")
    torch.testing.assert_close(torch.compile(loss, backend="eager")(*rows), loss(*rows))
    torch._dynamo.reset()


def test_operators_have_schemas_in_words() -> None:
    """torch 2.6 infers none from ``list[Tensor]``."""
    assert str(loss_and_gradients._opoverload._schema).endswith(
        "(Tensor[] tensors, str call, bool[] learns) -> Tensor[]"
    )
