"""The losses of the random steps: this library's, users' own and other libraries', with samples to call each with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.loss_base.loss import Inputs
from contrastive_zoo.testing.catalogue import CATALOGUE
from tests.random_steps import user_code
from tests.zoo import BatchHard

D, CLASSES = 4, 5
Compares = Literal["views", "three views", "stacked views", "labels", "whole numbers", "mask", "teachers", "ids", "texts",
                   "tokens", "mined"]  # fmt: skip
"""Two or three views; three in one tensor; embeddings with labels, also of whole numbers, many of whose dot products are
equal; embeddings with a mask of positives; two towers with those of a teacher; two towers with ids; videos with two texts
each; queries and documents of tokens, with a mask each; or queries, documents, hard negatives and the queries that these
were mined for."""


@dataclass(frozen=True)
class Loss:
    make: Callable[..., Any]  # ``make(whole=False)`` returns a rank's loss, if it is sharded
    compares: Compares = "views"  # what it is called with
    setting: tuple[str, tuple[Any, ...]] = ("temperature", (0.5, 0.3, 0.02))  # a path and values it may change to
    wrapper: Callable[[], dict[str, Any]] = dict  # further arguments of DistributedLoss
    third_party: bool = False  # from another library
    remembers: bool = False  # whether it keeps a state from step to step
    sharded: bool = False  # whether each rank keeps its part of the class weights
    user_code: bool = False  # in 64 bits, and its copies are not the same


class MaskedMNRL(cz.MNRL):
    """Ids that meet by chance, of values, and a margin, in all directions."""

    directions = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
    false_negative_margin = 0.1
    hardness_mode = "hard_negatives"
    hardness_strength = 2.0

    def inputs(self, queries: Tensor, documents: Tensor, negatives: Tensor, owners: Tensor) -> Inputs:
        ids = (x[:, 0].detach().floor().long() for x in (documents, negatives, 3 * queries))
        return super().inputs(queries, documents, negatives, owners, *ids)


class MaskedGIST(cz.GIST):
    """Ids that meet by chance, of values; negatives are the positives in reverse."""

    def inputs(self, a: Tensor, p: Tensor, guide_a: Tensor, guide_p: Tensor) -> Inputs:
        ids = (x[:, 0].detach().floor().long() for x in (p, 2 * p, 3 * a))
        return super().inputs(a, p, guide_a, guide_p, p.flip(1), guide_p.flip(1), *ids)


def learnt() -> cz.LearnableTemperature:
    return cz.LearnableTemperature(0.5)


def bias() -> nn.Parameter:
    return nn.Parameter(torch.tensor([-1.0]))


def arc_face(*, whole: bool = True) -> nn.Module:
    return cz.ArcFace(CLASSES, D, scale=4.0, shard_over=None if whole else cz.World.of())


def weighted_sum() -> nn.Module:
    temperature = learnt()
    return cz.WeightedSum([cz.NTXent(temperature=temperature), cz.InfoNCE(temperature=0.5)], weights=[1.0, 0.5])


def mnrl(other: str = "doc_to_doc") -> nn.Module:
    return cz.MNRL(temperature=learnt(), directions=("query_to_doc", other))  # type: ignore[arg-type]  # why: a direction


def pml(name: str, *args: Any, **settings: Any) -> nn.Module:
    from pytorch_metric_learning import losses

    return getattr(losses, name)(*args, **settings)


def mined() -> dict[str, Any]:
    from pytorch_metric_learning import miners

    return {"miner": miners.TripletMarginMiner(margin=0.2, type_of_triplets="semihard")}


MARGIN, ARC, NORMALIZE = ("margin", (0.2, 0.3)), ("margin", (0.5, 0.3)), ("normalize", (True, False))
LOSSES = {
    "SigLIP, sum": Loss(lambda: cz.SigLIP(temperature=learnt(), reduction="sum"), setting=NORMALIZE),
    "Triplet, soft": Loss(
        lambda: cz.Triplet(mining="hard", metric="similarity", soft=True), "labels", ("margin", (0.05, 0.3))
    ),
    "Triplet, ties": Loss(
        lambda: cz.Triplet(mining="hard", metric="squared distance", soft=True, normalize=False),
        "whole numbers",
        ("margin", (0.05, 0.3)),
    ),
    "SupCon, first views": Loss(lambda: cz.SupCon(temperature=0.5, contrast_mode="one"), "stacked views"),
    "SupCon, mask": Loss(lambda: cz.SupCon(temperature=0.5), "mask"),
    "MNRL with negatives": Loss(
        lambda: cz.MNRL(temperature=0.5, directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction"),
        "three views",
        NORMALIZE,
    ),
    "SupCon, in": Loss(lambda: cz.SupCon(temperature=0.5, variant="in"), "labels"),
    "NCA": Loss(lambda: cz.NCA(temperature=learnt()), "labels", NORMALIZE),
    "TupletMargin": Loss(lambda: cz.TupletMargin(temperature=0.5), "labels"),
    "NPairs": Loss(lambda: cz.NPairs(temperature=0.5), "labels"),
    "DCLW": Loss(lambda: cz.DCLW(temperature=0.5)),
    "HCL": Loss(lambda: cz.HCL(temperature=0.5)),
    "Debiased": Loss(lambda: cz.Debiased(temperature=0.5)),
    "AlignUniform": Loss(cz.AlignUniform, setting=("t", (2.0, 1.0))),
    "MNRL of pairs": Loss(lambda: mnrl("doc_to_query"), setting=("partition_mode", ("joint", "per_direction"))),
    "MILNCE": Loss(lambda: cz.MILNCE(temperature=2.0), "texts", ("denominator", ("exact", "reference"))),
    "MaxSim": Loss(
        lambda: cz.MaxSim(temperature=learnt(), symmetric=True), "tokens", ("token_reduction", ("sum", "mean"))
    ),
    "MaxSimPairwise": Loss(lambda: cz.MaxSimPairwise(temperature=0.5), "tokens"),
    "MultiPositive": Loss(
        lambda: cz.MultiPositive(temperature=0.5), "ids", ("duplicates", ("positive", "ignore", "negative"))
    ),
    "ClipDistillation": Loss(lambda: cz.ClipDistillation(temperature=0.5), "teachers"),
    "GIST": Loss(lambda: MaskedGIST(temperature=learnt()), "teachers", ("margin", (0.0, 0.2))),
    "SignalToNoise": Loss(cz.SignalToNoise, "labels", ("neg_margin", (1.0, 0.8))),
    "Circle": Loss(lambda: cz.Circle(gamma=3.0), "labels", ("m", (0.4, 0.3))),
    "LiftedStructure": Loss(cz.LiftedStructure, "labels", ("neg_margin", (1.0, 0.8))),
    "GeneralizedLiftedStructure": Loss(cz.GeneralizedLiftedStructure, "labels", ("neg_margin", (1.0, 0.8))),
    "Margin": Loss(lambda: cz.Margin(nu=0.3), "labels", MARGIN),
    "RankedList": Loss(lambda: cz.RankedList(t_p=2.0, epsilon=1e-3), "labels", NORMALIZE),
    "FastAP": Loss(cz.FastAP, "labels", ("num_bins", (10, 5))),
    "NTXent": Loss(lambda: cz.NTXent(temperature=0.5)),
    "NTXent, learnt": Loss(lambda: cz.NTXent(temperature=learnt()), setting=NORMALIZE),
    "NTXent of three views": Loss(lambda: cz.NTXent(temperature=0.3), "three views"),
    "InfoNCE with negatives": Loss(lambda: cz.InfoNCE(temperature=0.3), "three views", NORMALIZE),
    "InfoNCE": Loss(lambda: cz.InfoNCE(temperature=learnt()), setting=("symmetric", (False, True))),
    "Clip": Loss(lambda: cz.Clip(temperature=learnt()), setting=NORMALIZE),
    "SupCon": Loss(lambda: cz.SupCon(temperature=0.5), "labels"),
    "SigLIP": Loss(lambda: cz.SigLIP(temperature=learnt(), logit_bias=bias()), setting=NORMALIZE),
    "SupSigmoid": Loss(lambda: cz.SupSigmoid(temperature=learnt(), logit_bias=bias()), "labels", NORMALIZE),
    "Contrastive": Loss(cz.Contrastive, "labels", ("neg_margin", (1.0, 0.8))),
    "MultiSimilarity": Loss(lambda: cz.MultiSimilarity(epsilon=0.1), "labels", ("base", (0.5, 0.3))),
    "Triplet": Loss(lambda: cz.Triplet(mining="hard"), "labels", ("margin", (0.05, 0.3))),
    "SINCERE": Loss(lambda: cz.SINCERE(temperature=learnt()), "labels", NORMALIZE),
    "DCL": Loss(lambda: cz.DCL(temperature=0.5)),
    "RowLoss": Loss(BatchHard, "labels", NORMALIZE),
    "MNRL": Loss(mnrl, "mined", ("partition_mode", ("joint", "per_direction"))),
    "MNRL, masked": Loss(lambda: MaskedMNRL(temperature=learnt()), "mined", ("false_negative_margin", (0.1, -0.05))),
    "WeightedSum": Loss(weighted_sum, setting=("losses.1.temperature", (0.5, 0.3))),
    "WeightedSum of MNRL": Loss(
        lambda: cz.WeightedSum([mnrl()]), "mined", ("losses.0.partition_mode", ("joint", "per_direction"))
    ),
    "Matryoshka": Loss(
        lambda: cz.Matryoshka(cz.InfoNCE(temperature=learnt()), (2, D)),
        setting=("loss.symmetric", (False, True)),
    ),
    "CrossBatchMemory": Loss(
        lambda: cz.CrossBatchMemory(cz.InfoNCE(temperature=0.5), 7, D),
        setting=("loss.temperature", (0.5, 0.3)),
        remembers=True,
    ),
    "ArcFace": Loss(arc_face, "labels", ARC),
    "ArcFace, sharded": Loss(arc_face, "labels", ARC, sharded=True),
    "WeightedSum of ArcFace, sharded": Loss(
        lambda *, whole=True: cz.WeightedSum([arc_face(whole=whole)]),
        "labels",
        ("losses.0.margin", (0.5, 0.3)),
        sharded=True,
    ),
    "PML triplet with a miner": Loss(
        lambda: pml("TripletMarginLoss", margin=0.2), "labels", MARGIN, mined, third_party=True
    ),
    "PML proxies": Loss(
        lambda: pml("ProxyAnchorLoss", CLASSES, D, alpha=4), "labels", ("margin", (0.1, 0.2)), third_party=True
    ),
}


@functools.cache
def can_ring(name: str) -> bool:
    if (
        LOSSES[name].third_party or LOSSES[name].user_code or name in ("SupCon, mask", "MNRL", "WeightedSum of MNRL")
    ):  # of their arguments
        return False
    return LOSSES[name].make().ring_problem() is None


def _others() -> dict[str, Loss]:
    """Losses of the catalogue that the table lacks, which may ring, and which can be called as their entry says."""
    made = {type(loss.make()) for loss in LOSSES.values() if not loss.third_party}
    entries = [x for x in CATALOGUE.values() if x.loss not in made and "normalize" in x.loss.fields]
    return {
        x.name: Loss(x.make, x.call, NORMALIZE)
        for x in entries
        if x.call != "other" and x.make().ring_problem() is None
    }


LOSSES |= _others()
LOSSES |= {name: Loss(make, "labels", user_code=True) for name, make in user_code.LABELLED.items()}
LOSSES |= {name: Loss(make, user_code=True) for name, make in user_code.PAIRED.items()}
LOSSES |= {name: Loss(make, "labels", remembers=True, user_code=True) for name, make in user_code.STATEFUL.items()}
LOSSES |= {name: Loss(make, remembers=True, user_code=True) for name, make in user_code.STATEFUL_PAIRS.items()}


def global_rows(compares: Compares, total: int, seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def embeddings() -> Tensor:
        return torch.randn(total, D, dtype=torch.float64, generator=generator).to(dtype)

    if (count := {"views": 2, "three views": 3, "teachers": 4}.get(compares)) is not None:
        return [embeddings() for _ in range(count)]
    if compares == "texts":
        return [embeddings(), torch.stack([embeddings(), embeddings()], 1)]
    if compares == "tokens":
        towers = [torch.stack([embeddings() for _ in range(length)], 1) for length in (2, 3)]
        valid = [torch.randint(2, x.shape[:2], generator=generator) for x in towers]
        return [*towers, *(x.index_fill(1, torch.tensor(0), 1) for x in valid)]  # one token is always there
    if compares == "stacked views":
        return [torch.stack([embeddings() for _ in range(3)], 1)]
    if compares == "mask":
        return [embeddings(), torch.rand(total, total, dtype=torch.float32, generator=generator) < 0.3]
    if compares in ("labels", "ids", "whole numbers"):
        towers = [embeddings() for _ in range(2 if compares == "ids" else 1)]
        towers = [x.round() for x in towers] if compares == "whole numbers" else towers
        return [*towers, torch.randint(1, CLASSES, (total,), generator=generator)]  # with 0 they might be row numbers
    owners = torch.arange(total).where(torch.rand(total, dtype=torch.float32, generator=generator) < 0.7, -1)
    return [embeddings(), embeddings(), embeddings(), owners]


def local_rows(compares: Compares, rows: list[Tensor], start: int, size: int) -> list[Tensor]:
    mine = [x[start : start + size] for x in rows]
    if compares == "mined":
        mine[3] = torch.where(mine[3] < 0, -1, mine[3] - start)
    return mine


def called(loss: Callable[..., Tensor], compares: Compares, *rows: Tensor) -> Tensor:
    names = ("mask",) if compares == "mask" else ()
    return loss(*rows[: 1 if names else None], **dict(zip(names, rows[1:], strict=False)))
