"""Behind its adapter every loss of sentence-transformers is the same function on W ranks as on one, or is refused."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from contrastive_zoo.testing.worlds import RankError, Worlds
from contrastive_zoo.wrapper import call_history
from tests.adapters import sentence_losses as table
from tests.adapters.sentence_losses import MNRL, SCORES, D, N, bert, drawn, features, library, loss_of, make, words
from tests.helpers import EVERY_CASE, Pools, assert_says, close, distance, error_message

SPLITS = [(6,), (4, 2), (3, 1, 2), (2, 0, 4)]
# sentence-transformers keeps two losses that it would rather not
pytestmark = pytest.mark.filterwarnings("ignore:The .*SymmetricRankingLoss is deprecated")


def distributed(loss: nn.Module, **settings: Any) -> Any:
    return import_module("contrastive_zoo.adapters.sentence_transformers").DistributedSentenceLoss(loss, **settings)


REFUSED: dict[str, tuple[Callable[[Any], nn.Module], str]] = {
    "a cached loss in another one": (
        lambda m: nn.Sequential(loss_of(m, MNRL), loss_of(m, table.CACHED_MNRL)),
        "has no gradient cache, and contains CachedMultipleNegativesRankingLoss",
    ),
    "a cross encoder": (lambda m: nn.Sequential(nn.BCEWithLogitsLoss()), "a loss of a CrossEncoder needs no wrapper"),
    "gathered": (lambda m: loss_of(m, MNRL, {"gather_across_devices": True}), "Pass gather_across_devices=False"),
    "a loss of embeddings": (lambda m: nn.CosineEmbeddingLoss(), "holds no SentenceTransformer, SparseEncoder or"),
    **{
        name: (partial(loss_of, key=name), "trains 2 encoders (model2, model1)")
        for name in ("ContrastiveTensionLoss", "ContrastiveTensionLossInBatchNegatives")
    },
}
NO_LOSSES = {
    "BatchHardTripletLossDistanceFunction", "ContrastiveTensionDataLoader", "SiameseDistanceMetric",
    "TripletDistanceMetric",
}  # fmt: skip


@dataclass
class Found:
    value: Tensor
    encoder: dict[str, Tensor]
    parameters: dict[str, Tensor]


def bare(loss: nn.Module, **_: Any) -> nn.Module:
    return loss


def measured(key: str, shards: Any, wrap: Any, checkpoint: str = "", ddp: bool = False, **settings: Any) -> Found:
    """Return what a rank computes; the loss's own parameters start differently on every rank."""
    case = table.CASES[key]
    rank, model = dist.get_rank(), bert(checkpoint) if key in table.LAYERS else case.build()
    torch.manual_seed(100 + rank)
    random.seed(100 + rank)
    loss = wrap(make(key, model).double(), **settings)
    if ddp:
        trainer = library().SentenceTransformerTrainer
        # a trainer needs datasets to be made
        loss = trainer.override_model_in_loss(trainer.__new__(trainer), loss, DistributedDataParallel(model))
    rows = slice(sum(shards[:rank]), sum(shards[: rank + 1]))
    value = loss(features(case.columns, rows), None if case.labels is None else case.labels[rows])
    total = torch.stack(list(value.values())).sum() if isinstance(value, dict) else value  # as the trainer does
    total.backward()
    encoder = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    encoders = import_module("contrastive_zoo.adapters.sentence_transformers").ENCODERS
    theirs = {x for part in loss.modules() if isinstance(part, encoders) for x in part.parameters()}
    own = {name.removeprefix("loss."): x.grad for name, x in loss.named_parameters() if x not in theirs}
    return Found(torch.stack(tree_leaves(tree_map(torch.Tensor.detach, value))), encoder, own)


def alone(worlds: Worlds, key: str, checkpoint: str = "") -> Found:
    return worlds.run(1, measured, key, (N,), bare, checkpoint)[0]


def on_ranks(worlds: Worlds, key: str, shards: tuple[int, ...], wrap: Any = distributed, **how: Any) -> list[Found]:
    return worlds.run(len(shards), measured, key, shards, wrap, **how)


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


@pytest.mark.trainers
def test_every_loss_is_in_a_table() -> None:
    known = {key.partition(",")[0] for key in (*table.CASES, *REFUSED)} | NO_LOSSES | {"DenoisingAutoEncoderLoss"}
    assert set(library("sentence_transformer.losses").__all__) <= known


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("bert")
    table.save_bert(path)
    return str(path)


DRAWN = [*list(table.PLAIN)[:: 1 if EVERY_CASE else 2], *table.CACHED, *table.OTHER_ENCODERS, *table.LAYERS]


