"""Lightning's Trainer with an audit of its running training: the right one goes on unchanged, the wrong one is named."""

import logging
import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import contrastive_zoo as cz
from contrastive_zoo.testing.report import AuditReport
from contrastive_zoo.testing.worlds import Worlds

pytest.importorskip("lightning")

from lightning.pytorch import LightningModule, Trainer

from contrastive_zoo.testing.auditing.lightning import AuditCallback

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning: few workers, no validation


class Embedder(LightningModule):
    """Encoder and loss of one module, and a logged value."""

    def __init__(self, loss_fn: nn.Module) -> None:
        super().__init__()
        self.encoder, self.loss_fn = nn.Linear(4, 3), loss_fn

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        value: Tensor = self.loss_fn(self.encoder(batch[0]), self.encoder(batch[1]))
        self.log("loss", value, on_epoch=True, batch_size=1)
        return value

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def trained(kind: str, every: int | None, **settings: Any) -> tuple[list[Tensor], AuditReport | None]:
    """Train two epochs of three steps; return the parameters and what was logged, and the last report."""
    rank = dist.get_rank()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    module = Embedder(cz.NTXent() if kind == "local negatives" else cz.DistributedLoss(cz.NTXent()))
    samples = torch.randn(2, 15, 4, generator=torch.Generator().manual_seed(rank))
    callback = AuditCallback(every=every or 10**6)
    torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    with patch.dict(os.environ, {"TORCHELASTIC_RUN_ID": "test", **{key: str(x) for key, x in torchrun.items()}}):
        trainer = Trainer(
            accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False, gradient_clip_val=0.1,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False, callbacks=[] if every is None else [callback], **settings,
        )  # fmt: skip
        trainer.fit(module, DataLoader(list(zip(*samples, strict=True)), batch_size=5))
    return [*module.state_dict().values(), *trainer.callback_metrics.values(), torch.tensor(trainer.global_step)], (
        callback.report
    )


def test_a_training_is_audited_and_goes_on_as_without(worlds: Worlds) -> None:
    for kind in ("right", "local negatives"):
        plain, audited = worlds.run(2, trained, kind, None), worlds.run(2, trained, kind, 4)
        for (expected, _), (found, report) in zip(plain, audited, strict=True):
            assert all(map(torch.equal, expected, found))
            assert report is not None
            assert [x.mistake for x in report.findings] == ([] if kind == "right" else [kind]), str(report)
            assert report.ok is (kind == "right"), str(report)
            assert report.name == "the training, step 5"


def accumulated() -> str:
    with pytest.raises(ValueError, match="accumulate_grad_batches=2") as error:
        trained("right", 4, accumulate_grad_batches=2)
    return str(error.value)


def test_a_step_of_several_batches_is_refused_on_every_rank(worlds: Worlds) -> None:
    assert len(set(worlds.run(2, accumulated))) == 1
