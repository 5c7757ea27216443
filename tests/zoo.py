"""The table of losses under test: a row buys every conformance test."""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.loss_base.loss import Inputs
from contrastive_zoo.testing.measurement import Call, Case, GradReduction


@dataclass(frozen=True)
class Entry:
    """A loss, its call form, and its definition in plain torch on one process (given temperature and labels)."""

    name: str
    make: Callable[..., Any]
    dense: Callable[..., Tensor]
    call: Call = "views"
    views: int = 2

    def case(self, grad_reduction: GradReduction = "mean", **settings: Any) -> Case:
        make = self.make

        def wrapped() -> Any:
            return cz.DistributedLoss(make(**settings), grad_reduction=grad_reduction)

        return Case(wrapped, self.call, grad_reduction, views=self.views, name=self.name)

    def __str__(self) -> str:
        return self.name


Arguments = Callable[..., Sequence[Any]]


def row(
    name: str,
    dense: Callable[..., Tensor],
    call: Call = "views",
    arguments: Arguments | None = None,
    views: int = 2,
    prepare: Callable[[Any], object] | None = None,
    kind: Callable[..., Any] | None = None,
    **fixed: Any,
) -> Entry:
    kind = getattr(cz, name.partition(",")[0]) if kind is None else kind
    if arguments is not None or prepare is not None:
        kind, dense = fed(kind, arguments, prepare), dense if arguments is None else of_arguments(dense, arguments)

    def of(function: Callable[..., Any]) -> Callable[..., Any]:
        parameters = getattr(function, "fields", None) or inspect.signature(function).parameters
        takes_all = any(getattr(x, "kind", None) is inspect.Parameter.VAR_KEYWORD for x in parameters.values())

        def called(*args: Any, **settings: Any) -> Any:
            both = {**settings, **fixed}
            return function(*args, **{key: x for key, x in both.items() if takes_all or key in parameters})

        return called

    return Entry(name, of(kind), of(dense), call, views)


def fed(kind: Any, arguments: Arguments | None, prepare: Callable[[Any], object] | None = None) -> Any:
    """Return the loss, which makes its arguments from those of a call of the table."""

    class Fed(kind):
        takes_any_width: ClassVar[bool] = arguments is not None

        def __post_init__(self) -> None:
            super().__post_init__()
            if prepare is not None:
                prepare(self)

        def inputs(self, *rows: Tensor) -> Inputs:
            return super().inputs(*(rows if arguments is None else arguments(*rows)))

    Fed.__name__, Fed.__module__ = kind.__name__, (arguments or prepare).__module__
    return Fed


def of_arguments(dense: Callable[..., Tensor], arguments: Arguments) -> Callable[..., Tensor]:
    @functools.wraps(dense)
    def formula(*rows: Tensor, **settings: Any) -> Tensor:
        return dense(*arguments(*rows), **settings)

    return formula


def unit(z: Tensor) -> Tensor:
    return F.normalize(z, dim=1)


def roots(squares: Tensor) -> Tensor:
    """Distances, whose derivative is 0 at 0."""
    return squares.where(squares > 1e-14, 1).sqrt().where(squares > 1e-14, 0 * squares)


def masks(labels: Tensor) -> tuple[Tensor, Tensor]:
    same = labels[:, None] == labels
    return same & ~itself(labels), ~same


def mean_over(losses: Tensor, average: str = "all") -> Tensor:
    """The mean of these losses, or of those that are not 0; a zero that hangs in the graph if there are none."""
    count = (losses > 0).sum() if average == "nonzero" else len(losses)
    return losses.sum() / max(1, int(count))


def log_sums(logits: Tensor, mask: Tensor, empty: float = -torch.inf) -> Tensor:
    some = mask.any(-1)
    return logits.masked_fill(~mask, -torch.inf).where(some[..., None], 0).logsumexp(-1).where(some, empty)


def softplus(x: Tensor) -> Tensor:
    return F.softplus(x, threshold=100)


def itself(z: Tensor) -> Tensor:
    """[n, n]: where a row meets itself."""
    return torch.eye(len(z), dtype=torch.bool, device=z.device)


