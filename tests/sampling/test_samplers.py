"""What each sampler yields, the position, bad arguments, and agreement between ranks."""

import math
from collections import namedtuple
from collections.abc import Callable
from dataclasses import make_dataclass
from functools import partial
from itertools import chain, combinations
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import DataLoader, TensorDataset, default_collate

import contrastive_zoo as cz
from contrastive_zoo.data import GlobalBatchSampler, MPerClassBatchSampler, OneDatasetBatchSampler, token_chunks
from contrastive_zoo.testing.auditing.records import listed
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import common_error

ONE_PROCESS = cz.World()
LABELS = [0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3]


def test_a_loaded_step_belongs_to_its_epoch() -> None:
    sampler = GlobalBatchSampler(10, batch_size=4, process_group=ONE_PROCESS)
    whole = list(sampler)
    sampler.set_position({"epoch": 0, "step": 2})
    sampler.set_epoch(0)  # what a loop does at the beginning of each epoch
    assert list(sampler) == list(sampler) == whole[2:]
    assert len(sampler) == 3
    sampler.set_epoch(1)
    assert len(list(sampler)) == 3
    sampler.set_epoch(0)
    assert list(sampler) == whole


def test_an_epoch_that_was_set_is_not_replaced_by_an_earlier_one() -> None:
    """Accelerate's loader sets the epoch that it has counted. Lightning may set one whose batches are all trained."""
    sampler = GlobalBatchSampler(10, batch_size=4, process_group=ONE_PROCESS)
    first = list(sampler)
    for move in (lambda: sampler.set_epoch(1), lambda: sampler.set_position({"epoch": 1, "step": 2})):
        move()
        sampler.set_epoch(0)
        with pytest.raises(ValueError, match=r"epoch 1 was set .* got epoch 0\. .* loader\.set_epoch\(epoch\)"):
            list(sampler)
        sampler.set_epoch(1)
        assert list(sampler) != first
    sampler.set_epoch(2)
    sampler.set_position({"epoch": 0, "step": 0})
    assert list(sampler) == first
    for epoch in (0, 1, 0):  # to count the batches of all epochs
        sampler.set_epoch(epoch)
    assert list(sampler) == first


def test_a_loader_with_a_state_of_its_own_takes_a_sampler_for_one_without() -> None:
    """torchdata's StatefulDataLoader would call these methods, without the number of batches that were trained."""
    assert not isinstance(NINE, Stateful)


def test_workers_and_batches_without_samples() -> None:
    data = TensorDataset(torch.arange(5), torch.randn(5, 3))
    sampler = GlobalBatchSampler(5, batch_size=4, process_group=cz.World(2, 3))
    loader = DataLoader(data, batch_sampler=sampler, num_workers=1, collate_fn=cz.data.CollateEmptyBatches(data[0]))
    shapes = [(list(index.shape), list(x.shape), index.dtype) for index, x in loader]
    assert shapes == [([1], [1, 3], torch.int64), ([0], [0, 3], torch.int64)]


def test_a_long_tail_makes_the_last_batches_small_and_is_warned_of() -> None:
    labels = [0] * 150 * 8 + [x for x in range(1, 61) for _ in range(8)]
    with pytest.warns(UserWarning, match="last 130 of 150 batches .* classes_per_batch=4 .* class 0 needs 150 batches"):
        sampler = MPerClassBatchSampler(labels, m=8, classes_per_batch=4, process_group=ONE_PROCESS)
    assert [len({labels[x] for x in batch}) for batch in sampler] == [4] * 20 + [1] * 130
    MPerClassBatchSampler(labels, m=8, classes_per_batch=4, process_group=cz.World(1, 2))  # rank 0 says it
    MPerClassBatchSampler(LABELS, m=2, classes_per_batch=3, process_group=ONE_PROCESS)  # the last batch has fewer


