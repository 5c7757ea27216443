"""Refreshed negatives are those of the current encoder, the same on any number of ranks, and survive a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.mining import RefreshedNegatives
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import common_error, numbers

N, M, EVERY = 23, 41, 3


def trained(state: dict[str, Any] | None, first: int, stop: int) -> tuple[list[Tensor], dict[str, Any], Tensor]:
    """Return the negatives at each step of a training, and what a checkpoint holds after it."""
    torch.manual_seed(0)
    encoder = nn.Linear(5, 4).double()
    queries, corpus = numbers(N, 5, seed=1), numbers(M, 5, seed=2)
    negatives = RefreshedNegatives(
        lambda i: encoder(queries[i]), lambda i: encoder(corpus[i]), torch.arange(N), corpus_size=M, every=EVERY,
        chunk_size=4, num_negatives=2, range_max=10, sampling="random", seed=5,
    )  # fmt: skip
    if state:
        encoder.load_state_dict(state["encoder"])
        negatives.load_state_dict(state["negatives"])
    seen = []
    for step in range(first, stop):
        mined = negatives.update(step)
        assert mined == (step % EVERY == 0)
        seen.append(negatives[torch.arange(N)].clone())
        with torch.no_grad():
            encoder.weight += 0.3 * numbers(4, 5, seed=step)
    return seen, {"encoder": encoder.state_dict(), "negatives": negatives.state_dict()}, encoder.weight.detach()


def test_a_run_resumed_on_other_ranks_has_the_negatives_of_one_process(worlds: Worlds) -> None:
    ((expected, _, weights),) = worlds.run(1, trained, None, 0, 8)
    before = worlds.run(2, trained, None, 0, 5)
    after = worlds.run(3, trained, before[1][1], 5, 8)
    for seen, _, _ in before:
        assert all(map(torch.equal, seen, expected[:5]))
    for seen, _, found in after:
        assert all(map(torch.equal, seen, expected[5:]))
        assert torch.equal(found, weights)
    assert torch.equal(expected[0], expected[2])
    assert not torch.equal(expected[2], expected[3])


def test_negatives_are_those_of_a_search() -> None:
    rows = numbers(N, 4, seed=0)
    found = RefreshedNegatives(
        rows.__getitem__, rows.__getitem__, torch.arange(N)[:, None], corpus_size=N, every=1, num_negatives=2
    )
    found.update(0)
    mined = cz.mine_hard_negatives(rows, rows, torch.arange(N), num_negatives=2, output="n-tuple")
    assert found.negatives.tolist() == mined["negative"].tolist()


def test_bad_input(worlds: Worlds) -> None:
    rows = numbers(N, 4, seed=0)

    def make(**settings: Any) -> RefreshedNegatives:
        settings = {"corpus_size": N, "every": 2, **settings}
        return RefreshedNegatives(rows.__getitem__, rows.__getitem__, torch.arange(N), **settings)

    with pytest.raises(ValueError, match="every is an integer of at least 1, got 0"):
        make(every=0)
    with pytest.raises(ValueError, match="'top' or 'random'"):
        make(sampling="all")
    with pytest.raises(ValueError, match=r"negatives is int64 \[23, 2\] here, the state dict holds int64 \[23, 3\]"):
        make(num_negatives=2).load_state_dict(make().state_dict())
    text, _ = common_error(worlds, 2, lambda: make().update(dist.get_rank()), lambda: make().update(0))
    assert "step" in text
    other = lambda: RefreshedNegatives(  # noqa: E731
        rows.__getitem__, rows.__getitem__, torch.arange(N) * (1 - dist.get_rank()), corpus_size=N, every=2
    ).update(0)
    text, _ = common_error(worlds, 2, other, lambda: make().update(0))
    assert "positives" in text
