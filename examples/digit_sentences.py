"""The digits as sentences, for sentence-transformers, and its training on one process."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

from examples.digits import LEARNING_RATE, make_dataset
from examples.setup import Trained

STEPS, BATCH_SIZE = 10, 24
Make = Callable[[SentenceTransformer], nn.Module]


class EmbeddingLoss(nn.Module):
    """Give a loss of embeddings and labels the interface of sentence-transformers."""

    def __init__(self, model: SentenceTransformer, loss_fn: nn.Module) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor) -> Tensor:
        return self.loss_fn(self.model(next(iter(sentence_features)))["sentence_embedding"], labels)


class Words(nn.Module):
    """The mean of a sentence's word vectors, as a module of sentence-transformers."""

    def __init__(self) -> None:
        super().__init__()
        words = {"[PAD]": 0, "[UNK]": 1, **{f"p{i}": i + 2 for i in range(64)}}
        self.tokenizer = self.processor = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
        self.tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        self.tokenizer.enable_padding()
        self.table = nn.Embedding(len(words), 16)

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        mask = features["attention_mask"].unsqueeze(-1).to(self.table.weight.dtype)
        features["sentence_embedding"] = (self.table(features["input_ids"]) * mask).sum(1) / mask.sum(1).clamp(min=1)
        return features

    def preprocess(self, inputs: list[str], **_: Any) -> dict[str, Tensor]:
        found = self.tokenizer.encode_batch(inputs)
        ids, masks = [x.ids for x in found], [x.attention_mask for x in found]
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(masks)}

    def get_embedding_dimension(self) -> int:
        return self.table.embedding_dim

    def save(self, *_: Any, **__: Any) -> None: ...


def make_model() -> SentenceTransformer:
    """Return a model that needs no download."""
    torch.manual_seed(0)
    return SentenceTransformer(modules=[Words()], device="cpu").double()


def sentences(images: Tensor, dark: float) -> list[str]:
    """Return each image as the names of its dark pixels."""
    return [" ".join(f"p{i}" for i, x in enumerate(image) if x > dark) for image in images.tolist()]


def make_data(accumulate: int, pairs: bool) -> dict[str, list[Any]]:
    """Return the columns of ten steps: sentences and labels, or pairs of sentences."""
    images, labels = make_dataset(STEPS * BATCH_SIZE * accumulate).tensors
    second = {"positive": sentences(images, 0.8)} if pairs else {"label": labels.tolist()}
    return {"anchor": sentences(images, 0.4), **second}


def trained(model: SentenceTransformer, loss_fn: nn.Module) -> Trained:
    """Return both kinds of parameters; the second is the encoder's again if the loss has none."""
    of_encoder = {id(x) for x in model.parameters()}
    own = [x.detach().clone() for x in loss_fn.parameters() if id(x) not in of_encoder]
    copied = [x.detach().clone() for x in model.parameters()]
    return Trained(copied, own or copied)


def one_process(make: Make, accumulate: int = 1, pairs: bool = False) -> tuple[Trained, Trained]:
    """Train with a loss of one process in a plain loop."""
    model, data = make_model(), make_data(accumulate, pairs)
    loss_fn, labels = make(model), torch.tensor(data.pop("label", [0] * len(data["anchor"])))
    before = trained(model, loss_fn)
    parameters = {*model.parameters(), *loss_fn.parameters()}
    optimizer = torch.optim.SGD(parameters, LEARNING_RATE)
    for i, batch in enumerate(torch.arange(len(labels)).split(BATCH_SIZE)):
        features = [model.preprocess([column[j] for j in batch]) for column in data.values()]
        (loss_fn(features, labels[batch]) / accumulate).backward()
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return before, trained(model, loss_fn)
