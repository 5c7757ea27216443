"""What an argument of a third-party loss means is never guessed: it is gathered as samples, has a role, or is refused."""

from collections import UserDict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pytorch_metric_learning import losses
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import assert_says, groups, numbers, refused, warned
from tests.test_roles import Prototypes, Relations, Views

D = 4


def z(n: int = 5, seed: int = 0, rank: int | None = None) -> Tensor:
    return numbers(n, D, seed=seed + (dist.get_rank() if rank is None else rank))


def of_all(n: int = 5) -> Tensor:
    return numbers(n, D, seed=99)


def total(z: Tensor, *others: Any) -> Tensor:
    return z.square().sum() + sum(x.cdouble().abs().sum() for x in tree_leaves(others) if isinstance(x, Tensor))


def with_other(z: Any, other: Any, more: Any = None) -> Tensor:
    return total(*(x for x in tree_leaves((z, other, more)) if isinstance(x, Tensor)))


def called(*arguments: Any, loss: Any = with_other, **options: Any) -> Any:
    return cz.DistributedLoss(loss, **options)(*arguments)


def first(x: Any, other: Any) -> Any:
    return other if dist.get_rank() else x


class Output:
    """A model's output of a class of its own."""

    def __init__(self, z: Any) -> None:
        self.z = z


class Slots:
    __slots__ = ("z",)

    def __init__(self, z: Any) -> None:
        self.z = z


def by_name(z: Tensor, pos_idx: Any = None, speaker: Any = None) -> Tensor:
    return total(z, pos_idx, speaker)


Y = torch.arange(5) % 3


VALUES: list[Callable[[int], Any]] = [
    lambda x: np.float32(x),
    lambda x: SimpleNamespace(margin=x, name="loss"),
    lambda x: Output([x]),
    lambda x: Slots(x),
    lambda x: {"a", "b", "c", str(x)},
    lambda x: complex(0, x),
    lambda x: [torch.float32, torch.float64][x],
    lambda x: [torch.exp, torch.log][x],
    lambda x: partial(torch.add, x),
    lambda x: range(10**9 + x),
]
"""Other objects, which are equal on every rank."""

WITHOUT_SAMPLES: list[Callable[[], Tensor]] = [
    lambda: torch.arange(1, 8),  # counts of classes
    lambda: torch.arange(7) % 2 == 0,
    lambda: torch.eye(7),
    lambda: torch.tensor([2.0]),
    lambda: torch.complex(of_all(), of_all()),
]
"""Tensors of all ranks."""


def test_a_shared_tensor_of_all_ranks_is_that_of_one_process(worlds: Worlds) -> None:
    def job() -> list[float]:
        return [called(z(), make(), Y, shared={"other"}).real.item() for make in WITHOUT_SAMPLES]

    rows = torch.cat([z(rank=0), z(rank=1)])
    expected = [with_other(rows, make(), torch.cat([Y, Y])).real.item() for make in WITHOUT_SAMPLES]
    assert worlds.run(2, job) == [pytest.approx(expected)] * 2


def test_equal_labels_warn_once_at_the_second_call_in_a_row(worlds: Worlds) -> None:
    labels, others, ones = lambda: torch.arange(5), lambda: torch.arange(5) + dist.get_rank(), lambda: torch.ones(5)

    def heard(of_calls: list[Any], **options: Any) -> list[str]:
        loss = cz.DistributedLoss(with_other, **options)
        return warned(*(lambda make=make: loss(z(), make()) for make in of_calls), file=__file__)

    def job() -> list[list[str]]:
        first = heard([labels] * 4), heard([labels, others] * 3), heard([ones] * 3)
        return [*first, heard([labels] * 3, batch_dim={"other": 0}), heard([labels] * 3, check_distinct=False)]

    says = "other was equal on every rank at two calls in a row … torch.arange(n) + rank * n … shared={'other'} … "
    for (text,), *silent in worlds.run(2, job):
        assert_says(text, says + "batch_dim={'other': 0}")
        assert silent == [[]] * 4


