"""Lightning's Trainer with an audit of its running training: the right one goes on unchanged, the wrong one is named."""

import logging
import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from contrastive_zoo.testing.report import AuditReport
from contrastive_zoo.testing.worlds import Worlds

pytest.importorskip("lightning")
pytest.importorskip("sklearn")  # for the digits

from contrastive_zoo.testing.auditing.lightning import AuditCallback
from examples.digits import make_loader, make_loss
from examples.lightning_module import Digits, Embedder, train
from examples.setup import Trained

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning: few workers, no validation


class WithoutEmptyBatches(Digits):
    def train_dataloader(self) -> Any:
        return make_loader(self.trainer.global_rank, self.trainer.world_size, samples=124)


class LocalNegatives(Embedder):
    def __init__(self) -> None:
        super().__init__()
        self.loss_fn = make_loss()


def trained(module: Any, every: int | None, **settings: Any) -> tuple[Trained, AuditReport | None]:
    """Return the parameters after eight steps, and the last report."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    callback, rank = AuditCallback(every=every or 10**6), dist.get_rank()
    torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    with patch.dict(os.environ, {"TORCHELASTIC_RUN_ID": "test", **{key: str(x) for key, x in torchrun.items()}}):
        callbacks = [] if every is None else [callback]
        settings |= {"callbacks": callbacks, "limit_val_batches": 0, "gradient_clip_val": 0.1}
        found = train(WithoutEmptyBatches, module, **settings)
    return found, callback.report


@pytest.mark.parametrize(("module", "mistakes"), [(Embedder, []), (LocalNegatives, ["local negatives"])])
def test_a_training_is_audited_and_goes_on_as_without(module: Any, mistakes: list[str], worlds: Worlds) -> None:
    plain, audited = worlds.run(2, trained, module, None), worlds.run(2, trained, module, 4)
    for (expected, _), (found, report) in zip(plain, audited, strict=True):
        assert all(map(torch.equal, [*expected.encoder, *expected.loss], [*found.encoder, *found.loss]))
        assert report is not None
        assert [x.mistake for x in report.findings] == mistakes, str(report)
        assert report.ok is (not mistakes), str(report)
        assert report.name == "the training, step 5"


def accumulated() -> str:
    with pytest.raises(ValueError, match="accumulate_grad_batches=2") as error:
        trained(Embedder, 4, accumulate_grad_batches=2)
    return str(error.value)


def test_a_step_of_several_batches_is_refused_on_every_rank(worlds: Worlds) -> None:
    assert len(set(worlds.run(2, accumulated))) == 1