def test_a_loss_on_two_ranks_is_that_of_one_process(pools: Pools) -> None:
    found = on_ranks(pools.threads, MNRL, (4, 2), grad_reduction="sum")
    assert_same(found, alone(pools.threads, MNRL), "sum")


@pytest.mark.trainers
@pytest.mark.parametrize("key", DRAWN)
def test_ranks_compute_what_one_process_computes(key: str, checkpoint: str, worlds: Worlds) -> None:
    """Losses of a gradient cache, of other encoders and of layers under DDP, as in a trainer; others without it, too."""
    expected = alone(worlds, key, checkpoint)
    assert bool(expected.parameters) == table.CASES[key].learnt
    for shards in SPLITS[: -1 if key in table.LAYERS else None]:  # BERT takes no empty batch
        ddp = len(shards) > 1 and (key not in table.PLAIN or shards == (3, 1, 2))
        how = "sum" if key in table.PLAIN and shards == (4, 2) else "mean"
        found = on_ranks(worlds, key, shards, checkpoint=checkpoint, ddp=ddp, grad_reduction=how)
        assert_same(found, expected, how)
        # already reduced: the trainer has nothing left to do, unless BERT has parameters that it does not use
        for each in found if ddp and key not in table.LAYERS else ():
            assert_same([each], expected)


def compiled(checkpoint: str, rows: slice) -> str | None:
    loss = distributed(make("AdaptiveLayerLoss", bert(checkpoint)))
    loss.model = torch.compile(loss.model, backend="eager")
    return error_message(lambda: loss(features(2, rows), SCORES[rows]))


@pytest.mark.kernels
def test_compiled_layers_are_refused(checkpoint: str, worlds: Worlds) -> None:
    texts = worlds.run(3, compiled, checkpoint, slice(2))
    assert len(set(texts)) == 1
    assert "Do not compile it" in (texts[0] or "")


BARE = (table.CACHED_MNRL, "SpladeLoss", "CachedMultiVectorMultipleNegativesRankingLoss")


@pytest.mark.trainers
@pytest.mark.parametrize("key", [*list(table.PLAIN)[:: 1 if EVERY_CASE else 5], *BARE])
def test_the_bare_loss_is_detected(key: str, worlds: Worlds) -> None:
    expected, found = alone(worlds, key), on_ranks(worlds, key, (3, 1, 2), bare)
    with pytest.raises(AssertionError):
        assert_same(found, expected)
    averaged = {name: torch.stack([x.encoder[name] for x in found]).mean(0) for name in expected.encoder}
    assert max(distance(averaged[name], x) for name, x in expected.encoder.items()) > 1e-4


@pytest.mark.trainers
def test_refusals_name_the_fix(checkpoint: str) -> None:
    for of_model, text in REFUSED.values():
        with pytest.raises(ValueError, match=re.escape(text)):
            distributed(of_model(words()))
    with pytest.raises(ValueError, match="reads tokens with a decoder"):
        distributed(loss_of(bert(checkpoint), "DenoisingAutoEncoderLoss"))
    with pytest.raises(ValueError, match="'mean' or 'sum', got 'avg'"):
        distributed(loss_of(words(), MNRL), grad_reduction="avg")


def softmax_loss() -> Any:
    return distributed(loss_of(words(), "SoftmaxLoss", {"embedding_dimension": D, "num_labels": 3}).double())


def classify(loss: Any) -> None:
    loss(features(2, slice(2)), table.CLASSES[:2])


