"""Losses of sentence-transformers, the encoders that they train, and batches of words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

N, D, WORDS = 6, 4, 11
VOCABULARY = {"[PAD]": 0, "[UNK]": 1, **{f"w{i}": i for i in range(2, WORDS)}}


def library(name: str = "") -> Any:
    """Return a module of sentence-transformers. It takes seconds to import, so it is not when tests are collected."""
    return import_module(f"sentence_transformers{name and '.'}{name}")


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    bare = Tokenizer(WordLevel(VOCABULARY, unk_token="[UNK]"))
    bare.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=bare, pad_token="[PAD]", unk_token="[UNK]")


class Words(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.table, self.head, self.drop = nn.Embedding(WORDS, D), nn.Linear(D, D), nn.Dropout(drop)
        self.tokenizer = self.processor = tokenizer()
        self.max_seq_length = 8

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        mask = features["attention_mask"].unsqueeze(-1).to(self.head.weight.dtype)
        z = (self.table(features["input_ids"]) * mask).sum(1) / mask.sum(1).clamp(min=1)
        features["sentence_embedding"] = self.drop(torch.tanh(self.head(z)))
        return features

    def preprocess(self, inputs: list[str], **_: Any) -> dict[str, Tensor]:
        return dict(self.tokenizer(inputs, padding=True, return_tensors="pt", return_token_type_ids=False))

    def get_embedding_dimension(self) -> int:
        return D

    def save(self, *_: Any, **__: Any) -> None: ...


class Tokens(Words):
    def forward(self, features: dict[str, Tensor], task: str | None = None) -> dict[str, Tensor]:
        features["token_embeddings"] = torch.tanh(self.head(self.table(features["input_ids"])))
        return features


def words(seed: int = 0, drop: float = 0, kind: str = "SentenceTransformer", first: Any = Words, codes: int = 0) -> Any:
    torch.manual_seed(seed)
    modules = [first(drop)]
    if codes:
        modules.append(library("sparse_encoder.modules").SparseAutoEncoder(D, hidden_dim=codes, k=2, k_aux=2))
    return getattr(library(), kind)(modules=modules, device="cpu").double()


def features(columns: int, rows: slice = slice(None)) -> list[dict[str, Tensor]]:
    found = []
    for column in range(columns):
        generator = torch.Generator().manual_seed(column)
        ids = torch.randint(2, WORDS, (N, 5), generator=generator)
        lengths = torch.randint(1, 6, (N,), generator=generator)[rows]
        width = int(lengths.max()) if len(lengths) else 1
        mask = (torch.arange(width) < lengths[:, None]).long()
        found.append({"input_ids": ids[rows, :width] * mask, "attention_mask": mask})
    return found


def drawn(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


Settings = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A loss: that of its key in the table, up to the comma, with settings that may need the model."""

    settings: Settings | Callable[[Any], Settings] = field(default_factory=dict)
    columns: int = 2
    labels: Tensor | None = None
    build: Callable[[], Any] = words
    learnt: bool = False
    room: str = "sentence_transformer"


def loss_of(model: Any, key: str, settings: Any = (), room: str = "sentence_transformer") -> Any:
    kind = getattr(library(f"{room}.losses"), key.partition(",")[0])
    return kind(model, **(settings(model) if callable(settings) else dict(settings)))


def make(key: str, model: Any) -> nn.Module:
    return loss_of(model, key, CASES[key].settings, CASES[key].room)


def guided(model: Any) -> Settings:
    return {"guide": words(1), "temperature": 0.5}


def around(key: str, inner: Any = (), room: str = "sentence_transformer", **settings: Any) -> Callable[[Any], Settings]:
    """Return the settings of a loss around another one."""
    return lambda model: {"loss": loss_of(model, key, inner, room), **settings}