def test_an_audit_lists_the_batches_of_a_sampler() -> None:
    epoch = listed(DataLoader(range(9), batch_sampler=(sampler := GlobalBatchSampler(9, batch_size=4, seed=1))))
    assert epoch.batches == [*sampler]
    assert (epoch.complete, epoch.sampler, epoch.shuffles, epoch.seed) == (True, "GlobalBatchSampler", True, 1)


def prepared(sampler: GlobalBatchSampler, world_size: int, rank: int = 0) -> Any:
    from accelerate.data_loader import prepare_data_loader

    loader: Any = DataLoader(range(24), batch_sampler=sampler)  # type: ignore[arg-type]  # it has a length and items
    return prepare_data_loader(loader, num_processes=world_size, process_index=rank)


def split_again(rank: int) -> list[int]:
    sampler = GlobalBatchSampler(24, batch_size=6, process_group=cz.World(rank, 2))
    return [int(x) for batch in prepared(sampler, 2, rank) for x in batch]


@pytest.mark.trainers
def test_a_loader_that_accelerate_has_prepared_continues_at_the_position() -> None:
    pytest.importorskip("accelerate")
    plain, sampler = (GlobalBatchSampler(24, batch_size=6, process_group=ONE_PROCESS) for _ in range(2))
    loader = prepared(sampler, 1)
    for x in (plain, sampler):
        x.set_position({"epoch": 1, "step": 2})
    for epoch in (1, 2):
        plain.set_epoch(epoch)
        loader.set_epoch(epoch)
        assert [x.tolist() for x in loader] == [*plain]
    sampler.set_epoch(4)  # the loader has counted to 3
    with pytest.raises(ValueError, match=r"epoch 4 was set .* got epoch 3"):
        list(loader)


@pytest.mark.trainers
def test_a_trainer_that_would_split_each_part_again_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    for rank in range(2):
        with pytest.raises(ValueError, match=r"GlobalBatchSampler: the trainer would split .* num_processes=1"):
            split_again(rank)
    assert GlobalBatchSampler(24, batch_size=6, process_group=cz.World()).drop_last is False
    monkeypatch.setattr(cz.data.BaseBatchSampler, "drop_last", False)
    assert len(split_again(0) + split_again(1)) < 24


def test_batches_mix_classes() -> None:
    """Two classes of equally many samples are rarely in one batch again."""
    labels = [x for x in range(100) for _ in range(20)]
    sampler = MPerClassBatchSampler(labels, m=2, classes_per_batch=10, process_group=ONE_PROCESS)
    pairs = [pair for batch in sampler for pair in combinations(sorted({labels[x] for x in batch}), 2)]
    assert len(set(pairs)) > 0.6 * len(pairs)


@pytest.mark.parametrize(("temperature", "expected"), [(1, [16, 4, 1]), (2, [16, 8, 4]), (math.inf, [16, 16, 16])])
def test_turns_of_data_sets(temperature: float, expected: list[int]) -> None:
    sizes = [160, 40, 10]
    samplers = [GlobalBatchSampler(size, batch_size=10, process_group=ONE_PROCESS) for size in sizes]
    mixed = OneDatasetBatchSampler(samplers, sizes=sizes, temperature=temperature, process_group=ONE_PROCESS)
    for epoch in range(2):
        mixed.set_epoch(epoch)
        batches = list(mixed)
        assert np.bincount([np.searchsorted([160, 200], min(x), "right") for x in batches]).tolist() == expected
        repeated = [x for x in batches if min(x) >= 200]  # the smallest data set: another order in each pass
        assert {frozenset(x) for x in repeated} == {frozenset(range(200, 210))}
        assert len({tuple(x) for x in repeated}) == len(repeated)


