"""What an argument of a third-party loss means is never guessed: it is gathered as samples, has a role, or is refused."""

import functools
import warnings
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
from contrastive_zoo.testing.messages import Messages
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import groups, numbers, refused
from tests.test_roles import Prototypes, Relations, Views

D = 4


def of_rank(n: int = 5, seed: int = 0, rank: int | None = None) -> Tensor:
    return numbers(n, D, seed=seed + (dist.get_rank() if rank is None else rank))


def of_all(n: int = 5) -> Tensor:
    return numbers(n, D, seed=99)


def total(z: Tensor, *others: Any) -> Tensor:
    return z.square().sum() + sum(
        x.to(torch.complex128).abs().sum() for x in tree_leaves(others) if isinstance(x, Tensor)
    )


def with_other(z: Any, other: Any, more: Any = None) -> Tensor:
    return total(*(x for x in tree_leaves((z, other, more)) if isinstance(x, Tensor)))


def called(*arguments: Any, loss: Any = with_other, **options: Any) -> Any:
    return cz.DistributedLoss(loss, **options)(*arguments)


def stacked(n: int = 2, seed: int = 0) -> Tensor:
    return numbers(n, 5, D, seed=seed + dist.get_rank())


def on_rank_0(x: Any, other: Any) -> Any:
    return other if dist.get_rank() else x


def documents(*lengths: int) -> list[Tensor]:
    return [of_rank(length, seed=10 + 10 * i) for i, length in enumerate(lengths)]


class Output:
    """A model's output of a class of its own."""

    def __init__(self, z: Any) -> None:
        self.z = z


class Slots:
    __slots__ = ("z",)

    def __init__(self, z: Any) -> None:
        self.z = z


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(3, dtype=torch.float64)

    def forward(self, embeddings: Tensor, labels: Any = None) -> Tensor:
        return self.head(embeddings).square().sum()


class LazyFormula(cz.RowLoss):
    def __post_init__(self) -> None:
        self.head = nn.LazyLinear(1, dtype=torch.float64)

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(similarity)[:, 0], positive.any(1)


def by_name(z: Tensor, pos_idx: Any = None, speaker: Any = None) -> Tensor:
    return total(z, pos_idx, speaker)