def info_nce(queries: Tensor, keys: Tensor, scale: Any, reduction: str = "mean", smoothing: float = 0.0) -> Tensor:
    """Row i of keys belongs to row i of queries; more rows are negatives."""
    logits, targets = scale * queries @ keys.T, torch.arange(len(queries), device=queries.device)
    return F.cross_entropy(logits, targets, reduction=reduction, label_smoothing=smoothing)


def clip(a: Tensor, b: Tensor, scale: Any, *how: Any) -> Tensor:
    return (info_nce(a, b, scale, *how) + info_nce(b, a, scale, *how)) / 2


def siglip(a: Tensor, b: Tensor, scale: Any, bias: Any) -> Tensor:
    logits = scale * a @ b.T + bias
    positive = torch.eye(*logits.shape, dtype=torch.bool, device=logits.device)
    return -F.logsigmoid(logits.where(positive, -logits)).sum() / len(a)


def sup_con(z: Tensor, labels: Tensor, scale: Any, reduction: str = "mean") -> Tensor:
    log_shares = (scale * z @ z.T).masked_fill(itself(z), -torch.inf).log_softmax(1)
    positive = (labels[:, None] == labels) & ~itself(z)
    losses = -log_shares.where(positive, 0).sum(1) / positive.sum(1).clamp(min=1)
    return losses if reduction == "none" else losses.sum() / positive.any(1).sum().clamp(min=1)


def nt_xent(a: Tensor, b: Tensor, scale: Any) -> Tensor:
    return sup_con(torch.cat([a, b]), torch.arange(len(a), device=a.device).repeat(2), scale)


def dense_info_nce(queries: Tensor, keys: Tensor, temperature: Any, reduction: str = "mean") -> Tensor:
    return info_nce(unit(queries), unit(keys), 1 / temperature, reduction)


def dense_clip(a: Tensor, b: Tensor, temperature: Any, reduction: str = "mean", label_smoothing: float = 0.0) -> Tensor:
    return clip(unit(a), unit(b), 1 / temperature, reduction, label_smoothing)


def dense_siglip(a: Tensor, b: Tensor, temperature: Any, bias: float = -10.0) -> Tensor:
    return siglip(unit(a), unit(b), 1 / temperature, bias)


def dense_sup_con(z: Tensor, labels: Tensor, temperature: Any, reduction: str = "mean") -> Tensor:
    return sup_con(unit(z), labels, 1 / temperature, reduction)


def dense_nt_xent(*views: Tensor, temperature: Any, reduction: str = "mean") -> Tensor:
    return dense_sup_con(torch.cat(views), torch.arange(len(views[0])).repeat(len(views)), temperature, reduction)


class BatchHard(cz.RowLoss):
    def __init__(self, temperature: Any = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.margin = nn.Parameter(torch.tensor(0.25))

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        farthest = similarity.masked_fill(~positive, 2).amin(1)
        nearest = similarity.masked_fill(~negative, -2).amax(1)
        return F.softplus(nearest - farthest + self.margin), positive.any(1) & negative.any(1)


def dense_batch_hard(z: Tensor, labels: Tensor, temperature: Any = None, reduction: str = "mean") -> Tensor:
    similarity, (positive, negative) = unit(z) @ unit(z).T, masks(labels)
    farthest, nearest = similarity.masked_fill(~positive, 2).amin(1), similarity.masked_fill(~negative, -2).amax(1)
    valid = positive.any(1) & negative.any(1)
    losses = F.softplus(nearest - farthest + 0.25).where(valid, 0)
    return losses if reduction == "none" else losses.sum() / valid.sum().clamp(min=1)


ZOO = [
    Entry("NTXent", cz.NTXent, dense_nt_xent),
    Entry("NTXent, three views", cz.NTXent, dense_nt_xent, views=3),
    Entry("InfoNCE", cz.InfoNCE, dense_info_nce),
    Entry("CLIP", lambda **settings: cz.InfoNCE(symmetric=True, **settings), dense_clip),
    Entry("SupCon", cz.SupCon, dense_sup_con, call="labels"),
    Entry("RowLoss, labels", BatchHard, dense_batch_hard, call="labels"),
]
