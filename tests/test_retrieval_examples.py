"""The examples of retrieval: stopped and continued on other processes, they have the weights and scores of one process."""

import pytest
import torch

from contrastive_zoo.testing.worlds import Worlds

pytestmark = pytest.mark.trainers


def test_stop_on_two_processes_and_continue_on_three(worlds: Worlds) -> None:
    pytest.importorskip("skimage")
    from examples import retrieval

    # steps: the run is resumed before the first mining, and ends in the second epoch, after the second mining
    short, stop, end = retrieval.Settings(points=1200, batch_size=60, epochs=2, mine_from=12, mine_every=10), 9, 23
    (expected,) = worlds.run(1, retrieval.train, None, end, short)
    stopped = worlds.run(2, retrieval.train, None, stop, short)
    for found in worlds.run(3, retrieval.train, stopped[1].checkpoint, end, short):
        assert (found.weights - expected.weights).abs().max() <= 1e-9
        assert (found.recall, found.recall_disturbed) == (expected.recall, expected.recall_disturbed)
        negatives = (x.checkpoint["negatives"] for x in (found, expected))
        assert torch.equal(*negatives)
        assert found.checkpoint["sampler"] == expected.checkpoint["sampler"]


def test_training_on_docstrings_is_the_same_on_two_processes(worlds: Worlds) -> None:
    pytest.importorskip("sklearn")
    from examples import text_retrieval
    from examples.docstrings import texts

    short = text_retrieval.Settings(epochs=2, width=8, mine_every=2, learning_rate=1e-2, chunk_tokens=400, chunks=5)
    data = texts(("logging", "json"))
    (expected,) = worlds.run(1, text_retrieval.train, data, short)
    for found in worlds.run(2, text_retrieval.train, data, short):
        assert (found.weights - expected.weights).abs().max() <= 1e-10
        assert found.losses == pytest.approx(expected.losses, abs=1e-10)
        assert found.scores == expected.scores
    assert sum(expected.losses[-3:]) < sum(expected.losses[:3])
    local = text_retrieval.train(data, short._replace(epochs=1), local=True)
    assert abs(local.losses[0] - expected.losses[0]) > 0.1  # fewer negatives
