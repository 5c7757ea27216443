"""Arguments and settings that do not fit, sizes beyond memory and numbers beyond float32: what came, and the fix."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.loss_base.settings import is_number
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import assert_says, close, refused
from tests.own_losses import OF_CATALOGUE

EYE, Y, TOKENS = torch.eye(3), torch.arange(3), torch.eye(3)[:, None].repeat(1, 2, 1)
QWEN = ("query_to_doc", "doc_to_doc")


def spoilt(loss: cz.ClassLoss, weights: Tensor) -> cz.ClassLoss:
    loss.weights = nn.Parameter(weights)
    return loss


BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: cz.SupSigmoid()(EYE, None), "SupSigmoid: labels are missing"),
    (lambda: cz.Clip(symmetric=False), "Clip has no setting 'symmetric'.*normalize, reduction, check_fi"),
    (lambda: cz.DCL(denominators="both"), "DCL: denominators is 'joint' or 'per_view', got 'both'"),
    (lambda: cz.MultiPositive(duplicates="drop"), "one of 'positive', 'ignore', 'negative', got 'drop'"),
    (lambda: cz.MultiPositive()(EYE, EYE[:2], Y), "MultiPositive: key_ids are missing"),
    (lambda: cz.MultiPositive()(EYE, EYE[:, :2], Y), r"keys must be floating-point \[m, d\] with the d of queries"),
    (
        lambda: cz.MultiPositive()(EYE, EYE, Y.double()),
        r"ids must be integer \[n\] or integer \[n, k\], got float64 \[3\]",
    ),
    (lambda: cz.MultiPositive(symmetric=True)(EYE, EYE, Y, Y), "are for paired rows: leave key_ids and weights out"),
    (lambda: cz.MultiPositive()(EYE, EYE, Y, Y, -torch.ones(3)), "weights are non-negative, one per id"),
    (lambda: cz.InfoNCE(in_batch_negatives=False)(EYE, EYE), "InfoNCE: in_batch_negatives=False .* pass negatives"),
    (lambda: cz.InfoNCE(in_batch_negatives=False, symmetric=True)(EYE, EYE, EYE), "and not symmetric"),
    (lambda: cz.OnlineContrastive()(EYE, EYE, Y), "labels are 1 for a positive pair and 0"),
    (lambda: cz.GIST()(EYE, EYE, EYE, EYE, EYE), "GIST: negatives came without guide_negatives"),
    (lambda: cz.GIST()(EYE, EYE, EYE, EYE, query_ids=Y[:2]), "GIST: query_ids are one per row, got 2 for 3 rows"),
    (lambda: cz.GIST()(EYE, EYE, EYE, EYE, negative_ids=Y), "GIST: negative_ids came without negatives. Leave"),
    (lambda: cz.MNRL()(EYE, EYE[:2]), "row i of documents belongs .* Pass further documents as negatives"),
    (lambda: cz.MNRL()(EYE, EYE, EYE[:, :2]), r"negatives must be floating-point \[m, d\] with the d of queries"),
    (lambda: cz.MNRL()(EYE, EYE, EYE, Y + 1), r"MNRL: owners are rows of this rank's 3 queries, or -1, got 1 … 3"),
    (lambda: cz.MNRL()(EYE, EYE, EYE, Y[:2]), "MNRL: owners are one per row"),
    (lambda: cz.MNRL()(EYE, EYE, None, Y), "MNRL: owners came without negatives"),
    (lambda: cz.MNRL()(EYE, EYE, document_ids=Y[:2]), "MNRL: document_ids are one per row, got 2 for 3 rows"),
    (lambda: cz.MNRL()(EYE, EYE, query_ids=Y.double()), "MNRL: query_ids are one integer per row"),
    (lambda: cz.MNRL()(EYE, EYE, EYE, None, None, Y), "MNRL: negative_ids are compared with document_ids"),
    (lambda: cz.MNRL(false_negative_margin=torch.ones(1, requires_grad=True)), "a constant"),
    (lambda: cz.MNRL(directions=("doc_to_query",)), "MNRL: directions are 'query_to_doc' and any of"),
    (lambda: cz.MNRL(directions=QWEN, partition_mode="per_direction"), "doc_to_doc never hold the positive"),
    (lambda: cz.MarginMSE()(EYE, EYE, EYE[:, None], EYE[:, :2]), r"margins must be .* with the k of negatives"),
    (lambda: cz.ScoreDistillation()(EYE, EYE[:, None], EYE[:, :1]), r"candidates are \[n, k, d\] with k >= 2"),
    (lambda: cz.SupCon()(EYE, Y, torch.ones(3, 3)), "labels or by a mask, got both"),
    (lambda: cz.SupCon()(EYE, mask=torch.ones(3, 2)), "a column for each of the 3 samples of all ranks, got float32"),
    (lambda: cz.SupCon()(EYE), "labels are missing"),
    (lambda: cz.FastAP(normalize=False), "unit rows"),
    (lambda: cz.NormalizedSoftmax(2, 3)(EYE, Y), r"labels are classes 0 … 1, got 2. Number them"),
    (lambda: cz.NormalizedSoftmax(3, 2)(EYE, Y), r"as wide as embeddings, got float32 \[3, 2\]"),
    (lambda: cz.NormalizedSoftmax(2, 3, shard_over=cz.World())(EYE, Y), r"labels are classes 0 … 1"),
    (lambda: cz.NormalizedSoftmax(5, 3, shard_over=cz.World(0, 2))(EYE, Y), "hold the weights of 3 classes of 5"),
    (lambda: cz.NormalizedSoftmax(3, 3)(EYE, Y - 1), "got -1"),
    (lambda: cz.NormalizedSoftmax(3, 3)(EYE), "labels are missing"),
    (lambda: spoilt(cz.ProxyAnchor(3, 3), TOKENS)(EYE, Y), r"weights are \[classes, d\] and as wide"),
    (lambda: cz.CosFace(3, 4, shard_over=2), "shard_over is a World, such as World.of"),
    (lambda: cz.SoftTriple(3, 4, shard_over=cz.World()), "SoftTriple has no setting 'shard_over'"),
    (lambda: cz.ProxyAnchor(3, 4, sub_centers=2), "ProxyAnchor has no setting 'sub_centers'"),
    (lambda: cz.SwAV(3, 4)(EYE, EYE), r"prototypes are \[clusters, d\] with d=3 as views"),
    (lambda: cz.SwAV(4, 3)(EYE), "two or more views"),
    (lambda: cz.SwAV(4, 3, code_views=3)(EYE, EYE), "1 <= code_views <= 2, got 3"),
    (lambda: cz.SwAV(torch.tensor(39, dtype=torch.uint8), 3), "SwAV: num_prototypes must be at least 1"),
    (lambda: cz.DINO(4)(EYE, EYE), r"the centre is as wide as outputs.*Construct DINO\(out_dim"),
    (lambda: cz.DINO(3)(EYE[:, None], EYE[:, None]), "student sees two or more views .* got 1 from"),
    (lambda: cz.MaxSim()(EYE, TOKENS), r"queries must be floating-point \[n, a, d\], got float32"),
    (lambda: cz.MaxSim()(TOKENS, TOKENS[..., :2]), r"documents must be .* with the d of queries, got"),
    (lambda: cz.MaxSim()(TOKENS, TOKENS, negatives=TOKENS.half()), "negatives must have the dtype of queries"),
    (lambda: cz.MaxSim()(TOKENS[:2], TOKENS), "Pass further documents as negatives"),
    (lambda: cz.MaxSim()(TOKENS, TOKENS, torch.ones(3, 3).bool()), r"query_mask must be .* with the a of queries"),
    (lambda: cz.MaxSim()(TOKENS, TOKENS, torch.ones(3, 2)), r"query_mask must be bool \[n, a\] or integer"),
    (lambda: cz.MaxSim()(TOKENS, TOKENS, negative_mask=torch.ones(3, 2).bool()), "negative_mask came without"),
    (
        lambda: cz.MaxSim()(TOKENS, TOKENS, None, torch.eye(3, 2).long()),
        "one valid token or more each, got none in row 2",
    ),
    (lambda: cz.MaxSim()(TOKENS, TOKENS[:, :0]), "documents have one valid token or more each"),
    (lambda: cz.MaxSim(token_reduction="max"), "token_reduction is 'sum' or 'mean', got 'max'"),
    (lambda: cz.MaxSimPairwise()(TOKENS / 0, TOKENS), "tokens of queries hold NaN or infinite values in 6"),
    (lambda: cz.MaxSim()(TOKENS[:0], TOKENS[:0]), "the global batch is empty"),
    (lambda: cz.Matryoshka(cz.SupCon(), ()), "one or more widths"),
    (lambda: cz.Matryoshka(cz.SupCon(), (0, 3)), "at least 1"),
    (lambda: cz.Matryoshka(cz.SupCon(), (1, 2), weights=[1.0]), "one weight for each of 2 terms"),
    (lambda: cz.Matryoshka(nn.MSELoss(), (1, 2)), "this library's, got MSELoss"),
    (lambda: cz.Matryoshka(cz.SupCon(), (1, 2), weights=[1.0, torch.nan]), "weights must be finite"),
    (lambda: cz.WeightedSum([cz.NTXent()], weights=[torch.inf]), "weights must be finite"),
    (lambda: cz.WeightedSum([]), "one weight for each of 0 terms"),
    (lambda: cz.WeightedSum([cz.SupCon()], weights=[1.0, 2.0]), "one weight for each of 1 terms"),
    (lambda: cz.WeightedSum([cz.SupCon(), nn.MSELoss()]), "this library's, got MSELoss"),
    (lambda: cz.WeightedSum([cz.NTXent(), cz.SupCon]), r"pass an instance, SupCon\(...\), not the class SupCon\."),
    (lambda: cz.Matryoshka(cz.SupCon, (1, 2)), r"pass an instance, SupCon\(...\), not the class SupCon\."),
    (lambda: cz.CrossBatchMemory(cz.SupCon, 8, 4), r"pass an instance, SupCon\(...\), not the class SupCon\."),
    (lambda: cz.DistributedLoss(cz.MaxSim(), pad_dims={"queries": 1}), "pad_dims is for a third-party loss"),
    (lambda: cz.DistributedLoss(nn.MSELoss(), pad_dims={"input": 0}), "pad_dims are the padded dimensions, 1 or more"),
    (lambda: cz.DistributedLoss(nn.MSELoss(), pad_dims=["input"]), r"got \['input'\]"),
]


@pytest.mark.parametrize("name", OF_CATALOGUE)
def test_each_argument_has_as_many_samples_as_the_first(name: str) -> None:
    """By the annotations of ``inputs``; without their check a loss goes on, or stops in the words of torch."""
    loss = OF_CATALOGUE[name].make()
    rows = [x.detach() for x in OF_CATALOGUE[name].arguments().values()]
    for index in range(1, len(rows)):
        if len(rows[index]) == len(rows[0]):
            with pytest.raises(ValueError, match=r"belongs to row i of|are one per row, got 7|do not pair"):
                loss.double()(*rows[:index], rows[index][:-1], *rows[index + 1 :])


def test_without_the_check_of_shapes_the_words_are_those_of_torch() -> None:
    with patch("contrastive_zoo.loss_base.shapes.shapes_problem", return_value=None), pytest.raises(RuntimeError):
        cz.Clip()(EYE, EYE[:2])


@pytest.mark.parametrize(("call", "said"), BAD, ids=[said for _, said in BAD])
def test_bad_arguments_are_refused_with_the_fix(call: Callable[[], Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        call()


META, HUGE = torch.device("meta"), 2**62
Z, LABELS = torch.eye(4, 3), torch.arange(4) % 2


def hard_negatives(**settings: Any) -> Any:
    return cz.data.mine_hard_negatives(**{"queries": Z, "corpus": Z.clone(), "positives": torch.arange(4), **settings})


def integer_prototypes() -> nn.Module:
    loss = cz.SwAV(5, 3)
    loss.prototypes = nn.Parameter(torch.ones(5, 3).long(), requires_grad=False)
    return loss


def no_meta(name: str) -> str:
    return f"{name} must hold values, got float32 [] on the meta device"


def third_party(embeddings: Tensor, weights: Tensor) -> Tensor:
    return (embeddings.sum(1) * weights).sum()


def ranking() -> nn.Module:
    """A loss of sentence-transformers holds its encoder."""
    loss = nn.Module()
    loss.model = type("BaseModel", (nn.Module,), {"__module__": "sentence_transformers.base"})()
    return loss


def no_miner(embeddings: Tensor, labels: Tensor) -> None:
    pass


SENTENCES: dict[str, Callable[[], object]] = {
    f"ArcFace: nothing can be made of num_classes=4, embedding_size={HUGE}": lambda: cz.ArcFace(4, HUGE),
    f"SoftTriple: nothing can be made of num_classes={HUGE}": lambda: cz.SoftTriple(HUGE, 3),
    "SwAV: nothing can be made of num_prototypes=5": lambda: cz.SwAV(5, HUGE),
    f"MemoryQueue: nothing can be made of size={HUGE}": lambda: cz.MemoryQueue(HUGE, 3),
    "nothing can be made of size=8": lambda: cz.NNCLR(8, HUGE),
    "TiCo: nothing can be made of embedding_size": lambda: cz.TiCo(HUGE),
    "DINO: nothing can be made of out_dim": lambda: cz.DINO(HUGE),
    "Margin: nothing can be made of num_classes": lambda: cz.Margin(num_classes=HUGE),
    "SIGReg: nothing can be made of embedding_size=3": lambda: cz.SIGReg(3, num_slices=HUGE)(Z),
    "nothing can be made of num_samples": lambda: list(cz.data.GlobalBatchSampler(2**59, batch_size=2)),
    "n · views <= 1000000000, got n=4": lambda: cz.engine.global_sample_ids(4, views=HUGE),
    "num_negatives is an integer, 1 … 1000000": lambda: hard_negatives(num_negatives=2**70),
    "FastAP: … num_bins is an integer, 1 … 16777216": lambda: cz.FastAP(num_bins=HUGE),
    "Histogram: … num_bins is an integer, 1 … 16777216": lambda: cz.Histogram(num_bins=HUGE),
    "DynamicSoftMargin: … num_bins is an integer, 1 … 16777216": lambda: cz.DynamicSoftMargin(HUGE),
    "num_points is an integer, 2 … 10000": lambda: cz.SIGReg(3, num_points=HUGE),
    "iterations <= 10000": lambda: cz.SwAV(5, 3, iterations=HUGE),
    "margin is an integer, 1 … 100": lambda: cz.SphereFace(4, 3, margin=HUGE),
    "scale must be within the range of float32": lambda: cz.ArcFace(4, 3, scale=1e308),
    "temperature must be within the range of float32": lambda: cz.NTXent(temperature=1e-300),
    "invariance must be a float, or an integer of 64 bits": lambda: cz.FroSSL(invariance=-(2**63)),
    "neg_margin must be finite, got uint8 []": lambda: cz.Contrastive(neg_margin=torch.tensor(3, dtype=torch.uint8)),
    "scores and margins are numbers": lambda: hard_negatives(absolute_margin=True),
    "queries must be a tensor": lambda: hard_negatives(queries=np.array(["a", "b"])),
    "ignore_label is an integer of 64 bits": lambda: cz.metrics.evaluate(Z, labels=LABELS, ignore_label=2**70),
    "MultiPositive: queries must be floating-point [n, d]": (
        lambda: cz.MultiPositive()(torch.tensor(1.0), torch.tensor(1.0), LABELS)
    ),
    "replicated: x must be a tensor, got list": lambda: cz.collectives.replicated([1.0]),  # type: ignore[arg-type]  # why: wrong on purpose
    "β of a class needs labels": lambda: cz.Margin(num_classes=2)(Z, LABELS.to(torch.complex64)),
    "prototypes are [clusters, d]": lambda: integer_prototypes()(Z, Z),
    "positive … got 0.0": lambda: cz.LearnableTemperature(0.0),
    "positive … got nan": lambda: cz.LearnableTemperature(float("nan")),
    "1 / max_scale … 0.001 … max_scale=100": lambda: cz.LearnableTemperature(0.001),
    no_meta("pos_margin"): lambda: cz.Contrastive(pos_margin=torch.empty((), device=META)),
    no_meta("neg_margin"): lambda: cz.SignalToNoise(neg_margin=torch.empty((), device=META)),
    no_meta("temperature"): lambda: cz.SigLIP(temperature=torch.empty((), device=META)),
    no_meta("beta"): lambda: cz.Margin(beta=nn.Parameter(torch.empty((), device=META))),
    "SigLIP: logit_bias must hold values": lambda: cz.SigLIP(logit_bias=torch.empty(1, device="meta")),
    "MILNCE: videos must be floating-point [n, d]": lambda: cz.MILNCE()(torch.tensor(1.0), torch.ones(4, 2, 3)),
    "LeJEPA: ": lambda: cz.LeJEPA(3)(torch.tensor(1.0), torch.tensor(1.0)),
    "Margin: view 1 must be a tensor, got complex.": lambda: cz.Margin(num_classes=3)(torch.ones(4, 3), 1j),
    "Margin: β of a class needs labels": lambda: cz.Margin(num_classes=3)(torch.ones(4, 3), torch.ones(4, 3)),
    "Margin: labels are one integer per row": lambda: cz.Margin(num_classes=3)(torch.ones(4, 3), torch.tensor(1)),
    "Triplet: mining is one of": lambda: cz.Triplet(mining=np.zeros(0)),  # type: ignore[arg-type]  # why: wrong on purpose
    "Triplet: compares embeddings with labels, or views; got targets as well": lambda: cz.Triplet()(Z, targets=LABELS),
    "'mean' or 'sum' … got 'avg' … DDP": lambda: cz.DistributedLoss(cz.NTXent(), grad_reduction="avg"),  # type: ignore[arg-type]  # why: wrong on purpose
    "check_finite is True or False, got 1": lambda: cz.DistributedLoss(third_party, check_finite=1),  # type: ignore[arg-type]  # why: wrong on purpose
    "SupCon weighs all pairs itself … Leave the miner out": lambda: cz.DistributedLoss(cz.SupCon(), miner=no_miner),
    "third_party(embeddings: 'Tensor', weights: 'Tensor') -> 'Tensor' takes no indices_tuple": (
        lambda: cz.DistributedLoss(third_party, miner=no_miner)
    ),
    "can be called … got float": lambda: cz.DistributedLoss(0.1),  # type: ignore[arg-type]  # why: wrong on purpose
    "distributed already": lambda: cz.DistributedLoss(cz.DistributedLoss(third_party)),
    "Module holds the encoder … DistributedSentenceLoss": lambda: cz.DistributedLoss(ranking()),
    "a bare miner … got DistributedMiner": lambda: cz.data.DistributedMiner(cz.data.DistributedMiner(no_miner)),
    "DistributedMiner: … can be called … got int": lambda: cz.data.DistributedMiner(3),  # type: ignore[arg-type]  # why: wrong on purpose
    "cached_step: loss_fn returns one number as a tensor, got float32 [4, 2]": (
        lambda: cz.cached_step(nn.Linear(3, 2), Z.split(2), lambda z: z)
    ),
    "cached_step: there is at least one model": lambda: cz.cached_step([], [], lambda z: z.sum()),
    "cached_step: chunks are a sequence of inputs for each model": (
        lambda: cz.cached_step([nn.Linear(3, 2)], np.arange(4), lambda z: z.sum())
    ),
    "chunk_size=0": lambda: cz.GradCache(nn.Linear(3, 2), 0),
    "torch.nn.Module … got function": lambda: cz.GradCache(lambda x: x, 2),  # type: ignore[arg-type]  # why: wrong on purpose
    "chunk_size=None and chunk_tokens=None": lambda: cz.GradCache(nn.Linear(3, 2)),
    "chunk_size=2 and chunk_tokens=8": lambda: cz.GradCache(nn.Linear(3, 2), 2, chunk_tokens=8),
}


@pytest.mark.parametrize("words", SENTENCES)
def test_what_cannot_be_is_named(words: str) -> None:
    with pytest.raises(ValueError, match=": ") as raised:
        SENTENCES[words]()
    assert_says(str(raised.value), words)


@pytest.mark.parametrize(
    ("make", "call"),
    [
        (lambda: cz.Margin(), lambda loss: loss(Z, LABELS)),
        (lambda: cz.SigLIP(), lambda loss: loss(Z, Z)),
        (lambda: cz.ArcFace(2, 3), lambda loss: loss(Z, LABELS)),
        (lambda: cz.MemoryQueue(8, 3), lambda queue: queue.enqueue(Z)),
        (lambda: cz.CrossBatchMemory(cz.SupCon(), size=8, embedding_size=3), lambda loss: loss(Z, LABELS)),
    ],
)
def test_a_loss_without_values_is_refused_until_it_has_some(make: Callable[[], nn.Module], call: Any) -> None:
    with META:
        empty = make()
    with pytest.raises(ValueError, match="is on the meta device and has no value"):
        call(empty)
    empty.to_empty(device="cpu").load_state_dict(make().state_dict())
    assert call(empty).isfinite().all()


def test_the_least_and_the_largest_number_decide() -> None:
    assert is_number(torch.tensor([0.0, 1.0, 2.0]), low=0, high=2, several=True)
    assert not is_number(torch.tensor([0.0, -1.0, 2.0]), low=0, several=True)
    assert not is_number(torch.tensor([0.0, torch.nan, 2.0]), several=True)
    assert is_number(torch.empty(0), several=True)


def test_numbers_at_the_ends_of_float32_are_numbers() -> None:
    finfo = torch.finfo(torch.float32)
    assert is_number(finfo.max)
    assert is_number(-finfo.max)
    assert is_number(finfo.tiny, above=0)
    assert is_number(1e-300)  # not divided by
    assert not is_number(finfo.tiny / 2, above=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int32])
def test_a_momentum_in_a_tensor_has_any_dtype(dtype: torch.dtype) -> None:
    share, plain = torch.ones(1, dtype=dtype) / 1, 1.0
    losses = [cz.DINO(3, centre_momentum=share), cz.DINO(3, centre_momentum=plain)]  # type: ignore[arg-type]  # why: a float otherwise
    for loss in losses:
        loss(Z, Z)
    close(losses[0].centre, losses[1].centre)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_temperature_in_a_tensor_of_one_keeps_the_dtype_of_rows(dtype: torch.dtype) -> None:
    sharp = torch.tensor([0.5], dtype=dtype)
    found = cz.DINO(3, teacher_temperature=sharp)(Z, Z)  # type: ignore[arg-type]  # why: a float otherwise
    close(found, cz.DINO(3, teacher_temperature=0.5)(Z, Z))


def test_weights_of_single_ids_are_one_a_query() -> None:
    loss, ids, keys = cz.MultiPositive(), torch.tensor([0, 1, 0, 1]), torch.arange(4)
    halves = loss(Z, Z, ids, key_ids=keys, weights=torch.full((4,), 0.5))
    close(halves, loss(Z, Z, ids[:, None], key_ids=keys, weights=torch.full((4, 1), 0.5)))
    with pytest.raises(ValueError, match="weights must be real"):
        loss(Z, Z, ids, key_ids=keys, weights=torch.ones(4, dtype=torch.complex64))


def test_rows_of_width_0_have_scores() -> None:
    empty = torch.empty(4, 0)
    assert cz.metrics.top_k(empty, k=1).scores.tolist() == [[0.0]] * 4
    assert cz.OrthogonalRegularization()(empty).isfinite()


def nested() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises the other layout
        return torch.nested.nested_tensor([*Z])


ROWS: dict[str, Callable[[], Tensor]] = {
    "sparse": lambda: Z.to_sparse(),
    "csr": lambda: Z.to_sparse_csr(),
    "nested": nested,
    "jagged": lambda: torch.nested.nested_tensor([*Z], layout=torch.jagged),
    "meta": lambda: Z.to(META),
    "quantised": lambda: torch.quantize_per_tensor(Z, 0.1, 0, torch.qint8),
}


def first_only(embeddings: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    return labels, labels, labels


CALLS: dict[str, Callable[[Tensor], object]] = {
    "labels": lambda x: cz.DistributedLoss(cz.SupCon())(Z, x),
    "views": lambda x: cz.DistributedLoss(cz.NTXent())(x, Z),
    "weights of a third-party loss": lambda x: cz.DistributedLoss(third_party)(Z, x),
    "rows of a miner": lambda x: cz.data.DistributedMiner(first_only)(x, LABELS),
}
RIGHT = {"labels": LABELS, "views": Z, "weights of a third-party loss": torch.ones(4), "rows of a miner": Z}


@pytest.mark.parametrize("kind", ROWS)
def test_rows_of_one_rank_that_cannot_be_sent(kind: str, worlds: Worlds) -> None:
    for name in CALLS:

        def bad(name: str = name) -> object:
            return CALLS[name](ROWS[kind]() if dist.get_rank() == 1 else RIGHT[name])

        refused(worlds, 2, bad, "rank 1")


def test_rows_of_a_miner_have_a_dimension(worlds: Worlds) -> None:
    def bad() -> object:
        return cz.data.DistributedMiner(first_only)(torch.tensor(1.0) if dist.get_rank() == 1 else Z, LABELS)

    refused(worlds, 2, bad, "rank 1: embeddings are rows, one a label, got float32 []")


def test_what_a_rank_cannot_state_is_said_on_every_rank(worlds: Worlds) -> None:
    class Unreadable(cz.SupCon):
        def split_reason(self) -> str | None:
            if dist.get_rank() == 1:
                raise LookupError("no such setting")
            return super().split_reason()

    words = "rank 1: LookupError: no such setting"
    refused(worlds, 2, lambda: cz.DistributedLoss(Unreadable())(Z + dist.get_rank(), LABELS), words)


def test_equal_rows_are_noticed_in_any_layout(worlds: Worlds) -> None:
    """The digest of the first call's rows reads an expanded row, too."""

    def job() -> float:
        weights = torch.ones(1).expand(4)
        return cz.DistributedLoss(third_party)(Z + dist.get_rank(), weights).item()

    assert worlds.run(2, job) == [pytest.approx(2 * float(Z.sum()) + 12.0)] * 2
