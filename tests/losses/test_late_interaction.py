"""MaxSim: what the table of losses under test, whose rows are :func:`tokens_of`, does not show of sets of tokens."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

import contrastive_zoo as cz
from contrastive_zoo.engine import exchange, tiling
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import Largest, close, numbers
from tests.losses.zoo_pairs import dense_max_sim, tokens_of
from tests.random_steps.rank import play
from tests.simulated import device, on_cpu, value_and_gradients

VIEWS = [numbers(7, 4, seed=seed) for seed in range(3)]


def test_the_first_of_equal_tokens_gets_the_gradient() -> None:
    queries = torch.eye(2)[:, None]
    documents = torch.eye(2)[:, None].repeat(1, 3, 1).requires_grad_()
    cz.MaxSim(normalize=False)(queries, documents, None, torch.tensor([[0, 1, 1], [1, 1, 1]])).backward()
    assert documents.grad.abs().amax(2).gt(0).tolist() == [[False, True, False], [True, False, False]]


@pytest.mark.parametrize("cached", [False, True], ids=["recomputed", "cached"])
def test_similarities_of_all_tokens_are_never_held(cached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "TILE_BYTES", 2**14)
    queries, documents = (numbers(24, 16, 4, seed=seed, dtype=torch.float32).requires_grad_() for seed in (1, 2))
    with cz.engine.memory_budget(2**20 if cached else 0), Largest() as largest:
        cz.MaxSim()(queries, documents).backward()
    selected = 24 * 16 * 24
    assert largest.elements <= selected < (24 * 16) ** 2 / 4


@pytest.mark.path("engines")
def test_documents_longer_than_a_tile_are_scored_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tokens_of(*VIEWS[:2])
    monkeypatch.setattr(tiling, "TILE_BYTES", 16)  # 2 numbers of 64 bits, where documents have up to 3 tokens
    close(cz.MaxSim()(*rows), dense_max_sim(*rows))


def test_tokens_of_16_bits_are_sent_as_they_came() -> None:
    sent = []
    for dtype in (torch.float32, torch.bfloat16):
        tokens = numbers(2, 3, 4, seed=1).to(dtype)
        with patch.object(exchange, "start_gather", wraps=exchange.start_gather) as start_gather:
            cz.MaxSim()(tokens, tokens)
        sent.append(start_gather.call_args.args[0].dtype)
    assert sent == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("loss", [cz.MaxSim(), cz.MaxSimPairwise()], ids=str)
def test_products_of_the_shortest_tokens_select_one(loss: Any) -> None:
    """Products of these numbers are 0 in float32, and no token would be the best one."""
    tokens = [(x[:, None].repeat(1, 2, 1) * numbers(2, 4, seed=9) * 1e-24).bfloat16() for x in VIEWS[:2]]
    found = value_and_gradients(loss, tokens)
    with cz.engine.plain_formulas():
        expected = value_and_gradients(loss, [x.double() for x in tokens])
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x / y.abs().amax(), y / y.abs().amax(), rtol=0, atol=5e-3, check_dtype=False)


@pytest.mark.parametrize(
    "make",
    [cz.MaxSim, lambda: cz.WeightedSum([cz.MaxSim(), cz.MaxSimPairwise()]), lambda: cz.Matryoshka(cz.MaxSim(), (2, 4))],
)
def test_lengths_are_read_once(make: Callable[[], Any]) -> None:
    rows = tokens_of(*VIEWS)
    with device() as mode, cz.engine.memory_budget(0), patch.object(tiling, "TILE_BYTES", 400):  # several blocks
        loss, moved = cz.DistributedLoss(make(), check_finite=False, check_equal=False), [*map(mode.put, rows)]
        for _ in range(3):
            mode.reads.clear()
            mode.uploads.clear()
            found = value_and_gradients(loss, moved)
        assert len([*mode.reads, *mode.uploads]) == 1
        found = on_cpu(found)
    torch.testing.assert_close(found, value_and_gradients(make(), rows), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["MaxSim", "MaxSim, negatives"])
def test_a_ring_of_ranks_that_read_their_lengths_before(name: str, worlds: Worlds) -> None:
    """With what is computed on accelerators: the simulated device has no ring."""
    program = [("set_option", {"ring": True}), *(("step", {"batches": [sizes]}) for sizes in ((3, 5), (0, 2)))]
    worlds.run(2, play, name, {"ranks.devices.on_cpu": lambda x: False}, program)


@pytest.mark.parametrize("frozen", [0, 1, 4])
def test_frozen_tokens_need_no_gradient(frozen: int) -> None:
    rows = [x.requires_grad_(x.is_floating_point() and i != frozen) for i, x in enumerate(tokens_of(*VIEWS))]
    trained = [x for x in rows if x.requires_grad]
    found = torch.autograd.grad(cz.MaxSim()(*rows), trained)
    with cz.engine.plain_formulas():
        expected = torch.autograd.grad(cz.MaxSim()(*rows), trained)
    for x, y in zip(found, expected, strict=True):
        close(x, y)
