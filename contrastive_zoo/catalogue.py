"""What is in the zoo: one row per loss."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import contrastive_zoo

_INPUTS = {"views": "view1, view2", "labels": "embeddings, labels"}


@dataclass(frozen=True)
class Species:
    """A loss of the zoo.

    Args:
        name: as the command line spells it.
        cls: its class in :mod:`contrastive_zoo`.
        call: ``"views"`` for ``loss(view1, view2)``, ``"labels"`` for ``loss(embeddings, labels)``, ``"other"``.
        family: what it is a kind of.
        engine: what computes it; GEMM counts are forward + backward, in units of one N × d × N product.
        settings: what the constructor is given for a check.
        inputs: what it is called with, if that is something else than ``call`` says.
        peers: what other libraries call the same formula.
    """

    name: str
    cls: str
    call: Literal["views", "labels", "other"]
    family: str
    engine: str
    settings: tuple[tuple[str, Any], ...] = ()
    inputs: str = ""
    peers: str = ""

    def make(self) -> Any:
        """The loss with these settings."""
        return getattr(contrastive_zoo, self.cls)(**dict(self.settings))

    @cached_property
    def _doc(self) -> str:
        cls = getattr(contrastive_zoo, self.cls)
        function: Callable[..., Any] = getattr(cls, "function", cls)
        return inspect.getdoc(function) or ""

    @property
    def called_with(self) -> str:
        """Its arguments."""
        return self.inputs or _INPUTS[self.call]

    @property
    def summary(self) -> str:
        """First line of its docstring."""
        return re.sub(r":\w+:`(\w+)`", r"\1", self._doc.partition("\n")[0])

    @property
    def parameters(self) -> str:
        """What its class is made with, and the values that they have if not given."""
        found = inspect.signature(getattr(contrastive_zoo, self.cls)).parameters.values()
        given = [x for x in found if x.name != "check_finite" and x.kind is not x.VAR_KEYWORD]
        return ", ".join(x.name if x.default is x.empty else f"{x.name}={x.default!r}" for x in given)

    @property
    def formula(self) -> str:
        """The indented lines that follow it, where the docstring writes the formula."""
        lines = self._doc.partition("\n")[2].partition("\nArgs:")[0].split("\n")
        return "\n".join(line[4:] for line in lines if line.startswith("    ")).strip("\n")

    @property
    def source(self) -> str:
        """The citation."""
        return " ".join(self._doc.partition("Source:")[2].split())


_PAIRS = "softmax over pairs"
_SIGMOID = "sigmoid over pairs"
_MARGINS = "margins over pairs and triplets"
_CLASSES = "proxies and classifiers"
_STATISTICS = "feature statistics"
_CLUSTERS = "clusters and teachers"
_WEIGHTS = (("num_classes", 64), ("embedding_size", 3))
_PML, _ST, _LIGHTLY, _CLIP = "pytorch-metric-learning", "sentence-transformers", "lightly", "open_clip"

CATALOGUE = {
    species.name: species
    for species in (
        Species(
            "nt-xent",
            "NTXent",
            "views",
            _PAIRS,
            "softmax, one tower: 2 GEMM, 1.5 kept",
            peers=f"{_LIGHTLY} NTXentLoss, {_PML} SelfSupervisedLoss(NTXentLoss())",
        ),
        Species("info-nce", "InfoNCE", "views", _PAIRS, "softmax, two towers: 4 GEMM, 3 kept"),
        Species("clip", "Clip", "views", _PAIRS, "softmax, two towers: 4 GEMM, 3 kept", peers=f"{_CLIP} ClipLoss"),
        Species(
            "clip-distillation",
            "ClipDistillation",
            "other",
            _PAIRS,
            "rows: 3 GEMM",
            inputs="x, y, teacher_x, teacher_y",
            peers=f"{_CLIP} DistillClipLoss",
        ),
        Species(
            "sup-con", "SupCon", "labels", _PAIRS, "softmax, one tower: 2 GEMM, 1.5 kept", peers=f"{_PML} SupConLoss"
        ),
        Species("sup-con-in", "SupCon", "labels", _PAIRS, "rows: 3 GEMM", (("variant", "in"),)),
        Species("multi-positive", "MultiPositive", "other", _PAIRS, "rows: 3 GEMM", inputs="queries, keys, ids"),
        Species("dcl", "DCL", "views", _PAIRS, "rows: 3 GEMM", peers=f"{_LIGHTLY} DCLLoss"),
        Species("dclw", "DCLW", "views", _PAIRS, "rows: 3 GEMM", peers=f"{_LIGHTLY} DCLWLoss"),
        Species("hcl", "HCL", "views", _PAIRS, "rows: 3 GEMM"),
        Species("debiased", "Debiased", "views", _PAIRS, "rows: 3 GEMM"),
        Species(
            "mnrl",
            "MNRL",
            "views",
            _PAIRS,
            "softmax, two towers: 4 GEMM, 3 kept; rows with hardness",
            inputs="queries, documents, negatives, owners",
            peers=f"{_ST} MultipleNegativesRankingLoss",
        ),
        Species(
            "gist",
            "GIST",
            "other",
            _PAIRS,
            "rows: 3 GEMM",
            inputs="anchors, positives, guide_anchors, guide_positives",
            peers=f"{_ST} GISTEmbedLoss",
        ),
        Species(
            "mil-nce",
            "MILNCE",
            "other",
            _PAIRS,
            "softmax, two towers: 4 GEMM, 3 kept",
            inputs="videos [n, d], texts [n, k, d]",
        ),
        Species("sincere", "SINCERE", "labels", _PAIRS, "rows: 3 GEMM", peers=f"{_PML} NTXentLoss"),
        Species("nca", "NCA", "labels", _PAIRS, "rows: 3 GEMM", peers=f"{_PML} NCALoss"),
        Species("n-pairs", "NPairs", "labels", _PAIRS, "rows: 3 GEMM", peers=f"{_PML} NPairsLoss"),
        Species("tuplet-margin", "TupletMargin", "labels", _PAIRS, "rows: 3 GEMM", peers=f"{_PML} TupletMarginLoss"),
        Species("siglip", "SigLIP", "views", _SIGMOID, "rows: 3 GEMM", peers=f"{_CLIP} SigLipLoss"),
        Species("sup-sigmoid", "SupSigmoid", "labels", _SIGMOID, "rows: 3 GEMM"),
        Species(
            "signal-to-noise",
            "SignalToNoise",
            "labels",
            _MARGINS,
            "rows: 4 GEMM",
            peers=f"{_PML} SignalToNoiseRatioContrastiveLoss",
        ),
        Species("contrastive", "Contrastive", "labels", _MARGINS, "rows: 4 GEMM", peers=f"{_PML} ContrastiveLoss"),
        Species(
            "triplet",
            "Triplet",
            "labels",
            _MARGINS,
            "rows: 3 GEMM",
            peers=f"{_PML} TripletMarginLoss, {_ST} BatchAllTripletLoss",
        ),
        Species(
            "triplet-hard",
            "Triplet",
            "labels",
            _MARGINS,
            "rows: 3 GEMM",
            (("mining", "hard"),),
            peers=f"{_PML} TripletMarginLoss + BatchHardMiner, {_ST} BatchHardTripletLoss",
        ),
        Species(
            "triplet-semi-hard",
            "Triplet",
            "labels",
            _MARGINS,
            "rows: 3 GEMM",
            (("mining", "semi-hard"),),
            peers=f"{_PML} TripletMarginLoss + TripletMarginMiner(type_of_triplets='semihard')",
        ),
        Species(
            "multi-similarity",
            "MultiSimilarity",
            "labels",
            _MARGINS,
            "rows: 3 GEMM",
            peers=f"{_PML} MultiSimilarityLoss",
        ),
        Species("circle", "Circle", "labels", _MARGINS, "rows: 3 GEMM", peers=f"{_PML} CircleLoss"),
        Species(
            "lifted-structure",
            "LiftedStructure",
            "labels",
            _MARGINS,
            "rows, twice: 7 GEMM",
            peers=f"{_PML} LiftedStructureLoss",
        ),
        Species(
            "generalized-lifted-structure",
            "GeneralizedLiftedStructure",
            "labels",
            _MARGINS,
            "rows: 3 GEMM",
            peers=f"{_PML} GeneralizedLiftedStructureLoss",
        ),
        Species("margin", "Margin", "labels", _MARGINS, "rows: 3 GEMM", peers=f"{_PML} MarginLoss"),
        Species("ranked-list", "RankedList", "labels", _MARGINS, "rows: 3 GEMM", peers=f"{_PML} RankedListLoss"),
        Species("fast-ap", "FastAP", "labels", _MARGINS, "rows: 3 GEMM", peers=f"{_PML} FastAPLoss"),
        Species("smooth-ap", "SmoothAP", "labels", _MARGINS, "rows: 3 GEMM", peers=f"{_PML} SmoothAPLoss"),
        Species(
            "angular", "Angular", "labels", _MARGINS, "rows: about 4 GEMM per positive", peers=f"{_PML} AngularLoss"
        ),
        Species(
            "normalized-softmax",
            "NormalizedSoftmax",
            "labels",
            _CLASSES,
            "classes: 4 GEMM of N × d × C",
            _WEIGHTS,
            peers=f"{_PML} NormalizedSoftmaxLoss",
        ),
        Species(
            "cos-face",
            "CosFace",
            "labels",
            _CLASSES,
            "classes: 4 GEMM of N × d × C",
            _WEIGHTS,
            peers=f"{_PML} CosFaceLoss",
        ),
        Species(
            "arc-face",
            "ArcFace",
            "labels",
            _CLASSES,
            "classes: 4 GEMM of N × d × C",
            _WEIGHTS,
            peers=f"{_PML} ArcFaceLoss",
        ),
        Species(
            "sub-center-arc-face",
            "ArcFace",
            "labels",
            _CLASSES,
            "classes: 4 GEMM of N × d × kC",
            (*_WEIGHTS, ("sub_centers", 3)),
            peers=f"{_PML} SubCenterArcFaceLoss",
        ),
        Species(
            "proxy-nca",
            "ProxyNCA",
            "labels",
            _CLASSES,
            "classes: 4 GEMM of N × d × C",
            _WEIGHTS,
            peers=f"{_PML} ProxyNCALoss",
        ),
        Species(
            "proxy-anchor",
            "ProxyAnchor",
            "labels",
            _CLASSES,
            "classes: 4 GEMM of N × d × C",
            _WEIGHTS,
            peers=f"{_PML} ProxyAnchorLoss",
        ),
        Species(
            "soft-triple",
            "SoftTriple",
            "labels",
            _CLASSES,
            "classes: 4 GEMM of N × d × kC",
            (*_WEIGHTS, ("sub_centers", 2)),
            peers=f"{_PML} SoftTripleLoss",
        ),
        Species(
            "vicreg",
            "VICReg",
            "views",
            _STATISTICS,
            "moments: d × d, no pairs",
            peers=f"{_PML} VICRegLoss, {_LIGHTLY} VICRegLoss",
        ),
        Species(
            "barlow-twins",
            "BarlowTwins",
            "views",
            _STATISTICS,
            "moments: d × d, no pairs",
            peers=f"{_LIGHTLY} BarlowTwinsLoss",
        ),
        Species("spectral-contrastive", "SpectralContrastive", "views", _STATISTICS, "moments: d × d, no pairs"),
        Species(
            "align-uniform",
            "AlignUniform",
            "views",
            _STATISTICS,
            "softmax, one tower, twice",
            peers=f"{_LIGHTLY} HypersphereLoss",
        ),
        Species(
            "swav",
            "SwAV",
            "views",
            _CLUSTERS,
            "N × K, Sinkhorn",
            (("num_prototypes", 5), ("embedding_size", 3)),
            peers=f"{_LIGHTLY} SwaVLoss",
        ),
        Species(
            "dino",
            "DINO",
            "views",
            _CLUSTERS,
            "N × k, no pairs",
            (("out_dim", 3),),
            inputs="student, teacher",
            peers=f"{_LIGHTLY} DINOLoss",
        ),
    )
}
"""All losses by name."""
