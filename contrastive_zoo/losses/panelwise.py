"""From a function of one panel to a loss of all anchors: what the functions of the zoo hand to the rows engine."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from contrastive_zoo.engine.rows import Panel


class Panelwise(nn.Module):
    """``function(panel, **settings, **numbers)`` as the rows engine takes it.

    Args:
        function: a panel to the loss of its anchors and whether they count.
        settings: what the function needs besides. A tensor is learnt: it gets the gradient of all ranks' anchors, also
            where it is no leaf, such as a :class:`LearnableTemperature`'s value.

    Example:
        >>> nearest = lambda panel, t: ((panel.anchors @ panel.columns.T).amax(1) / t, panel.negative.any(1))
        >>> [name for name, _ in Panelwise(nearest, t=torch.tensor(1.0)).named_parameters()]
        ['t']
    """

    def __init__(self, function: Callable[..., tuple[Tensor, Tensor]], **settings: Any) -> None:
        super().__init__()
        self.learnt = [name for name, x in settings.items() if isinstance(x, Tensor)]
        self.function = functools.partial(function, **{k: x for k, x in settings.items() if k not in self.learnt})
        for name in self.learnt:
            setattr(self, name, settings[name])

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """The learnt numbers."""
        return ((name, getattr(self, name)) for name in self.learnt)

    def on_panel(self, panel: Panel) -> tuple[Tensor, Tensor]:
        """The function, with its settings."""
        return self.function(panel, **{name: getattr(self, name) for name in self.learnt})


def log_sum_exp_where(
    x: Float[Tensor, "c N"], where: Bool[Tensor, "c N"], *, empty: float = -torch.inf
) -> Float[Tensor, " c"]:
    """``logsumexp(x, 1)`` over the entries that ``where`` holds; ``empty``, without gradient, for a row of none.

    Example:
        >>> log_sum_exp_where(torch.zeros(2, 3), torch.tensor([[True, True, False], [False, False, False]]))
        tensor([0.6931,   -inf])
    """
    none = ~where.any(1)
    kept = x.masked_fill(~where, -torch.inf).masked_fill(none[:, None], 0)
    return kept.logsumexp(1).masked_fill(none, empty)


class Pairs(NamedTuple):
    """A panel whose rows are pairs, side by side, and whose columns are pairs and single rows."""

    first: Tensor
    """[c, d] of the anchors."""
    second: Tensor
    firsts: Tensor
    """[P, d] of the columns."""
    seconds: Tensor
    singles: Tensor
    """[M, d]."""
    own: Tensor
    """[c, P], which pair the anchor is."""
    mine: Tensor
    """[c, M], whose ids of singles are the anchor's."""


def side_by_side(
    first: Float[Tensor, "n d"], second: Float[Tensor, "n d"], singles: Float[Tensor, "m d"]
) -> tuple[Float[Tensor, "n e"], Float[Tensor, "k e"], Bool[Tensor, " k"]]:
    """Pairs as anchors, so that one can look with either of its rows; pairs and singles as columns, and which is which.

    Example:
        >>> [x.tolist() for x in side_by_side(torch.ones(1, 1), torch.zeros(1, 1), torch.full((1, 1), 7.0))]
        [[[1.0, 0.0]], [[1.0, 0.0], [7.0, 0.0]], [False, True]]
    """
    pairs = torch.cat([first, second], 1)
    single = torch.arange(len(pairs) + len(singles), device=pairs.device) >= len(pairs)
    return pairs, torch.cat([pairs, torch.cat([singles, torch.zeros_like(singles)], 1)]), single


def apart(rows: Tensor, columns: Tensor, single: Tensor, positive: Tensor) -> Pairs:
    """What :func:`side_by_side` put together, of a panel."""
    pair, extra = single.logical_not().nonzero().flatten(), single.nonzero().flatten()
    (first, second), (firsts, seconds) = rows.chunk(2, 1), columns[pair].chunk(2, 1)
    singles = columns[extra].chunk(2, 1)[0]
    return Pairs(first, second, firsts, seconds, singles, positive[:, pair], positive[:, extra])
