"""TiCo: equal views, and embeddings away from the directions that past embeddings filled."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from contrastive_zoo.collectives import sum_over_ranks
from contrastive_zoo.compiling import traced_as
from contrastive_zoo.engine.moments import second_moments
from contrastive_zoo.engine.reduction import reduce_anchors
from contrastive_zoo.handshake import kind
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.checks import is_number, number_problem, views_problem
from contrastive_zoo.loss_base.class_loss import ConstructingLoss
from contrastive_zoo.loss_base.graph_operator import GraphModule
from contrastive_zoo.loss_base.numbers import move_towards
from contrastive_zoo.loss_base.preparation import begin_views, prepare_rows
from contrastive_zoo.sizes import of_size
from contrastive_zoo.world import ALONE, World


@checked
def tico(
    view1: Float[Tensor, "n d"],
    view2: Float[Tensor, "n d"],
    *,
    covariance: Float[Tensor, "d d"],
    beta: float = 0.9,
    rho: float = 8.0,
    world: World = ALONE,
) -> Float[Tensor, ""]:
    r"""Compute transformation invariance and covariance contrast.

    With a, b the unit rows of the two views of all ranks and M the moving average of past second moments,

        C = β M + (1 − β)/N Σ_i a_i a_iᵀ
        loss = mean_i [ 1 − a_i·b_i  +  ρ a_iᵀ C a_i ]

    C has no gradient. Equal to lightly's TiCoLoss. Its memory is one d × d matrix, no queue of negatives.

    Args:
        view1: a, [n, d]; n may differ between ranks.
        view2: b, [n, d], usually of a momentum encoder; rows of one sample stand at the same index.
        covariance: M; the buffer of :class:`TiCo`.
        beta: β, 0 … 1.
        rho: ρ.
        world: the ranks that share the batch.

    Raises:
        ValueError: a β outside 0 … 1, a ρ that is not finite, a covariance of another width, or what any :class:`Loss`
            refuses.

    Examples:
        >>> eye = torch.eye(2)
        >>> tico(eye, eye, covariance=torch.zeros(2, 2), beta=0.5, rho=1.0)   # 0 + ½ · ½
        tensor(0.2500)

    Source: Zhu et al. 2022, https://arxiv.org/abs/2206.10698
    """
    problem = _settings_problem(beta, rho) or views_problem((view1, view2))
    if problem is None and covariance.shape != 2 * view1.shape[-1:]:
        fix = f"Construct TiCo(embedding_size={view1.shape[-1]})."
        problem = f"the covariance is as wide as embeddings, got {kind(covariance)} for views {kind(view1)}. {fix}"
    (a, b), shards = begin_views("TiCo", (view1, view2), problem=problem, beta=beta, rho=rho, world=world)
    moments = second_moments(a, a, world=world) / shards.total
    contrast = beta * covariance.to(moments) + (1 - beta) * moments.detach()
    return reduce_anchors(1 - (a * b).sum(1), world=world) + rho * (moments * contrast).sum()


def _settings_problem(beta: float, rho: float) -> str | None:
    return number_problem(low=0, high=1, beta=beta) or number_problem(rho=rho)


class TiCo(ConstructingLoss, function=tico, check=_settings_problem):
    """The moving average is the buffer ``covariance``, which starts at 0.

    In training mode each call uses the buffer and then stores C in it: it is equal on every rank, and equal to that of
    one process.

    Args:
        embedding_size: d.

    Raises:
        ValueError: an embedding_size below 1, or above what memory holds.

    Examples:
        >>> eye = torch.eye(2)
        >>> TiCo(2, beta=0.5, rho=1.0)(eye, eye)   # 0 + ½ · ½
        tensor(0.2500)
    """

    made = ("covariance",)
    covariance: Tensor
    beta: float

    def __init__(self, embedding_size: int, **settings: Any) -> None:
        if not is_number(embedding_size, low=1, whole=True):
            raise ValueError(f"TiCo: embedding_size is at least 1, got {embedding_size}.")
        size = int(embedding_size)
        zeros = of_size("TiCo", lambda: torch.zeros(size, size), embedding_size=size)
        super().__init__(covariance=nn.Buffer(zeros), **settings)
        self.embedding_size = size

    @traced_as(GraphModule.traced_forward)
    def forward(self, view1: Tensor, view2: Tensor, *, world: World | None = None) -> Tensor:  # type: ignore[override]  # rows by name
        """Return the loss, and move the covariance by one step.

        Args:
            view1: as in the function.
            view2: as in the function.
            world: the ranks that share the batch; None is this rank alone. ``DistributedLoss`` passes its own.
        """
        world = self.local() if world is None else world
        loss = super().forward(view1, view2, world=world)
        if self.training:
            self.move_covariance(view1, world)
        return loss

    @torch.no_grad()
    def move_covariance(self, view1: Tensor, world: World) -> None:
        """Move the covariance by one step towards the second moments of the first view of all ranks."""
        a = prepare_rows(view1, normalize=True, world=world)
        count = sum_over_ranks(a.new_full((), len(a)), gradient="complete", world=world)
        move_towards(self.covariance, second_moments(a, a, world=world) / count, 1 - self.beta)