@given(lengths=st.lists(st.integers(1, 6), max_size=6), budget=st.integers(6, 14))
def test_no_division_of_the_samples_has_fewer_chunks(lengths: list[int], budget: int) -> None:
    def fewest(rest: list[int]) -> int:
        others = [x for size in range(len(rest)) for x in combinations(range(1, len(rest)), size)]
        chunks = [x for x in others if (len(x) + 1) * max([rest[0], *(rest[i] for i in x)]) <= budget]
        return 1 + min(fewest([y for i, y in enumerate(rest) if i and i not in x]) for x in chunks) if rest else 0

    chunks = token_chunks(lengths, budget)
    assert sorted(chain.from_iterable(x.tolist() for x in chunks)) == list(range(len(lengths)))
    assert all(len(x) * max(lengths[i] for i in x) <= budget for x in chunks)
    assert len(chunks) == fewest(lengths)


def test_an_empty_batch_has_the_structure_of_the_others() -> None:
    pair, of = namedtuple("pair", "x y"), make_dataclass("of", ["parts", "scale"])
    example = {"views": [torch.ones(2), torch.ones(3)], "pair": pair(1, 2.0), "name": "a", "array": np.ones((2, 2))}
    collate = cz.data.CollateEmptyBatches(example, lambda x: of(default_collate(x), 0.5))
    empty = collate([]).parts
    assert [list(x.shape) for x in (*empty["views"], empty["array"])] == [[0, 2], [0, 3], [0, 2, 2]]
    assert (type(empty["pair"]), *(x.dtype for x in empty["pair"])) == (pair, torch.int64, torch.float64)
    assert (empty["name"], collate([]).scale) == ([], 0.5)
    empty["name"].append("b")
    assert collate([]).parts["name"] == []


NINE = GlobalBatchSampler(9, batch_size=9, process_group=ONE_PROCESS)
BAD: list[tuple[Callable[..., Any], str]] = [
    (partial(GlobalBatchSampler, 0, batch_size=4), "num_samples is an integer of at least 1, got 0"),
    (partial(MPerClassBatchSampler, LABELS, m=1, classes_per_batch=2), "m is an integer of at least 2, got 1"),
    (partial(MPerClassBatchSampler, LABELS, m=2, classes_per_batch=5), "at most the number of classes, 4, got 5"),
    (partial(MPerClassBatchSampler, [], m=2, classes_per_batch=1), "labels are one per sample, got none"),
    (partial(MPerClassBatchSampler, ["a", "a", "b"], m=2, classes_per_batch=1), r"1 of 2 classes have one .*'b'"),
    (partial(MPerClassBatchSampler, LABELS, m=2, classes_per_batch=2, singletons="no"), "one of 'raise', 'keep'"),
    (partial(MPerClassBatchSampler, np.ones((3, 2)), m=2, classes_per_batch=1), r"\[n\], got shape \[3, 2\]"),
    (partial(cz.data.NoDuplicatesBatchSampler, batch_size=2), r"equal lengths of at least 1, got lengths \[\]"),
    (partial(cz.data.NoDuplicatesBatchSampler, [1, 2], [1], batch_size=2), r"got lengths \[2, 1\]"),
    (partial(token_chunks, [3, 9], 8), "at most chunk_tokens=8 tokens, got 9 for sample 1. Cut longer samples, or"),
    (partial(token_chunks, [3, 0], 8), "at least 1 token, got 0 for sample 1"),
    (partial(token_chunks, [0.5], 8), r"lengths are integers \[n\], got float64 \[1\]"),
    (partial(token_chunks, [[1], [2, 3]], 8), r"lengths are integers \[n\] on the CPU, got \[\[1\], \[2, 3\]\]"),
    (partial(token_chunks, [1], 0), r"chunk_tokens is an integer in 1 … 2\*\*60, got 0"),
    (partial(cz.data.TokenBatchSampler, [], chunk_tokens=8, chunks_per_batch=1), "lengths are one per sample, got"),
    (partial(GlobalBatchSampler, 9, batch_size=2, drop_last="yes"), "drop_last is True or False, got 'yes'"),
    (partial(OneDatasetBatchSampler, [NINE], sizes=[9], drop_last=True), "Pass drop_last=True to each of them"),
    (partial(OneDatasetBatchSampler, [], sizes=[]), r"one batch sampler for each data set, got \[\]"),
    (partial(OneDatasetBatchSampler, [[[0]]], sizes=[1]), r"batch samplers of contrastive_zoo\.data, got \[\[0\]\]"),
    (partial(OneDatasetBatchSampler, [NINE], sizes=[9, 9]), r"one integer for each of the 1 samplers, got \[9, 9\]"),
    (partial(OneDatasetBatchSampler, [NINE], sizes=[9], temperature=0.5), r"of at least 1, got 0\.5"),
    (lambda: [*OneDatasetBatchSampler([NINE], sizes=[8])], "set 0 are between 0 and 7, got 0 … 8. Pass the sizes"),
    (partial(cz.data.NoDuplicatesBatchSampler, [object()], batch_size=2), "by their content, got a object. Pass a"),
    (partial(cz.data.NoDuplicatesBatchSampler, [torch.ones(2)], batch_size=2), r"by their content, got float32 \[2\]"),
    (partial(cz.data.CollateEmptyBatches, 1, len), r"returns 1 for one sample and 2 for two\. Return tensors"),
    (partial(cz.data.CollateEmptyBatches, 1, lambda x: torch.tensor(len(x))), r"int64 \[\] for one"),
    (partial(cz.data.CollateEmptyBatches, 1, iter), "a list_iterator for one"),
]


