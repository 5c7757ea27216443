"""Recipes of a whole training step: a model, a loss and a gradient all-reduce, right and wrong."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from contrastive_zoo.ranks.collectives import all_gather, all_reduce
from contrastive_zoo.testing.batch import FEATURES
from contrastive_zoo.testing.gallery.gather import local_parameters
from contrastive_zoo.testing.gallery.recipe import DenseInfoNCE, rank_and_size, recipe, world_size
from contrastive_zoo.wrapper.averaging import average_gradients
from contrastive_zoo.wrapper.distributed import DistributedLoss

WIDTH, PROXIES = 4, 64
"""Width of the embeddings, and number of proxies."""

Step = tuple[nn.Module, Callable[..., Tensor]]
Reduce = Callable[[nn.Module], None]


class _Model(nn.Module):
    def __init__(self, loss: nn.Module | None = None) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, WIDTH))
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)


def _sum_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad = all_reduce(parameter.grad)


def _step(
    loss: nn.Module | None = None,
    *,
    in_model: bool = True,
    reduce: Reduce = average_gradients,
    factor: Callable[[], float] = lambda: 1.0,
    prepare: Callable[[Tensor], Tensor] = lambda x: x,
) -> Step:
    """Return a training step of two views, or of samples and labels, and its model."""
    loss = DistributedLoss(DenseInfoNCE()) if loss is None else loss
    model = _Model(loss if in_model else None)

    def step(model: nn.Module, *arguments: Tensor) -> Tensor:
        embedded = [model(x) if x.is_floating_point() else x for x in arguments]
        value: Tensor = factor() * loss(*map(prepare, embedded))
        value.backward()
        reduce(model)
        return value

    return model, step


_step_recipe = partial(recipe, step=True)

_step_recipe("loss in the model")(_step)
_step_recipe("loss outside the model")(partial(_step, in_model=False))


@_step_recipe("DDP of a model that returns its loss")
def _ddp_of_a_model_with_loss() -> Step:

    class ModelWithLoss(_Model):
        def forward(self, *views: Tensor) -> Tensor:
            assert self.loss is not None
            return self.loss(*map(self.encoder, views))

    def step(model: nn.Module, *views: Tensor) -> Tensor:
        value: Tensor = model(*views)
        value.backward()
        return value

    return DistributedDataParallel(ModelWithLoss(DistributedLoss(DenseInfoNCE())).double()), step


def _step_of_sum_loss(reduce: Reduce) -> Step:
    return _step(DistributedLoss(DenseInfoNCE(), grad_reduction="sum"), reduce=reduce)


_step_recipe("sum trainer, sum loss")(partial(_step_of_sum_loss, _sum_gradients))
_step_recipe("step × W", mistake="times W")(partial(_step, factor=world_size))
_step_recipe("sum trainer", mistake="trainer sums")(partial(_step, reduce=_sum_gradients))
_step_recipe("mean trainer", mistake="trainer averages")(partial(_step_of_sum_loss, average_gradients))
_step_recipe("gathered before the loss", mistake="gathered first")(partial(_step, prepare=all_gather))


@_step_recipe("proxies seeded per rank", mistake="unequal parameters", call="labels")
def _proxies_seeded_per_rank() -> Step:

    class Proxies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(rank_and_size()[0])
            self.proxies = nn.Parameter(torch.randn(PROXIES, WIDTH, generator=generator))

        def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
            return nn.functional.cross_entropy(embeddings @ self.proxies.T, labels)

    return _step(DistributedLoss(Proxies()), in_model=False)


_step_recipe("loss parameters not reduced", mistake="parameters not reduced")(
    lambda: _step(local_parameters(), in_model=False)
)
_step_recipe("gradients not reduced", mistake="not reduced")(partial(_step, reduce=lambda module: None))
_step_recipe("plain loss in a step", mistake="local negatives")(lambda: _step(DenseInfoNCE()))