CLASSES, PAIRS, SCORES = torch.tensor([0, 1, 0, 2, 1, 0]), torch.tensor([1, 0, 0, 1, 1, 0]), drawn(N)
MNRL, CACHED_MNRL = "MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"
ALL_WAYS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
HARD = {"directions": ALL_WAYS, "hardness_mode": "hard_negatives", "hardness_strength": 1.0}
SMALL = {"mini_batch_size": 2}
SPLADE = {"document_regularizer_weight": 0.3, "query_regularizer_weight": 0.1, "room": "sparse_encoder"}
PLAIN = {
    MNRL: Case(),
    f"{MNRL}, negatives": Case({"directions": ALL_WAYS}, columns=4),
    f"{MNRL}, hardness": Case({"hardness_mode": "all_negatives", "hardness_strength": 2.0}, columns=3),
    "MultipleNegativesSymmetricRankingLoss": Case(),
    "GISTEmbedLoss": Case(guided, columns=3),
    "CoSENTLoss": Case(labels=SCORES),
    "AnglELoss": Case(labels=SCORES),
    "CosineSimilarityLoss": Case(labels=SCORES),
    "ContrastiveLoss": Case(labels=PAIRS),
    "OnlineContrastiveLoss": Case(labels=PAIRS),
    "TripletLoss": Case(columns=3),
    "MegaBatchMarginLoss": Case({"use_mini_batched_version": False}),
    "MarginMSELoss": Case(columns=3, labels=SCORES),
    "DistillKLDivLoss": Case(columns=3, labels=4 * drawn(N, 2)),
    "BatchHardTripletLoss": Case(columns=1, labels=CLASSES),
    "BatchHardSoftMarginTripletLoss": Case(columns=1, labels=CLASSES),
    "BatchSemiHardTripletLoss": Case(columns=1, labels=CLASSES),
    "BatchAllTripletLoss": Case(columns=1, labels=CLASSES),
    "GlobalOrthogonalRegularizationLoss": Case(),
    "SoftmaxLoss": Case({"embedding_dimension": D, "num_labels": 3}, labels=CLASSES, learnt=True),
    "EmbedDistillLoss": Case({"projection_dim": 5}, labels=drawn(N, 5), learnt=True),
    "MSELoss": Case({"projection_dim": 5}, labels=drawn(N, 2, 5), learnt=True),
    "MatryoshkaLoss": Case(around(MNRL, matryoshka_dims=[4, 2, 1])),
    "MatryoshkaLoss, some dims": Case(around(MNRL, matryoshka_dims=[4, 3, 2, 1], n_dims_per_step=2)),
    "MatryoshkaLoss, guide": Case(around("GISTEmbedLoss", guided, matryoshka_dims=[4, 2])),
}
CACHED = {
    CACHED_MNRL: Case(SMALL),
    f"{CACHED_MNRL}, negatives": Case(HARD | SMALL, columns=4),
    f"{CACHED_MNRL}, tokens": Case(SMALL | {"mini_batch_num_tokens": 4}),
    "CachedMultipleNegativesSymmetricRankingLoss": Case(SMALL),
    "CachedGISTEmbedLoss": Case(lambda model: guided(model) | SMALL, columns=3),
    "MegaBatchMarginLoss, cached": Case(SMALL),
    "MatryoshkaLoss, cached": Case(
        around(CACHED_MNRL, SMALL, matryoshka_dims=[4, 3, 2, 1], matryoshka_weights=[1, 2, 3, 4], n_dims_per_step=2)
    ),
}
sparse, late = partial(words, kind="SparseEncoder"), partial(words, kind="MultiVectorEncoder", first=Tokens)
splade = partial(around, "SparseMultipleNegativesRankingLoss", **SPLADE)
OF_TOKENS = {"build": late, "room": "multi_vector_encoder", "columns": 3}
OTHER_ENCODERS = {
    "SpladeLoss": Case(splade(), 3, build=sparse, room="sparse_encoder"),
    "CachedSpladeLoss": Case(splade(**SMALL), 3, build=sparse, room="sparse_encoder"),
    "CSRLoss": Case(build=partial(sparse, codes=8), room="sparse_encoder"),
    "MultiVectorMultipleNegativesRankingLoss": Case(**OF_TOKENS),
    "CachedMultiVectorMultipleNegativesRankingLoss": Case(SMALL | {"score_mini_batch_size": 3}, **OF_TOKENS),
    "MultiVectorDistillKLDivLoss": Case(labels=4 * drawn(N, 2), **OF_TOKENS),
}


def save_bert(path: Any) -> None:
    """Save an encoder with layers, which ranks load: they would save a part of it."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": D, "intermediate_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = BertConfig(vocab_size=WORDS, **sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    BertModel(config).save_pretrained(path)
    tokenizer().save_pretrained(path)


def bert(path: str) -> Any:
    modules = library("sentence_transformer.modules")
    layers = [modules.Transformer(path), modules.Pooling(D)]
    return library().SentenceTransformer(modules=layers, device="cpu").double().train()


LAYERS = {
    "AdaptiveLayerLoss": Case(around("CoSENTLoss"), labels=SCORES),
    "Matryoshka2dLoss": Case(around(MNRL, matryoshka_dims=[4, 2])),
}
CASES = PLAIN | CACHED | OTHER_ENCODERS | LAYERS
