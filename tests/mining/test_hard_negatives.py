"""Mined negatives are those of a plain search, and the same bits for every split of queries and corpus."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from contrastive_zoo.data import mine_hard_negatives as mine
from contrastive_zoo.data import mining
from contrastive_zoo.ranks.collectives import all_gather
from contrastive_zoo.ranks.world import ONE_PROCESS, World
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import numbers, refused

pytestmark = pytest.mark.data

N, M, D = 37, 90, 6
COLUMNS = ("query", "positive", "negative", "positive_score", "negative_score")


def data(seed: int = 0, *, ties: bool = False, alone: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    queries, corpus = numbers(N, D, seed=seed).float(), numbers(M, D, seed=seed + 1).float()
    if ties:
        queries, corpus = (torch.randint(-1, 2, (size, 3), generator=generator).float() for size in (N, M))
    positives = torch.randint(0, M, (N, 2), generator=generator)
    positives[::3, 1] = -1
    if alone:
        return {"queries": queries, "positives": positives.where(positives < 0, positives % N)}
    return {"queries": queries, "corpus": corpus, "positives": positives}


def mine_in(queries: Tensor, positives: Tensor, corpus: Tensor | None = None, **settings: Any) -> dict[str, Any]:
    with torch.device("meta"):  # the user's default device
        return mine(queries, corpus, positives, **settings)


def by_hand(given: dict[str, Tensor], settings: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the columns by looking at all pairs one after the other ("top" only)."""
    get = {"range_min": 0, "num_negatives": 3, **settings}.get
    alone = "corpus" not in given
    q, c = (F.normalize(given[x].double(), dim=1) for x in ("queries", "queries" if alone else "corpus"))
    scores = q @ c.T
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for query, positives in enumerate(given["positives"].tolist()):
        positives = [x for x in positives if x >= 0]
        score = scores[query].tolist()
        candidates = [x for x in range(len(c)) if x not in positives and not (alone and x == query)]
        candidates.sort(key=lambda x: (-round(score[x], 6), x))
        worst = min(score[x] for x in positives)
        bounds = [get("max_score", np.inf), worst - get("absolute_margin", -np.inf)]
        bounds += [worst - abs(worst) * settings["relative_margin"]] if "relative_margin" in settings else []
        negatives = [
            x for x in candidates[get("range_min") : get("range_max")]
            if get("min_score", -np.inf) <= score[x] <= min(bounds)
        ][: get("num_negatives")]  # fmt: skip
        rows: list[Any] = negatives
        if get("output") == "n-tuple":
            rows = [negatives] if len(negatives) == get("num_negatives") else []
        for positive, x in product(positives, rows):
            values = query, positive, x, score[positive], scores[query, x].tolist()
            for column, value in zip(columns.values(), values, strict=True):
                column.append(value)
    return columns


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "range": {"range_min": 4, "range_max": 9, "num_negatives": 2},
    "more than there are": {"num_negatives": 7, "range_max": 200},
    "thresholds": {"max_score": 0.6, "min_score": -0.1, "range_max": 60},
    "absolute margin": {"absolute_margin": 0.4, "range_max": 90, "num_negatives": 20},
    "relative margin": {"relative_margin": 0.3, "range_max": 90},
}


def test_one_process_finds_what_a_plain_search_finds() -> None:
    for name, settings in SETTINGS.items():
        # thresholds between equal scores are a matter of the last bit
        for ties in (False, True) if name in ("plain", "range") else (False,):
            for alone, output in product((False, True), ("triplet", "n-tuple")):
                rows, of = data(ties=ties, alone=alone), settings | {"output": output}
                found, expected = mine_in(**rows, **of), by_hand(rows, of)
                assert tuple(found) == COLUMNS
                assert all(isinstance(x, np.ndarray) for x in found.values())  # as datasets and pyarrow take them
                for column, x in expected.items():
                    np.testing.assert_allclose(found[column], np.array(x).reshape(found[column].shape), atol=1e-6)


