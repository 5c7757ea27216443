"""SogCLR and iSogCLR for the table of losses under test, with the papers' equations over the whole matrix."""

from typing import Any

import torch
from torch import Tensor

import contrastive_zoo as cz
from tests.losses.zoo_statistics import widened
from tests.zoo import itself, row, unit

SAMPLES = 5
BEFORE = torch.tensor([[0.0, -0.5, 1.0, 0.3, 2.0], [0.7, 0.0, -1.0, 0.4, 1.5]])
"""log u of each sample before the step, 0 for a sample without a call."""
TEMPERATURES = torch.tensor([[0.3, 0.1, 0.5, 0.2, 0.4], [0.2, 0.6, 0.1, 0.3, 0.25]])


def with_ids(*views: Tensor) -> tuple[Tensor, ...]:
    """Samples of the data set, made of values; in most batches some sample occurs twice."""
    a, b = widened(*views)
    return a, b, (7 * a[:, 0].detach()).floor().int() % SAMPLES


def averages(g: Tensor, before: Tensor, gamma: float) -> Tensor:
    """Return u after a step, given u before, 0 for a sample without a call."""
    return g.where(before == 0, (1 - gamma) * before + gamma * g)


def means(a: Tensor, b: Tensor, t: Tensor, bimodal: bool) -> Tensor:
    """Return g of both views, [2, n], given their temperatures."""
    others, g = ~itself(a), []
    for x, y, of_view in ((a, b, t[0]), (b, a, t[1])):
        s, mask = x @ y.T, others
        if bimodal:
            s = s - (x * y).sum(1, keepdim=True)
        else:
            s, mask = torch.cat([s, x @ x.T], 1), torch.cat([mask, mask], 1)
        g.append((s / of_view[:, None]).exp().where(mask, 0).sum(1) / mask.sum(1))
    return torch.stack(g)


def estimated(a: Tensor, b: Tensor, before: Tensor, t: Tensor, gamma: float, rho: float, bimodal: bool) -> Tensor:
    """Return the losses, [n], with the authors' estimate of their gradient: that of t g / u for constant t and u."""
    if len(a) < 2:
        return 0 * (a * b).sum(1)
    g = means(a, b, t, bimodal)
    u = averages(g.detach(), before, gamma)
    log_u = u.log() + (g - g.detach()) / u
    return (t * (log_u + rho)).mean(0) - (0 if bimodal else (a * b).sum(1))


def dense_sogclr(a: Tensor, b: Tensor, ids: Tensor, temperature, gamma=0.9, rho=0.0, bimodal=False) -> Tensor:
    log_u = BEFORE[: 1 + bimodal, ids.long()].double().expand(2, -1)
    t = torch.as_tensor(temperature, dtype=a.dtype).expand(2, len(a))
    return estimated(unit(a), unit(b), log_u.exp().where(log_u != 0, 0), t, gamma, rho, bimodal).mean()


def dense_isogclr(a: Tensor, b: Tensor, ids: Tensor, bimodal: bool = False) -> Tensor:
    t = TEMPERATURES[: 1 + bimodal, ids.long()].double().expand(2, -1)
    return dense_sogclr(a, b, ids, t, rho=0.3, bimodal=bimodal)


def remember(loss: cz.SogCLR) -> None:
    loss.log_u.copy_(BEFORE[: len(loss.log_u)])
    if loss.temperature_range is not None:
        loss.temperatures.data.copy_(TEMPERATURES[: len(loss.log_u)].flatten())


DATA: dict[str, Any] = {"prepare": remember, "num_samples": SAMPLES}
LEARNT = {"temperature": 0.1, "temperature_range": (0.1, 0.7), "rho": 0.3, **DATA}

ENTRIES = [
    row("SogCLR", dense_sogclr, "views", with_ids, **DATA),
    row("SogCLR, two towers", dense_sogclr, "views", with_ids, bimodal=True, gamma=0.4, rho=0.5, **DATA),
    row("SogCLR, learnt temperatures", dense_isogclr, "views", with_ids, **LEARNT),
    row("SogCLR, learnt temperatures of two towers", dense_isogclr, "views", with_ids, bimodal=True, **LEARNT),
]
