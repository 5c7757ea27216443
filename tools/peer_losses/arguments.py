"""The arguments of a loss: what this rank passes of a batch that all ranks draw."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastive_zoo.testing.batch import FEATURES
from tools.comparison import Batch

WIDTH, CLASSES, TOKENS = 8, 4, 3


@dataclass(frozen=True)
class Samples(Batch):
    """A batch, of which a loss takes embeddings that resemble each other, labels, and what is equal on all ranks."""

    numbers: Mapping[str, Tensor]
    """Parameters of the model that a loss is called with, such as a logit scale."""

    def embeddings(self, view: int) -> Tensor:
        first, other = self.normal(0, FEATURES), self.normal(view, FEATURES)
        return self.encoder(first if view == 0 else first + 0.5 * other)

    def equal(self, seed: int, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 + seed))

    def index(self) -> Tensor:
        return self.local(torch.arange(self.total))


Role = Literal["rows", "shared", "batch_dim"]


@dataclass(frozen=True)
class Argument:
    """What a loss takes: its name in the table, and the value of the so-manieth argument."""

    name: str
    value: Callable[[Samples, int], Any]
    role: Role = "rows"
    parameter: str = ""  # its name, if it is one of the model


def _tokens(batch: Samples, view: int, count: int = TOKENS) -> Tensor:
    return torch.stack([batch.embeddings(10 * view + token) for token in range(count)], dim=1)


def _features(batch: Samples, view: int) -> dict[str, Tensor]:
    """What a tokeniser returns, with embeddings that are already computed."""
    ones = torch.ones(len(batch.index()), TOKENS, dtype=torch.long)
    return {"token_embeddings": _tokens(batch, view), "input_ids": ones, "attention_mask": ones.clone()}


def _documents(batch: Samples, view: int) -> dict[str, Tensor]:
    columns = [_features(batch, view), _features(batch, view + 1)]
    return {name: torch.stack([x[name] for x in columns], 1).flatten(0, 1) for name in columns[0]}


queries_and_documents = Argument("dicts of tokens", lambda batch, _: [_features(batch, 0), _documents(batch, 1)])
triples = Argument("3 dicts of tokens", lambda batch, _: [_features(batch, view) for view in range(3)])


rows = Argument("rows", lambda batch, view: batch.embeddings(view))
unit_rows = Argument("unit rows", lambda batch, view: F.normalize(batch.embeddings(view), dim=1))
targets = Argument("rows without gradient", lambda batch, view: batch.embeddings(view).detach())
probabilities = Argument("rows of probabilities", lambda batch, view: batch.embeddings(view).detach().softmax(1))
tokens = Argument("tokens", _tokens)
unit_tokens = Argument("unit tokens", lambda batch, view: F.normalize(_tokens(batch, view), dim=2))
documents = Argument("negatives", lambda batch, view: _tokens(batch, view, 2))
long_documents = Argument(
    "token negatives", lambda batch, view: torch.stack([_tokens(batch, view), _tokens(batch, view + 1)], 1)
)
several_scores = Argument("scores of 2", lambda batch, _: batch.normal(50, 2))
regions = Argument("regions", lambda batch, view: (batch.index()[:, None] + torch.arange(TOKENS) + view) % TOKENS)
mask = Argument("mask", lambda batch, _: torch.ones(len(batch.index()), 1, TOKENS, dtype=torch.bool))
patches = Argument("rows of patches", lambda batch, view: _tokens(batch, view).flatten(0, 1))
tokens_masked = Argument("token mask", lambda batch, _: (batch.index()[:, None] + torch.arange(TOKENS)) % 2 == 0)
captions = Argument("token logits", _tokens)
caption_labels = Argument("token labels", lambda batch, _: batch.index()[:, None].expand(-1, TOKENS) % WIDTH)
scale = Argument("number", lambda batch, _: batch.numbers["scale"], parameter="scale")
bias = Argument("number", lambda batch, _: batch.numbers["bias"], parameter="bias")
prototypes = Argument("learnt shared", lambda batch, _: batch.numbers["prototypes"], "shared", "prototypes")


def _listed(count: int, first: int = 0, of: Argument = rows) -> Argument:
    return Argument(f"list of {count} {of.name}", lambda batch, _: [of.value(batch, first + x) for x in range(count)])


two_views, three_views, two_more_views = _listed(2), _listed(3), _listed(2, first=2)
two_of_probabilities = _listed(2, of=probabilities)


def _stack(batch: Samples, view: int, count: int) -> Tensor:
    """Views [V, n, d]."""
    return torch.stack([batch.embeddings(10 * view + x) for x in range(count)])


stack_of_2, stack_of_3 = (Argument(f"stack of {n}", partial(_stack, count=n), "batch_dim") for n in (2, 3))
stack_of_probabilities = Argument(
    "stack of probabilities", lambda batch, view: _stack(batch, view, 2).detach().softmax(2).float(), "batch_dim"
)


def _shared(*shape: int) -> Argument:
    """A tensor that is equal on all ranks: prototypes, or a queue."""
    return Argument("shared", lambda batch, view: F.normalize(batch.equal(view, *shape), dim=1), "shared")


queue, queue_of_columns, shared_negatives = _shared(16, WIDTH), _shared(WIDTH, 16), _shared(5, WIDTH)
