"""Mined negatives are those of a plain search, and the same bits for every split of queries and corpus."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.data import mining
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import common_error, numbers
from tests.mining.test_invariants import same_columns_for_every_split

N, M, D = 37, 90, 6
BASIC = ("queries", "corpus", "positives")
COLUMNS = ("query", "positive", "negative", "positive_score", "negative_score")


def data(seed: int = 0, ties: bool = False) -> dict[str, Tensor]:
    """Return queries, a corpus, one or two positives each, labels and ids; with many equal scores on request."""
    generator = torch.Generator().manual_seed(seed)
    if ties:
        queries, corpus = (torch.randint(-1, 2, (size, 3), generator=generator).float() for size in (N, M))
    else:
        queries, corpus = numbers(N, D, seed=seed).float(), numbers(M, D, seed=seed + 1).float()
    positives = torch.randint(0, M, (N, 2), generator=generator)
    positives[::3, 1] = -1
    return {
        "queries": queries,
        "corpus": corpus,
        "positives": positives,
        "query_labels": torch.arange(N) % 4,
        "corpus_labels": torch.arange(M) % 5,
        "corpus_ids": torch.arange(M) // 2,
    }


def basic() -> dict[str, Tensor]:
    """Return what every mining needs."""
    return {name: data()[name] for name in BASIC}


def by_hand(given: dict[str, Tensor], guide: Tensor | None = None, **settings: Any) -> list[list[int]]:
    """Return the negatives of each query, found by looking at all pairs one after the other ("top" only)."""
    get = {"range_min": 0, "num_negatives": 3, **settings}.get
    q, c = (F.normalize(given[name].double(), dim=1) for name in ("queries", "corpus"))
    scores = q @ c.T
    found = []
    for query, positives in enumerate(given["positives"].tolist()):
        positives = [x for x in positives if x >= 0]
        ids = {given["corpus_ids"][x].item() for x in positives} if "corpus_ids" in given else set()
        label = given["query_labels"][query].item() if "query_labels" in given else None
        candidates = [
            x for x in range(len(c))
            if x not in positives
            and (label is None or given["corpus_labels"][x].item() != label)
            and ("corpus_ids" not in given or given["corpus_ids"][x].item() not in ids)
        ]  # fmt: skip
        candidates.sort(key=lambda x: (-round(scores[query, x].item(), 6), x))
        worst = min((scores[query, x].item() for x in positives), default=np.inf)

        def allowed(x: int, query: int = query, worst: float = worst, positives: list[int] = positives) -> bool:
            score = scores[query, x].item()
            return (
                (get("max_score") is None or score <= get("max_score"))
                and (get("min_score") is None or score >= get("min_score"))
                and (get("absolute_margin") is None or score <= worst - get("absolute_margin"))
                and (get("relative_margin") is None or score <= worst - abs(worst) * get("relative_margin"))
                and (guide is None or guide[query, x] <= min(guide[query, p] for p in positives))
            )

        window = candidates[get("range_min") : get("range_max")]
        found.append([x for x in window if allowed(x)][: get("num_negatives")])
    return found


def negatives(columns: dict[str, Any], queries: int = N) -> list[list[int]]:
    """Return the negatives of each query from triplets, of its first positive."""
    found: list[list[int]] = [[] for _ in range(queries)]
    first: dict[int, int] = {}
    for query, positive, negative in zip(*(columns[name].tolist() for name in COLUMNS[:3]), strict=True):
        if first.setdefault(query, positive) == positive:
            found[query].append(negative)
    return found


SETTINGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "plain": ({}, ()),
    "range": ({"range_min": 4, "range_max": 9, "num_negatives": 2}, ()),
    "thresholds": ({"max_score": 0.6, "min_score": -0.1, "range_max": 60}, ()),
    "absolute margin": ({"absolute_margin": 0.2, "range_max": 90}, ()),
    "relative margin": ({"relative_margin": 0.3, "range_max": 90}, ()),
    "labels": ({"num_negatives": 5}, ("query_labels", "corpus_labels")),
    "ids": ({"num_negatives": 4}, ("corpus_ids",)),
    "labels and ids": ({"num_negatives": 7, "range_max": 200}, ("query_labels", "corpus_labels", "corpus_ids")),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_one_process_finds_what_a_plain_search_finds(name: str, ties: bool) -> None:
    settings, used = SETTINGS[name]
    if ties and name not in ("plain", "range", "labels", "ids"):
        pytest.skip("thresholds between equal scores are a matter of the last bit")
    rows = {x: data(ties=ties)[x] for x in (*BASIC, *used)}
    assert negatives(cz.data.mine_hard_negatives(**rows, **settings)) == by_hand(rows, **settings)


def test_a_guide_refuses_false_negatives() -> None:
    rows = basic()
    scores = numbers(N, M, seed=9)
    found = cz.data.mine_hard_negatives(**rows, guide=lambda query, corpus: scores[query, corpus], range_max=M)
    assert negatives(found) == by_hand(rows, guide=scores)


def test_columns_of_both_forms() -> None:
    rows = basic()
    triplets = cz.data.mine_hard_negatives(**rows, num_negatives=2)
    tuples = cz.data.mine_hard_negatives(**rows, num_negatives=2, output="n-tuple")
    assert tuple(triplets) == tuple(tuples) == COLUMNS
    assert {len(x) for x in triplets.values()} == {2 * int((rows["positives"] >= 0).sum())}
    assert tuples["negative"].ravel().tolist() == triplets["negative"].tolist()
    q, c = (F.normalize(rows[name].double(), dim=1) for name in ("queries", "corpus"))
    for of in ("positive", "negative"):
        expected = (q[triplets["query"]] * c[triplets[of]]).sum(1)
        np.testing.assert_allclose(triplets[f"{of}_score"], expected, atol=1e-6)


def test_n_tuples_are_complete_and_triplets_are_not() -> None:
    rows = basic()
    settings = {"absolute_margin": 0.4, "range_max": 90, "num_negatives": 40}
    complete = {i for i, x in enumerate(by_hand(rows, **settings)) if len(x) == 40}
    assert 0 < len(complete) < N
    assert set(cz.data.mine_hard_negatives(**rows, **settings, output="n-tuple")["query"].tolist()) == complete


def test_random_negatives_are_a_function_of_the_seed() -> None:
    rows = basic()
    first, again, other = (
        cz.data.mine_hard_negatives(**rows, sampling="random", seed=seed, range_max=20)["negative"].tolist()
        for seed in (0, 0, 1)
    )
    assert first == again != other
    window = by_hand(rows, num_negatives=20, range_max=20)
    drawn = negatives(cz.data.mine_hard_negatives(**rows, sampling="random", range_max=20))
    assert all(set(x) <= set(y) for x, y in zip(drawn, window, strict=True))
    places = [window[query].index(x) for query, found in enumerate(drawn) for x in found]
    assert 7 < np.mean(places) < 12  # uniform over 20 ranks, 111 draws


def test_the_steps_do_not_show(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = basic()
    expected = cz.data.mine_hard_negatives(**rows, sampling="random")
    monkeypatch.setattr(mining, "QUERIES_OF_A_STEP", 8)
    found = cz.data.mine_hard_negatives(**rows, sampling="random", progress=True)
    assert "37/37" in capsys.readouterr().err
    assert all(np.array_equal(found[name], expected[name]) for name in COLUMNS)


def test_the_corpus_may_be_a_memory_map(tmp_path: Any) -> None:
    rows = {name: x.numpy() for name, x in basic().items()}
    np.save(tmp_path / "corpus.npy", rows["corpus"])
    expected = cz.data.mine_hard_negatives(**rows)
    rows["corpus"] = np.load(tmp_path / "corpus.npy", mmap_mode="r")
    assert np.array_equal(cz.data.mine_hard_negatives(**rows)["negative"], expected["negative"])


def test_columns_are_a_dataset() -> None:
    datasets = pytest.importorskip("datasets")
    rows = basic()
    found = datasets.Dataset.from_dict(cz.data.mine_hard_negatives(**rows, output="n-tuple"))
    assert found.column_names == list(COLUMNS)
    assert len(found[0]["negative"]) == 3


# ----------------------------------------------------------------------------------------------------- several ranks


def guided(**arguments: Any) -> Any:
    return cz.data.mine_hard_negatives(
        **arguments, guide=lambda query, corpus: ((query * 31 + corpus * 17) % 101).float()
    )


@st.composite
def splits(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Draw shard sizes of queries and corpus, uneven and empty ones too."""
    size = draw(st.integers(2, 4))

    def shards(total: int) -> list[int]:
        cuts = sorted(draw(st.lists(st.integers(0, total), min_size=size - 1, max_size=size - 1)))
        return np.diff([0, *cuts, total]).tolist()

    return shards(N), shards(M)


