"""The real code of one rank of 8, 64 and 512 sends what the page on scaling says, and holds nearly what it says."""

import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from contrastive_zoo.engine import exchange

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import scaling
from one_rank import PATHS, WIDTH, counted, expected, split_of

CASES = [(path, 8, 64) for path in PATHS]
CASES += [("gathered", 64, 16), ("two-level ring", 64, 16), ("small batch", 512, 2), ("third-party loss", 512, 16)]


@pytest.mark.parametrize(("path", "ranks", "rows"), CASES)
def test_a_rank_sends_what_the_page_says(path: str, ranks: int, rows: int) -> None:
    sizes = split_of(ranks, rows)
    assert 0 in sizes
    found, formula = counted(path, sizes), expected(path, sizes)
    assert found[:3] == formula[:3]
    assert found.held < 2 * formula.held


def test_a_rank_that_sends_more_would_be_noticed() -> None:
    """The mutant: candidates are sent in float64."""
    sizes = split_of(8, 16)
    gather = exchange.start_gather
    with patch.object(exchange, "start_gather", lambda columns, *where: gather(columns.double(), *where)):
        found, formula = counted("gathered", sizes), expected("gathered", sizes)
    assert found[:2] == formula[:2]
    assert found.sent > formula.sent


@pytest.mark.parametrize("ring", [False, True])
def test_the_model_of_even_shards_has_the_same_bytes(ring: bool) -> None:
    for ranks in (8, 4096):
        work = scaling.amounts(scaling.Option(2, ring=ring), 16, WIDTH, ranks)
        assert work.sent == expected("ring" if ring else "gathered", [16] * ranks).sent
