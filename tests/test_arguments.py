"""What an argument of a third-party loss means is never guessed: it is gathered as samples, has a role, or is refused."""

import warnings
from collections import UserDict
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import contrastive_zoo as cz
from contrastive_zoo.testing.messages import Messages
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import groups, numbers, refused

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


class Batch(dict[str, Any]):
    pass


class Pair(tuple[Any, ...]):
    pass


CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a namespace": (lambda z: SimpleNamespace(z=z), "got a SimpleNamespace. Pass tensors, such as vars(z)"),
    "a UserDict": (lambda z: UserDict(z=z), "got a UserDict. Pass tensors, such as dict(z)"),
    "a subclass of dict": (lambda z: Batch(z=z), "got a Batch. Pass tensors, such as dict(z)"),
    "a subclass of tuple": (lambda z: Pair([z]), "got a Pair. Pass tensors, such as list(z)"),
    "a generator": (lambda z: (x for x in [z]), "got a generator. Pass tensors, such as list(z)"),
    "a partial": (lambda z: partial(torch.mul, z), "got a partial"),
    "an output": (lambda z: Output(z), "got a Output. Pass tensors, such as vars(z)"),
    "an output with slots": (lambda z: Slots(z), "got a Slots"),
    "an output in an output": (lambda z: Output([Output({"z": z})]), "got a Output"),
    "an output in a list": (
        lambda z: [Output(z)],
        "z[0] must be a tensor … got a Output. Pass tensors, such as vars(z[0])",
    ),
    "an array": (lambda z: z.numpy(), "got a ndarray. Pass tensors, such as torch.as_tensor(z)"),
    "an array in an output": (lambda z: Output(z.numpy()), "got a Output"),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_what_hides_a_tensor_is_refused_at_the_first_call(name: str, worlds: Worlds) -> None:
    make, words = CONTAINERS[name]
    refused(worlds, 2, lambda: called(make(of_rank()), torch.arange(5) % 2), words)


VALUES: dict[str, Callable[[int], Any]] = {
    "a number of NumPy": lambda x: np.float32(x),
    "a namespace": lambda x: SimpleNamespace(margin=x, name="loss"),
    "an object": lambda x: Output([x]),
    "an object with slots": lambda x: Slots(x),
    "a set": lambda x: {"a", "b", "c", str(x)},
    "a fraction": lambda x: Fraction(x, 7),
    "a complex number": lambda x: complex(0, x),
    "bytes": lambda x: bytes([x]),
    "a dtype": lambda x: [torch.float32, torch.float64][x],
    "a function": lambda x: [torch.exp, torch.log][x],
    "a partial": lambda x: partial(torch.add, x),
    "a size": lambda x: torch.Size([x]),
    "a range": lambda x: range(10**9 + x),
}


@pytest.mark.parametrize("name", VALUES)
def test_other_objects_are_equal_on_every_rank(name: str, worlds: Worlds) -> None:
    make = VALUES[name]
    refused(worlds, 2, lambda: called(of_rank(), make(dist.get_rank())), "ranks disagree on other … rank 0 has")
    worlds.run(2, lambda: called(of_rank(), make(1)))


def test_code_and_devices_may_be_passed(worlds: Worlds) -> None:
    for make in (lambda: nn.Linear(2, 2), lambda: torch.device("cpu"), lambda: Output, lambda: lambda x: x):
        worlds.run(2, lambda make=make: called(of_rank(), make()))


WITHOUT_SAMPLES: dict[str, Callable[[], Any]] = {
    "counts of classes": lambda: torch.arange(1, 8),
    "a mask of classes": lambda: torch.arange(7) % 2 == 0,
    "an adjacency of classes": lambda: torch.eye(7),
    "integers of classes": lambda: torch.eye(7, dtype=torch.int64),
    "a scale": lambda: torch.tensor([2.0]),
    "an integer scale": lambda: torch.tensor([2]),
    "a mean": lambda: numbers(1, D, seed=9),
    "ones": lambda: torch.ones(7),
    "complex prototypes": lambda: torch.complex(of_all(), of_all()),
}


@pytest.mark.parametrize("name", WITHOUT_SAMPLES)
def test_a_tensor_of_all_ranks_needs_its_role(name: str, worlds: Worlds) -> None:
    make = WITHOUT_SAMPLES[name]
    labels = torch.arange(5) % 3
    words = "other is equal on every rank … shared={'other'}"
    refused(worlds, 2, lambda: called(of_rank(), make(), labels), words)
    refused(worlds, 3, lambda: called(of_rank(on_rank_0(0, 5)), make(), labels[: on_rank_0(0, 5)]), words)
    expected = with_other(
        torch.cat([of_rank(rank=0), of_rank(rank=1)]), make(), torch.cat([labels, labels])
    ).real.item()
    found = worlds.run(2, lambda: called(of_rank(), make(), labels, shared={"other"}).item())
    assert found == [pytest.approx(expected)] * 2


def test_two_tensors_of_all_ranks_are_no_pair(worlds: Worlds) -> None:
    refused(
        worlds, 2, lambda: called(of_rank(), torch.arange(7), torch.arange(7) % 2 == 0), "other is equal on every rank"
    )


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