@given(
    shards=splits(),
    name=st.sampled_from([*SETTINGS]),
    ties=st.booleans(),
    mine=st.sampled_from([cz.data.mine_hard_negatives, guided]),
    more=st.sampled_from([{}, {"sampling": "random"}, {"output": "n-tuple"}]),
)
def test_every_split_mines_the_same_bits(
    shards: tuple[list[int], list[int]], name: str, ties: bool, mine: Any, more: dict[str, Any], worlds: Worlds
) -> None:
    settings, used = SETTINGS[name]
    rows = {x: data(ties=ties)[x] for x in (*BASIC, *used)}
    same_columns_for_every_split(mine, worlds, rows, settings | more, shards)


def test_sentence_transformers_mines_the_same() -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    datasets = pytest.importorskip("datasets")
    rows = basic()
    rows["positives"] = rows["positives"][:, 0]
    unit = {name: F.normalize(rows[name], dim=1) for name in ("queries", "corpus")}
    pairs = datasets.Dataset.from_dict(
        {"query": [f"q{i}" for i in range(N)], "answer": [f"c{i}" for i in rows["positives"].tolist()]}
    )

    class StandIn(sentence_transformers.SentenceTransformer):
        """A model whose embeddings are its inputs."""

        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

        device = torch.device("cpu")
        encode_query = encode_document = lambda self, texts, **_: np.stack(
            [unit["queries" if text[0] == "q" else "corpus"][int(text[1:])] for text in texts]
        )
        similarity = staticmethod(lambda a, b: torch.as_tensor(a) @ torch.as_tensor(b).T)
        similarity_pairwise = staticmethod(lambda a, b: (torch.as_tensor(a) * torch.as_tensor(b)).sum(1))

    for settings in ({}, {"relative_margin": 0.1}, {"absolute_margin": 0.1, "max_score": 0.5}, {"range_min": 2}):
        theirs = sentence_transformers.util.mine_hard_negatives(
            pairs, StandIn(), corpus=[f"c{i}" for i in range(M)], range_max=M - 1, verbose=False, **settings
        )
        found: list[list[int]] = [[] for _ in range(N)]
        for query, negative in zip(theirs["query"], theirs["negative"], strict=True):
            found[int(query[1:])].append(int(negative[1:]))
        assert found == negatives(cz.data.mine_hard_negatives(**rows, range_max=M - 1, **settings))


