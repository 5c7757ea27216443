# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.losses.sigreg import SIGReg
from contrastive_zoo.world import ALONE, World

def lejepa(
    *views: Float[Tensor, "n d"],
    directions: Float[Tensor, "d m"],
    lambda_: float = 0.05,
    global_views: int = 2,
    num_points: int = 17,
    limit: float = 3.0,
    world: World = ALONE,
) -> Float[Tensor, ""]:
    """Compute SIGReg of each view plus the distance of views from the mean of the global views.

    With z_v the rows of all ranks in view v of V, of d features, and m_i the mean of sample i over the first g views,

        loss = λ mean_v SIGReg(z_v)  +  (1 − λ) mean_{v,i} ‖z_vi − m_i‖² / d

    where :func:`sigreg` takes the same directions in each view. Embeddings are not normalised. Equal to lightly's LeJEPALoss
    on all views.

    Args:
        views: two or more views of the same samples, [n, d] each, the global ones first; n may differ between ranks.
        directions: [d, m], equal on every rank; :class:`LeJEPA` draws them.
        lambda_: λ, 0 … 1.
        global_views: g.
        num_points: as in :func:`sigreg`.
        limit: as in :func:`sigreg`.
        world: the ranks that share the batch.

    Raises:
        ValueError: a λ outside 0 … 1, global_views that are not 1 … V, what :func:`sigreg` or any :class:`Loss` refuses.

    Examples:
        >>> z = torch.ones(2, 1)
        >>> lejepa(z, -z, directions=torch.ones(1, 1), lambda_=0.0)   # 1² from the mean 0
        tensor(1.)

    Source: Balestriero & LeCun 2025, https://arxiv.org/abs/2511.08544
    """

class LeJEPA(SIGReg):
    """Compute SIGReg of each view plus the distance of views from the mean of the global views.

    With z_v the rows of all ranks in view v of V, of d features, and m_i the mean of sample i over the first g views,

        loss = λ mean_v SIGReg(z_v)  +  (1 − λ) mean_{v,i} ‖z_vi − m_i‖² / d

    where :func:`sigreg` takes the same directions in each view. Embeddings are not normalised. Equal to lightly's LeJEPALoss
    on all views.

    In training mode each call draws other directions, as :class:`SIGReg` does.

    Called as ``loss(view1, view2, …)``:

    - views: two or more views of the same samples, [n, d] each, the global ones first; n may differ between ranks.

    Args:
        embedding_size: d.
        num_slices: m, the number of directions.
        lambda_: λ, 0 … 1.
        global_views: g.
        num_points: as in :func:`sigreg`.
        limit: as in :func:`sigreg`.
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: a λ outside 0 … 1, global_views that are not 1 … V, what :func:`sigreg` or any :class:`Loss` refuses.

    Examples:
        >>> loss = LeJEPA(1, lambda_=0.0)
        >>> loss(torch.ones(2, 1), -torch.ones(2, 1)), loss.step
        (tensor(1.), tensor(1))

    Source: Balestriero & LeCun 2025, https://arxiv.org/abs/2511.08544
    """

    embedding_size: int
    num_slices: int
    lambda_: float
    global_views: int
    num_points: int
    limit: float
    check_finite: bool

    def __init__(
        self,
        embedding_size: int,
        *,
        num_slices: int = 1024,
        lambda_: float = 0.05,
        global_views: int = 2,
        num_points: int = 17,
        limit: float = 3.0,
        check_finite: bool = True,
    ) -> None: ...
    def __call__(self, *views: Float[Tensor, "n d"], world: World | None = None) -> Tensor: ...
