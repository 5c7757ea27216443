"""Any contrastive or metric-learning loss, the same function on W processes as on one.

loss_fn = contrastive_zoo.DistributedLoss(contrastive_zoo.NTXent(temperature=0.1))
loss = loss_fn(view1, view2)      # my rows; value and gradients are those of all ranks' rows
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "ALONE": "world",
    "AlignUniform": "losses.align_uniform",
    "Angular": "losses.angular",
    "ArcFace": "losses.arc_face",
    "BarlowTwins": "losses.barlow_twins",
    "Circle": "losses.circle",
    "ClassLoss": "loss_base.class_loss",
    "Clip": "losses.clip",
    "ClipDistillation": "losses.clip_distillation",
    "Contrastive": "losses.contrastive",
    "CosFace": "losses.cos_face",
    "CrossBatchMemory": "memory.cross_batch",
    "DCL": "losses.dcl",
    "DCLW": "losses.dcl",
    "DINO": "losses.dino",
    "Debiased": "losses.hcl",
    "DistributedLoss": "distributed",
    "DistributedMiner": "mining",
    "FastAP": "losses.fast_ap",
    "GIST": "losses.gist",
    "GeneralizedLiftedStructure": "losses.generalized_lifted_structure",
    "GradCache": "gradcache",
    "HCL": "losses.hcl",
    "InfoNCE": "losses.info_nce",
    "LearnableTemperature": "loss_base.temperature",
    "LiftedStructure": "losses.lifted_structure",
    "MILNCE": "losses.mil_nce",
    "MNRL": "losses.mnrl",
    "Margin": "losses.margin",
    "Matryoshka": "losses.matryoshka",
    "MemoryQueue": "memory.queue",
    "MomentumEncoder": "memory.momentum",
    "MultiPositive": "losses.multi_positive",
    "MultiSimilarity": "losses.multi_similarity",
    "NCA": "losses.nca",
    "NPairs": "losses.n_pairs",
    "NTXent": "losses.nt_xent",
    "NormalizedSoftmax": "losses.normalized_softmax",
    "ProxyAnchor": "losses.proxy_anchor",
    "ProxyNCA": "losses.proxy_nca",
    "RankedList": "losses.ranked_list",
    "RowLoss": "loss_base.row_loss",
    "SINCERE": "losses.sincere",
    "SigLIP": "losses.siglip",
    "SignalToNoise": "losses.signal_to_noise",
    "SmoothAP": "losses.smooth_ap",
    "SoftTriple": "losses.soft_triple",
    "SpectralContrastive": "losses.spectral_contrastive",
    "SupCon": "losses.sup_con",
    "SupSigmoid": "losses.sup_sigmoid",
    "SwAV": "losses.swav",
    "Triplet": "losses.triplet",
    "TupletMargin": "losses.tuplet_margin",
    "VICReg": "losses.vicreg",
    "WeightedSum": "losses.weighted_sum",
    "World": "world",
    "align_uniform": "losses.align_uniform",
    "all_gather": "collectives.functions",
    "all_reduce": "collectives.functions",
    "arc_face": "losses.arc_face",
    "average_gradients": "averaging",
    "barlow_twins": "losses.barlow_twins",
    "broadcast": "collectives.functions",
    "cached_step": "gradcache",
    "clip": "losses.clip",
    "clip_distillation": "losses.clip_distillation",
    "cos_face": "losses.cos_face",
    "dcl": "losses.dcl",
    "debiased": "losses.hcl",
    "dense": "engine.dense_mode",
    "dino": "losses.dino",
    "gather": "collectives.functions",
    "gist": "losses.gist",
    "hcl": "losses.hcl",
    "info_nce": "losses.info_nce",
    "lifted_structure": "losses.lifted_structure",
    "memory_budget": "engine.similarity_budget",
    "mil_nce": "losses.mil_nce",
    "mnrl": "losses.mnrl",
    "multi_positive": "losses.multi_positive",
    "n_pairs": "losses.n_pairs",
    "nca": "losses.nca",
    "normalized_softmax": "losses.normalized_softmax",
    "nt_xent": "losses.nt_xent",
    "pair_masks": "masks",
    "proxy_anchor": "losses.proxy_anchor",
    "proxy_nca": "losses.proxy_nca",
    "recall_at_k": "evaluation",
    "reduce": "collectives.functions",
    "reduce_scatter": "collectives.functions",
    "replicated": "collectives.functions",
    "sample_ids": "masks",
    "scatter": "collectives.functions",
    "siglip": "losses.siglip",
    "sincere": "losses.sincere",
    "soft_triple": "losses.soft_triple",
    "spectral_contrastive": "losses.spectral_contrastive",
    "sup_con": "losses.sup_con",
    "sup_sigmoid": "losses.sup_sigmoid",
    "swav": "losses.swav",
    "tuplet_margin": "losses.tuplet_margin",
    "vicreg": "losses.vicreg",
}

__all__ = [*_HOMES, "__version__"]

if TYPE_CHECKING:
    from contrastive_zoo.averaging import average_gradients as average_gradients
    from contrastive_zoo.collectives.functions import all_gather as all_gather
    from contrastive_zoo.collectives.functions import all_reduce as all_reduce
    from contrastive_zoo.collectives.functions import broadcast as broadcast
    from contrastive_zoo.collectives.functions import gather as gather
    from contrastive_zoo.collectives.functions import reduce as reduce
    from contrastive_zoo.collectives.functions import reduce_scatter as reduce_scatter
    from contrastive_zoo.collectives.functions import replicated as replicated
    from contrastive_zoo.collectives.functions import scatter as scatter
    from contrastive_zoo.distributed import DistributedLoss as DistributedLoss
    from contrastive_zoo.engine.dense_mode import dense as dense
    from contrastive_zoo.engine.similarity_budget import memory_budget as memory_budget
    from contrastive_zoo.evaluation import recall_at_k as recall_at_k
    from contrastive_zoo.gradcache import GradCache as GradCache
    from contrastive_zoo.gradcache import cached_step as cached_step
    from contrastive_zoo.loss_base.class_loss import ClassLoss as ClassLoss
    from contrastive_zoo.loss_base.row_loss import RowLoss as RowLoss
    from contrastive_zoo.loss_base.temperature import LearnableTemperature as LearnableTemperature
    from contrastive_zoo.losses.align_uniform import AlignUniform as AlignUniform
    from contrastive_zoo.losses.align_uniform import align_uniform as align_uniform
    from contrastive_zoo.losses.angular import Angular as Angular
    from contrastive_zoo.losses.arc_face import ArcFace as ArcFace
    from contrastive_zoo.losses.arc_face import arc_face as arc_face
    from contrastive_zoo.losses.barlow_twins import BarlowTwins as BarlowTwins
    from contrastive_zoo.losses.barlow_twins import barlow_twins as barlow_twins
    from contrastive_zoo.losses.circle import Circle as Circle
    from contrastive_zoo.losses.clip import Clip as Clip
    from contrastive_zoo.losses.clip import clip as clip
    from contrastive_zoo.losses.clip_distillation import ClipDistillation as ClipDistillation
    from contrastive_zoo.losses.clip_distillation import clip_distillation as clip_distillation
    from contrastive_zoo.losses.contrastive import Contrastive as Contrastive
    from contrastive_zoo.losses.cos_face import CosFace as CosFace
    from contrastive_zoo.losses.cos_face import cos_face as cos_face
    from contrastive_zoo.losses.dcl import DCL as DCL
    from contrastive_zoo.losses.dcl import DCLW as DCLW
    from contrastive_zoo.losses.dcl import dcl as dcl
    from contrastive_zoo.losses.dino import DINO as DINO
    from contrastive_zoo.losses.dino import dino as dino
    from contrastive_zoo.losses.fast_ap import FastAP as FastAP
    from contrastive_zoo.losses.generalized_lifted_structure import (
        GeneralizedLiftedStructure as GeneralizedLiftedStructure,
    )
    from contrastive_zoo.losses.gist import GIST as GIST
    from contrastive_zoo.losses.gist import gist as gist
    from contrastive_zoo.losses.hcl import HCL as HCL
    from contrastive_zoo.losses.hcl import Debiased as Debiased
    from contrastive_zoo.losses.hcl import debiased as debiased
    from contrastive_zoo.losses.hcl import hcl as hcl
    from contrastive_zoo.losses.info_nce import InfoNCE as InfoNCE
    from contrastive_zoo.losses.info_nce import info_nce as info_nce
    from contrastive_zoo.losses.lifted_structure import LiftedStructure as LiftedStructure
    from contrastive_zoo.losses.lifted_structure import lifted_structure as lifted_structure
    from contrastive_zoo.losses.margin import Margin as Margin
    from contrastive_zoo.losses.matryoshka import Matryoshka as Matryoshka
    from contrastive_zoo.losses.mil_nce import MILNCE as MILNCE
    from contrastive_zoo.losses.mil_nce import mil_nce as mil_nce
    from contrastive_zoo.losses.mnrl import MNRL as MNRL
    from contrastive_zoo.losses.mnrl import mnrl as mnrl
    from contrastive_zoo.losses.multi_positive import MultiPositive as MultiPositive
    from contrastive_zoo.losses.multi_positive import multi_positive as multi_positive
    from contrastive_zoo.losses.multi_similarity import MultiSimilarity as MultiSimilarity
    from contrastive_zoo.losses.n_pairs import NPairs as NPairs
    from contrastive_zoo.losses.n_pairs import n_pairs as n_pairs
    from contrastive_zoo.losses.nca import NCA as NCA
    from contrastive_zoo.losses.nca import nca as nca
    from contrastive_zoo.losses.normalized_softmax import NormalizedSoftmax as NormalizedSoftmax
    from contrastive_zoo.losses.normalized_softmax import normalized_softmax as normalized_softmax
    from contrastive_zoo.losses.nt_xent import NTXent as NTXent
    from contrastive_zoo.losses.nt_xent import nt_xent as nt_xent
    from contrastive_zoo.losses.proxy_anchor import ProxyAnchor as ProxyAnchor
    from contrastive_zoo.losses.proxy_anchor import proxy_anchor as proxy_anchor
    from contrastive_zoo.losses.proxy_nca import ProxyNCA as ProxyNCA
    from contrastive_zoo.losses.proxy_nca import proxy_nca as proxy_nca
    from contrastive_zoo.losses.ranked_list import RankedList as RankedList
    from contrastive_zoo.losses.siglip import SigLIP as SigLIP
    from contrastive_zoo.losses.siglip import siglip as siglip
    from contrastive_zoo.losses.signal_to_noise import SignalToNoise as SignalToNoise
    from contrastive_zoo.losses.sincere import SINCERE as SINCERE
    from contrastive_zoo.losses.sincere import sincere as sincere
    from contrastive_zoo.losses.smooth_ap import SmoothAP as SmoothAP
    from contrastive_zoo.losses.soft_triple import SoftTriple as SoftTriple
    from contrastive_zoo.losses.soft_triple import soft_triple as soft_triple
    from contrastive_zoo.losses.spectral_contrastive import SpectralContrastive as SpectralContrastive
    from contrastive_zoo.losses.spectral_contrastive import spectral_contrastive as spectral_contrastive
    from contrastive_zoo.losses.sup_con import SupCon as SupCon
    from contrastive_zoo.losses.sup_con import sup_con as sup_con
    from contrastive_zoo.losses.sup_sigmoid import SupSigmoid as SupSigmoid
    from contrastive_zoo.losses.sup_sigmoid import sup_sigmoid as sup_sigmoid
    from contrastive_zoo.losses.swav import SwAV as SwAV
    from contrastive_zoo.losses.swav import swav as swav
    from contrastive_zoo.losses.triplet import Triplet as Triplet
    from contrastive_zoo.losses.tuplet_margin import TupletMargin as TupletMargin
    from contrastive_zoo.losses.tuplet_margin import tuplet_margin as tuplet_margin
    from contrastive_zoo.losses.vicreg import VICReg as VICReg
    from contrastive_zoo.losses.vicreg import vicreg as vicreg
    from contrastive_zoo.losses.weighted_sum import WeightedSum as WeightedSum
    from contrastive_zoo.masks import pair_masks as pair_masks
    from contrastive_zoo.masks import sample_ids as sample_ids
    from contrastive_zoo.memory.cross_batch import CrossBatchMemory as CrossBatchMemory
    from contrastive_zoo.memory.momentum import MomentumEncoder as MomentumEncoder
    from contrastive_zoo.memory.queue import MemoryQueue as MemoryQueue
    from contrastive_zoo.mining import DistributedMiner as DistributedMiner
    from contrastive_zoo.world import ALONE as ALONE
    from contrastive_zoo.world import World as World


def __getattr__(name: str) -> Any:
    """Public names are imported when first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
