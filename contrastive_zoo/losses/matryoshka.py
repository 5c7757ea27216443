"""Matryoshka: the first few dimensions of an embedding are to be an embedding, too."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.losses.base import Loss
from contrastive_zoo.losses.weighted_sum import weighed
from contrastive_zoo.meeting import kind, meet
from contrastive_zoo.world import World


class Matryoshka(Loss):
    r"""``loss`` on prefixes of the embeddings, added up.

        L = Σ_m c_m · loss(z[:, :m])

    Dense: ``sum(c * loss(z[:, :m], labels) for m, c in zip(dims, weights))``; a loss that normalises does so for each
    prefix. Each prefix is gathered by itself: Σ m numbers a row travel, where sharing one gather would send max m, and
    only the loss's engine could.

    Args:
        loss: a loss of this library, with any call form; its parameters are shared by all prefixes.
        dims: widths m. Give the whole width as well if the whole embedding is to be trained.
        weights: c_m; None is 1 for each, as in the paper and in sentence-transformers' MatryoshkaLoss.

    Raises:
        ValueError: a loss from elsewhere, no dims or some below 1, or not as many weights as dims. At the call, on every
            rank alike: embeddings narrower than a prefix, and whatever the loss refuses.

    Example:
        >>> import contrastive_zoo as cz
        >>> a, b = torch.eye(2), torch.tensor([[1.0, 0.0], [1.0, 1.0]])
        >>> loss = Matryoshka(cz.InfoNCE(temperature=1.0, normalize=False), dims=(1, 2))
        >>> loss(a, b)   # log 2 for queries 1 and 0, keys 1 and 1; then the mean of log 2 and log(e + 1) − 1
        tensor(1.1964)

    Source: Kusupati et al. 2022, eq. 1, https://arxiv.org/abs/2205.13147
    """

    def __init__(self, loss: Loss, dims: Sequence[int], *, weights: Sequence[float] | None = None) -> None:
        if not dims or min(dims) < 1:
            raise ValueError(f"Matryoshka: dims are one or more widths of at least 1, got {list(dims)}.")
        chosen = weighed("Matryoshka", [loss], len(dims), weights)
        super().__init__(check_finite=loss.check_finite)
        self.loss, self.dims, self.weights = loss, tuple(dims), chosen

    def forward(self, *rows: Tensor, world: World | None = None, **named_rows: Tensor) -> Float[Tensor, "..."]:
        """The weighted sum over the prefixes.

        Args:
            rows: as the loss takes them; prefixes are taken of whatever is floating and has a width.
            world: who else holds rows; None is nobody. ``DistributedLoss`` passes the process group's.
            named_rows: as the loss takes them.
        """
        world = self.local() if world is None else world
        every = {**{f"argument {index}": x for index, x in enumerate(rows)}, **named_rows}
        narrow = [f"{name} {kind(x)}" for name, x in every.items() if _wide(x) and x.shape[-1] < max(self.dims)]
        problem = f"a prefix of {max(self.dims)} does not fit into {', '.join(narrow)}." if narrow else None
        meet("Matryoshka", {}, world=world, problem=problem)
        values = []
        for m, c in zip(self.dims, self.weights, strict=True):
            args, kwargs = [_prefix(x, m) for x in rows], {name: _prefix(x, m) for name, x in named_rows.items()}
            values.append(c * self.loss(*args, **kwargs, world=world))
        return torch.stack(values).sum(0)

    def extra_repr(self) -> str:
        return f"dims={self.dims}, weights={self.weights}"


def _wide(x: Tensor) -> bool:
    return x.is_floating_point() and x.ndim > 1


def _prefix(x: Tensor, m: int) -> Tensor:
    return x[..., :m] if _wide(x) else x
