"""Refreshed negatives are those of the current encoder, the same on any number of ranks, and survive a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.data.refreshed import RefreshedNegatives
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
    mined = cz.data.mine_hard_negatives(rows, rows, torch.arange(N), num_negatives=2, output="n-tuple")
    assert found.negatives.tolist() == mined["negative"].tolist()


ENCODERS: list[tuple[Any, str]] = [
    (lambda indices: {}["model"], "encode_corpus: rank 1: KeyError: 'model'"),
    (
        lambda indices: numbers(len(indices) - 1, 4, seed=0),
        "encode_corpus: rank 1: ValueError: RefreshedNegatives: an encoder returns one row",
    ),
    (lambda indices: [1.0] * len(indices), "one row [d] for each of 23 indices, got a list"),
]


def test_an_encoder_that_fails_on_one_rank_is_every_ranks_error(worlds: Worlds) -> None:
    """The others would wait in the search."""
    rows = numbers(N, 4, seed=0)

    def update(encode: Any) -> list[int]:
        encode_corpus = encode if dist.get_rank() == 1 else lambda indices: rows[indices % N]
        negatives = RefreshedNegatives(
            rows.__getitem__, encode_corpus, torch.arange(N), corpus_size=2 * N, every=2, chunk_size=N, num_negatives=1
        )
        try:
            negatives.update(0)
        except ValueError:
            assert negatives.mined_at is None
            raise
        return negatives.negatives[:2].flatten().tolist()

    for bad, says in ENCODERS:
        text, good = common_error(
            worlds, 2, lambda bad=bad: update(bad), lambda: update(lambda indices: rows[indices % N])
        )
        assert says in text
        assert good[0] == good[1]


def test_bad_input(worlds: Worlds) -> None:
    rows = numbers(N, 4, seed=0)

    def make(positives: Any = None, **settings: Any) -> RefreshedNegatives:
        settings = {"corpus_size": N, "every": 2, **settings}
        positives = torch.arange(N) if positives is None else positives
        return RefreshedNegatives(rows.__getitem__, rows.__getitem__, positives, **settings)

    for positives in ([0, 1], torch.zeros(3), torch.zeros(2, 1, 1).long(), torch.zeros(0).long()):
        with pytest.raises(ValueError, match="RefreshedNegatives: positives "):
            make(positives)
    with pytest.raises(ValueError, match="every is an integer of at least 1, got 0"):
        make(every=0)
    with pytest.raises(ValueError, match="'top' or 'random'"):
        make(sampling="all")
    with pytest.raises(ValueError, match=r"negatives is int64 \[23, 2\] here, the state dict holds int64 \[23, 3\]"):
        make(num_negatives=2).load_state_dict(make().state_dict())
    text, _ = common_error(worlds, 2, lambda: make().update(dist.get_rank()), lambda: make().update(0))
    assert "step" in text

    def of_another_step(step: Any) -> None:
        negatives, loss = make(), cz.DistributedLoss(cz.NTXent(), check_distinct=False)
        negatives.update(0)
        negatives.update(step if dist.get_rank() == 1 else 1)  # that mines nothing: rank 0 goes on to its loss
        loss(rows, rows)

    for step in (-1, 0.5, 2**65):
        text, _ = common_error(worlds, 2, lambda step=step: of_another_step(step), lambda: of_another_step(1))
        assert text == f"RefreshedNegatives: rank 1: step is an integer in 0 … 2**62, got {step}."
    text, _ = common_error(
        worlds, 2, lambda: make(torch.arange(N) * (1 - dist.get_rank())).update(0), lambda: make().update(0)
    )
    assert "positives" in text