def complaints() -> list[tuple[str, str | None]]:
    """Return messages, and what each must say."""
    mistaken = dist.get_rank() == 1

    def job(key: str, columns: int, labels: Tensor | None, rows: int = 2, model: Any = None, **settings: Any) -> Any:
        loss = distributed(loss_of(model or words(), key, settings).double())
        return error_message(lambda: loss(features(columns, slice(rows)), labels))

    def again(change: Callable[[Any], Any]) -> str | None:
        """Call a loss with classes, and once more after a change on rank 1."""
        classify(loss := softmax_loss())
        if mistaken:
            change(loss)
        text = error_message(lambda: classify(loss))
        call_history.JOINED.clear()
        return text

    spoilt = words()
    with torch.no_grad():
        spoilt[0].head.weight.mul_(float("nan") if mistaken else 1.0)
    guide = words(1)
    guide.forward = (lambda *_, **__: None) if mistaken else guide.forward
    nameless = library().SentenceTransformer(modules=[table.Tokens()], device="cpu")
    of_classes = {"model": spoilt, "embedding_dimension": D, "num_labels": 3}
    return [
        ("has 2 rows where the labels", job("CoSENTLoss", 2, drawn(3 if mistaken else 2))),
        ("brought labels, rank 1 brought none", job("CoSENTLoss", 2, None if mistaken else drawn(2))),
        ("number of columns", job("CoSENTLoss", 3 if mistaken else 2, drawn(2))),
        ("NaN or infinite", job("SoftmaxLoss", 2, table.CLASSES[:2], **of_classes)),
        ("no rank brought a row", job("CoSENTLoss", 2, drawn(0), rows=0)),
        ("no rank brought a row", job(MNRL, 2, None, rows=0)),
        ("one of sentence_embedding, ", job(MNRL, 2, None, model=nameless.double())),
        ("returns a dict … got None", job("GISTEmbedLoss", 2, None, guide=guide)),
        ("scale: rank 0 has 20.0, rank 1 has 5.0", job(MNRL, 2, None, scale=5.0 if mistaken else 20.0)),
        ("the loss: rank 0 has CoSENTLoss", job("AnglELoss" if mistaken else "CoSENTLoss", 2, drawn(2))),
        ("classifier.bias", again(lambda loss: loss.classifier.bias.data.add_(1))),
        ("join() is active", again(lambda _: call_history.JOINED.append(SimpleNamespace(_enable=True)))),
    ]


@pytest.mark.trainers
def test_bad_input_is_refused_on_every_rank_alike(worlds: Worlds) -> None:
    found = worlds.run(3, complaints)
    assert found[0] == found[1] == found[2]
    for says, text in found[0]:
        assert_says(text, says)


def in_another_order() -> None:
    losses = softmax_loss(), softmax_loss()
    for index in (0, 1, dist.get_rank()):
        classify(losses[index])


@pytest.mark.trainers
def test_losses_that_ranks_call_in_another_order_are_refused(worlds: Worlds) -> None:
    """As the Trainer does with several data sets, of which it gives each rank a batch of another one."""
    with pytest.raises(RankError, match="out of step: rank 0 is in SoftmaxLoss, which is wrapper number"):
        worlds.run(2, in_another_order)


def draws() -> tuple[Tensor, Tensor]:
    class Drawing(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, columns: list[dict[str, Tensor]], labels: Tensor | None) -> Tensor:
            z = self.model(columns[0])["sentence_embedding"]
            return torch.cat([z.detach().flatten(), torch.rand(3, dtype=z.dtype)])

    model = words(drop=0.5)
    torch.manual_seed(dist.get_rank())
    found = distributed(Drawing(model))(features(1), None)
    return found[:-3].view(3, N, D), found[-3:]


@pytest.mark.trainers
def test_encoders_draw_per_rank_and_losses_from_one_stream(worlds: Worlds) -> None:
    by_rank = worlds.run(3, draws)
    for embeddings, loss in by_rank:
        assert not torch.equal(embeddings[0] == 0, embeddings[1] == 0)
        assert torch.equal(loss, by_rank[0][1])


@pytest.mark.trainers
def test_the_encoders_forward_is_restored() -> None:
    model = words()
    loss = distributed(make("CoSENTLoss", model))
    with pytest.raises(IndexError):
        loss([{"input_ids": torch.full((2, 1), table.WORDS), "attention_mask": torch.ones(2, 1)}] * 2, drawn(2))
    assert "forward" not in vars(model)
    loss(features(2), SCORES)
    assert "forward" not in vars(model)


@pytest.mark.trainers
def test_attributes_of_the_loss_are_readable() -> None:
    model = words()
    inner = loss_of(model, MNRL, {"scale": 7.0})
    loss = distributed(inner)
    assert loss.scale == 7.0
    assert loss.get_config_dict() == inner.get_config_dict()
    assert loss.citation == inner.citation
    assert [name for name, _ in loss.named_parameters()] == [name for name, _ in inner.named_parameters()]
    assert not hasattr(loss, "no_such_thing")
    again = copy.deepcopy(loss)
    assert again.model is again.loss.model is not model


@pytest.mark.kernels
def test_a_compiled_encoder_returns_all_ranks_embeddings(worlds: Worlds) -> None:
    def wrap(loss: Any, **settings: Any) -> Any:
        whole = distributed(loss, **settings)
        whole.model = torch.compile(whole.model, backend="eager")
        return whole

    assert_same(on_ranks(worlds, "CoSENTLoss", (3, 1, 2), wrap), alone(worlds, "CoSENTLoss"))