def copied(labels: Tensor) -> Any:
    """A call in which pairs of ranks bring the same embeddings."""
    return called(of_rank(rank=dist.get_rank() // 2), labels)


def prototypes_of(prototypes: Tensor | None = None, **options: Any) -> Any:
    """A call with prototypes that are equal on every rank, or with other ones."""
    prototypes = of_all() if prototypes is None else prototypes
    return called(of_rank(), of_rank(seed=7), prototypes, loss=Prototypes(), **options)


def views_of(n: int = 3, **options: Any) -> Any:
    return called(numbers(2, n, D, seed=dist.get_rank()), torch.arange(n), loss=Views(), **options)


Y, LIST = torch.arange(5) % 3, "is a list of … pad_sequence( … pad_dims={ … batch_dim={"
EQUAL = "other is equal on every rank … shared={'other'}"
STACK = "samples or 5 … batch_dim={'z': 1} … batch_dim={'z': 0}"
INDICES = "holds integers, but not one for each embedding … find them in the loss … batch_dim={'other"
ROW_NUMBERS = "below … as row numbers do … find them in the loss … batch_dim={'"
COPIES = "brought the very same embeddings … context … process_group=mesh.get_group('dp') … check_distinct"
LAZY = "LazyLinear has no parameters yet … Call the bare loss once"

HIDING: list[tuple[Callable[[Tensor], Any], str]] = [
    (lambda z: SimpleNamespace(z=z), "got a SimpleNamespace. Pass tensors, such as vars(z)"),
    (lambda z: UserDict(z=z), "got a UserDict. Pass tensors, such as dict(z)"),
    (lambda z: type("Pair", (tuple,), {})([z]), "got a Pair. Pass tensors, such as list(z)"),
    (lambda z: (x for x in [z]), "got a generator. Pass tensors, such as list(z)"),
    (lambda z: partial(torch.mul, z), "got a partial"),
    (lambda z: Slots(z), "got a Slots"),
    (lambda z: [Output([Output({"z": z})])], "z[0] must be a tensor … got a Output. Pass tensors, such as vars(z[0])"),
    (lambda z: z.numpy(), "got a ndarray. Pass tensors, such as torch.as_tensor(z)"),
    (lambda z: Output(z.numpy()), "got a Output"),
]
"""What hides a tensor, which is refused at the first call."""

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

REFUSED: list[tuple[int, Callable[[], Any], str]] = [
    *((2, lambda make=make: called(make(of_rank()), torch.arange(5) % 2), said) for make, said in HIDING),
    *(
        (2, lambda make=make: called(of_rank(), make(dist.get_rank())), "ranks disagree on other … rank 0 has")
        for make in VALUES
    ),
    *((2, lambda make=make: called(of_rank(), make(), Y), EQUAL) for make in WITHOUT_SAMPLES),
    (3, lambda: called(of_rank(on_rank_0(0, 5)), torch.ones(7), Y[: on_rank_0(0, 5)]), EQUAL),
    (2, lambda: called(of_rank(), torch.arange(7), torch.arange(7) % 2 == 0), EQUAL),
    (2, lambda: called(of_rank(3), documents(4, 2, 5)), LIST),
    (2, lambda: called(of_rank(3), {"a": documents(4, 4, 4)}), LIST),
    (2, lambda: called([*of_rank(3)], torch.arange(3) + dist.get_rank()), LIST),
    (2, lambda: called([*numbers(3, 2, 5, 5, seed=dist.get_rank())], torch.arange(3)), LIST),
    (2, lambda: called(stacked(), stacked(seed=7)), STACK),
    (2, lambda: called(stacked(), torch.arange(5)), STACK),
    (2, lambda: called(stacked(on_rank_0(3, 2)), None), STACK),
    (2, lambda: called(of_rank(), numbers(7, 2, seed=dist.get_rank()).long()), INDICES),
    (2, lambda: called(of_rank(), tuple(numbers(3, 7, seed=dist.get_rank()).long())), INDICES),
    (2, lambda: called(of_rank(), numbers(on_rank_0(2, 4), 2, seed=1).long()), INDICES),
    (4, lambda: copied(Y), f"ranks 0 and 1 {COPIES}"),
    (4, lambda: copied(Y + dist.get_rank()), f"ranks 0 and 1 {COPIES}"),
    (4, lambda: called(of_rank(rank=max(dist.get_rank(), 1)), Y), f"ranks 0 and 1 {COPIES}"),
    (
        4,
        lambda: cz.DistributedLoss(cz.NTXent())(*[of_rank(rank=dist.get_rank() // 2, seed=seed) for seed in (0, 20)]),
        f"ranks 0 and 1 {COPIES}",
    ),
    (2, lambda: called(of_rank(8), torch.arange(8).roll(4)), ROW_NUMBERS),
    (2, lambda: called(of_rank(8), torch.arange(8).roll(4) * on_rank_0(1, 9)), ROW_NUMBERS),
    (2, lambda: called(of_rank(8), torch.arange(8) % 2, torch.arange(8).roll(1)), ROW_NUMBERS),
    (2, lambda: called(of_rank(), torch.zeros(5, dtype=torch.int64), loss=by_name), ROW_NUMBERS),
    (2, lambda: called(of_rank(), torch.tensor([[1, -1]] * 5), loss=by_name), ROW_NUMBERS),
    (2, lambda: called(of_rank(), Y, loss=Lazy()), LAZY),
    (2, lambda: called(of_rank(), Y, loss=LazyFormula()), LAZY),
    (
        2,
        lambda: called(of_rank(), of_rank(seed=7), {"queue": of_all(9)}, loss=Relations()),
        "DistributedLoss(loss, shared={\"memory['queue']\"})",
    ),
    (
        2,
        lambda: called(of_rank(), Y % 2, None, of_all(7), torch.arange(7) % 2, loss=losses.TripletMarginLoss()),
        "shared={'ref_emb'} … with its labels",
    ),
    (
        2,
        lambda: called([*(of_rank(seed=k) for k in range(9)), of_all()], loss=lambda rows: sum(x.sum() for x in rows)),
        "rows[9] is equal on every rank",
    ),
    (2, lambda: views_of(), "views [2, 3, 4] on rank 0 may hold 2 samples or 3 … batch_dim={'views': 1}"),
    (2, lambda: views_of(on_rank_0(3, 4)), "ranks disagree on the width of views … batch_dim={'views': 1}"),
    (
        2,
        lambda: prototypes_of(of_rank(seed=8), shared={"prototypes"}),
        "the shared prototypes differs between ranks … out of shared",
    ),
    (
        2,
        lambda: called(of_rank(), F.normalize(of_rank(2**16)).float(), shared={"other"}),
        "the shared other differs between ranks",
    ),
    (
        2,
        lambda: prototypes_of(of_all(on_rank_0(5, 6)), shared={"prototypes"}),
        "ranks disagree on the shared prototypes: rank 0 has float64 [5, 4], rank 1 has float64 [6, 4]",
    ),
    (
        2,
        lambda: prototypes_of(of_all().requires_grad_(on_rank_0(True, False)), shared={"prototypes"}),
        "rank 0 has float64 [5, 4] with a gradient, rank 1 has float64 [5, 4]",
    ),
    (
        2,
        lambda: prototypes_of(shared=on_rank_0({"prototypes"}, None), check_distinct=False),
        "ranks disagree on the roles of arguments: rank 0 has shared={'prototypes'}",
    ),
    (
        2,
        lambda: prototypes_of(shared={"prototype"}),
        "shared names prototype, which is no argument of this call. Its arguments are anchors, targets, prototypes.",
    ),
    (
        2,
        lambda: views_of(batch_dim=on_rank_0({"view": 1}, {"views": 1})),
        "rank 0: batch_dim names view, which is no argument of this call",
    ),
    (2, lambda: views_of(batch_dim={"views": 3}), "batch_dim['views'] is 3, which is no dimension of [2, 3, 4]"),
    (
        2,
        lambda: called(
            of_rank(2)[None],
            torch.arange(3),
            loss=lambda embeddings, labels: 0,
            batch_dim={"embeddings": 1},
        ),
        "labels are one per row, got 3 for 2 rows",
    ),
]


@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_every_rank_refuses_alike(index: int, worlds: Worlds) -> None:
    world_size, bad, words = REFUSED[index]
    refused(worlds, world_size, bad, words)


def test_code_devices_and_equal_values_may_be_passed(worlds: Worlds) -> None:
    def job() -> None:
        for make in (*VALUES, *(lambda x, y=y: y for y in (nn.Linear(2, 2), torch.device("cpu"), Output, lambda x: x))):
            called(of_rank(), make(1))

    worlds.run(2, job)


def test_a_shared_tensor_of_all_ranks_is_that_of_one_process(worlds: Worlds) -> None:
    def job() -> list[float]:
        return [called(of_rank(), make(), Y, shared={"other"}).real.item() for make in WITHOUT_SAMPLES]

    rows = torch.cat([of_rank(rank=0), of_rank(rank=1)])
    expected = [with_other(rows, make(), torch.cat([Y, Y])).real.item() for make in WITHOUT_SAMPLES]
    assert worlds.run(2, job) == [pytest.approx(expected)] * 2


def warned(calls: list[Any], **options: Any) -> list[str]:
    loss = cz.DistributedLoss(with_other, **options)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for make in calls:
            loss(of_rank(), make())
    return [str(x.message) for x in found]


def test_equal_labels_warn_once_at_the_second_call_in_a_row(worlds: Worlds) -> None:
    labels, others, ones = lambda: torch.arange(5), lambda: torch.arange(5) + dist.get_rank(), lambda: torch.ones(5)

    def job() -> list[list[str]]:
        return [
            warned([labels] * 4),
            warned([labels, others] * 3),
            warned([ones] * 3),
            warned([labels] * 3, batch_dim={"other": 0}),
            warned([labels] * 3, check_distinct=False),
        ]

    for (text,), *silent in worlds.run(2, job):
        assert "other was equal on every rank at two calls in a row" in text
        assert "torch.arange(n) + rank * n" in text
        assert "shared={'other'}" in text
        assert "batch_dim={'other': 0}" in text
        assert silent == [[]] * 4


def test_lists_of_views_are_gathered(worlds: Worlds) -> None:
    """Of one number of samples, of some crops a sample, of pools; an empty shard; several arguments are no list, and a
    pool may be as large on every rank beside uneven rows."""

    def job() -> None:
        n = on_rank_0(0, 3)
        called([of_rank(n), of_rank(n, seed=9)], torch.arange(n))
        called([of_rank(2 * n), of_rank(8 * n, seed=9)], torch.arange(n))
        called([of_rank(5), of_rank(5, seed=9)], of_rank(6, seed=20))
        called(documents(4, 2), torch.arange(3), batch_dim={"z": 0, "other": 0})
        called(of_rank(5), of_rank(3, seed=9), loss=lambda *rows: with_other(*rows))
        called(of_rank(n), of_rank(6, seed=40))

    worlds.run(2, job)


def test_tokens_beside_a_mask_or_labels_are_samples(worlds: Worlds) -> None:
    def job() -> None:
        n = on_rank_0(2, 3)
        tokens = numbers(n, 5, D, seed=dist.get_rank())
        called(tokens, torch.ones(n, 5))
        called(tokens, torch.arange(n))
        called(tokens, None, pad_dims={"z": 1})
        called(tokens, None, batch_dim={"z": 0})

    worlds.run(2, job)


def test_labels_are_no_row_numbers(worlds: Worlds) -> None:
    """Classes below the number of rows, numbers of samples, an empty shard, and whatever has its role."""

    def job() -> None:
        rank, n = dist.get_rank(), on_rank_0(0, 5)
        called(of_rank(), torch.tensor([1, 2, 3, 4, 1 + rank]))
        called(of_rank(), torch.arange(5) + 100 * rank + 6, loss=by_name)
        called(of_rank(), torch.arange(5), torch.tensor([3, 3, 1, 0, rank]), loss=by_name, batch_dim={"pos_idx": 0})
        called(of_rank(n), torch.tensor([1, 2, 3, 4, 1])[:n])
        called(of_rank(8), torch.arange(8).roll(1 + rank), batch_dim={"other": 0})
        called(of_rank(), torch.arange(5).roll(1 + rank))
        called(of_rank(8), torch.arange(8).roll(1 + rank), loss=lambda z, labels: total(z, labels))
        called(of_rank(), torch.tensor([0, 1, 1, 0, rank]), loss=lambda z, class_idx: total(z, class_idx))

    worlds.run(2, job)


def test_ranks_of_one_model_are_left_out_by_their_group(worlds: Worlds) -> None:
    def job() -> float:
        with groups([0, 2], [1, 3]) as of_data:
            return called(of_rank(rank=dist.get_rank() // 2), torch.arange(5), process_group=of_data).item()

    expected = with_other(torch.cat([of_rank(rank=0), of_rank(rank=1)]), torch.arange(5).repeat(2)).item()
    assert worlds.run(4, job) == [pytest.approx(expected)] * 4


def test_shards_that_may_be_equal(worlds: Worlds) -> None:
    """One row, rows that are all the same, none, one of two arguments, signs, and whatever a user accepts."""

    def job() -> None:
        rank, labels = dist.get_rank() // 2, torch.arange(5) + dist.get_rank()
        called(of_rank(1, rank=rank), labels[:1])
        called(of_rank(1, rank=rank).expand(5, -1), labels)
        called(of_rank(5 * (dist.get_rank() > 1)), labels[: 5 * (dist.get_rank() > 1)])
        called(of_rank(), of_rank(rank=rank, seed=9))
        called(torch.tensor([[1.0, -1.0], [1.0, 1.0 - 2 * rank]]), labels[:2])
        called(of_rank(rank=rank), labels, check_distinct=False)
        called(of_all(1).expand(3, -1), labels[:3])
        cz.DistributedLoss(cz.NTXent(), check_distinct=False)(of_rank(rank=rank), of_rank(rank=rank, seed=9))

    worlds.run(4, job)


def test_a_loss_with_its_parameters_is_computed(worlds: Worlds) -> None:
    def ready() -> float:
        torch.manual_seed(0)
        loss = Lazy()
        loss(of_rank(1))
        return called(of_rank(), loss=loss).item()

    assert len({*worlds.run(2, ready)}) == 1


def test_a_step_sends_no_more_messages(worlds: Worlds) -> None:
    """Labels, masks, lists and shared tensors are compared by the header that is sent anyway."""

    def job() -> list[int]:
        counts, batch_dim = [], {"z": 0, "other": 0, "more": 0}
        for options in ({}, {"batch_dim": batch_dim}, {"check_distinct": False}, {"shared": {"more"}}):
            loss, more = cz.DistributedLoss(with_other, **options), torch.eye(5) * dist.get_rank()
            more = of_all() if "shared" in options else more
            arguments = [of_rank(), of_rank(seed=9)], torch.arange(5) + dist.get_rank(), more
            loss(*arguments)
            with Messages() as messages:
                loss(*arguments)
            counts.append(len(messages.sent))
        return counts

    assert worlds.run(2, job) == [[2] * 4] * 2


def test_a_refusal_names_the_fix(worlds: Worlds) -> None:
    """At a later step, too, and on three ranks."""

    def bad() -> None:
        loss = cz.DistributedLoss(Prototypes())
        loss(of_rank(), of_rank(seed=7), of_rank(seed=30))
        loss(of_rank(), of_rank(seed=7), of_all())

    refused(worlds, 3, bad, "Prototypes: prototypes is equal on every rank")
    assert len({*worlds.run(3, lambda: prototypes_of(shared={"prototypes"}).item())}) == 1


MAY_BE_EQUAL: dict[str, Callable[[], Any]] = {
    "ones": lambda: torch.ones(5),
    "an expanded weight": lambda: torch.full((5, 3), 0.5),
    "a mask": lambda: torch.eye(5),
    "targets, smoothed": lambda: F.one_hot(torch.arange(5) % 3, 3) * 0.9 + 0.05,
    "targets": lambda: torch.linspace(0, 1, 5),
    "labels": lambda: torch.arange(5),
    "a temperature": lambda: torch.tensor(0.07),
    "labels of both views": lambda: torch.arange(10) % 4,
    "a mask of both views": lambda: torch.tensor([1.0, 0, 0, 1, 1, 0, 1, 0, 0, 1]),
    "a collapsed encoder": lambda: torch.linspace(0, 1, 8).expand(5, 8),
    "nothing": lambda: torch.empty(0, 4),
}


def test_what_may_be_equal_on_every_rank(worlds: Worlds) -> None:
    def job() -> None:
        for make in MAY_BE_EQUAL.values():
            loss = cz.DistributedLoss(lambda z, other: z.sum() + other.sum())
            for _ in range(2):
                loss(of_rank(), make())

    worlds.run(2, job)


def test_equal_rows_are_accepted_where_they_are_stated(worlds: Worlds) -> None:
    def job() -> list[float]:
        arguments, loss = (of_rank(), of_all()), functools.partial(called, loss=lambda z, text: z.sum() + text.sum())
        return [x.item() for x in (loss(*arguments, batch_dim={"text": 0}), loss(*arguments, check_distinct=False))]

    for found in worlds.run(2, job):
        assert found[0] == found[1]
