"""Sizes beyond memory, numbers beyond float32, and tensors without values: each is named, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.loss_base.settings import is_number
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import assert_says, close, refused

META, HUGE = torch.device("meta"), 2**62
Z, LABELS = torch.eye(4, 3), torch.arange(4) % 2


def hard_negatives(**settings: Any) -> Any:
    return cz.data.mine_hard_negatives(**{"queries": Z, "corpus": Z, "positives": torch.arange(4), **settings})


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
    # ---- sizes
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
    # ---- numbers of repetitions
    "FastAP: … num_bins is an integer, 1 … 16777216": lambda: cz.FastAP(num_bins=HUGE),
    "Histogram: … num_bins is an integer, 1 … 16777216": lambda: cz.Histogram(num_bins=HUGE),
    "DynamicSoftMargin: … num_bins is an integer, 1 … 16777216": lambda: cz.DynamicSoftMargin(HUGE),
    "num_points is an integer, 2 … 10000": lambda: cz.SIGReg(3, num_points=HUGE),
    "iterations <= 10000": lambda: cz.SwAV(5, 3, iterations=HUGE),
    "margin is an integer, 1 … 100": lambda: cz.SphereFace(4, 3, margin=HUGE),
    # ---- numbers
    "scale must be within the range of float32": lambda: cz.ArcFace(4, 3, scale=1e308),
    "temperature must be within the range of float32": lambda: cz.NTXent(temperature=1e-300),
    "invariance must be finite": lambda: cz.FroSSL(invariance=-(2**63)),
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
    # ---- no values
    no_meta("pos_margin"): lambda: cz.Contrastive(pos_margin=torch.empty((), device=META)),
    no_meta("neg_margin"): lambda: cz.SignalToNoise(neg_margin=torch.empty((), device=META)),
    no_meta("temperature"): lambda: cz.SigLIP(temperature=torch.empty((), device=META)),
    no_meta("beta"): lambda: cz.Margin(beta=nn.Parameter(torch.empty((), device=META))),
    "SigLIP: logit_bias must hold values": lambda: cz.SigLIP(logit_bias=torch.empty(1, device="meta")),
    # ---- what is no row, label or setting
    "MILNCE: videos must be floating-point [n, d]": lambda: cz.MILNCE()(torch.tensor(1.0), torch.ones(4, 2, 3)),
    "LeJEPA: ": lambda: cz.LeJEPA(3)(torch.tensor(1.0), torch.tensor(1.0)),
    "Margin: view 1 must be a tensor, got complex.": lambda: cz.Margin(num_classes=3)(torch.ones(4, 3), 1j),
    "Margin: β of a class needs labels": lambda: cz.Margin(num_classes=3)(torch.ones(4, 3), torch.ones(4, 3)),
    "Margin: labels are one integer per row": lambda: cz.Margin(num_classes=3)(torch.ones(4, 3), torch.tensor(1)),
    "Triplet: mining is one of": lambda: cz.Triplet(mining=np.zeros(0)),  # type: ignore[arg-type]  # why: wrong on purpose
    "Triplet: compares embeddings with labels, or views; got targets as well": lambda: cz.Triplet()(Z, targets=LABELS),
    # ---- wrappers
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
    # ---- GradCache
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


ROWS: dict[str, Callable[[], Tensor]] = {
    "sparse": lambda: Z.to_sparse(),
    "csr": lambda: Z.to_sparse_csr(),
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
