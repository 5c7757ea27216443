"""Parts of the gallery's recipes: the registry, two dense losses, and functions of gathered tensors."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from contrastive_zoo.ranks.world import World
from contrastive_zoo.testing.measurement import Call, Case, GradReduction

ABOUT = {
    "DistributedLoss, own loss": "`DistributedLoss(InfoNCE(...))`",
    "DistributedLoss, any loss": "`DistributedLoss(any_loss)`",
    "DistributedLoss, labels": "`DistributedLoss(any_loss)` of embeddings and labels",
    "DistributedLoss, sum trainer": '`DistributedLoss(loss, grad_reduction="sum")` under a sum hook',
    "gather with reduce-scatter": "all ranks compute the whole loss from a gather whose backward sums over ranks",
    "torch functional all_gather": "functional all_gather of equal shards, whole loss on every rank",
    "own slice": "an autograd.Function (`GatherLayer`) whose backward keeps this rank's slice",
    "GatherLayer that all-reduces": "a `GatherLayer` whose backward sums over ranks, then keeps this rank's slice",
    "GatherLayer of equal shards": "the same with a plain `torch.distributed.all_gather`: the process dies "
    "on uneven shards",
    "overwritten slice": "gather, then overwrite this rank's slice with the live tensor",
    "own slice × W": "the same, loss × W",
    "detached gather": "accelerate's gather, or a plain all_gather: no gradient at all",
    "sharded anchors": "local anchors against a differentiable gather of candidates, global sum / global count",
    "wrong adjoint": "the same, with a gather whose backward reduces with MAX",
    "local parameters": "the same, where the temperature of each rank gets only the gradient of the local anchors",
    "detached candidates": "local anchors against detached gathered candidates (`local_loss`)",
    "local loss": "local anchors, gather with gradient (`gather_with_grad`): each rank returns its local mean",
    "GatherLayer, local anchors": "the same with a `GatherLayer` whose backward all-reduces (lightly, solo-learn)",
    "GatherLayer of own slice, local anchors": "the same with a `GatherLayer` whose backward keeps this rank's slice",
    "local loss × W": "local anchors, right offsets, gather with gradient, loss × W (PyLate 1.6)",
    "queries only, × W": "local queries as the only anchors, documents gathered with gradient, loss × W "
    "(sentence-transformers, formerly)",
    "mean of means": "local anchors, gather with gradient, and the local means averaged over ranks",
    "mask without offset": "local anchors against gathered candidates, targets `arange(n)` on every rank",
    "local negatives": "no gather: each rank computes the loss of its local samples",
    "views split wrongly": "`[view1; view2]` gathered in one tensor and split in half: P N P N read as P P N N",
    "[W, n, d] folded wrongly": "Lightning's `all_gather` returns [W, n, d]; the samples of one view are "
    "interleaved, those of the other are not",
    "own rank first": "`[local, others]`: results that depend on the order of samples differ between ranks",
    "labels not gathered": "embeddings gathered, labels not: the embeddings of all ranks get this rank's labels",
    "labels by position": "ids from `arange(n)` on every rank: the first samples of all ranks become positives",
    "statistic without gradient": "a cross-correlation all-reduced in place (Barlow Twins): right value, "
    "gradient of the local term",
    "statistic with gradient": "the same through a differentiable all_reduce",
    "naive softmax": "sums of exponentials all-reduced over ranks without a common maximum",
    "mean assumed, trainer sums": "written for a trainer that averages, used under one that sums",
    "sum assumed, trainer averages": "written for a trainer that sums, used under one that averages",
    "ignored grad_output": "an autograd.Function that returns its gradient without grad_output",
    "gradient × √(B/τ)": "a memory-efficient loss whose backward rescales the gradient by √(B/τ), with the "
    "local batch size B",
    "overwritten tensors": "an autograd.Function that stores tensors for the backward pass on the class",
    "scaled from call 3": "right for two calls, then another code path multiplies by W",
    "own random stream": "every rank computes the whole loss, with noise from its local generator",
    "shared random stream": "the same, with the noise of rank 0 broadcast to all ranks",
    "sharded weights": "class weights sharded over ranks; each shard gets its complete gradient",
    "sharded weights, W×": "the same, with these gradients scaled for an average that no trainer computes",
    "compared by hand": "a hand-written wrapper that compares settings, parameters and arguments before it gathers",
    "settings not compared": "the same, without the comparison of settings",
    "parameters not compared": "the same, without the comparison of the loss's parameters: proxies from a "
    "different seed per rank stay undetected",
    "arguments not compared": "the same, without the comparison of arguments: a rank that lacks one enters "
    "one gather less",
    "one message more": "one rank calls one collective more than the others, here in a group of its own",
    "early return": "a rank without a valid pair returns before the collective",
    "rank's own queue": "a queue or running statistic updated with local samples only",
    "loss in the model": "`DistributedLoss` as a member of the model; the trainer averages all gradients",
    "loss outside the model": "`DistributedLoss` outside the model; the trainer averages the encoder's gradients only",
    "DDP of a model that returns its loss": "DDP around a model whose `forward` returns the loss",
    "sum trainer, sum loss": "a trainer that sums gradients, and `DistributedLoss(loss, "
    'grad_reduction="sum")` in the model',
    "step × W": "the loss multiplied by W before `backward`",
    "sum trainer": "a trainer that sums gradients, and a loss for one that averages",
    "mean trainer": 'a trainer that averages gradients, and `DistributedLoss(loss, grad_reduction="sum")`',
    "gathered before the loss": "embeddings gathered before `DistributedLoss`, which gathers them again",
    "proxies seeded per rank": "`torch.manual_seed(rank)` before the proxies are drawn; the loss is outside the model",
    "loss parameters not reduced": "a loss whose parameters get the gradient of the local anchors, outside "
    "the model that is reduced",
    "gradients not reduced": "no DDP, and no gradient all-reduce",
    "plain loss in a step": "the loss of one process in a step whose gradients are averaged",
}
"""What people write, by name of the recipe, in one line. "The same" refers to the recipe before it."""


@dataclass(frozen=True)
class Recipe:
    """An implementation of a loss, or of a training step as ``(model, step)``, for several processes."""

    name: str
    make: Callable[[], Any]
    mistake: str | None  # key of the diagnosis; None if the contract holds
    call: Call
    grad_reduction: GradReduction
    about: str
    step: bool = field(default=False, kw_only=True)

    @property
    def case(self) -> Case:
        """Return the recipe as a case under test."""
        return Case(partial(make, self.name), self.call, self.grad_reduction, step=self.step, name=self.name)


GALLERY: dict[str, Recipe] = {}
"""All recipes of a loss by name."""

TRAINING_STEPS: dict[str, Recipe] = {}
"""All recipes of a training step by name."""

T = TypeVar("T", bound=Callable[..., Any])


def make(name: str) -> Any:
    """Construct the loss, or the training step, of a recipe."""
    import contrastive_zoo.testing.gallery  # noqa: F401 - a rank that receives only the name has registered none yet

    return (GALLERY | TRAINING_STEPS)[name].make()


def recipe(
    name: str,
    *,
    mistake: str | None = None,
    call: Call = "views",
    grad_reduction: GradReduction = "mean",
    step: bool = False,
    is_loss: bool = False,
) -> Callable[[T], T]:
    """Register a function in the gallery: it is the loss, or it returns the loss or the training step."""

    def register(function: T) -> T:
        make = (lambda: function) if is_loss else function
        recipes = TRAINING_STEPS if step else GALLERY
        recipes[name] = Recipe(name, make, mistake, call, grad_reduction, ABOUT[name], step=step)
        return function

    return register


loss_recipe = partial(recipe, is_loss=True)


class DenseInfoNCE(nn.Module):
    """Dense InfoNCE in both directions of what ``gather`` returns for each view, times ``factor()``."""

    def __init__(self, gather: Callable[[Tensor], Tensor] = lambda x: x, factor: Callable[[], float] = lambda: 1.0):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.gather, self.factor = gather, factor

    def forward(self, view1: Tensor, view2: Tensor) -> Tensor:
        a, b = (self.gather(F.normalize(view, dim=1)) for view in (view1, view2))
        return self.factor() * symmetric_cross_entropy(self.scale * a @ b.T)


def symmetric_cross_entropy(logits: Tensor) -> Tensor:
    """Return the mean cross-entropy of the rows and columns of logits [n, n], with the positives on the diagonal."""
    positive = torch.arange(len(logits))
    return (F.cross_entropy(logits, positive) + F.cross_entropy(logits.T, positive)) / 2


def dense_sup_con(z: Tensor, labels: Tensor) -> Tensor:
    """Return the SupCon loss of these embeddings at temperature 1, from the whole similarity matrix."""
    self_pair = torch.eye(len(z), dtype=torch.bool)
    positive = (labels[:, None] == labels) & ~self_pair
    log_p = F.log_softmax((F.normalize(z, dim=1) @ F.normalize(z, dim=1).T).masked_fill(self_pair, -torch.inf), 1)
    counts = positive.sum(1)
    losses = -(log_p.where(positive, 0)).sum(1) / counts.clamp(min=1)
    return losses.sum() / (counts > 0).sum().clamp(min=1)


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the world size: (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def world_size() -> int:
    """Return the number of ranks, the factor of many mistakes."""
    return rank_and_size()[1]


def shard_sizes(x: Tensor) -> list[int]:
    """Return the number of samples on each rank."""
    return list(World.of().shards(len(x)).sizes)


def gather_detached(x: Tensor) -> list[Tensor]:
    """Return the shards of all ranks without gradient. They are padded for the gather, so uneven shards are accepted."""
    if world_size() == 1:
        return [x.detach()]
    sizes = shard_sizes(x)
    padded = torch.cat([x.detach(), x.new_zeros(max(sizes) - len(x), *x.shape[1:])])
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded)
    return [shard[:size] for shard, size in zip(gathered, sizes, strict=True)]


def scale_gradient(factor: float, x: Tensor) -> Tensor:
    """Return x; its gradient is multiplied by ``factor``."""
    return x + (factor - 1) * (x - x.detach())
