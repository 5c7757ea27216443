"""The example on docstrings has the weights and scores of one process on two, and its encoder learns."""

import pytest

from contrastive_zoo.testing.worlds import Worlds

pytest.importorskip("sklearn")

from examples import text_retrieval
from examples.docstrings import texts

SHORT = text_retrieval.Settings(epochs=2, width=8, mine_every=2, learning_rate=1e-2, chunk_tokens=400, chunks=5)


def test_training_on_docstrings_is_the_same_on_two_processes(worlds: Worlds) -> None:
    data = texts(("logging", "json"))
    (expected,) = worlds.run(1, text_retrieval.train, data, SHORT, timeout=60.0)
    for found in worlds.run(2, text_retrieval.train, data, SHORT, timeout=60.0):
        assert (found.weights - expected.weights).abs().max() <= 1e-10
        assert found.losses == pytest.approx(expected.losses, abs=1e-10)
        assert found.scores == expected.scores
    assert sum(expected.losses[-3:]) < sum(expected.losses[:3])
    local = text_retrieval.train(data, SHORT._replace(epochs=1), local=True)
    assert abs(local.losses[0] - expected.losses[0]) > 0.1  # fewer negatives