LISTS: dict[str, Callable[[], Any]] = {
    "documents of several lengths": lambda: called(of_rank(3), documents(4, 2, 5)),
    "documents of one length": lambda: called(of_rank(3), documents(4, 4, 4)),
    "documents and labels": lambda: called(documents(4, 2, 5), torch.arange(3) + dist.get_rank()),
    "documents in a dict": lambda: called(of_rank(3), {"a": documents(4, 2, 5)}),
    "a vector a sample": lambda: called([*of_rank(3)], torch.arange(3) + dist.get_rank()),
    "an image a sample": lambda: called([*numbers(3, 2, 5, 5, seed=dist.get_rank())], torch.arange(3)),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_of_samples_is_refused(name: str, worlds: Worlds) -> None:
    refused(worlds, 2, LISTS[name], "is a list of … pad_sequence( … pad_dims={ … batch_dim={")


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


STACKS: dict[str, Callable[[], Any]] = {
    "views alone": lambda: called(numbers(2, 5, D, seed=dist.get_rank()), None),
    "views of two networks": lambda: called(
        numbers(2, 5, D, seed=dist.get_rank()), numbers(2, 5, D, seed=7 + dist.get_rank())
    ),
    "views and labels": lambda: called(numbers(2, 5, D, seed=dist.get_rank()), torch.arange(5)),
    "uneven": lambda: called(numbers(on_rank_0(3, 2), 5, D, seed=dist.get_rank()), None),
}


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_without_a_vector_needs_its_role(name: str, worlds: Worlds) -> None:
    refused(worlds, 2, STACKS[name], "samples or 5 … batch_dim={'z': 1} … batch_dim={'z': 0}")


def test_tokens_beside_a_mask_or_labels_are_samples(worlds: Worlds) -> None:
    def job() -> None:
        n = on_rank_0(2, 3)
        tokens = numbers(n, 5, D, seed=dist.get_rank())
        called(tokens, torch.ones(n, 5))
        called(tokens, torch.arange(n))
        called(tokens, None, pad_dims={"z": 1})
        called(tokens, None, batch_dim={"z": 0})

    worlds.run(2, job)


def by_name(z: Tensor, pos_idx: Any = None, speaker: Any = None) -> Tensor:
    return total(z, pos_idx, speaker)


PARTNERS: dict[str, Callable[[], Any]] = {
    "each other's": lambda: called(of_rank(6), (torch.arange(6) + 3) % 6),
    "each other's on one rank": lambda: called(of_rank(6), (torch.arange(6) + 3) % 6 * on_rank_0(1, 7)),
    "beside labels": lambda: called(of_rank(), torch.arange(5) % 2, torch.arange(5).roll(1)),
    "by name": lambda: called(of_rank(), torch.zeros(5, dtype=torch.int64), loss=by_name),
    "several an embedding": lambda: called(of_rank(), torch.tensor([[1, -1]] * 5), loss=by_name),
}


@pytest.mark.parametrize("name", PARTNERS)
def test_row_numbers_of_one_rank_are_refused(name: str, worlds: Worlds) -> None:
    refused(worlds, 2, PARTNERS[name], "below … as row numbers do … find them in the loss … batch_dim={'")


def test_labels_are_no_row_numbers(worlds: Worlds) -> None:
    """Classes below the number of rows, numbers of samples, an empty shard, and whatever has its role."""

    def job() -> None:
        rank, n = dist.get_rank(), on_rank_0(0, 5)
        called(of_rank(), torch.tensor([1, 2, 3, 4, 1 + rank]))
        called(of_rank(), torch.arange(5) + 100 * rank + 6, loss=by_name)
        called(of_rank(), torch.arange(5), torch.tensor([3, 3, 1, 0, rank]), loss=by_name, batch_dim={"pos_idx": 0})
        called(of_rank(n), torch.tensor([1, 2, 3, 4, 1])[:n])
        called(of_rank(), torch.arange(5).roll(1 + rank), batch_dim={"other": 0})

    worlds.run(2, job)


INDICES: dict[str, Callable[[], Any]] = {
    "pairs": lambda: called(of_rank(), torch.randint(5, (7, 2))),
    "triplets": lambda: called(of_rank(), tuple(torch.randint(5, (3, 7)))),
    "uneven": lambda: called(of_rank(), torch.randint(5, (on_rank_0(2, 4), 2))),
}


@pytest.mark.parametrize("name", INDICES)
def test_numbers_of_rows_are_refused(name: str, worlds: Worlds) -> None:
    def bad() -> None:
        torch.manual_seed(dist.get_rank())
        INDICES[name]()

    refused(
        worlds, 2, bad, "holds integers, but not one for each embedding … find them in the loss … batch_dim={'other"
    )


def own(seed: int) -> Any:
    rank = dist.get_rank() // 2
    return cz.DistributedLoss(cz.NTXent())(of_rank(3, rank=rank, seed=seed), of_rank(3, rank=rank, seed=seed + 20))


COPIES: dict[str, Callable[[], Any]] = {
    "a third-party loss": lambda: called(of_rank(rank=dist.get_rank() // 2), torch.arange(5)),
    "other labels": lambda: called(of_rank(rank=dist.get_rank() // 2), torch.arange(5) + dist.get_rank()),
    "an own loss": lambda: own(seed=0),
    "some": lambda: called(of_rank(rank=max(dist.get_rank(), 1)), torch.arange(5)),
}


@pytest.mark.parametrize("name", COPIES)
def test_two_ranks_with_one_shard_are_refused(name: str, worlds: Worlds) -> None:
    refused(
        worlds,
        4,
        COPIES[name],
        "ranks 0 and 1 brought the very same embeddings … context … process_group=mesh.get_group('dp') … check_distinct",
    )


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


def test_a_loss_without_parameters_yet_is_refused(worlds: Worlds) -> None:
    for make in (Lazy, LazyFormula):
        refused(
            worlds,
            2,
            lambda make=make: called(of_rank(), torch.arange(5) // 2, loss=make()),
            "LazyLinear has no parameters yet … Call the bare loss once",
        )

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
