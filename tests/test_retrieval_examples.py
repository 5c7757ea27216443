"""The example of retrieval: on two processes it has the weights and scores of one."""

import pytest

from contrastive_zoo.testing.worlds import Worlds

pytestmark = pytest.mark.trainers


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
