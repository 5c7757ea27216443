"""The example of the whole, stopped on two processes and continued on three, has the weights of one process."""

import pytest
import torch

from contrastive_zoo.testing.worlds import Worlds

pytest.importorskip("skimage")

from examples import retrieval

SHORT = retrieval.Settings(points=1200, batch_size=60, epochs=2, mine_from=12, mine_every=10)
STOP, END = 9, 23
"""Steps: the run is resumed before the first mining, and ends in the second epoch, after the second mining."""


def test_stop_on_two_processes_and_continue_on_three(worlds: Worlds) -> None:
    (expected,) = worlds.run(1, retrieval.train, None, END, SHORT, timeout=60.0)
    stopped = worlds.run(2, retrieval.train, None, STOP, SHORT, timeout=60.0)
    resumed = worlds.run(3, retrieval.train, stopped[1].checkpoint, END, SHORT, timeout=60.0)
    for found in resumed:
        assert (found.weights - expected.weights).abs().max() <= 1e-9
        assert (found.recall, found.recall_disturbed) == (expected.recall, expected.recall_disturbed)
        assert torch.equal(found.checkpoint.negatives["negatives"], expected.checkpoint.negatives["negatives"])
        assert found.checkpoint.sampler == expected.checkpoint.sampler
