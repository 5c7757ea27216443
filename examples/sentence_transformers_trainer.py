"""``torchrun --standalone --nproc-per-node 2 -m examples sentence_transformers_trainer``: sentence-transformers' Trainer."""

import tempfile
from functools import partial
from typing import Any

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer import losses
from torch import nn
from torch.utils.data import BatchSampler, SequentialSampler

import contrastive_zoo as cz
from contrastive_zoo.adapters.sentence_transformers import DistributedSentenceLoss
from examples.digit_sentences import BATCH_SIZE, STEPS, EmbeddingLoss, Make, make_data, make_model, one_process, trained
from examples.digits import LEARNING_RATE, make_loss
from examples.setup import Setup, Trained


def in_order(data: Any, batch_size: int, drop_last: bool, **_: Any) -> Any:
    return BatchSampler(SequentialSampler(data), batch_size, drop_last)


def train(make: Make, accumulate: int = 1, pairs: bool = False) -> Trained:
    arguments = SentenceTransformerTrainingArguments(
        tempfile.mkdtemp(), max_steps=STEPS, per_device_train_batch_size=BATCH_SIZE // 2, optim="sgd",
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", max_grad_norm=0.0, batch_sampler=in_order,
        gradient_accumulation_steps=accumulate, ddp_find_unused_parameters=False, use_cpu=True, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    model = make_model()
    loss_fn = make(model)
    data = Dataset.from_dict(make_data(accumulate, pairs))
    SentenceTransformerTrainer(model, arguments, train_dataset=data, loss=loss_fn).train()
    return trained(model, loss_fn)


def bare(model: SentenceTransformer) -> nn.Module:
    return EmbeddingLoss(model, make_loss())


def wrapped(model: SentenceTransformer) -> nn.Module:
    return DistributedSentenceLoss(bare(model))


def inside(model: SentenceTransformer) -> nn.Module:
    return EmbeddingLoss(model, cz.DistributedLoss(make_loss()))


cached = partial(losses.CachedMultipleNegativesRankingLoss, mini_batch_size=4)
gathered = partial(cached, gather_across_devices=True)
on_one = partial(one_process, losses.MultipleNegativesRankingLoss, pairs=True)
SETUPS = [
    Setup(name, partial(train, make, n), reference=partial(one_process, bare, n), shards="even")
    for n, suffix in ((1, ""), (2, ", accumulation of 2 batches"))
    for name, make in ((f"DistributedSentenceLoss{suffix}", wrapped), (f"DistributedLoss in the loss{suffix}", inside))
]
SETUPS += [
    Setup("Cached…Loss(gather_across_devices=True)", partial(train, gathered, pairs=True), reference=on_one, shards="even",
          note="the loss has no parameters; the second number repeats the encoder's"),
    Setup("the bare loss", partial(train, bare), reference=partial(one_process, bare), shards="even",
          mistake="each rank compares its own sentences only", fix="DistributedSentenceLoss(loss)"),
    Setup("Cached…Loss without gather_across_devices", partial(train, cached, pairs=True), reference=on_one, shards="even",
          mistake="each rank compares its own sentences only", fix="gather_across_devices=True"),
]  # fmt: skip
