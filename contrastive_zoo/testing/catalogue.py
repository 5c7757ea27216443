"""The catalogue of losses: one entry per loss, by family."""

import inspect
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from torch import nn

import contrastive_zoo
from contrastive_zoo.loss_base.loss import Loss

_ARGUMENTS = {
    "views": (("view1", "rows"), ("view2", "rows")),
    "labels": (("embeddings", "rows"), ("labels", "labels")),
}

_SECTION = re.compile(r"^(?:Args|Raises|Examples|Source):", re.MULTILINE)


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
        arguments: names and kinds of the arguments, if they are not those that ``call`` implies; a kind is a key of
            :data:`tools.vectors.cases.KINDS`.
        inputs: the arguments in words, where their names do not say enough.
        draws: what the loss draws, if it does: there are no conformance vectors of it.
        peers: names of the same formula in other libraries.
    """

    name: str
    cls: str
    call: Literal["views", "labels", "other"]
    family: str
    engine: str
    settings: tuple[tuple[str, Any], ...] = ()
    arguments: tuple[tuple[str, str], ...] = ()
    inputs: str = ""
    draws: str = ""
    peers: str = ""

    @property
    def loss(self) -> type[Loss]:
        return getattr(contrastive_zoo, self.cls)

    def make(self) -> Any:
        return self.loss(**dict(self.settings))

    @cached_property
    def _docs(self) -> list[str]:
        """The docstrings of the class and its bases, where it leaves to them what it does not say."""
        return [inspect.cleandoc(vars(cls).get("__doc__") or "") for cls in self.loss.__mro__]

    @property
    def called_with(self) -> str:
        return self.inputs or ", ".join(self.kinds)

    @property
    def kinds(self) -> dict[str, str]:
        return dict(self.arguments or _ARGUMENTS[self.call])

    @property
    def summary(self) -> str:
        """Return the first line of the loss's docstring."""
        return re.sub(r":\w+:`(\w+)`", r"\1", self._docs[0].partition("\n")[0])

    @property
    def parameters(self) -> str:
        """Return the constructor's parameters with their default values."""
        taken = {name: x for name, x in self.loss.fields.items() if x.init and name != "check_finite"}
        defaults = {name: x.value() for name, x in taken.items()}
        return ", ".join(
            name if x is inspect.Parameter.empty else f"{name}={default_text(x)}" for name, x in defaults.items()
        )

    @property
    def formula(self) -> str:
        """Return the formula: the indented lines of the docstring before its sections."""
        result = (_SECTION.split(doc)[0].split("\n") for doc in self._docs)
        formulas = ("\n".join(line[4:] for line in lines if line.startswith("    ")).strip("\n") for lines in result)
        return next(filter(None, formulas), "")

    @property
    def source(self) -> str:
        return next(filter(None, (" ".join(doc.partition("Source:")[2].split()) for doc in self._docs)), "")


def default_text(default: object) -> str:
    """Return a default value as a signature shows it.

    Examples:
        >>> default_text(nn.Parameter(nn.Linear(1, 1).bias.detach().fill_(-10)))
        'Parameter([-10.0])'
    """
    return f"Parameter({default.tolist()})" if isinstance(default, nn.Parameter) else repr(default)


_PAIRS = "softmax over pairs"
_SIGMOID = "sigmoid over pairs"
_MARGINS = "margins over pairs and triplets"
_CLASSES = "proxies and classifiers"
_STATISTICS = "feature statistics"
_CLUSTERS = "clusters and teachers"
_SCORES = "annotated pairs and scores"
_SPREAD = "spread of embeddings"
_TOKENS = "late interaction"

_ROWS = "rows: 3 GEMM"
_ROWS_4 = "rows: 4 GEMM"
_ONE_TOWER = "softmax, one tower: 2 GEMM, 1.5 cached"
_TWO_TOWERS = "softmax, two towers: 4 GEMM, 3 cached"
_CLASS_WEIGHTS = "classes: 4 GEMM of N × d × C"
_SUB_CENTERS = "classes: 4 GEMM of N × d × kC"
_MOMENTS = "moments: d × d, no pairs"
_OWN_ROWS = "local rows, no pairs"

