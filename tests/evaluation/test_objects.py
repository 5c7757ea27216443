"""A refused batch leaves nothing behind, and ranks collect one dtype."""

import pytest
import torch

import contrastive_zoo as cz
from tests.helpers import error_message

pytestmark = pytest.mark.data

ROWS = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(40) % 5


def test_a_batch_that_is_refused_leaves_nothing_behind():
    metric = cz.metrics.RetrievalMetrics("map")
    metric.update(ROWS[:20], LABELS[:20])
    state = {name: [x.clone() for x in batches] for name, batches in metric.batches.items()}
    refusals = {
        "no metric recall@r": lambda: cz.metrics.RetrievalMetrics(["map", "recall@r"]),
        "one per row, got 5 for 20 rows": lambda: metric.update(ROWS[20:], LABELS[:5]),
        "one integer per row": lambda: metric.update(ROWS[20:], LABELS[20:].float()),
        "as wide as those of earlier batches": lambda: metric.update(ROWS[20:, :3], LABELS[20:]),
        "gallery_labels belong to a gallery": lambda: metric.update(ROWS[20:], LABELS[20:], gallery_labels=LABELS[20:]),
        "of one width and dtype, got float32 [8] and": lambda: metric.update(ROWS[0], LABELS[20:]),
        "grades [j], got int64 [3], int64 [3], float32 [2]": lambda: metric.update(
            ROWS[20:], judgements=(LABELS[:3], LABELS[:3], torch.ones(2))
        ),
        "three tensors, got 3": lambda: metric.update(ROWS[20:], judgements=3),
    }
    for says, update in refusals.items():
        assert says in str(error_message(update)), says
        assert {name: len(batches) for name, batches in metric.batches.items()} == dict.fromkeys(state, 1)
        assert all(torch.equal(metric.batches[name][0], x) for name, (x,) in state.items())
    metric.update(ROWS[20:], LABELS[20:])
    assert metric.compute().item() == cz.metrics.evaluate(ROWS, labels=LABELS, metrics=["map"])["map"]


def test_numbers_have_one_dtype_also_on_a_rank_that_has_collected_none(worlds):
    """Integer grades and narrow labels came from the data set; an empty shard has neither."""

    def job(rank):
        judged, labelled, nothing = map(cz.metrics.RetrievalMetrics, ("ndcg", "map", "map"))
        if rank == 1:
            ids = torch.arange(40)
            judged.update(ROWS, ids=ids, judgements=(ids, ids.roll(1), LABELS + 1))
            labelled.update(ROWS.double(), LABELS.to(torch.int32))
        says = str(error_message(nothing.compute))
        return judged.compute().item(), labelled.compute().item(), says

    ((expected,), *found) = worlds.run(1, job, each=[(1,)]), *worlds.run(3, job, each=[(0,), (1,), (2,)])
    assert found == [expected] * 3
    assert expected[1] == cz.metrics.evaluate(ROWS.double(), labels=LABELS, metrics=["map"])["map"]
    assert "before any update()" in expected[2]
