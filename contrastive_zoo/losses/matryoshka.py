"""Matryoshka: train prefixes of an embedding as embeddings."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import starmap

from torch import Tensor

from contrastive_zoo.collectives import derived
from contrastive_zoo.handshake import kind
from contrastive_zoo.loss_base.checks import is_number
from contrastive_zoo.loss_base.composition import Composition
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.row_checks import described, tensor_problem
from contrastive_zoo.session import refuse
from contrastive_zoo.world import World


class Matryoshka(Composition):
    r"""Add the values of ``loss`` on prefixes of the embeddings.

        L = Σ_m c_m · loss(z[:, :m])

    A loss that normalises does so for each prefix. Embeddings are gathered once, gradients are communicated per prefix.

    Args:
        loss: a loss of this library, with any call form; its parameters are shared by all prefixes.
        dims: widths m. Include the whole width to train the whole embedding.
        weights: c_m; None is 1 for each, as in the paper and in sentence-transformers' MatryoshkaLoss.

    Raises:
        ValueError: a third-party loss or a class in place of its instance, dims below 1, other than a finite weight for
            each; at the call narrower embeddings.

    Examples:
        >>> import torch
        >>> import contrastive_zoo as cz
        >>> Matryoshka(cz.InfoNCE(temperature=1.0), (1, 2))(torch.eye(2), torch.eye(2))   # ½ (0.3133 + log 2) + 0.3133
        tensor(0.8165)

    Source: Kusupati et al. 2022, eq. 1, https://arxiv.org/abs/2205.13147
    """

    shown = ("dims", "weights")

    def __init__(self, loss: Loss, dims: Sequence[int], *, weights: Sequence[float] | None = None) -> None:
        listed = isinstance(dims, Sequence) and not isinstance(dims, (str, bytes))
        if not listed or not dims or not all(is_number(m, low=1, whole=True) for m in dims):
            raise ValueError(f"Matryoshka: dims are one or more widths of at least 1, got {described(dims)}.")
        super().__init__([loss], len(dims), weights)
        self.loss, self.dims = loss, tuple(dims)

    def terms(
        self, rows: Sequence[Tensor], named_rows: Mapping[str, Tensor], world: World
    ) -> list[Callable[[], Tensor]]:
        tensors = {**{f"argument {index}": x for index, x in enumerate(rows)}, **named_rows}
        if wrong := next(filter(None, starmap(tensor_problem, tensors.items())), None):
            return [partial(refuse, "Matryoshka", wrong, world=world)]
        narrow = [f"{name} {kind(x)}" for name, x in tensors.items() if _wide(x) and x.shape[-1] < max(self.dims)]
        problem = f"a prefix of {max(self.dims)} does not fit into {', '.join(narrow)}." if narrow else None
        if problem is not None:
            return [partial(refuse, "Matryoshka", problem, world=world)]
        cut = [
            ([_prefix(x, m, world) for x in rows], {k: _prefix(x, m, world) for k, x in named_rows.items()})
            for m in self.dims
        ]
        return [partial(self.loss, *args, **kwargs, world=world) for args, kwargs in cut]


def _wide(x: Tensor) -> bool:
    return x.is_floating_point() and x.ndim > 1


def _prefix(x: Tensor, m: int, world: World) -> Tensor:
    return derived(lambda whole: whole[..., :m], x, world=world) if _wide(x) else x