_SIZES = (("num_classes", 64), ("embedding_size", 3))
_PML, _ST, _LIGHTLY, _CLIP = "pytorch-metric-learning", "sentence-transformers", "lightly", "open_clip"
_SOLO, _PYLATE, _COLPALI = "solo-learn", "PyLate", "colpali-engine"
_MAX_SIM = "tokens: 1 GEMM of all tokens, 2/L of it backward"

_TOWERS = (("queries", "rows"), ("keys", "rows"))
_IMAGES = (("images", "rows"), ("texts", "rows"))
_POSITIVES = (("anchors", "rows"), ("positives", "rows"))
_TEACHER = (("student", "rows"), ("teacher", "rows"))
_TOKEN_ROWS = (
    ("queries", "several"), ("documents", "several"), ("query_mask", "token mask"), ("document_mask", "token mask"),
)  # fmt: skip
_NNCLR = tuple((f"{name}{view}", "rows") for name in ("projections", "predictions") for view in (1, 2))
_DRAWS = "directions from torch's random generator in each call"

# fmt: off
_ENTRIES = (
    Entry("nt-xent", "NTXent", "views", _PAIRS, _ONE_TOWER,
          peers=f"{_LIGHTLY} NTXentLoss, {_PML} SelfSupervisedLoss(NTXentLoss())"),
    Entry("info-nce", "InfoNCE", "views", _PAIRS, _TWO_TOWERS, arguments=_TOWERS),
    Entry("clip", "Clip", "views", _PAIRS, _TWO_TOWERS, arguments=_IMAGES, peers=f"{_CLIP} ClipLoss"),
    Entry("clip-distillation", "ClipDistillation", "other", _PAIRS, _ROWS,
          arguments=(*_IMAGES, ("teacher_images", "rows"), ("teacher_texts", "rows")), peers=f"{_CLIP} DistillClipLoss"),
    Entry("sup-con", "SupCon", "labels", _PAIRS, _ONE_TOWER, peers=f"{_PML} SupConLoss"),
    Entry("sup-con-in", "SupCon", "labels", _PAIRS, _ROWS, (("variant", "in"),)),
    Entry("multi-positive", "MultiPositive", "other", _PAIRS, _ROWS, arguments=(*_TOWERS, ("ids", "labels"))),
    Entry("dcl", "DCL", "views", _PAIRS, _ROWS, peers=f"{_LIGHTLY} DCLLoss"),
    Entry("dclw", "DCLW", "views", _PAIRS, _ROWS, peers=f"{_LIGHTLY} DCLWLoss"),
    Entry("hcl", "HCL", "views", _PAIRS, _ROWS),
    Entry("debiased", "Debiased", "views", _PAIRS, _ROWS),
    Entry("mnrl", "MNRL", "views", _PAIRS, "softmax, two towers: 4 GEMM, 3 cached; rows with hardness",
          arguments=(("queries", "rows"), ("documents", "rows"), ("negatives", "negatives")),
          inputs="queries, documents, negatives, owners", peers=f"{_ST} MultipleNegativesRankingLoss"),
    Entry("gist", "GIST", "other", _PAIRS, _ROWS,
          arguments=(*_POSITIVES, ("guide_anchors", "rows"), ("guide_positives", "rows")), peers=f"{_ST} GISTEmbedLoss"),
    Entry("mil-nce", "MILNCE", "other", _PAIRS, _TWO_TOWERS,
          arguments=(("videos", "rows"), ("texts", "several")), inputs="videos [n, d], texts [n, k, d]"),
    Entry("sincere", "SINCERE", "labels", _PAIRS, _ROWS, peers=f"{_PML} NTXentLoss"),
    Entry("nca", "NCA", "labels", _PAIRS, _ROWS, peers=f"{_PML} NCALoss"),
    Entry("n-pairs", "NPairs", "labels", _PAIRS, _ROWS, peers=f"{_PML} NPairsLoss"),
    Entry("tuplet-margin", "TupletMargin", "labels", _PAIRS, _ROWS, peers=f"{_PML} TupletMarginLoss"),

    Entry("siglip", "SigLIP", "views", _SIGMOID, _ROWS, arguments=_IMAGES, peers=f"{_CLIP} SigLipLoss"),
    Entry("sup-sigmoid", "SupSigmoid", "labels", _SIGMOID, _ROWS),

    Entry("signal-to-noise", "SignalToNoise", "labels", _MARGINS, _ROWS_4,
          peers=f"{_PML} SignalToNoiseRatioContrastiveLoss"),
    Entry("contrastive", "Contrastive", "labels", _MARGINS, _ROWS_4, peers=f"{_PML} ContrastiveLoss"),
    Entry("triplet", "Triplet", "labels", _MARGINS, _ROWS,
          peers=f"{_PML} TripletMarginLoss, {_ST} BatchAllTripletLoss"),
    Entry("triplet-hard", "Triplet", "labels", _MARGINS, _ROWS, (("mining", "hard"),),
          peers=f"{_PML} TripletMarginLoss + BatchHardMiner, {_ST} BatchHardTripletLoss"),
    Entry("triplet-semi-hard", "Triplet", "labels", _MARGINS, _ROWS, (("mining", "semi-hard"),),
          peers=f"{_PML} TripletMarginLoss + TripletMarginMiner(type_of_triplets='semihard')"),
    Entry("mega-batch-margin", "MegaBatchMargin", "views", _MARGINS, _ROWS, inputs="queries, keys",
          peers=f"{_ST} MegaBatchMarginLoss"),
    Entry("dynamic-soft-margin", "DynamicSoftMargin", "views", _MARGINS, "rows, twice: 8 GEMM",
          (("num_bins", 8),), arguments=_POSITIVES, peers=f"{_PML} DynamicSoftMarginLoss"),
    Entry("multi-similarity", "MultiSimilarity", "labels", _MARGINS, _ROWS, peers=f"{_PML} MultiSimilarityLoss"),
    Entry("circle", "Circle", "labels", _MARGINS, _ROWS, peers=f"{_PML} CircleLoss"),
    Entry("lifted-structure", "LiftedStructure", "labels", _MARGINS, "rows, twice: 7 GEMM",
          peers=f"{_PML} LiftedStructureLoss"),
    Entry("generalized-lifted-structure", "GeneralizedLiftedStructure", "labels", _MARGINS, _ROWS,
          peers=f"{_PML} GeneralizedLiftedStructureLoss"),
    Entry("margin", "Margin", "labels", _MARGINS, _ROWS, peers=f"{_PML} MarginLoss"),
    Entry("ranked-list", "RankedList", "labels", _MARGINS, _ROWS, peers=f"{_PML} RankedListLoss"),
    Entry("fast-ap", "FastAP", "labels", _MARGINS, _ROWS, peers=f"{_PML} FastAPLoss"),
    Entry("smooth-ap", "SmoothAP", "labels", _MARGINS, _ROWS, peers=f"{_PML} SmoothAPLoss"),
    Entry("angular", "Angular", "labels", _MARGINS, "rows: about 4 GEMM per positive", peers=f"{_PML} AngularLoss"),
    Entry("histogram", "Histogram", "labels", _MARGINS, "rows, twice: 5 GEMM", peers=f"{_PML} HistogramLoss"),
    Entry("pnp", "PNP", "labels", _MARGINS, _ROWS, peers=f"{_PML} PNPLoss"),
    Entry("threshold-consistent-margin", "ThresholdConsistentMargin", "labels", _MARGINS, _ROWS_4,
          peers=f"{_PML} ThresholdConsistentMarginLoss"),
    Entry("intra-pair-variance", "IntraPairVariance", "labels", _MARGINS, _ROWS_4,
          peers=f"{_PML} IntraPairVarianceLoss"),

    Entry("cosent", "CoSENT", "other", _SCORES, "N numbers, sorted", arguments=(*_TOWERS, ("scores", "scores")),
          peers=f"{_ST} CoSENTLoss"),
    Entry("angle", "AnglE", "other", _SCORES, "N numbers, sorted", arguments=(*_TOWERS, ("scores", "scores")),
          peers=f"{_ST} AnglELoss"),
    Entry("online-contrastive", "OnlineContrastive", "other", _SCORES, _OWN_ROWS, arguments=(*_TOWERS, ("labels", "binary")),
          peers=f"{_ST} OnlineContrastiveLoss"),
    Entry("margin-mse", "MarginMSE", "other", _SCORES, _OWN_ROWS,
          arguments=(("queries", "rows"), ("positives", "rows"), ("negatives", "several"), ("margins", "several scores")),
          peers=f"{_ST} MarginMSELoss"),
    Entry("score-distillation", "ScoreDistillation", "other", _SCORES, _OWN_ROWS,
          arguments=(("queries", "rows"), ("candidates", "several"), ("scores", "several scores")),
          peers=f"{_ST} DistillKLDivLoss"),

    Entry("max-sim", "MaxSim", "other", _TOKENS, _MAX_SIM, arguments=_TOKEN_ROWS,
          inputs="queries [n, a, d], documents [n, b, d], masks, negatives",
          peers=f"{_PYLATE} Contrastive, {_COLPALI} ColbertLoss"),
    Entry("max-sim-pairwise", "MaxSimPairwise", "other", _TOKENS, _MAX_SIM, arguments=_TOKEN_ROWS,
          inputs="queries [n, a, d], documents [n, b, d], masks, negatives",
          peers=f"{_COLPALI} ColbertPairwiseCELoss"),

    Entry("normalized-softmax", "NormalizedSoftmax", "labels", _CLASSES, _CLASS_WEIGHTS, _SIZES,
          peers=f"{_PML} NormalizedSoftmaxLoss"),
    Entry("cos-face", "CosFace", "labels", _CLASSES, _CLASS_WEIGHTS, _SIZES, peers=f"{_PML} CosFaceLoss"),
    Entry("arc-face", "ArcFace", "labels", _CLASSES, _CLASS_WEIGHTS, _SIZES, peers=f"{_PML} ArcFaceLoss"),
    Entry("sub-center-arc-face", "ArcFace", "labels", _CLASSES, _SUB_CENTERS, (*_SIZES, ("sub_centers", 3)),
          peers=f"{_PML} SubCenterArcFaceLoss"),
    Entry("proxy-nca", "ProxyNCA", "labels", _CLASSES, _CLASS_WEIGHTS, _SIZES, peers=f"{_PML} ProxyNCALoss"),
    Entry("proxy-anchor", "ProxyAnchor", "labels", _CLASSES, _CLASS_WEIGHTS, _SIZES, peers=f"{_PML} ProxyAnchorLoss"),
    Entry("soft-triple", "SoftTriple", "labels", _CLASSES, _SUB_CENTERS, (*_SIZES, ("sub_centers", 2)),
          peers=f"{_PML} SoftTripleLoss"),
    Entry("large-margin-softmax", "LargeMarginSoftmax", "labels", _CLASSES, _CLASS_WEIGHTS, _SIZES,
          peers=f"{_PML} LargeMarginSoftmaxLoss"),
    Entry("sphere-face", "SphereFace", "labels", _CLASSES, _CLASS_WEIGHTS, _SIZES, peers=f"{_PML} SphereFaceLoss"),
    Entry("instance", "Instance", "other", _CLASSES, "classes: 8 GEMM of N × d × C", _SIZES,
          arguments=(("x", "rows"), ("y", "rows"), ("labels", "labels"))),
    Entry("p2s-grad", "P2SGrad", "labels", _CLASSES, _MOMENTS, _SIZES, peers=f"{_PML} P2SGradLoss"),

    Entry("vicreg", "VICReg", "views", _STATISTICS, _MOMENTS, peers=f"{_PML} VICRegLoss, {_LIGHTLY} VICRegLoss"),
    Entry("barlow-twins", "BarlowTwins", "views", _STATISTICS, _MOMENTS, peers=f"{_LIGHTLY} BarlowTwinsLoss"),
    Entry("spectral-contrastive", "SpectralContrastive", "views", _STATISTICS, _MOMENTS),
    Entry("align-uniform", "AlignUniform", "views", _STATISTICS, "softmax, one tower, twice",
          peers=f"{_LIGHTLY} HypersphereLoss"),
    Entry("vibcreg", "VIbCReg", "views", _STATISTICS, _MOMENTS, peers=f"{_SOLO} vibcreg_loss_func"),
    Entry("tico", "TiCo", "views", _STATISTICS, _MOMENTS, (("embedding_size", 3),), peers=f"{_LIGHTLY} TiCoLoss"),
    Entry("frossl", "FroSSL", "views", _STATISTICS, _MOMENTS, peers=f"{_LIGHTLY} FroSSLLoss"),
    Entry("w-mse", "WMSE", "views", _STATISTICS, _MOMENTS, peers=f"{_LIGHTLY} WMSELoss, {_SOLO} wmse_loss_func"),
    Entry("mmcr", "MMCR", "views", _STATISTICS, _MOMENTS, peers=f"{_LIGHTLY} MMCRLoss"),

    Entry("koleo", "KoLeo", "other", _SPREAD, _ROWS_4, arguments=(("embeddings", "rows"),), peers=f"{_LIGHTLY} KoLeoLoss"),
    Entry("sigreg", "SIGReg", "other", _SPREAD, "N × slices, no pairs", (("embedding_size", 3),),
          arguments=(("embeddings", "rows"),), draws=_DRAWS, peers=f"{_LIGHTLY} SIGReg"),
    Entry("lejepa", "LeJEPA", "views", _SPREAD, "N × slices, no pairs", (("embedding_size", 3),),
          draws=_DRAWS, peers=f"{_LIGHTLY} LeJEPALoss"),
    Entry("orthogonal-regularization", "OrthogonalRegularization", "other", _SPREAD, _MOMENTS,
          arguments=(("embeddings", "rows"),),
          peers=f"{_ST} GlobalOrthogonalRegularizationLoss"),

    Entry("negative-cosine", "NegativeCosine", "views", _CLUSTERS, _OWN_ROWS,
          arguments=(("predictions", "rows"), ("targets", "rows")),
          peers=f"{_LIGHTLY} NegativeCosineSimilarity, {_SOLO} byol_loss_func, simsiam_loss_func"),
    Entry("nnclr", "NNCLR", "other", _CLUSTERS, "N × m, then softmax, two towers, twice",
          (("size", 64), ("embedding_size", 3)), arguments=_NNCLR,
          peers=f"{_SOLO} nnclr_loss_func"),
    Entry("ressl", "ReSSL", "other", _CLUSTERS, "N × m, no pairs", (("size", 64), ("embedding_size", 3)),
          arguments=_TEACHER, peers=f"{_SOLO} ressl_loss_func"),
    Entry("swav", "SwAV", "views", _CLUSTERS, "N × K, Sinkhorn", (("num_prototypes", 5), ("embedding_size", 3)),
          peers=f"{_LIGHTLY} SwaVLoss"),
    Entry("dino", "DINO", "views", _CLUSTERS, "N × k, no pairs", (("out_dim", 3),),
          arguments=_TEACHER, peers=f"{_LIGHTLY} DINOLoss"),
)
# fmt: on

CATALOGUE = {entry.name: entry for entry in _ENTRIES}
"""All losses by name."""
