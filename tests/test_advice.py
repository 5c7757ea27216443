"""The fix that an error names is right: it is applied as it stands, and the call then returns what the right call does."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import contrastive_zoo as cz
from tests.helpers import close, error_message, numbers

Z, OTHERS = numbers(6, 3, seed=0), numbers(6, 3, seed=1)
LABELS = torch.tensor([0, 1, 0, 2, 1, 0])
ONE_HOT = torch.nn.functional.one_hot(LABELS)

EXPRESSION = re.compile(r"(?:Use|Pass|such as) (\w+(?:\[[^\]]*\])?(?:\.\w+(?:\([^()]*\))?)*(?:\([^()]*\))?)")
SETTING = re.compile(r"(?:Use|Pass|pass) (\w+)=([\w.'/]*[\w'])")


TENSORS: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "a column of labels": (lambda labels: cz.SupCon()(Z, labels), LABELS[:, None], LABELS),
    "a row of labels": (lambda labels: cz.SupCon()(Z, labels), LABELS[None], LABELS),
    "one-hot labels": (lambda labels: cz.SupCon()(Z, labels), ONE_HOT, LABELS),
    "one-hot labels as floats": (lambda labels: cz.SupCon()(Z, labels), ONE_HOT.double(), LABELS),
    "labels as floats": (lambda labels: cz.SupCon()(Z, labels), LABELS.double(), LABELS),
    "a column of labels as floats": (lambda labels: cz.SupCon()(Z, labels), LABELS.double()[:, None], LABELS),
    "one label": (lambda labels: cz.ArcFace(3, 3).double()(Z[:1], labels), torch.tensor(1), torch.tensor([1])),
    "sparse embeddings": (lambda embeddings: cz.SupCon()(embeddings, LABELS), Z.to_sparse(), Z),
    "short floats": (
        lambda embeddings: cz.SupCon()(embeddings, LABELS),
        Z.to(torch.float8_e4m3fn),
        Z.to(torch.float8_e4m3fn).bfloat16(),
    ),
    "a single number to gather": (cz.collectives.all_gather, torch.tensor(3.0), torch.tensor([3.0])),
    "a learnable constant": (
        lambda tau_plus: cz.Debiased(tau_plus=tau_plus)(Z, OTHERS),
        torch.tensor(0.1, requires_grad=True),
        torch.tensor(0.1),
    ),
}
"""A call of a tensor, a wrong one, and the one that is meant."""


def obeyed(text: str, x: Any) -> Any:
    """Return what the error's expression makes of the argument, whatever name it has there."""
    (expression, *_) = [found for found in EXPRESSION.findall(text) if re.search(r"[.(\[]", found)]
    name = re.match(r"\w+", expression).group()  # type: ignore[union-attr]  # it begins with one
    return eval(expression.replace(name, "x", 1) if name != "torch" else expression, {"x": x, "torch": torch})


@pytest.mark.parametrize("name", TENSORS)
def test_an_expression_is_right(name: str) -> None:
    call, bad, right = TENSORS[name]
    torch.manual_seed(0)
    text = error_message(lambda: call(bad))
    assert text is not None
    corrected = obeyed(text, bad)
    torch.manual_seed(0)
    found = call(corrected)
    torch.manual_seed(0)
    close(found.double(), call(right).double())


def test_the_advice_on_logit_scales_is_right() -> None:
    text = error_message(lambda: cz.InfoNCE(temperature=-20.0))
    assert text is not None
    ((name, value),) = SETTING.findall(text)
    scale = 20.0
    loss = cz.InfoNCE(**{name: eval(value, {"s": scale})})
    rows = [x / x.norm(dim=1, keepdim=True) for x in (Z, OTHERS)]
    close(loss(Z, OTHERS), torch.nn.functional.cross_entropy(scale * rows[0] @ rows[1].T, torch.arange(6)))
