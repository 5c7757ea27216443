"""Trainers pass on each rank's parts: nothing is split again, repeated or dropped, and every epoch has its own order."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import contrastive_zoo as cz
from contrastive_zoo.data import BaseBatchSampler, CollateEmptyBatches, GlobalBatchSampler
from contrastive_zoo.testing.auditing.records import listed
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import as_torchrun

pytestmark = pytest.mark.trainers

SIZE, BATCH, EPOCHS = 9, 4, 3
"""The last batch of an epoch has one sample, so rank 1 of 2 has none."""


DATA: Any = [{"x": torch.tensor([float(index)])} for index in range(SIZE)]


class Recorder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.seen: list[list[int]] = []

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.seen.append([int(value) for (value,) in x.tolist()])
        return {"loss": self.linear(x).sum()}


def loader() -> DataLoader[Any]:
    sampler = GlobalBatchSampler(SIZE, batch_size=BATCH, seed=1)
    return DataLoader(DATA, batch_sampler=sampler, collate_fn=CollateEmptyBatches(DATA[0]))


def expected() -> list[list[int]]:
    sampler = GlobalBatchSampler(SIZE, batch_size=BATCH, seed=1, process_group=cz.World())
    return [batch.tolist() for epoch in range(EPOCHS) for batch in sampler.global_batches(epoch)]


def torchrun_variables() -> None:
    as_torchrun()
    os.environ.update(GROUP_RANK="0", TORCHELASTIC_RUN_ID="none", MASTER_ADDR="localhost", MASTER_PORT="0")


def with_trainer(folder: str, resume: bool) -> list[list[int]]:
    """Hugging Face: return the plain loader from ``get_train_dataloader``."""
    from transformers import Trainer, TrainingArguments

    class WithSampler(Trainer):
        def get_train_dataloader(self) -> DataLoader[Any]:
            return loader()

    torchrun_variables()
    model = Recorder()
    arguments = TrainingArguments(
        folder, num_train_epochs=EPOCHS, optim="sgd", report_to=[], save_strategy="steps", save_steps=4, use_cpu=True,
        logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, ddp_find_unused_parameters=False,
    )  # fmt: skip
    trainer = WithSampler(model, arguments, train_dataset=DATA)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-4" if resume else None)
    return model.seen


def test_an_audit_lists_the_batches_of_a_sampler() -> None:
    (epoch,) = listed([loader()])
    assert epoch.batches == expected()[: len(epoch.batches)]
    assert (epoch.complete, epoch.sampler, epoch.shuffles, epoch.seed) == (True, "GlobalBatchSampler", True, 1)


def merged(by_rank: list[list[list[int]]]) -> list[list[int]]:
    return [[x for part in parts for x in part] for parts in zip(*by_rank, strict=True)]


def quietly(job: Any, *arguments: Any) -> list[list[int]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the number of workers, and a loss without samples
        return job(*arguments)


@pytest.fixture(scope="module")
def own() -> Any:
    """Trainers change the state of a process, so these worlds are not shared."""
    with Worlds(timeout=300.0) as pool:
        yield pool


def test_hugging_face(own: Worlds, tmp_path: Any) -> None:
    pytest.importorskip("accelerate")
    assert merged(own.run(2, quietly, with_trainer, str(tmp_path), False)) == expected()
    assert merged(own.run(2, quietly, with_trainer, str(tmp_path), True)) == expected()[4:]


def split_again(rank: int) -> list[int]:
    from accelerate.data_loader import prepare_data_loader

    sampler = GlobalBatchSampler(24, batch_size=6, process_group=cz.World(rank, 2))
    loader: Any = DataLoader(range(24), batch_sampler=sampler)  # type: ignore[arg-type]  # it has a length and items
    return [int(x) for batch in prepare_data_loader(loader, num_processes=2, process_index=rank) for x in batch]


def test_a_trainer_that_would_split_each_part_again_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    for rank in range(2):
        with pytest.raises(ValueError, match=r"GlobalBatchSampler: the trainer asks for drop_last, .* num_processes=1"):
            split_again(rank)
    assert GlobalBatchSampler(24, batch_size=6, process_group=cz.World()).drop_last is False
    monkeypatch.setattr(BaseBatchSampler, "drop_last", False)
    assert len(split_again(0) + split_again(1)) < 24