def test_views_one_after_the_other_warn_once_beside_labels_or_a_teacher(worlds: Worlds) -> None:
    """Passages of a query do not, whose query is trained, too; nor do rows with labels, or a role. A rank has no samples."""

    def job() -> list[list[str]]:
        n = 2 * (dist.get_rank() != 1)
        few, many, labels = z(n, seed=9).requires_grad_(), z(6 * n).requires_grad_(), torch.arange(n)
        calls = (
            (many, labels),
            (many.detach(), labels),
            (many, few.detach()),
            (few, many),
            (few.detach(), many.detach()),
        )
        of_calls = [
            warned(*[partial(called, *x)] * 2, file=__file__) for x in (*calls, (many, labels, labels.repeat(6)))
        ]
        return [*of_calls, warned(partial(called, many, labels, batch_dim={"z": 0}))]

    for found in worlds.run(3, job):
        assert [len(texts) for texts in found] == [1, 1, 1, 0, 0, 0, 0]
        assert_says(found[0][0], "z has 6 rows for each row of other … view after view … batch_dim={'z': 0}")


def test_ranks_of_one_model_are_left_out_by_their_group(worlds: Worlds) -> None:
    def job() -> float:
        with groups([0, 2], [1, 3]) as of_data:
            return called(z(rank=dist.get_rank() // 2), torch.arange(5), process_group=of_data).item()

    expected = with_other(torch.cat([z(rank=0), z(rank=1)]), torch.arange(5).repeat(2)).item()
    assert worlds.run(4, job) == [pytest.approx(expected)] * 4


def equal_values() -> None:
    """Also code, devices and modules."""
    others: list[Any] = [nn.Linear(2, 2), torch.device("cpu"), Output, lambda x: x]
    for value in (*(make(1) for make in VALUES), *others):
        called(z(), value)


def lists_of_views() -> None:
    """Of one number of samples, of some crops a sample, of pools; an empty shard; several arguments are no list, and a
    pool may be as large on every rank beside uneven rows."""
    n = first(0, 3)
    called([z(n), z(n, seed=9)], torch.arange(n))
    called([z(2 * n), z(8 * n, seed=9)], torch.arange(n))
    called([z(5), z(5, seed=9)], z(6, seed=20))
    called([z(4), z(2)], torch.arange(3), batch_dim={"z": 0, "other": 0})
    called(z(5), z(3, seed=9), loss=lambda *rows: with_other(*rows))
    called(z(n), z(6, seed=40))


def tokens_beside_a_mask_or_labels() -> None:
    n = first(2, 3)
    tokens = numbers(n, 5, D, seed=dist.get_rank())
    called(tokens, torch.ones(n, 5))
    called(tokens, torch.arange(n))
    called(tokens, None, batch_dim={"z": 0})


def labels_that_are_no_row_numbers() -> None:
    """Classes below the number of rows, numbers of samples, an empty shard, and whatever has its role."""
    rank, n = dist.get_rank(), first(0, 5)
    called(z(), torch.tensor([1, 2, 3, 4, 1 + rank]))
    called(z(), torch.arange(5) + 100 * rank + 6, loss=by_name)
    called(z(), torch.arange(5), torch.tensor([3, 3, 1, 0, rank]), loss=by_name, batch_dim={"pos_idx": 0})
    called(z(n), torch.tensor([1, 2, 3, 4, 1])[:n])
    called(z(8), torch.arange(8).roll(1 + rank), batch_dim={"other": 0})
    called(z(), torch.arange(5).roll(1 + rank))
    called(z(8), torch.arange(8).roll(1 + rank), loss=lambda z, labels: total(z, labels))
    called(z(), torch.tensor([0, 1, 1, 0, rank]), loss=lambda z, class_idx: total(z, class_idx))


def shards_that_may_be_equal() -> None:
    """One row, rows that are all the same, none, one of two arguments, signs, and whatever a user accepts."""
    rank, labels = dist.get_rank() // 2, torch.arange(5) + dist.get_rank()
    called(z(1, rank=rank), labels[:1])
    called(z(1, rank=rank).expand(5, -1), labels)
    called(z(5 * (dist.get_rank() > 1)), labels[: 5 * (dist.get_rank() > 1)])
    called(z(), z(rank=rank, seed=9))
    called(torch.tensor([[1.0, -1.0], [1.0, 1.0 - 2 * rank]]), labels[:2])
    called(z(rank=rank), labels, check_distinct=False)
    called(of_all(1).expand(3, -1), labels[:3])
    cz.DistributedLoss(cz.NTXent(), check_distinct=False)(z(rank=rank), z(rank=rank, seed=9))


def test_what_is_right_is_not_refused(worlds: Worlds) -> None:
    worlds.run(4, shards_that_may_be_equal)
    for job in (equal_values, lists_of_views, tokens_beside_a_mask_or_labels, labels_that_are_no_row_numbers):
        worlds.run(2, job)


def at_a_later_step() -> None:
    loss = cz.DistributedLoss(Prototypes())
    for prototypes in (z(seed=30), of_all()):
        loss(z(), z(seed=7), prototypes)


def prototypes_of(prototypes: Tensor | None = None, *, shared: Any = ("prototypes",), **options: Any) -> Any:
    """A call with shared prototypes that are equal on every rank, or with other ones."""
    prototypes = of_all() if prototypes is None else prototypes
    return called(z(), z(seed=7), prototypes, loss=Prototypes(), shared=shared, **options)


def views_of(n: int = 3, **options: Any) -> Any:
    return called(numbers(2, n, D, seed=dist.get_rank()), torch.arange(n), loss=Views(), **options)


def stacked(n: int = 2, seed: int = 0) -> Tensor:
    return numbers(n, 5, D, seed=seed + dist.get_rank())


EQUAL = "other is equal on every rank … shared={'other'}"

SEVERAL: dict[str, list[Callable[[], Any]]] = {
    "disagree on other … rank 0 has": [lambda make=make: called(z(), make(dist.get_rank())) for make in VALUES],
    EQUAL: [lambda make=make: called(z(), make(), Y) for make in WITHOUT_SAMPLES],
    "is a list of … pad_sequence( … batch_dim={": [
        lambda: called(z(3), [z(n, seed=10 * n) for n in (4, 2, 5)]),
        lambda: called([*z(3)], torch.arange(3) + dist.get_rank()),
    ],
    "samples or 5 … batch_dim={'z': 1} … batch_dim={'z': 0}": [
        lambda: called(stacked(), torch.arange(5)),
        lambda: called(stacked(first(3, 2)), None),
    ],
    "holds integers, but not one for each embedding … find them in the loss … batch_dim={'other": [
        lambda: called(z(), numbers(7, 2, seed=dist.get_rank()).long()),
        lambda: called(z(), tuple(numbers(3, 7, seed=dist.get_rank()).long())),
    ],
    "below … as row numbers do … find them in the loss … batch_dim={'": [
        lambda: called(z(8), torch.arange(8).roll(4) * first(1, 9)),
        lambda: called(z(), torch.tensor([[1, -1]] * 5), loss=by_name),
    ],
}
"""Words of an error, and what two ranks call."""

OF_TWO: dict[str, Callable[[], Any]] = {
    "got a Output. Pass tensors, such as vars(z)": lambda: called(Output(z()), Y),
    "got a UserDict. Pass tensors, such as dict(z)": lambda: called(UserDict(z=z()), Y),
    "got a generator. Pass tensors, such as list(z)": lambda: called((x for x in [z()]), Y),
    "z[0] must be a tensor … Output … such as vars(z[0])": lambda: called([Output([Output({"z": z()})])], Y),
    "got a ndarray. Pass tensors, such as torch.as_tensor(z)": lambda: called(z().numpy(), Y),
    "LazyLinear has no parameters yet … bare loss once": lambda: called(z(), loss=nn.Sequential(nn.LazyLinear(3))),
    "DistributedLoss(loss, shared={\"memory['queue']\"})": lambda: called(
        z(), z(seed=7), {"queue": of_all(9)}, loss=Relations()
    ),
    "shared={'ref_emb'} … with its labels": lambda: called(
        z(), Y % 2, None, of_all(7), torch.arange(7) % 2, loss=losses.TripletMarginLoss()
    ),
    "views [2, 3, 4] on rank 0 may hold 2 samples or 3 … batch_dim={'views': 1}": views_of,
    "ranks disagree on the width of views … batch_dim={'views': 1}": lambda: views_of(first(3, 4)),
    "the shared prototypes differs between ranks … out of shared": lambda: prototypes_of(z(seed=8)),
    "shared other differs": lambda: called(z(), F.normalize(z(2**16)).float(), shared={"other"}),
    "ranks disagree on the shared prototypes: rank 0 has float64 [5, 4], rank 1 has float64 [6, 4]": lambda: (
        prototypes_of(of_all(first(5, 6)))
    ),
    "rank 0 has float64 [5, 4] with a gradient, rank 1 has float64 [5, 4]": lambda: prototypes_of(
        of_all().requires_grad_(first(True, False))
    ),
    "ranks disagree on the roles of arguments: rank 0 has shared={'prototypes'}": lambda: prototypes_of(
        shared=first({"prototypes"}, None), check_distinct=False
    ),
    "shared names prototype, which is no argument of this call. Its arguments are anchors, targets, prototypes.": (
        lambda: prototypes_of(shared={"prototype"})
    ),
    "ref_labels are one per row of ref_emb": lambda: called(z(), Y, None, z(), Y[:4], loss=losses.ContrastiveLoss()),
    "ref_emb holds another view of each row": lambda: cz.DistributedLoss(losses.VICRegLoss())(z(), ref_emb=z(4)),
    "enqueue_mask is one per row of embeddings": lambda: cz.DistributedLoss(
        losses.CrossBatchMemory(losses.ContrastiveLoss(), D)
    )(z(), Y, enqueue_mask=Y[:4] == 0),
    "view2 is another view of each row": lambda: called(z(), z(4), loss=lambda view1, view2: total(view1, view2)),
    "TripletMarginLoss: it is wrong for other references than its batch … swap=False": lambda: called(
        z(), Y, None, z(4), Y[:4], loss=losses.TripletMarginLoss(swap=True)
    ),
    "batch_dim['views'] is 3, which is no dimension of [2, 3, 4]": lambda: views_of(batch_dim={"views": 3}),
    "labels are one per row, got 3 for 2 rows": lambda: called(
        z(2)[None], torch.arange(3), loss=lambda embeddings, labels: total(embeddings), batch_dim={"embeddings": 1}
    ),
}

TWINS = "ranks 0 and 1 brought the very same embeddings … context … process_group=mesh.get_group('dp') … check_distinct"
REFUSED: list[tuple[str, int, Callable[[], Any]]] = [
    *((words, 2, call) for words, calls in SEVERAL.items() for call in calls),
    *((words, 2, call) for words, call in OF_TWO.items()),
    (EQUAL, 3, lambda: called(z(5 * (dist.get_rank() > 0)), torch.ones(7), Y[: 5 * (dist.get_rank() > 0)])),
    (TWINS, 4, lambda: called(z(rank=dist.get_rank() // 2), Y)),
    (TWINS, 4, lambda: called(z(rank=max(dist.get_rank(), 1)), Y)),
    ("Prototypes: prototypes is equal on every rank", 3, at_a_later_step),
]
"""Words of the error, how many ranks, and the call on each."""


@pytest.mark.parametrize(("words", "world_size", "bad"), REFUSED, ids=[words for words, *_ in REFUSED])
def test_a_meaning_that_is_not_clear_is_refused(words: str, world_size: int, bad: Any, worlds: Worlds) -> None:
    refused(worlds, world_size, bad, words)
