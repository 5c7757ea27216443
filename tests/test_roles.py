"""Roles of a third-party loss's arguments: tensors that all ranks share, rows along another dimension, complex rows."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EXACT, distance, drawn, numbers, split

D = 4


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))


class Prototypes(Scaled):
    """Masked Siamese networks, as lightly's PMSN: targets of prototypes, and the divergence of their mean from a prior."""

    def forward(self, anchors: Tensor, targets: Tensor, prototypes: Tensor) -> Tensor:
        p = (self.scale * F.normalize(anchors) @ F.normalize(prototypes).T).softmax(1)
        q = (4 * F.normalize(targets) @ F.normalize(prototypes).T).softmax(1)
        prior = torch.arange(1, len(prototypes) + 1).double().reciprocal()
        return -(q * p.log()).sum(1).mean() + (p.mean(0) * (p.mean(0) / (prior / prior.sum())).log()).sum()


class Relations(Scaled):
    """ReSSL of solo-learn: similarities to a queue [K, D] of one view as a target for those of the other."""

    def forward(self, student: Tensor, teacher: Tensor, memory: dict[str, Tensor]) -> Tensor:
        target = (4 * teacher @ memory["queue"].T).softmax(1)
        return -(target * (self.scale * student @ memory["queue"].T).log_softmax(1)).sum(1).mean()


class Views(Scaled):
    """Every view of a sample against every view of all; a view of another shape needs a contiguous tensor."""

    def forward(self, views: Tensor, labels: Tensor) -> Tensor:
        z = views.view(-1, views.shape[2])
        same = labels.repeat(len(views))[:, None] == labels.repeat(len(views))
        return ((self.scale * z @ z.T).log_softmax(1) * same).sum(1).mean()


class Halves(Scaled):
    """Two views in one tensor [2n, d], which a function of both joins: in rank order the first half is no view."""

    def forward(self, *views: Tensor) -> Tensor:
        a, b = F.normalize(torch.cat(views)).chunk(2)
        return F.cross_entropy(self.scale * a @ b.T, torch.arange(len(a)))


class Stacks(Scaled):
    """Two stacks of views, of which one has its samples last, and a weight a sample."""

    def forward(self, crops: list[Tensor], weights: Tensor) -> Tensor:
        globals_, locals_ = crops
        return (weights * torch.einsum("vnd,wnd,n->n", globals_.exp(), locals_.tanh(), weights)).mean() * self.scale


class Phases(nn.Module):
    """The product of every two complex embeddings, as of a Fourier layer, turned by a learnt complex number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.3 + 0.4j, 0.1j], dtype=torch.complex128))

    def forward(self, z: Tensor) -> Tensor:
        return ((z @ z.mH).mul(self.scale.sum()).real - 1).square().mean()


def stack(*rows: Tensor) -> Tensor:
    return torch.stack([*rows, rows[0].sin()])


CASES: dict[str, tuple[Callable[[], Any], Callable[..., Any], dict[str, Any]]] = {
    "complex numbers": (Phases, lambda a, b, p: (torch.complex(a, b),), {}),
    "their conjugates": (Phases, lambda a, b, p: (torch.complex(a, b).conj(),), {}),
    "prototypes": (Prototypes, lambda a, b, p: (a, b, p), {"shared": {"prototypes"}}),
    "a queue in a dict": (Relations, lambda a, b, p: (a, b, {"queue": p}), {"shared": ["memory"]}),
    "a path": (Relations, lambda a, b, p: (a, b, {"queue": p}), {"shared": {"memory['queue']"}}),
    "views": (Views, lambda a, b, p: (stack(a, b), a.detach()[:, 0].sign().long()), {"batch_dim": {"views": 1}}),
    "views, joined in the loss": (Halves, lambda a, b, p: (a, b), {}),
    "stacks": (Stacks, lambda a, b, p: ([stack(a, b), stack(b)], a[:, 0]), {"batch_dim": {"crops": 1}}),
    "both": (
        Stacks,
        lambda a, b, p: ([stack(a, b), b[None]], a[:, 0]),
        {"batch_dim": {"crops[0]": 1, "crops[1]": 1, "weights": 0}},
    ),
}

WRONG = {"views in one tensor": (Halves, lambda a, b, p: (torch.cat([a, b]),), {})}

TRAININGS = [[(3, 4), (2, 5), (4, 4), (5, 0), (0, 3)], [(2, 0, 3), (3, 3, 3), (0, 4, 1)]]


def gradients(value: Tensor, model: Sequence[Tensor]) -> list[Tensor]:
    found: Sequence[Any] = torch.autograd.grad(value, model, allow_unused=True)
    found = [torch.zeros_like(x) if dx is None else dx for x, dx in zip(model, found, strict=True)]
    return [torch.view_as_real(dx.resolve_conj().contiguous()) if dx.is_complex() else dx for dx in found]


def errors(name: str, training: Sequence[Sequence[int]], trainer: Any, **options: Any) -> list[float]:
    """Errors of value and of the gradients of an encoder, of shared prototypes and of the loss's parameter."""
    make, call, roles = (CASES | WRONG)[name]
    loss, alone = cz.DistributedLoss(make(), grad_reduction=trainer, **(options or roles)), make()
    rank, world, found = dist.get_rank(), dist.get_world_size(), []
    for step, shards in enumerate(training):
        a, b, p = (numbers(n, D, seed=10 * step + k) for k, n in enumerate((sum(shards), sum(shards), 5)))
        encoder, prototypes = (x.requires_grad_() for x in (numbers(D, D, seed=3), p))
        expected = alone(*call(a @ encoder, b @ encoder, prototypes))
        whole = [expected.detach(), *gradients(expected, [encoder, prototypes, alone.scale])]
        a, b = (split(x, shards)[rank] for x in (a, b))
        value = loss(*call(a @ encoder, b @ encoder, prototypes))
        parts = gradients(value, [encoder, prototypes, loss.loss.scale])
        before = parts[2].clone() * (world if trainer == "sum" else 1)
        for dx in parts:
            dist.all_reduce(dx)
            dx /= world if trainer == "mean" else 1
        found += [distance(x, y) for x, y in zip([value.detach(), *parts, before], [*whole, whole[3]], strict=True)]
    return found


@pytest.mark.parametrize(("name", "training", "trainer"), drawn(CASES, TRAININGS, ["mean", "sum"], one_in=3), ids=str)
def test_roles_are_one_process(name: str, training: Any, trainer: str, worlds: Worlds) -> None:
    for found in worlds.run(len(training[0]), errors, name, training, trainer):
        assert max(found) <= EXACT


def test_without_roles_the_numbers_are_wrong(worlds: Worlds) -> None:
    """The control: explicit rows of dimension 0 compute what the roles are there to prevent."""
    of_first = {"prototypes": "prototypes", "a queue in a dict": "memory", "views in one tensor": "views"}
    for name, rows in of_first.items():
        (found, *_) = worlds.run(2, errors, name, [(4, 4)], "mean", batch_dim={rows: 0})
        assert found[0] > 1e-3, name
        if name == "prototypes":  # a target over a queue that stands there twice only adds log 2
            assert min(found[1:3]) > 1e-3


def test_one_process_has_no_roles() -> None:
    a, b, p = (numbers(5, D, seed=k) for k in range(3))
    loss = cz.DistributedLoss(Prototypes(), shared={"prototypes"})
    assert loss(a, b, p) == Prototypes()(a, b, p)
    assert "shared=('prototypes',)" in repr(loss)
    assert "batch_dim={'views': 1}" in repr(cz.DistributedLoss(Views(), batch_dim={"views": 1}))
