"""The table: every loss of another library that is compared, how it is made, and what it takes."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tools.comparison import Batch, Compared, Run, Wrap
from tools.peer_losses import arguments as a
from tools.peer_losses.arguments import CLASSES, WIDTH, Argument, Samples
from tools.peer_losses.packages import loaded


class Reading(nn.Module):
    """A stand-in for a model, which returns embeddings that are already computed."""

    skiplist: tuple[int, ...] = ()
    do_query_expansion = False
    device = torch.device("cpu")

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return features


def uniform(mean_anchor_probs: Tensor) -> Tensor:
    return torch.full_like(mean_anchor_probs, 1 / len(mean_anchor_probs))


IN_FLOAT32 = {"iBOTPatchLoss", "DINOv1Loss"}
"""Losses that convert embeddings to float32, whose gradients are rounded there."""


@dataclass(frozen=True)
class PeerLoss:
    """A loss of another library.

    Args:
        package: as the registry calls it.
        module: where the loss is.
        name: of the class or the function.
        takes: the arguments of a call by name.
        settings: of the constructor, or of the function.
        refused: what DistributedLoss says of it, if it refuses the loss.
    """

    package: str
    module: str
    name: str
    takes: Mapping[str, Argument]
    settings: Mapping[str, Any] = field(default_factory=dict)
    refused: str | None = None

    width = WIDTH

    def __str__(self) -> str:
        texts = {name: getattr(x, "__name__", repr(x)) for name, x in self.settings.items() if name != "model"}
        settings = ", ".join(f"{name}={text}" for name, text in texts.items())
        return self.name if self.name.endswith("_func") else f"{self.name}({settings})"

    @property
    def call(self) -> str:
        return ", ".join(f"{name}: {argument.name}" for name, argument in self.takes.items())

    def construct(self) -> Callable[..., Any]:
        """Return the loss with the same parameters at each call."""
        torch.manual_seed(0)
        found: Any = getattr(loaded(self.module), self.name)
        if inspect.isclass(found):
            loss: Any = found(**self.settings)
            return loss.double()
        return found

    def start(self, wrap: Wrap | None, **options: Any) -> tuple[nn.Module, Callable[[Batch], Any]]:
        loss = self.construct()
        loss_fn = loss if wrap is None else wrap(loss, **options, **self.options)
        numbers = {"scale": torch.tensor(2.0), "bias": torch.tensor(-1.0)}
        numbers["prototypes"] = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(9))
        model = nn.ParameterDict({x.parameter: numbers[x.parameter] for x in self.takes.values() if x.parameter})
        learnt = nn.ModuleDict({"model": model})
        if isinstance(loss, nn.Module):
            learnt["loss"] = loss

        def of_batch(batch: Batch) -> Any:
            samples = Samples(**vars(batch), numbers=dict(model.items()))
            return loss_fn(**{name: x.value(samples, view) for view, (name, x) in enumerate(self.takes.items())})

        return learnt, of_batch

    @property
    def tolerance(self) -> float:
        """Return the largest allowed difference, relative to the larger of 1 and the largest expected element."""
        return 1e-6 if self.name in IN_FLOAT32 else 1e-10

    def wrong(self, compared: Compared) -> str | None:
        """Return in words what differs, unless it is what is said of the loss; None if nothing does."""
        if self.refused is not None and self.refused in (compared.words or ""):
            return None
        refused = f"is not refused: {compared.words or compared.differences}"
        return compared.wrong(self.tolerance) or compared.unsupported if self.refused is None else refused

    @property
    def options(self) -> dict[str, Any]:
        """Return the roles of arguments that DistributedLoss is told."""
        names = {role: [x for x, of in self.takes.items() if of.role == role] for role in ("shared", "batch_dim")}
        options = {"shared": set(names["shared"]), "batch_dim": dict.fromkeys(names["batch_dim"], 1)}
        return {name: x for name, x in options.items() if x}


Row = tuple[str, str, Mapping[str, Argument], Mapping[str, Any]]
"""The file, the name, the arguments and the settings."""


def _of(package: str, folder: str, table: Iterable[Row]) -> Iterator[PeerLoss]:
    for file, name, takes, settings in table:
        yield PeerLoss(package, f"{folder}.{file}", name, takes, settings)


_TWO = {"out0": a.rows, "out1": a.rows}
_Z = {"z_a": a.rows, "z_b": a.rows}
_REGIONS = dict.fromkeys(("pred_view0", "pred_view1", "target_view0", "target_view1"), a.tokens)
_MASKS = {"mask_view0": a.regions, "mask_view1": a.regions}
_ANCHORS = {"anchors": a.rows, "targets": a.rows, "prototypes": a.prototypes}
_STACKED = {"local_proj": a.stack(2), "global_proj": a.stack(3)}
_DIM = {"output_dim": WIDTH}
_LIGHTLY: tuple[Row, ...] = (
    ("ntx_ent_loss", "NTXentLoss", _TWO, {}),
    ("ntx_ent_loss", "NTXentLoss", _TWO, {"memory_bank_size": (16, WIDTH)}),
    ("ntx_ent_loss", "NTXentLoss", _TWO, {"gather_distributed": True}),
    ("directclr_loss", "DirectCLRLoss", _TWO, {"loss_dim": 4}),
    ("dcl_loss", "DCLLoss", _TWO, {}),
    ("dcl_loss", "DCLWLoss", _TWO, {}),
    ("dcl_loss", "DCLLoss", _TWO, {"gather_distributed": True}),
    ("barlow_twins_loss", "BarlowTwinsLoss", _Z, {}),
    ("barlow_twins_loss", "BarlowTwinsLoss", _Z, {"gather_distributed": True}),
    ("vicreg_loss", "VICRegLoss", _Z, {}),
    ("vicreg_loss", "VICRegLoss", _Z, {"gather_distributed": True}),
    ("tico_loss", "TiCoLoss", _Z, {}),
    ("hypersphere_loss", "HypersphereLoss", _Z, {}),
    ("macl_loss", "MACLLoss", {"z0": a.rows, "z1": a.rows}, {}),
    ("negative_cosine_similarity", "NegativeCosineSimilarity", {"x0": a.rows, "x1": a.targets}, {}),
    ("koleo_loss", "KoLeoLoss", {"x": a.rows}, {}),
    ("emp_ssl_loss", "EMPSSLLoss", {"z_views": a.listed(3)}, {}),
    ("frossl_loss", "FroSSLLoss", {"z_views": a.listed(2)}, {}),
    ("mmcr_loss", "MMCRLoss", {"online": a.tokens, "momentum": a.tokens}, {}),
    ("detcon_loss", "DetConSLoss", {"view0": a.tokens, "view1": a.tokens, **_MASKS}, {}),
    ("detcon_loss", "DetConBLoss", {**_REGIONS, **_MASKS}, {}),
    ("dino_loss", "DINOLoss", {"teacher_out": a.listed(2), "student_out": a.listed(3)}, {"output_dim": WIDTH}),
    (*("ibot_loss", "IBOTPatchLoss"), {"teacher_out": a.patches, "student_out": a.patches, "mask": a.mask}, _DIM),
    (
        *("ibot_loss", "IBOTPlusPlusPatchLoss"),
        {"teacher_out": a.tokens, "student_out": a.tokens, "mask": a.tokens_masked},
        _DIM,
    ),
    ("swav_loss", "SwaVLoss", {"high_resolution_outputs": a.listed(2), "low_resolution_outputs": a.listed(2, 2)}, {}),
    ("msn_loss", "MSNLoss", _ANCHORS, {}),
    ("pmsn_loss", "PMSNLoss", _ANCHORS, {}),
    ("pmsn_loss", "PMSNCustomLoss", _ANCHORS, {"target_distribution": uniform}),
    ("capi_loss", "CAPILoss", {"teacher_logits": a.tokens, "student_logits": a.tokens}, {}),
    ("lejepa_loss", "SIGReg", {"proj": a.rows}, {}),
    ("lejepa_loss", "LeJEPALoss", _STACKED, {}),
    ("visreg_loss", "VISRegLoss", _STACKED, {}),
    ("lewm_loss", "LeWMLoss", {"predicted": a.tokens, "target": a.tokens, "embeddings": a.tokens}, {}),
    ("regularizer.co2", "CO2Regularizer", _TWO, {}),
    ("regularizer.co2", "CO2Regularizer", _TWO, {"memory_bank_size": (16, WIDTH)}),
    ("regularizer.dse", "DSERegularizer", {"representations": a.tokens}, {"local_clusters": 2, "global_clusters": 4}),
)

_SCHEDULE = {"warmup_teacher_temp": 0.04, "teacher_temp": 0.07, "warmup_teacher_temp_epochs": 0, "num_epochs": 2}
_SOLO: tuple[Row, ...] = (
    ("barlow", "barlow_loss_func", {"z1": a.rows, "z2": a.rows}, {}),
    ("byol", "byol_loss_func", {"p": a.rows, "z": a.rows}, {}),
    (
        "dino",
        "DINOLoss",
        {"student_output": a.rows, "teacher_output": a.targets},
        {"num_prototypes": WIDTH, **_SCHEDULE},
    ),
    ("moco", "moco_loss_func", {"query": a.unit_rows, "key": a.unit_rows, "queue": a.shared(WIDTH, 16)}, {}),
    ("nnclr", "nnclr_loss_func", {"nn": a.rows, "p": a.rows}, {}),
    ("ressl", "ressl_loss_func", {"q": a.unit_rows, "k": a.unit_rows, "queue": a.shared(16, WIDTH)}, {}),
    ("simclr", "simclr_loss_func", {"z1": a.rows, "z2": a.rows}, {}),
    ("simsiam", "simsiam_loss_func", {"p": a.rows, "z": a.rows}, {}),
    ("swav", "swav_loss_func", {"preds": a.listed(2), "assignments": a.listed(2, 0, a.probabilities)}, {}),
    ("vicreg", "vicreg_loss_func", {"z1": a.rows, "z2": a.rows}, {}),
    ("wmse", "wmse_loss_func", {"z1": a.rows, "z2": a.rows}, {}),
)

_STABLE: tuple[Row, ...] = (
    ("joint_embedding", "BYOLLoss", {"online_pred": a.rows, "target_proj": a.targets}, {}),
    ("joint_embedding", "BarlowTwinsLoss", {"z_i": a.rows, "z_j": a.rows}, {}),
    ("joint_embedding", "NTXEntLoss", {"z_i": a.rows, "z_j": a.rows}, {}),
    ("joint_embedding", "VICRegLoss", {"z_i": a.rows, "z_j": a.rows}, {}),
    ("multimodal", "CLIPLoss", {"feats_i": a.rows, "feats_j": a.rows}, {}),
    ("multimodal", "CLIPLoss", {"feats_i": a.rows, "feats_j": a.rows, "logit_scale": a.scale}, {}),
    ("utils", "VCRegLoss", {"z_i": a.rows}, {}),
    ("utils", "NegativeCosineSimilarity", {"z_i": a.rows, "z_j": a.targets}, {}),
    ("dino", "DINOv1Loss", {"student_logits": a.stack(3), "teacher_probs": a.stack_of_probabilities}, {}),
    ("dino", "iBOTPatchLoss", {"student_patch_logits": a.rows, "teacher_patch_probs": a.probabilities}, {}),
)

_TOWERS = {"image_features": a.unit_rows, "text_features": a.unit_rows}
_TEACHER = {"dist_image_features": a.unit_rows, "dist_text_features": a.unit_rows, "dist_logit_scale": a.scale}
_WEIGHTS = {"caption_loss_weight": 2.0, "clip_loss_weight": 1.0}
_CAPTIONS = {"logits": a.captions, "labels": a.caption_labels}
_OPEN_CLIP: tuple[Row, ...] = (
    ("loss", "ClipLoss", {**_TOWERS, "logit_scale": a.scale}, {}),
    ("loss", "ClipLoss", {**_TOWERS, "logit_scale": a.scale, "logit_bias": a.bias}, {"cache_labels": True}),
    (
        "loss",
        "CoCaLoss",
        {**_TOWERS, **_CAPTIONS, "logit_scale": a.scale},
        _WEIGHTS,
    ),
    ("loss", "DistillClipLoss", {**_TOWERS, "logit_scale": a.scale, **_TEACHER}, {}),
    ("loss", "SigLipLoss", {**_TOWERS, "logit_scale": a.scale, "logit_bias": a.bias}, {}),
)

_PAIR = {"query_embeddings": a.unit_rows, "doc_embeddings": a.unit_rows}
_LATE = {"query_embeddings": a.unit_tokens, "doc_embeddings": a.unit_tokens}
_NEGATIVES, _LATE_NEGATIVES = {"neg_doc_embeddings": a.documents}, {"neg_doc_embeddings": a.long_documents}
_WARM = {"temperature": 0.5}
_COLPALI: tuple[Row, ...] = (
    ("bi_encoder_losses", "BiEncoderLoss", _PAIR, _WARM),
    ("bi_encoder_losses", "BiEncoderLoss", _PAIR, {"pos_aware_negative_filtering": True}),
    ("bi_encoder_losses", "BiPairedEncoderLoss", _PAIR, _WARM),
    ("bi_encoder_losses", "BiNegativeCELoss", {**_PAIR, **_NEGATIVES}, _WARM),
    ("bi_encoder_losses", "BiPairwiseCELoss", _PAIR, {}),
    ("bi_encoder_losses", "BiPairwiseNegativeCELoss", {**_PAIR, **_NEGATIVES}, {}),
    ("bi_encoder_losses", "BiSigmoidLoss", _PAIR, {}),
    ("late_interaction_losses", "ColbertLoss", _LATE, _WARM),
    ("late_interaction_losses", "ColbertLoss", _LATE, {"use_smooth_max": True}),
    ("late_interaction_losses", "ColbertNegativeCELoss", {**_LATE, **_LATE_NEGATIVES}, _WARM),
    ("late_interaction_losses", "ColbertPairwiseCELoss", _LATE, {}),
    ("late_interaction_losses", "ColbertPairwiseNegativeCELoss", {**_LATE, **_LATE_NEGATIVES}, _WARM),
    ("late_interaction_losses", "ColbertSigmoidLoss", _LATE, {}),
)

_MODEL = {"model": Reading()}
_DISTILLED = {"sentence_features": a.queries_and_documents, "labels": a.several_scores}
_PYLATE: tuple[Row, ...] = (
    ("contrastive", "Contrastive", {"sentence_features": a.triples}, _MODEL),
    ("contrastive", "Contrastive", {"sentence_features": a.triples}, {**_MODEL, "gather_across_devices": True}),
    ("distillation", "Distillation", _DISTILLED, _MODEL),
)

_QUERIES = {"query": a.rows, "positive_key": a.rows}
_INFO_NCE: tuple[Row, ...] = (
    ("__init__", "InfoNCE", _QUERIES, {}),
    ("__init__", "InfoNCE", {**_QUERIES, "negative_keys": a.rows}, {}),
    ("__init__", "InfoNCE", {**_QUERIES, "negative_keys": a.shared(5, WIDTH)}, {}),
    ("__init__", "InfoNCE", {**_QUERIES, "negative_keys": a.documents}, {"negative_mode": "paired"}),
)


def _sentences(name: str, count: int, of: Argument, **settings: Any) -> Row:
    takes = {"sentence_features": a.sentences(count), "labels": of}
    return "sentence_transformer.losses", name, takes, {**_MODEL, **settings}


_SENTENCES: tuple[Row, ...] = (
    _sentences("MultipleNegativesRankingLoss", 3, a.labels),
    _sentences("MultipleNegativesRankingLoss", 3, a.labels, gather_across_devices=True),
    _sentences("CosineSimilarityLoss", 2, a.scores),
    _sentences("CoSENTLoss", 2, a.scores),
    _sentences("AnglELoss", 2, a.scores),
    _sentences("ContrastiveLoss", 2, a.pairs),
    _sentences("OnlineContrastiveLoss", 2, a.pairs),
    _sentences("TripletLoss", 3, a.labels),
    _sentences("MarginMSELoss", 3, a.differences),
    _sentences("SoftmaxLoss", 2, a.labels, embedding_dimension=WIDTH, num_labels=CLASSES),
    *(_sentences(f"Batch{kind}TripletLoss", 1, a.labels) for kind in ("All", "Hard", "HardSoftMargin", "SemiHard")),
)


def table() -> list[PeerLoss]:
    """Return all losses, in the order of the page."""
    return [
        *_of("lightly", "lightly.loss", _LIGHTLY),
        *_of("solo-learn", "solo.losses", _SOLO),
        *_of("stable-pretraining", "stable_pretraining.losses", _STABLE),
        *_of("open-clip-torch", "open_clip", _OPEN_CLIP),
        *_of("colpali-engine", "colpali_engine.loss", _COLPALI),
        *_of("pylate", "pylate.losses", _PYLATE),
        *_of("info-nce-pytorch", "info_nce", _INFO_NCE),
        *_of("sentence-transformers", "sentence_transformers", _SENTENCES),
    ]


STEPS = (((3, 9), (12, 0), (5, 3)), ((5, 0, 7), (1, 8, 3), (0, 6, 2)))
"""Samples of each rank at each step: uneven, and with empty ranks."""


def runs(_: PeerLoss) -> list[Run]:
    """Return the runs of every loss, under trainers that average and that sum."""
    return [Run(steps, grad_reduction) for steps in STEPS for grad_reduction in ("mean", "sum")]


LEFT_OUT: dict[str, str] = {
    "lightly PatchKernelAlignmentLoss": "its file imports torchvision",
    "lightly VICRegLLoss": "its file imports torchvision",
    "lightly WMSELoss": "its sub-batches have a size that divides the batch",
    "solo-learn deepclusterv2_loss_func": "its assignments are those of one k-means over the data set",
    "solo-learn manual_simclr_loss_func": "its masks [n, n] are of one rank's rows",
    "stable-pretraining SwAVLoss": "it changes a module that is an argument",
    "stable-pretraining InfoNCELoss": "its targets are indices of one rank's candidates",
    "stable-pretraining DINOv2Loss": "it is the sum of two others",
    "stable-pretraining MAELoss": "it compares no embeddings",
    "pylate CachedContrastive": "it computes its embeddings again in the backward pass; see `GradCache`",
}
"""Losses in the same files that are not compared, and why."""
