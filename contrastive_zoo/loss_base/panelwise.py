"""From a function of one panel to a loss of all anchors: what the functions of the zoo hand to the rows engine."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.engine.rows import Panel, sum_over_anchors
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.numbers import real
from contrastive_zoo.loss_base.preparation import begin_labelled
from contrastive_zoo.world import World

Average = Literal["anchors", "pairs"]


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
        settings = {name: real(x) for name, x in settings.items()}
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


class PanelLoss(Loss):
    """A function of labelled rows that is a sum over anchors of what ``panel(panel, **settings)`` says of them.

    A class that is declared with its panel, as in ``class NCA(PanelLoss, function=nca, panel=_neighbours)``, can also
    compare anchors with rows that are none, such as a memory's.

    Example:
        >>> from contrastive_zoo.losses.nca import NCA
        >>> NCA(temperature=torch.tensor(2.0)).panelwise().learnt
        ['temperature']
    """

    panel: ClassVar[Callable[..., tuple[Tensor, Tensor]]]

    def __init_subclass__(cls, panel: Callable[..., tuple[Tensor, Tensor]] | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if panel is not None:
            cls.panel = staticmethod(panel)

    def panelwise(self) -> Panelwise:
        """``panel`` with the settings of this moment."""
        of_rows = ("normalize", "reduction")
        return Panelwise(type(self).panel, **{k: x for k, x in self.settings().items() if k not in of_rows})


def over_anchors(
    caller: str,
    panel: Callable[..., tuple[Tensor, Tensor]],
    embeddings: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None,
    *,
    normalize: bool = True,
    reduction: Reduction,
    problem: str | None = None,
    world: World,
    **settings: Any,
) -> Float[Tensor, "..."]:
    """``panel(panel, **settings)`` of all labelled rows, which are checked and prepared first.

    Example:
        >>> from contrastive_zoo.world import ALONE
        >>> nearest = lambda panel, t: ((panel.anchors @ panel.columns.T).amax(1) / t, panel.negative.any(1))
        >>> over_anchors("Loss", nearest, torch.eye(2), torch.arange(2), reduction="mean", t=2.0, world=ALONE)
        tensor(0.5000)
    """
    z, ids, shards = begin_labelled(
        caller, embeddings, labels, normalize=normalize, reduction=reduction, problem=problem, world=world, **settings
    )
    return sum_over_anchors(Panelwise(panel, **settings), z, ids, shards=shards, reduction=reduction, world=world)


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


def each_positive(
    logits: Float[Tensor, "c N"], panel: Panel, average: Average, of_positives: Float[Tensor, "c N"] | None = None
) -> tuple[Float[Tensor, " c"], Shaped[Tensor, " c"]]:
    """log(1 + Σ_n exp(logits_n − logits_p)) of an anchor's positives p: their mean and whether, or their sum and number.

    Args:
        logits: of the anchors.
        panel: who is positive.
        average: of ``"anchors"`` or of ``"pairs"``.
        of_positives: the logits of positives, if they are others.
    """
    against = log_sum_exp_where(logits, panel.negative)
    own = logits if of_positives is None else of_positives
    losses = -F.logsigmoid(own - against[:, None]).where(panel.positive, 0).sum(1)
    pairs = panel.positive.sum(1)
    return (losses, pairs) if average == "pairs" else (losses / pairs.clamp(min=1), pairs > 0)


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
