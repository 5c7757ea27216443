"""Recipes of a whole training step: a model, a loss and a gradient all-reduce, right and wrong."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from contrastive_zoo.ranks.collectives import all_gather, all_reduce
from contrastive_zoo.testing.batch import FEATURES
from contrastive_zoo.testing.gallery.local_anchors import ShardedAnchors
from contrastive_zoo.testing.gallery.recipe import DenseInfoNCE, rank_and_size, recipe, scale_gradient
from contrastive_zoo.wrapper.averaging import average_gradients
from contrastive_zoo.wrapper.distributed import DistributedLoss

WIDTH, PROXIES = 4, 64
"""Width of the embeddings, and number of proxies."""

Step = tuple[nn.Module, Callable[..., Tensor]]
Reduce = Callable[[nn.Module], None]


class _Model(nn.Module):
    """An encoder; its loss may be a member."""

    def __init__(self, loss: nn.Module | None = None) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, WIDTH))
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)


class _ModelWithLoss(_Model):
    """A model that returns its loss, as those of Hugging Face's transformers."""

    def forward(self, *views: Tensor) -> Tensor:
        assert self.loss is not None
        return self.loss(*map(self.encoder, views))


def _sum_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad = all_reduce(parameter.grad)


def _step(
    loss: nn.Module,
    *,
    in_model: bool = True,
    reduce: Reduce = average_gradients,
    factor: Callable[[], float] = lambda: 1.0,
    prepare: Callable[[Tensor], Tensor] = lambda x: x,
) -> Step:
    """Return a training step of two views, or of samples and labels, and its model."""
    model = _Model(loss if in_model else None)

    def step(model: nn.Module, *arguments: Tensor) -> Tensor:
        embedded = [model(x) if x.is_floating_point() else x for x in arguments]
        value: Tensor = factor() * loss(*map(prepare, embedded))
        value.backward()
        reduce(model)
        return value

    return model, step


class _Proxies(nn.Module):
    """Cross-entropy over one proxy per class, drawn with a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(PROXIES, WIDTH, generator=torch.Generator().manual_seed(seed)))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(embeddings @ self.proxies.T, labels)


_step_recipe = partial(recipe, step=True)


def _world_size() -> float:
    return rank_and_size()[1]


@_step_recipe("loss in the model", mistake=None)
def _() -> Step:
    """`DistributedLoss` as a member of the model; the trainer averages all gradients"""
    return _step(DistributedLoss(DenseInfoNCE()))


@_step_recipe("loss outside the model", mistake=None)
def _() -> Step:
    """`DistributedLoss` outside the model; the trainer averages the encoder's gradients only"""
    return _step(DistributedLoss(DenseInfoNCE()), in_model=False)


@_step_recipe("DDP of a model that returns its loss", mistake=None)
def _() -> Step:
    """DDP around a model whose `forward` returns the loss"""
    model = DistributedDataParallel(_ModelWithLoss(DistributedLoss(DenseInfoNCE())).double())

    def step(model: nn.Module, *views: Tensor) -> Tensor:
        value: Tensor = model(*views)
        value.backward()
        return value

    return model, step


@_step_recipe("sum trainer, sum loss", mistake=None)
def _() -> Step:
    """a trainer that sums gradients, and `DistributedLoss(loss, grad_reduction="sum")` in the model"""
    return _step(DistributedLoss(DenseInfoNCE(), grad_reduction="sum"), reduce=_sum_gradients)


@_step_recipe("step × W", mistake="times W")
def _() -> Step:
    """the loss multiplied by W before `backward`"""
    return _step(DistributedLoss(DenseInfoNCE()), factor=_world_size)


@_step_recipe("sum trainer", mistake="trainer sums")
def _() -> Step:
    """a trainer that sums gradients, and a loss for one that averages"""
    return _step(DistributedLoss(DenseInfoNCE()), reduce=_sum_gradients)


@_step_recipe("mean trainer", mistake="trainer averages")
def _() -> Step:
    """a trainer that averages gradients, and `DistributedLoss(loss, grad_reduction="sum")`"""
    return _step(DistributedLoss(DenseInfoNCE(), grad_reduction="sum"))


@_step_recipe("gathered before the loss", mistake="gathered first")
def _() -> Step:
    """embeddings gathered before `DistributedLoss`, which gathers them again"""
    return _step(DistributedLoss(DenseInfoNCE()), prepare=all_gather)


@_step_recipe("proxies seeded per rank", mistake="unequal parameters", call="labels")
def _() -> Step:
    """`torch.manual_seed(rank)` before the proxies are drawn; the loss is outside the model"""
    loss = _Proxies(seed=rank_and_size()[0])
    return _step(DistributedLoss(loss), in_model=False)


@_step_recipe("loss parameters not reduced", mistake="parameters not reduced")
def _() -> Step:
    """a loss whose parameters get the gradient of the local anchors, outside the model that is reduced"""
    loss = ShardedAnchors(all_gather, replicate=lambda scale: scale_gradient(rank_and_size()[1], scale))
    return _step(loss, in_model=False)


@_step_recipe("gradients not reduced", mistake="not reduced")
def _() -> Step:
    """no DDP, and no gradient all-reduce"""
    return _step(DistributedLoss(DenseInfoNCE()), reduce=lambda module: None)


@_step_recipe("plain loss in a step", mistake="local negatives")
def _() -> Step:
    """the loss of one process in a step whose gradients are averaged"""
    return _step(DenseInfoNCE())


__all__ = ["WIDTH"]
