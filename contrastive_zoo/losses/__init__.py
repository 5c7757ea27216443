"""The losses, a file for each family, memories of earlier batches and the momentum encoder included."""

from typing import TYPE_CHECKING

from contrastive_zoo.losses.angular_margins import AdaFace, ArcFace, CurricularFace, MagFace
from contrastive_zoo.losses.annotated_pairs import CoSENT, OnlineContrastive
from contrastive_zoo.losses.class_softmax import (
    CenterLoss,
    CosFace,
    LargeMarginSoftmax,
    NormalizedSoftmax,
    ProxyAnchor,
    ProxyNCA,
    SoftTriple,
)
from contrastive_zoo.losses.compositions import Matryoshka, WeightedSum
from contrastive_zoo.losses.cross_batch_memory import CrossBatchMemory
from contrastive_zoo.losses.distillation import ClipDistillation, MarginMSE, ScoreDistillation
from contrastive_zoo.losses.info_nce import Clip, InfoLOOB, InfoNCE
from contrastive_zoo.losses.long_tails import BalSCL, PaCo
from contrastive_zoo.losses.max_sim import M3, MaxSim, MaxSimPairwise
from contrastive_zoo.losses.memory_queue import MemoryQueue, MomentumEncoder
from contrastive_zoo.losses.mnrl import GIST, MNRL
from contrastive_zoo.losses.modalities import GRAM
from contrastive_zoo.losses.multi_positive import GE2E, AngularPrototypical, MultiPositive, NPairs
from contrastive_zoo.losses.nnclr import NNCLR
from contrastive_zoo.losses.nt_xent import DCL, HCL, NTXent
from contrastive_zoo.losses.pair_margins import (
    Contrastive,
    Margin,
    RankedList,
    SignalToNoise,
    ThresholdConsistentMargin,
)
from contrastive_zoo.losses.random_slices import LeJEPA, RDMReg, SIGReg, VISReg
from contrastive_zoo.losses.ranking import FastAP, RankNContrast, SmoothAP
from contrastive_zoo.losses.redundancy import BarlowTwins, CyclicConsistency, TiCo, VICReg
from contrastive_zoo.losses.self_distillation import DINO, IBOT, MSN, NegativeCosine, SwAV
from contrastive_zoo.losses.sigmoid import SigLIP
from contrastive_zoo.losses.soft_margins import Circle, GeneralizedLiftedStructure, LiftedStructure, MultiSimilarity
from contrastive_zoo.losses.sogclr import SogCLR
from contrastive_zoo.losses.sparse import FLOPS
from contrastive_zoo.losses.sup_con import HMLC, NCA, SINCERE, SupCon, TupletMargin
from contrastive_zoo.losses.triplet import Angular, MegaBatchMargin, Triplet
from contrastive_zoo.losses.uniformity import AlignUniform, KoLeo, OrthogonalRegularization
from contrastive_zoo.ranks.suggestions import missing

__all__ = [
    "DCL", "DINO", "FLOPS", "GE2E", "GIST", "GRAM", "HCL", "HMLC", "IBOT", "M3", "MNRL", "MSN", "NCA", "NNCLR",
    "SINCERE", "AdaFace", "AlignUniform", "Angular", "AngularPrototypical", "ArcFace", "BalSCL", "BarlowTwins",
    "CenterLoss", "Circle", "Clip", "ClipDistillation", "CoSENT", "Contrastive", "CosFace", "CrossBatchMemory",
    "CurricularFace", "CyclicConsistency", "FastAP", "GeneralizedLiftedStructure", "InfoLOOB", "InfoNCE", "KoLeo",
    "LargeMarginSoftmax", "LeJEPA", "LiftedStructure", "MagFace", "Margin", "MarginMSE", "Matryoshka", "MaxSim",
    "MaxSimPairwise", "MegaBatchMargin", "MemoryQueue", "MomentumEncoder", "MultiPositive", "MultiSimilarity", "NPairs",
    "NTXent", "NegativeCosine", "NormalizedSoftmax", "OnlineContrastive", "OrthogonalRegularization", "PaCo",
    "ProxyAnchor", "ProxyNCA", "RDMReg", "RankNContrast", "RankedList", "SIGReg", "ScoreDistillation", "SigLIP",
    "SignalToNoise", "SmoothAP", "SoftTriple", "SogCLR", "SupCon", "SwAV", "ThresholdConsistentMargin", "TiCo",
    "Triplet", "TupletMargin", "VICReg", "VISReg", "WeightedSum",
]  # fmt: skip

if not TYPE_CHECKING:  # a checker would take any name
    __getattr__ = missing(__name__, __all__)
