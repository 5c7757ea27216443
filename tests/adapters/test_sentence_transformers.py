"""Every loss of sentence-transformers is, behind its adapter, the same function on W ranks as on one; or refused, and
why."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SentenceTransformerTrainer, SparseEncoder
from sentence_transformers.multi_vector_encoder import losses as late_losses
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from sentence_transformers.sparse_encoder import losses as sparse_losses
from sentence_transformers.sparse_encoder.modules import SparseAutoEncoder
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from contrastive_zoo.adapters.sentence_transformers import ENCODERS, DistributedSentenceLoss
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EVERY_CASE, assert_says, close, distance, error_message

N, D, WORDS = 6, 4, 11
SPLITS = [(6,), (4, 2), (3, 1, 2), (2, 0, 4)]
# sentence-transformers keeps two losses that it would rather not
pytestmark = pytest.mark.filterwarnings("ignore:The .*SymmetricRankingLoss is deprecated")
VOCABULARY = {"[PAD]": 0, "[UNK]": 1, **{f"w{i}": i for i in range(2, WORDS)}}


def tokenizer() -> PreTrainedTokenizerFast:
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


def words(seed: int = 0, drop: float = 0.0) -> SentenceTransformer:
    torch.manual_seed(seed)
    return SentenceTransformer(modules=[Words(drop)], device="cpu").double()


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


@dataclass(frozen=True)
class Case:
    make: Callable[[Any], nn.Module]
    columns: int = 2
    labels: Tensor | None = None
    build: Callable[[], Any] = words
    learnt: bool = False


CLASSES, PAIRS, SCORES = torch.tensor([0, 1, 0, 2, 1, 0]), torch.tensor([1, 0, 0, 1, 1, 0]), drawn(N)


def mnrl(model: SentenceTransformer, **settings: Any) -> nn.Module:
    return losses.MultipleNegativesRankingLoss(model, **settings)


def cached(model: SentenceTransformer, **settings: Any) -> nn.Module:
    return losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2, **settings)


ALL_WAYS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
CASES = {
    "MultipleNegativesRankingLoss": Case(mnrl),
    "MultipleNegativesRankingLoss, negatives": Case(lambda m: mnrl(m, directions=ALL_WAYS), columns=4),
    "MultipleNegativesRankingLoss, hardness": Case(
        lambda m: mnrl(m, hardness_mode="all_negatives", hardness_strength=2.0), columns=3
    ),
    "MultipleNegativesSymmetricRankingLoss": Case(losses.MultipleNegativesSymmetricRankingLoss),
    "GISTEmbedLoss": Case(lambda m: losses.GISTEmbedLoss(m, guide=words(1), temperature=0.5), columns=3),
    "CoSENTLoss": Case(losses.CoSENTLoss, labels=SCORES),
    "AnglELoss": Case(losses.AnglELoss, labels=SCORES),
    "CosineSimilarityLoss": Case(losses.CosineSimilarityLoss, labels=SCORES),
    "ContrastiveLoss": Case(losses.ContrastiveLoss, labels=PAIRS),
    "OnlineContrastiveLoss": Case(losses.OnlineContrastiveLoss, labels=PAIRS),
    "TripletLoss": Case(losses.TripletLoss, columns=3),
    "MegaBatchMarginLoss": Case(lambda m: losses.MegaBatchMarginLoss(m, use_mini_batched_version=False)),
    "MarginMSELoss": Case(losses.MarginMSELoss, columns=3, labels=SCORES),
    "DistillKLDivLoss": Case(losses.DistillKLDivLoss, columns=3, labels=4 * drawn(N, 2)),
    "BatchHardTripletLoss": Case(losses.BatchHardTripletLoss, 1, CLASSES),
    "BatchHardSoftMarginTripletLoss": Case(losses.BatchHardSoftMarginTripletLoss, 1, CLASSES),
    "BatchSemiHardTripletLoss": Case(losses.BatchSemiHardTripletLoss, 1, CLASSES),
    "BatchAllTripletLoss": Case(losses.BatchAllTripletLoss, 1, CLASSES),
    "GlobalOrthogonalRegularizationLoss": Case(losses.GlobalOrthogonalRegularizationLoss),
    "SoftmaxLoss": Case(lambda m: losses.SoftmaxLoss(m, D, num_labels=3), labels=CLASSES, learnt=True),
    "EmbedDistillLoss": Case(lambda m: losses.EmbedDistillLoss(m, projection_dim=5), labels=drawn(N, 5), learnt=True),
    "MSELoss": Case(lambda m: losses.MSELoss(m, projection_dim=5), labels=drawn(N, 2, 5), learnt=True),
    "MatryoshkaLoss": Case(lambda m: losses.MatryoshkaLoss(m, mnrl(m), [4, 2, 1])),
    "MatryoshkaLoss, some dims": Case(lambda m: losses.MatryoshkaLoss(m, mnrl(m), [4, 3, 2, 1], n_dims_per_step=2)),
    "MatryoshkaLoss, guide": Case(
        lambda m: losses.MatryoshkaLoss(m, losses.GISTEmbedLoss(m, guide=words(1), temperature=0.5), [4, 2])
    ),
}

CACHED = {
    "CachedMultipleNegativesRankingLoss": Case(cached),
    "CachedMultipleNegativesRankingLoss, negatives": Case(
        lambda m: cached(m, directions=ALL_WAYS, hardness_mode="hard_negatives", hardness_strength=1.0), columns=4
    ),
    "CachedMultipleNegativesRankingLoss, tokens": Case(lambda m: cached(m, mini_batch_num_tokens=4)),
    "CachedMultipleNegativesSymmetricRankingLoss": Case(
        lambda m: losses.CachedMultipleNegativesSymmetricRankingLoss(m, mini_batch_size=2)
    ),
    "CachedGISTEmbedLoss": Case(
        lambda m: losses.CachedGISTEmbedLoss(m, guide=words(1), temperature=0.5, mini_batch_size=2), columns=3
    ),
    "MegaBatchMarginLoss, cached": Case(lambda m: losses.MegaBatchMarginLoss(m, mini_batch_size=2)),
    "MatryoshkaLoss, cached": Case(
        lambda m: losses.MatryoshkaLoss(m, cached(m), [4, 3, 2, 1], matryoshka_weights=[1, 2, 3, 4], n_dims_per_step=2)
    ),
}


class Tokens(Words):
    def forward(self, features: dict[str, Tensor], task: str | None = None) -> dict[str, Tensor]:
        features["token_embeddings"] = torch.tanh(self.head(self.table(features["input_ids"])))
        return features


def sparse() -> Any:
    torch.manual_seed(0)
    return SparseEncoder(modules=[Words()], device="cpu").double()


def autoencoder() -> Any:
    torch.manual_seed(0)
    return SparseEncoder(modules=[Words(), SparseAutoEncoder(D, hidden_dim=8, k=2, k_aux=2)], device="cpu").double()


def late() -> Any:
    torch.manual_seed(0)
    return MultiVectorEncoder(modules=[Tokens()], device="cpu").double()


def splade(model: Any, kind: Any = sparse_losses.SpladeLoss, **settings: Any) -> nn.Module:
    inner = sparse_losses.SparseMultipleNegativesRankingLoss(model)
    return kind(model, inner, document_regularizer_weight=0.3, query_regularizer_weight=0.1, **settings)


def multi_vector(kind: Any, **settings: Any) -> Callable[[Any], nn.Module]:
    return lambda m: getattr(late_losses, f"{kind}Loss")(m, **settings)


OTHER_ENCODERS = {
    "SpladeLoss": Case(splade, 3, build=sparse),
    "CachedSpladeLoss": Case(lambda m: splade(m, sparse_losses.CachedSpladeLoss, mini_batch_size=2), 3, build=sparse),
    "CSRLoss": Case(sparse_losses.CSRLoss, build=autoencoder),
    "MultiVector": Case(multi_vector("MultiVectorMultipleNegativesRanking"), 3, build=late),
    "MultiVector, cached": Case(
        multi_vector("CachedMultiVectorMultipleNegativesRanking", mini_batch_size=2, score_mini_batch_size=3),
        3,
        build=late,
    ),
    "MultiVector, distilled": Case(multi_vector("MultiVectorDistillKLDiv"), 3, 4 * drawn(N, 2), build=late),
}
LAYERS = {
    "AdaptiveLayerLoss": Case(lambda m: losses.AdaptiveLayerLoss(m, losses.CoSENTLoss(m)), labels=SCORES),
    "Matryoshka2dLoss": Case(lambda m: losses.Matryoshka2dLoss(m, mnrl(m), [4, 2])),
}
REFUSED: dict[str, tuple[Callable[[SentenceTransformer], nn.Module], str]] = {
    "a cached loss in another one": (
        lambda m: nn.Sequential(mnrl(m), cached(m)),
        "has no gradient cache, and contains CachedMultipleNegativesRankingLoss",
    ),
    "a cross encoder": (
        lambda m: nn.Sequential(nn.BCEWithLogitsLoss()),
        "those of a CrossEncoder compare no embeddings",
    ),
    "gathered": (lambda m: mnrl(m, gather_across_devices=True), "Pass gather_across_devices=False"),
    "ContrastiveTensionLoss": (losses.ContrastiveTensionLoss, "trains 2 encoders (model2, model1)"),
    "ContrastiveTensionLossInBatchNegatives": (
        losses.ContrastiveTensionLossInBatchNegatives,
        "trains 2 encoders (model2, model1)",
    ),
    "a loss of embeddings": (lambda m: nn.CosineEmbeddingLoss(), "holds no SentenceTransformer, SparseEncoder or"),
}
NO_LOSSES = {
    "BatchHardTripletLossDistanceFunction",
    "ContrastiveTensionDataLoader",
    "SiameseDistanceMetric",
    "TripletDistanceMetric",
}


@dataclass
class Found:
    value: Tensor
    encoder: dict[str, Tensor]
    parameters: dict[str, Tensor]


def bare(loss: nn.Module, **_: Any) -> nn.Module:
    return loss


def measured(
    case: Case, shards: tuple[int, ...], wrap: Callable[..., Any], *, ddp: bool = False, grad_reduction: str = "mean"
) -> Found:
    """Return what a rank computes; the loss's own parameters start differently on every rank."""
    rank, model = dist.get_rank(), case.build()
    torch.manual_seed(100 + rank)
    random.seed(100 + rank)
    loss = wrap(case.make(model).double(), grad_reduction=grad_reduction)
    if ddp:
        loss = in_trainer(loss, DistributedDataParallel(model))
    rows = slice(sum(shards[:rank]), sum(shards[: rank + 1]))
    value = loss(features(case.columns, rows), None if case.labels is None else case.labels[rows])
    total = torch.stack(list(value.values())).sum() if isinstance(value, dict) else value  # as the trainer does
    total.backward()
    encoder = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    theirs = {x for part in loss.modules() if isinstance(part, ENCODERS) for x in part.parameters()}
    own = {name.removeprefix("loss."): x.grad for name, x in loss.named_parameters() if x not in theirs}
    return Found(torch.stack(tree_leaves(tree_map(torch.Tensor.detach, value))), encoder, own)