def test_bad_arguments() -> None:
    for make, says in BAD:
        with pytest.raises(ValueError, match=says):
            make()


def test_bad_positions_change_nothing() -> None:
    sampler, other_seed, other_data = (
        GlobalBatchSampler(size, batch_size=4, seed=seed, process_group=ONE_PROCESS)
        for size, seed in ((10, 0), (10, 1), (11, 0))
    )
    sampler.set_position({"epoch": 2, "step": 1})
    states: list[tuple[Any, str]] = [
        *((state, "GlobalBatchSampler: ") for state in (None, [], "x")),
        ({"epoch": 1}, r"a position has an epoch and a step, got \['epoch'\]"),
        ({"epoch": -1, "step": 0}, r"an epoch is an integer in 0 … 2\*\*62, got -1"),
        ({"epoch": 2**65, "step": 0}, r"an epoch is an integer in 0 … 2\*\*62, got 36893488147419103232"),
        ({"epoch": 1, "step": 4}, r"0 … 3, the number of batches of epoch 1, got 4"),
        (other_seed.get_position(step=1), "other data, another seed or other settings"),
        (other_data.get_position(step=1), "other data, another seed or other settings"),
    ]
    for state, says in states:
        with pytest.raises(ValueError, match=says):
            sampler.set_position(state)
        assert (sampler.epoch, sampler.step) == (2, 1)
    with pytest.raises(ValueError, match="got 4"):
        sampler.get_position(step=4)


def test_ranks_agree_on_data_and_settings(worlds: Worlds) -> None:
    def differ(what: str) -> MPerClassBatchSampler:
        bad = dist.get_rank() == 1
        labels = LABELS[::-1] if bad and what == "labels" else LABELS
        m, seed = 1 if bad and what == "m" else 2, int(bad and what == "seed")
        return MPerClassBatchSampler(labels, m=m, classes_per_batch=2, seed=seed)

    alone = MPerClassBatchSampler(LABELS, m=2, classes_per_batch=2, process_group=ONE_PROCESS)
    for what, says in (("labels", "labels"), ("seed", "seed"), ("m", "at least 2, got 1")):
        text, found = common_error(worlds, 3, partial(differ, what), lambda: [*differ("")])
        assert says in text
        assert [list(chain.from_iterable(parts)) for parts in zip(*found, strict=True)] == [*alone]