# ---------------------------------------------------------------------------------------------------------- bad input

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"corpus": torch.ones(M, D + 1)}, r"one width and dtype, got float32 \[37, 6\] and float32 \[90, 7\]"),
    "integers": ({"queries": torch.ones(N, D).long(), "corpus": torch.ones(M, D).long()}, "floating-point rows"),
    "nan": ({"corpus": torch.full((M, D), torch.nan)}, "NaN or infinite"),
    "outside": ({"positives": torch.full((N,), M)}, "indices into the 90 rows of the corpus, or -1, got 90"),
    "length": ({"positives": torch.zeros(3, dtype=torch.int64)}, r"for each of 37 rows, got int64 \[3\]"),
    "dtype": ({"positives": torch.zeros(N)}, r"positives are int64, got float32 \[37\]"),
    "one label": ({"query_labels": torch.zeros(N, dtype=torch.int64)}, "come together"),
    "range": ({"range_min": 5, "range_max": 6}, "fewer candidates than num_negatives=3"),
    "number": ({"num_negatives": 0}, "num_negatives is an integer, 1 … 1000000, got 0"),
    "sampling": ({"sampling": "best"}, "'top' or 'random', got 'best'"),
    "output": ({"output": "list"}, "'triplet' or 'n-tuple', got 'list'"),
    "threshold": ({"max_score": float("nan")}, "scores and margins are numbers"),
    "guide": ({"guide": lambda query, corpus: query[:1]}, "one number per pair"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    change, says = BAD[name]
    with pytest.raises(ValueError, match=says):
        cz.data.mine_hard_negatives(**{**basic(), **change})


def test_bad_input_of_one_rank_is_every_ranks_error(worlds: Worlds) -> None:
    def job(name: str | None) -> Any:
        rows: dict[str, Any] = {**basic(), "guide": lambda query, corpus: corpus}
        rows |= BAD[name][0] if name and dist.get_rank() == 1 else {}
        return cz.data.mine_hard_negatives(**rows)["negative"].tolist()

    for name in ("width", "nan", "outside", "length", "number", "guide"):
        text, _ = common_error(worlds, 2, lambda name=name: job(name), lambda: job(None))
        assert text.startswith(("mine_hard_negatives: ", "top_k: ")), text


def test_the_error_of_a_guide_is_the_cause() -> None:
    rows = basic()
    with pytest.raises(ValueError, match="the guide raised KeyError: 'model'") as raised:
        cz.data.mine_hard_negatives(**rows, guide=lambda query, corpus: {}["model"])
    assert isinstance(raised.value.__cause__, KeyError)
