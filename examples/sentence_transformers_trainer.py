"""``torchrun --standalone --nproc-per-node 2 -m examples.sentence_transformers_trainer``: sentence-transformers' Trainer."""

import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.utils.data import BatchSampler, SequentialSampler

import contrastive_zoo as cz
from contrastive_zoo.adapters.sentence_transformers import DistributedSentenceLoss
from examples.digits import LEARNING_RATE, make_dataset, make_loss
from examples.setup import Setup, Trained, main

STEPS, BATCH_SIZE = 10, 24
Make = Callable[[SentenceTransformer], nn.Module]


class EmbeddingLoss(nn.Module):
    """A loss of embeddings and labels with the interface of sentence-transformers."""

    def __init__(self, model: SentenceTransformer, loss_fn: nn.Module) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor) -> Tensor:
        return self.loss_fn(self.model(next(iter(sentence_features)))["sentence_embedding"], labels)


def make_model() -> SentenceTransformer:
    """Return a model of the mean of a sentence's word vectors; it is made without a download."""
    words = Tokenizer(models.WordLevel({"[UNK]": 0, **{f"p{i}": i + 1 for i in range(64)}}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    return SentenceTransformer(modules=[StaticEmbedding(words, embedding_dim=16)], device="cpu").double()


def sentences(images: Tensor, dark: float) -> list[str]:
    """Return each image as the names of its dark pixels."""
    return [" ".join(f"p{i}" for i in range(64) if image[i] > dark) for image in images.tolist()]


def make_data(accumulate: int, pairs: bool) -> dict[str, list[Any]]:
    images, labels = make_dataset(STEPS * BATCH_SIZE * accumulate).tensors
    return {"anchor": sentences(images, 0.4), **({"positive": sentences(images, 0.8)} if pairs else {"label": labels.tolist()})}


def in_order(data: Any, batch_size: int, drop_last: bool, **_: Any) -> BatchSampler:
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


def trained(model: SentenceTransformer, loss_fn: nn.Module) -> Trained:
    """Return both kinds of parameters; the second is the encoder's again if the loss has none."""
    encoder = {id(x) for x in model.parameters()}
    own = [x.detach().clone() for x in loss_fn.parameters() if id(x) not in encoder]
    copied = [x.detach().clone() for x in model.parameters()]
    return Trained(copied, own or copied)


def reference(make: Make, accumulate: int = 1, pairs: bool = False) -> tuple[Trained, Trained]:
    """Train on one process with the loss of one process, in a plain loop."""
    model, data = make_model(), make_data(accumulate, pairs)
    loss_fn, labels = make(model), torch.tensor(data.pop("label", [0] * len(data["anchor"])))
    before = trained(model, loss_fn)
    optimizer = torch.optim.SGD(loss_fn.parameters(), LEARNING_RATE)
    for i, batch in enumerate(torch.arange(len(labels)).split(BATCH_SIZE)):
        features = [model.preprocess([column[j] for j in batch]) for column in data.values()]
        (loss_fn(features, labels[batch]) / accumulate).backward()
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return before, trained(model, loss_fn)