def in_trainer(loss: Any, model: nn.Module) -> Any:
    trainer = SentenceTransformerTrainer.__new__(SentenceTransformerTrainer)  # needs datasets to be made
    return trainer.override_model_in_loss(loss, model)


def alone(worlds: Worlds, case: Case) -> Found:
    return worlds.run(1, measured, case, (N,), bare)[0]


def on_ranks(
    worlds: Worlds, case: Case, shards: tuple[int, ...], wrap: Any = DistributedSentenceLoss, **how: Any
) -> list[Found]:
    return worlds.run(len(shards), measured, case, shards, wrap, **how)


def assert_same(found: list[Found], expected: Found, reduce: str = "mean") -> None:
    for each in found:
        close(each.value, expected.value)
        assert each.parameters.keys() == expected.parameters.keys()
    for name, x in expected.encoder.items():
        gradients = torch.stack([each.encoder[name] for each in found])
        close(gradients.mean(0) if reduce == "mean" else gradients.sum(0), x)
    for name, x in expected.parameters.items():
        for each in found:
            close(each.parameters[name] * (len(found) if reduce == "sum" else 1), x)
            assert torch.equal(each.parameters[name], found[0].parameters[name])


def test_every_loss_is_in_a_table() -> None:
    known = (
        {name.partition(",")[0] for name in (*CASES, *CACHED, *LAYERS, *REFUSED)}
        | NO_LOSSES
        | {"DenoisingAutoEncoderLoss"}
    )
    assert set(losses.__all__) <= known


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    sizes = {"hidden_size": D, "intermediate_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2}
    BertModel(
        BertConfig(vocab_size=WORDS, **sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


def bert(path: str) -> SentenceTransformer:
    return SentenceTransformer(modules=[Transformer(path), Pooling(D)], device="cpu").double().train()


DRAWN = [*list(CASES)[:: 1 if EVERY_CASE else 2], *CACHED, *OTHER_ENCODERS, *LAYERS]
ONE_EACH = [next(iter(x)) for x in (CASES, CACHED, OTHER_ENCODERS, LAYERS)]


@pytest.mark.parametrize("name", [x if x in ONE_EACH else pytest.param(x, marks=pytest.mark.trainers) for x in DRAWN])
def test_ranks_compute_what_one_process_computes(name: str, checkpoint: str, worlds: Worlds) -> None:
    """Losses of a gradient cache, of other encoders and of layers under DDP, as in a trainer; others without it, too."""
    case = (CASES | CACHED | OTHER_ENCODERS | LAYERS)[name]
    case = replace(case, build=partial(bert, checkpoint)) if name in LAYERS else case
    expected = alone(worlds, case)
    assert bool(expected.parameters) == case.learnt
    for shards in SPLITS[: -1 if name in LAYERS else None]:  # BERT takes no empty batch
        ddp = len(shards) > 1 and (name not in CASES or shards == (3, 1, 2))
        how = "sum" if name in CASES and shards == (4, 2) else "mean"
        found = on_ranks(worlds, case, shards, ddp=ddp, grad_reduction=how)
        assert_same(found, expected, how)
        # already reduced: the trainer has nothing left to do, unless BERT has parameters that it does not use
        for each in found if ddp and name not in LAYERS else ():
            assert_same([each], expected)


def compiled(path: str, rows: slice) -> str | None:
    loss = DistributedSentenceLoss(LAYERS["AdaptiveLayerLoss"].make(bert(path)))
    loss.model = torch.compile(loss.model, backend="eager")
    return error_message(lambda: loss(features(2, rows), SCORES[rows]))


def test_compiled_layers_are_refused(checkpoint: str, worlds: Worlds) -> None:
    texts = worlds.run(3, compiled, checkpoint, slice(2))
    assert len(set(texts)) == 1
    assert "Do not compile it" in (texts[0] or "")


BARE = ("CachedMultipleNegativesRankingLoss", "SpladeLoss", "MultiVector, cached")


@pytest.mark.trainers
@pytest.mark.parametrize("name", [*list(CASES)[:: 1 if EVERY_CASE else 5], *BARE])
def test_the_bare_loss_is_detected(name: str, worlds: Worlds) -> None:
    case = (CASES | CACHED | OTHER_ENCODERS)[name]
    expected, found = alone(worlds, case), on_ranks(worlds, case, (3, 1, 2), bare)
    with pytest.raises(AssertionError):
        assert_same(found, expected)
    averaged = {key: torch.stack([x.encoder[key] for x in found]).mean(0) for key in expected.encoder}
    assert max(distance(averaged[key], x) for key, x in expected.encoder.items()) > 1e-4


def test_refusals_name_the_fix(checkpoint: str) -> None:
    for make, text in REFUSED.values():
        with pytest.raises(ValueError, match=re.escape(text)):
            DistributedSentenceLoss(make(words()))
    with pytest.raises(ValueError, match="reads tokens with a decoder"):
        DistributedSentenceLoss(losses.DenoisingAutoEncoderLoss(bert(checkpoint)))
    with pytest.raises(ValueError, match="'mean' or 'sum', got 'avg'"):
        DistributedSentenceLoss(mnrl(words()), grad_reduction="avg")


def nameless() -> SentenceTransformer:
    return SentenceTransformer(modules=[Tokens()], device="cpu")


def silent() -> SentenceTransformer:
    guide = words(1)
    guide.forward = lambda *_, **__: None
    return guide


def complaints() -> list[str | None]:
    mistaken = dist.get_rank() == 1
    cosent, classifier = CASES["CoSENTLoss"], CASES["SoftmaxLoss"]

    def job(case: Case, columns: int, labels: Tensor | None, spoil: float = 1.0, rows: int = 2) -> str | None:
        model = words()
        with torch.no_grad():
            model[0].head.weight.mul_(spoil)
        loss = DistributedSentenceLoss(case.make(model).double())
        return error_message(lambda: loss(features(columns, slice(rows)), labels))

    return [
        job(cosent, 2, drawn(3 if mistaken else 2)),
        job(cosent, 2, None if mistaken else drawn(2)),
        job(cosent, 3 if mistaken else 2, drawn(2)),
        job(classifier, 2, CLASSES[:2], float("nan") if mistaken else 1.0),
        job(cosent, 2, drawn(0), rows=0),
        job(CASES["MultipleNegativesRankingLoss"], 2, None, rows=0),
        error_message(lambda: DistributedSentenceLoss(mnrl(nameless()))(features(2, slice(2)), None)),
        job(Case(lambda m: losses.GISTEmbedLoss(m, guide=silent() if mistaken else words(1))), 2, None),
    ]


def test_bad_input_is_refused_on_every_rank_alike(worlds: Worlds) -> None:
    found = worlds.run(3, complaints)
    assert found[0] == found[1] == found[2]
    expected = ["has 2 rows where the labels", "brought labels, rank 1 brought none", "number of columns"]
    expected += ["NaN or infinite", "no rank brought a row", "no rank brought a row"]
    expected += ["one of sentence_embedding, ", "returns a dict … got None"]
    for text, part in zip(found[0], expected, strict=True):
        assert_says(text, part)


def draws() -> tuple[Tensor, Tensor]:
    class Drawing(nn.Module):
        def __init__(self, model: SentenceTransformer) -> None:
            super().__init__()
            self.model = model

        def forward(self, columns: list[dict[str, Tensor]], labels: Tensor | None) -> Tensor:
            z = self.model(columns[0])["sentence_embedding"]
            return torch.cat([z.detach().flatten(), torch.rand(3, dtype=z.dtype)])

    torch.manual_seed(dist.get_rank())
    model = words(drop=0.5)
    torch.manual_seed(dist.get_rank())
    found = DistributedSentenceLoss(Drawing(model))(features(1), None)
    return found[:-3].view(3, N, D), found[-3:]


def test_encoders_draw_per_rank_and_losses_from_one_stream(worlds: Worlds) -> None:
    by_rank = worlds.run(3, draws)
    for embeddings, loss in by_rank:
        assert not torch.equal(embeddings[0] == 0, embeddings[1] == 0)
        assert torch.equal(loss, by_rank[0][1])


def test_the_encoders_forward_is_restored() -> None:
    model = words()
    loss = DistributedSentenceLoss(CASES["CoSENTLoss"].make(model))
    with pytest.raises(IndexError):
        loss([{"input_ids": torch.full((2, 1), WORDS), "attention_mask": torch.ones(2, 1)}] * 2, drawn(2))
    assert "forward" not in vars(model)
    loss(features(2), SCORES)
    assert "forward" not in vars(model)


def test_attributes_of_the_loss_are_readable() -> None:
    model = words()
    inner = mnrl(model, scale=7.0)
    loss = DistributedSentenceLoss(inner)
    assert loss.scale == 7.0
    assert loss.get_config_dict() == inner.get_config_dict()
    assert loss.citation == inner.citation
    assert [name for name, _ in loss.named_parameters()] == [name for name, _ in inner.named_parameters()]
    assert not hasattr(loss, "no_such_thing")
    again = copy.deepcopy(loss)
    assert again.model is again.loss.model is not model


@pytest.mark.kernels
def test_a_compiled_encoder_returns_all_ranks_embeddings(worlds: Worlds) -> None:
    case, shards = CASES["CoSENTLoss"], (3, 1, 2)

    def wrap(loss: Any, **settings: Any) -> DistributedSentenceLoss:
        whole = DistributedSentenceLoss(loss, **settings)
        whole.model = torch.compile(whole.model, backend="eager")
        return whole

    assert_same(on_ranks(worlds, case, shards, wrap), alone(worlds, case))
