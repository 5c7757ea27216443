"""Ranks that are threads: each has what a process has once, messages of all kinds arrive, and nothing waits for ever."""

import os
import random
import sys
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist

import contrastive_zoo as cz
from contrastive_zoo.engine import plan
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.worlds import RankError, Worlds


@pytest.fixture(scope="module")
def pool() -> Iterator[Worlds]:
    with Worlds(timeout=300.0, threads=True) as made:
        yield made


def draws() -> tuple[float, ...]:
    return torch.rand(()).item(), float(np.random.rand()), random.random()


def draw_and_wait() -> list[tuple[float, ...]]:
    torch.manual_seed(dist.get_rank()), np.random.seed(dist.get_rank()), random.seed(dist.get_rank())
    found = [draws()]
    dist.barrier()
    return [*found, draws()]


def test_a_rank_draws_as_a_process_does_and_the_caller_draws_on(pool: Worlds, worlds: Worlds) -> None:
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    states = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()
    assert pool.run(3, draw_and_wait) == worlds.run(3, draw_and_wait)
    assert (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()) == states


def set_modes() -> list[object]:
    """Set what a process has once, differently on each rank, and say what is set after all have."""
    rank, call = dist.get_rank(), torch.nn.Module._call_impl
    torch.set_default_dtype(torch.float64 if rank else torch.float32)
    torch.set_grad_enabled(bool(rank))
    with splitting(always=rank == 0), warnings.catch_warnings():
        warnings.simplefilter("error" if rank else "ignore")
        dist.barrier()
        found = [torch.get_default_dtype(), torch.is_grad_enabled(), plan.SMALL_BATCH == -1, warnings.filters[0][0]]
    dist.barrier()
    torch.nn.Module._call_impl = call
    return [*found, plan.SMALL_BATCH]


def test_modes_and_patches_belong_to_a_rank(pool: Worlds) -> None:
    before = torch.get_default_dtype(), warnings.filters[:], plan.SMALL_BATCH
    assert pool.run(2, set_modes) == [
        [torch.float32, False, True, "ignore", before[2]],
        [torch.float64, True, False, "error", before[2]],
    ]
    assert (torch.get_default_dtype(), warnings.filters[:], plan.SMALL_BATCH) == before


def test_what_a_job_holds_is_a_copy_on_each_rank(pool: Worlds) -> None:
    layer, seen = torch.nn.Linear(1, 1), []

    def job() -> int:
        layer.weight.data.zero_()
        seen.append(1)
        return len(seen)

    assert pool.run(2, job) == [1, 1]
    assert layer.weight != 0
    assert seen == []


def messages() -> list[list[float]]:
    rank, of_rank = dist.get_rank(), torch.full((2, 1), float(dist.get_rank()), dtype=torch.float64)
    x = of_rank.clone()
    dist.broadcast(x, 2)
    found = [x]
    found += [cz.collectives.broadcast(of_rank, 1)]
    found += [cz.collectives.all_gather(of_rank[:rank]), cz.collectives.reduce_scatter(of_rank.repeat(3, 1))]
    for x in (torch.ones(1), torch.full((1,), float(rank))):
        dist.reduce(x, 0)
        found += [x] if rank == 0 else []
    neighbour, received = (rank + 1) % 3, torch.empty(1)
    work = dist.irecv(received, (rank - 1) % 3)  # before anything was sent
    dist.send(torch.tensor([float(rank)]), neighbour)
    work.wait()
    with torch.inference_mode():
        total = torch.ones(1)
        dist.all_reduce(total)
    return [y.flatten().tolist() for y in (*found, received, total)]


def test_messages_of_all_kinds_are_those_of_processes(pool: Worlds, worlds: Worlds) -> None:
    assert pool.run(3, messages) == worlds.run(3, messages)


def test_ranks_that_send_unequal_messages_are_told(pool: Worlds) -> None:
    with pytest.raises(RankError, match="ranks send unequal messages: allreduce of 1 float32; allreduce of 2 float32"):
        pool.run(2, lambda: dist.all_reduce(torch.ones(1 + dist.get_rank())))


def test_a_message_that_never_comes_is_noticed_at_once(pool: Worlds) -> None:
    """No time passes: the limit is a year."""
    with pytest.raises(RankError, match=r"rank 0 waits in all_reduce .* rank 1 has returned. Rank 1 never entered"):
        pool.run(2, lambda: dist.get_rank() or dist.all_reduce(torch.ones(1)), timeout=3e7)


def test_a_third_party_loss_is_alone_in_its_thread(pool: Worlds) -> None:
    def job() -> tuple[float, int]:
        sizes = []

        def loss(rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            sizes.append(dist.get_world_size())
            return rows.square().sum()

        rows = torch.ones(1 + dist.get_rank(), 2)
        return cz.DistributedLoss(loss)(rows, torch.zeros(len(rows), dtype=torch.int64)).item(), *sizes

    assert pool.run(3, job) == [(12.0, 1)] * 3


def test_more_ranks_than_threads_can_be_and_a_torch_without_them_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with Worlds(threads=True) as pool, pytest.raises(ValueError, match="at most 64 ranks, got W=65"):
        pool.run(65, os.getpid)
    for name in ("threads", "thread_group"):
        monkeypatch.delitem(sys.modules, f"contrastive_zoo.testing.{name}")
    monkeypatch.setitem(sys.modules, "torch.testing._internal.distributed.multi_threaded_pg", None)
    monkeypatch.delattr("torch.testing._internal.distributed.multi_threaded_pg")
    with pytest.raises(ValueError, match=r"which torch .* lacks. Leave out threads=True: ranks are processes then"):
        Worlds(threads=True)