def test_random_negatives_are_a_function_of_the_seed() -> None:
    first, again, other = (mine(**data(), sampling="random", seed=seed, range_max=20) for seed in (0, 0, 1))
    assert first["negative"].tolist() == again["negative"].tolist() != other["negative"].tolist()
    window = mine(**data(), num_negatives=20, output="n-tuple")
    best = dict(zip(window["query"].tolist(), window["negative"].tolist(), strict=True))
    drawn = zip(first["query"].tolist(), first["negative"].tolist(), strict=True)
    places = [best[query].index(x) for query, x in drawn]
    assert 7 < np.mean(places) < 12  # uniform over 20 ranks, 111 draws


def test_neither_the_steps_nor_a_memory_map_show(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    rows: dict[str, Any] = data()
    expected = mine(**rows, sampling="random")
    monkeypatch.setattr(mining, "QUERIES_OF_A_STEP", 8)
    np.save(tmp_path / "corpus.npy", rows["corpus"].numpy())
    rows["corpus"] = np.load(tmp_path / "corpus.npy", mmap_mode="r")
    found = mine(**rows, sampling="random")
    assert all(np.array_equal(found[name], expected[name]) for name in COLUMNS)


def same_columns_for_every_split(mine: Any, worlds: Worlds, rows: Any, settings: Any, shards: Any) -> None:
    def columns(shards: Any) -> dict[str, Any]:
        parts = {name: x.split(list(shards[name == "corpus"])) for name, x in rows.items()}
        each = [({name: x[rank].clone() for name, x in parts.items()},) for rank in range(len(shards[0]))]
        found = worlds.run(len(each), lambda rows: mine(**rows, **settings), each=each)
        return {name: np.concatenate([of_rank[name] for of_rank in found]) for name in found[0]}

    expected = columns([[sum(x)] for x in shards])
    for name, column in columns(shards).items():
        assert (column.shape, column.dtype) == (expected[name].shape, expected[name].dtype), name
        assert column.tobytes() == expected[name].tobytes(), name


# where the queries and the corpus are cut, as shares of their lengths
CUTS = st.lists(st.tuples(*[st.floats(0, 1)] * 2), min_size=1, max_size=3)
MORE = st.sampled_from([{}, {"sampling": "random"}, {"output": "n-tuple"}])


@given(cuts=CUTS, name=st.sampled_from([*SETTINGS]), ties=st.booleans(), alone=st.booleans(), more=MORE)
def test_every_split_mines_the_same_bits(cuts, name: str, ties: bool, alone: bool, more, worlds: Worlds) -> None:
    bounds = ((0, *sorted(round(n * x) for x in of), n) for n, of in zip((N, M), zip(*cuts, strict=True), strict=True))
    shards = [np.diff(x).tolist() for x in bounds]
    same_columns_for_every_split(mine_in, worlds, data(ties=ties, alone=alone), SETTINGS[name] | more, shards)


def own_corpus(queries: Tensor, corpus: Tensor, positives: Tensor, **settings: Any) -> Any:
    """Each rank searches in its own part of the corpus; positives elsewhere are forgotten."""
    world = World.of()
    queries_start, corpus_start = world.shards(len(queries)).start, world.shards(len(corpus)).start
    local = positives - corpus_start
    local[(local < 0) | (local >= len(corpus))] = -1
    found = mine(queries, corpus, local, **settings, process_group=ONE_PROCESS)
    offsets = {"query": queries_start, "positive": corpus_start, "negative": corpus_start}
    return {name: column + offsets.get(name, 0) for name, column in found.items()}


def positions_in_the_shard(queries: Tensor, corpus: Tensor, positives: Tensor, **settings: Any) -> Any:
    """Positives are taken for positions in the part of rank 0."""
    return mine(queries, corpus, positives % World.of().shards(len(corpus)).sizes[0], **settings)


def drawn_by_local_index(queries: Tensor, corpus: Tensor, positives: Tensor, **settings: Any) -> Any:
    """Each rank gathers the corpus and mines on its own, so that queries count from 0 on every rank."""
    found = mine(queries, all_gather(corpus), positives, **settings, process_group=ONE_PROCESS)
    return {**found, "query": found["query"] + World.of().shards(len(queries)).start}


def test_the_comparison_of_splits_catches_mistakes(worlds: Worlds) -> None:
    rows = {"queries": numbers(20, 4, seed=0), "corpus": numbers(40, 4, seed=1), "positives": torch.arange(20)}
    settings = {"num_negatives": 2, "range_max": 8, "sampling": "random"}
    for mistake in (own_corpus, drawn_by_local_index, positions_in_the_shard):
        with pytest.raises(AssertionError):
            same_columns_for_every_split(mistake, worlds, rows, settings, ((9, 11), (17, 23)))


def test_sentence_transformers_mines_the_same() -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    mine_theirs = sentence_transformers.util.mine_hard_negatives
    datasets = pytest.importorskip("datasets")
    rows = data()
    rows["positives"] = rows["positives"][:, 0]
    unit = {f"{name[0]}{i}": x for name in ("queries", "corpus") for i, x in enumerate(F.normalize(rows[name], dim=1))}
    answers, corpus = [f"c{i}" for i in rows["positives"].tolist()], [f"c{i}" for i in range(M)]
    pairs = datasets.Dataset.from_dict({"query": [f"q{i}" for i in range(N)], "answer": answers})

    class StandIn(sentence_transformers.SentenceTransformer):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

        device = torch.device("cpu")
        encode_query = encode_document = lambda self, texts, **_: np.stack([unit[text] for text in texts])
        similarity = staticmethod(lambda a, b: torch.as_tensor(a) @ torch.as_tensor(b).T)
        similarity_pairwise = staticmethod(lambda a, b: (torch.as_tensor(a) * torch.as_tensor(b)).sum(1))

    for settings in ({}, {"relative_margin": 0.1}, {"absolute_margin": 0.1, "max_score": 0.5}, {"range_min": 2}):
        theirs = mine_theirs(pairs, StandIn(), corpus=corpus, range_max=M - 1, verbose=False, **settings)
        found = [(int(q[1:]), int(x[1:])) for q, x in zip(theirs["query"], theirs["negative"], strict=True)]
        ours = mine(**rows, range_max=M - 1, **settings)
        expected = zip(ours["query"].tolist(), ours["negative"].tolist(), strict=True)
        assert sorted(found, key=lambda pair: pair[0]) == [*expected]


BAD: dict[str, dict[str, Any]] = {
    "one width and dtype, got float32 [37, 6] and float32 [90, 7]": {"corpus": torch.ones(M, D + 1)},
    "floating-point rows": {"queries": torch.ones(N, D).long(), "corpus": torch.ones(M, D).long()},
    "NaN or infinite": {"corpus": torch.full((M, D), torch.nan)},
    "into the 180 rows of the corpus, or -1, got 180": {"positives": torch.full((N, 2), 2 * M)},
    "for each of 37 queries, got int64 [3]": {"positives": torch.zeros(3, dtype=torch.int64)},
    "positives are int64, … got float32 [37]": {"positives": torch.zeros(N)},
    "fewer candidates than num_negatives=3": {"range_min": 5, "range_max": 6},
    "num_negatives is an integer, 1 … 1000000, got 0": {"num_negatives": 0},
    "'top' or 'random', got 'best'": {"sampling": "best"},
    "'triplet' or 'n-tuple', got 'list'": {"output": "list"},
    "scores and margins are numbers": {"max_score": float("nan")},
}


def test_bad_input_of_one_rank_is_every_ranks_error(worlds: Worlds) -> None:
    for words, change in BAD.items():
        refused(worlds, 2, lambda of=change: mine(**data(dist.get_rank()) | (of if dist.get_rank() else {})), words)
