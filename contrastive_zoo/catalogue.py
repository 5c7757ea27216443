"""The catalogue of losses: one entry per loss."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import contrastive_zoo

_INPUTS = {"views": "view1, view2", "labels": "embeddings, labels"}


@dataclass(frozen=True)
class Entry:
    """A loss of the catalogue.

    Args:
        name: name on the command line.
        cls: name of its class in :mod:`contrastive_zoo`.
        call: ``"views"`` for ``loss(view1, view2)``, ``"labels"`` for ``loss(embeddings, labels)``, ``"other"``.
        family: the heading under which the page lists it.
        engine: the engine that computes it; GEMM counts are forward + backward, in units of one N × d × N matmul.
        settings: constructor arguments for a check.
        inputs: argument names, if they differ from those that ``call`` implies.
        peers: names of the same formula in other libraries.
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
        """Construct the loss with these settings."""
        return getattr(contrastive_zoo, self.cls)(**dict(self.settings))

    @cached_property
    def _doc(self) -> str:
        cls = getattr(contrastive_zoo, self.cls)
        function: Callable[..., Any] = getattr(cls, "function", cls)
        return inspect.getdoc(function) or ""

    @property
    def called_with(self) -> str:
        """The arguments of a call."""
        return self.inputs or _INPUTS[self.call]

    @property
    def summary(self) -> str:
        """The first line of its docstring."""
        return re.sub(r":\w+:`(\w+)`", r"\1", self._doc.partition("\n")[0])

    @property
    def parameters(self) -> str:
        """The constructor's parameters with their default values."""
        found = inspect.signature(getattr(contrastive_zoo, self.cls)).parameters.values()
        given = [x for x in found if x.name != "check_finite" and x.kind is not x.VAR_KEYWORD]
        return ", ".join(x.name if x.default is x.empty else f"{x.name}={x.default!r}" for x in given)

    @property
    def formula(self) -> str:
        """The formula: the indented lines of the docstring before its sections."""
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
    entry.name: entry
    for entry in (
        Entry(
            "nt-xent",
            "NTXent",
            "views",
            _PAIRS,
            "softmax, one tower: 2 GEMM, 1.5 cached",
            peers=f"{_LIGHTLY} NTXentLoss, {_PML} SelfSupervisedLoss(NTXentLoss())",
        ),
        Entry("info-nce", "InfoNCE", "views", _PAIRS, "softmax, two towers: 4 GEMM, 3 cached"),
        Entry("clip", "Clip", "views", _PAIRS, "softmax, two towers: 4 GEMM, 3 cached", peers=f"{_CLIP} ClipLoss"),
        Entry(
            "clip-distillation",
            "ClipDistillation",
            "other",
            _PAIRS,
            "rows: 3 GEMM",
            inputs="x, y, teacher_x, teacher_y",
            peers=f"{_CLIP} DistillClipLoss",
        ),
        Entry(
            "sup-con", "SupCon", "labels", _PAIRS, "softmax, one tower: 2 GEMM, 1.5 cached", peers=f"{_PML} SupConLoss"
        ),
        Entry("sup-con-in", "SupCon", "labels", _PAIRS, "rows: 3 GEMM", (("variant", "in"),)),
        Entry("multi-positive", "MultiPositive", "other", _PAIRS, "rows: 3 GEMM", inputs="queries, keys, ids"),
        Entry("dcl", "DCL", "views", _PAIRS, "rows: 3 GEMM", peers=f"{_LIGHTLY} DCLLoss"),
        Entry("dclw", "DCLW", "views", _PAIRS, "rows: 3 GEMM", peers=f"{_LIGHTLY} DCLWLoss"),
        Entry("hcl", "HCL", "views", _PAIRS, "rows: 3 GEMM"),
        Entry("debiased", "Debiased", "views", _PAIRS, "rows: 3 GEMM"),
        Entry(
            "mnrl",
            "MNRL",
            "views",
            _PAIRS,
            "softmax, two towers: 4 GEMM, 3 cached; rows with hardness",
            inputs="queries, documents, negatives, owners",
            peers=f"{_ST} MultipleNegativesRankingLoss",
        ),
        Entry(
            "gist",
            "GIST",
            "other",
            _PAIRS,
            "rows: 3 GEMM",
            inputs="anchors, positives, guide_anchors, guide_positives",
            peers=f"{_ST} GISTEmbedLoss",
        ),
        Entry(
            "mil-nce",
            "MILNCE",
            "other",
            _PAIRS,
            "softmax, two towers: 4 GEMM, 3 cached",
            inputs="videos [n, d], texts [n, k, d]",
        ),
        Entry("sincere", "SINCERE", "labels", _PAIRS, "rows: 3 GEMM", peers=f"{_PML} NTXentLoss"),
        Entry("nca", "NCA", "labels", _PAIRS, "rows: 3 GEMM", peers=f"{_PML} NCALoss"),
        Entry("n-pairs", "NPairs", "labels", _PAIRS, "rows: 3 GEMM", peers=f"{_PML} NPairsLoss"),
        Entry("tuplet-margin", "TupletMargin", "labels", _PAIRS, "rows: 3 GEMM", peers=f"{_PML} TupletMarginLoss"),
        Entry("siglip", "SigLIP", "views", _SIGMOID, "rows: 3 GEMM", peers=f"{_CLIP} SigLipLoss"),
        Entry("sup-sigmoid", "SupSigmoid", "labels", _SIGMOID, "rows: 3 GEMM"),
        Entry(
            "signal-to-noise",
            "SignalToNoise",
            "labels",
            _MARGINS,
            "rows: 4 GEMM",
            peers=f"{_PML} SignalToNoiseRatioContrastiveLoss",
        ),
        Entry("contrastive", "Contrastive", "labels", _MARGINS, "rows: 4 GEMM", peers=f"{_PML} ContrastiveLoss"),
        Entry(
            "triplet",
            "Triplet",
            "labels",
            _MARGINS,
            "rows: 3 GEMM",
            peers=f"{_PML} TripletMarginLoss, {_ST} BatchAllTripletLoss",
        ),
        Entry(
            "triplet-hard",
            "Triplet",
            "labels",
            _MARGINS,
            "rows: 3 GEMM",
            (("mining", "hard"),),
            peers=f"{_PML} TripletMarginLoss + BatchHardMiner, {_ST} BatchHardTripletLoss",
        ),
        Entry(
            "triplet-semi-hard",
            "Triplet",
            "labels",
            _MARGINS,
            "rows: 3 GEMM",
            (("mining", "semi-hard"),),
            peers=f"{_PML} TripletMarginLoss + TripletMarginMiner(type_of_triplets='semihard')",
        ),
        Entry(
            "multi-similarity",
            "MultiSimilarity",
            "labels",
            _MARGINS,
            "rows: 3 GEMM",
            peers=f"{_PML} MultiSimilarityLoss",
        ),
        Entry("circle", "Circle", "labels", _MARGINS, "rows: 3 GEMM", peers=f"{_PML} CircleLoss"),
        Entry(
            "lifted-structure",
            "LiftedStructure",
            "labels",
            _MARGINS,
            "rows, twice: 7 GEMM",
            peers=f"{_PML} LiftedStructureLoss",
        ),
        Entry(
            "generalized-lifted-structure",
            "GeneralizedLiftedStructure",
            "labels",
            _MARGINS,
            "rows: 3 GEMM",
            peers=f"{_PML} GeneralizedLiftedStructureLoss",
        ),
        Entry("margin", "Margin", "labels", _MARGINS, "rows: 3 GEMM", peers=f"{_PML} MarginLoss"),
        Entry("ranked-list", "RankedList", "labels", _MARGINS, "rows: 3 GEMM", peers=f"{_PML} RankedListLoss"),
        Entry("fast-ap", "FastAP", "labels", _MARGINS, "rows: 3 GEMM", peers=f"{_PML} FastAPLoss"),
        Entry("smooth-ap", "SmoothAP", "labels", _MARGINS, "rows: 3 GEMM", peers=f"{_PML} SmoothAPLoss"),
        Entry("angular", "Angular", "labels", _MARGINS, "rows: about 4 GEMM per positive", peers=f"{_PML} AngularLoss"),
        Entry(
            "normalized-softmax",
            "NormalizedSoftmax",
            "labels",
            _CLASSES,
            "classes: 4 GEMM of N × d × C",
            _WEIGHTS,
            peers=f"{_PML} NormalizedSoftmaxLoss",
        ),
        Entry(
            "cos-face",
            "CosFace",
            "labels",
            _CLASSES,
            "classes: 4 GEMM of N × d × C",
            _WEIGHTS,
            peers=f"{_PML} CosFaceLoss",
        ),
        Entry(
            "arc-face",
            "ArcFace",
            "labels",
            _CLASSES,
            "classes: 4 GEMM of N × d × C",
            _WEIGHTS,
            peers=f"{_PML} ArcFaceLoss",
        ),
        Entry(
            "sub-center-arc-face",
            "ArcFace",
            "labels",
            _CLASSES,
            "classes: 4 GEMM of N × d × kC",
            (*_WEIGHTS, ("sub_centers", 3)),
            peers=f"{_PML} SubCenterArcFaceLoss",
        ),
        Entry(
            "proxy-nca",
            "ProxyNCA",
            "labels",
            _CLASSES,
            "classes: 4 GEMM of N × d × C",
            _WEIGHTS,
            peers=f"{_PML} ProxyNCALoss",
        ),
        Entry(
            "proxy-anchor",
            "ProxyAnchor",
            "labels",
            _CLASSES,
            "classes: 4 GEMM of N × d × C",
            _WEIGHTS,
            peers=f"{_PML} ProxyAnchorLoss",
        ),
        Entry(
            "soft-triple",
            "SoftTriple",
            "labels",
            _CLASSES,
            "classes: 4 GEMM of N × d × kC",
            (*_WEIGHTS, ("sub_centers", 2)),
            peers=f"{_PML} SoftTripleLoss",
        ),
        Entry(
            "vicreg",
            "VICReg",
            "views",
            _STATISTICS,
            "moments: d × d, no pairs",
            peers=f"{_PML} VICRegLoss, {_LIGHTLY} VICRegLoss",
        ),
        Entry(
            "barlow-twins",
            "BarlowTwins",
            "views",
            _STATISTICS,
            "moments: d × d, no pairs",
            peers=f"{_LIGHTLY} BarlowTwinsLoss",
        ),
        Entry("spectral-contrastive", "SpectralContrastive", "views", _STATISTICS, "moments: d × d, no pairs"),
        Entry(
            "align-uniform",
            "AlignUniform",
            "views",
            _STATISTICS,
            "softmax, one tower, twice",
            peers=f"{_LIGHTLY} HypersphereLoss",
        ),
        Entry(
            "swav",
            "SwAV",
            "views",
            _CLUSTERS,
            "N × K, Sinkhorn",
            (("num_prototypes", 5), ("embedding_size", 3)),
            peers=f"{_LIGHTLY} SwaVLoss",
        ),
        Entry(
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
