"""The table: every loss of another library that is compared, how it is made, and what it takes."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tools.peer_losses.arguments import (
    CLASSES,
    WIDTH,
    Argument,
    bias,
    caption_labels,
    captions,
    differences,
    documents,
    labels,
    listed,
    long_documents,
    mask,
    pairs,
    patches,
    probabilities,
    prototypes,
    queries_and_documents,
    regions,
    rows,
    scale,
    scores,
    sentences,
    several_scores,
    shared,
    stack,
    stack_of_probabilities,
    targets,
    tokens,
    tokens_masked,
    triples,
    unit_rows,
    unit_tokens,
)
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

    @property
    def tolerance(self) -> float:
        """Return the largest allowed difference, relative to the larger of 1 and the largest expected element."""
        return 1e-6 if self.name in IN_FLOAT32 else 1e-10

    @property
    def options(self) -> dict[str, Any]:
        """Return the roles of arguments that DistributedLoss is told."""
        names = {role: [x for x, of in self.takes.items() if of.role == role] for role in ("shared", "batch_dim")}
        options: dict[str, Any] = {}
        if names["shared"]:
            options["shared"] = set(names["shared"])
        if names["batch_dim"]:
            options["batch_dim"] = dict.fromkeys(names["batch_dim"], 1)
        return options


Row = tuple[str, str, Mapping[str, Argument], Mapping[str, Any]]
"""The file, the name, the arguments and the settings."""


def _of(package: str, folder: str, table: Iterable[Row]) -> Iterator[PeerLoss]:
    for file, name, takes, settings in table:
        yield PeerLoss(package, f"{folder}.{file}", name, takes, settings)


_TWO = {"out0": rows, "out1": rows}
_Z = {"z_a": rows, "z_b": rows}
_REGIONS = dict.fromkeys(("pred_view0", "pred_view1", "target_view0", "target_view1"), tokens)
_MASKS = {"mask_view0": regions, "mask_view1": regions}
_ANCHORS = {"anchors": rows, "targets": rows, "prototypes": prototypes}
_STACKED = {"local_proj": stack(2), "global_proj": stack(3)}
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
    ("macl_loss", "MACLLoss", {"z0": rows, "z1": rows}, {}),
    ("negative_cosine_similarity", "NegativeCosineSimilarity", {"x0": rows, "x1": targets}, {}),
    ("koleo_loss", "KoLeoLoss", {"x": rows}, {}),
    ("emp_ssl_loss", "EMPSSLLoss", {"z_views": listed(3)}, {}),
    ("frossl_loss", "FroSSLLoss", {"z_views": listed(2)}, {}),
    ("mmcr_loss", "MMCRLoss", {"online": tokens, "momentum": tokens}, {}),
    ("detcon_loss", "DetConSLoss", {"view0": tokens, "view1": tokens, **_MASKS}, {}),
    ("detcon_loss", "DetConBLoss", {**_REGIONS, **_MASKS}, {}),
    ("dino_loss", "DINOLoss", {"teacher_out": listed(2), "student_out": listed(3)}, {"output_dim": WIDTH}),
    (*("ibot_loss", "IBOTPatchLoss"), {"teacher_out": patches, "student_out": patches, "mask": mask}, _DIM),
    (
        *("ibot_loss", "IBOTPlusPlusPatchLoss"),
        {"teacher_out": tokens, "student_out": tokens, "mask": tokens_masked},
        _DIM,
    ),
    ("swav_loss", "SwaVLoss", {"high_resolution_outputs": listed(2), "low_resolution_outputs": listed(2, 2)}, {}),
    ("msn_loss", "MSNLoss", _ANCHORS, {}),
    ("pmsn_loss", "PMSNLoss", _ANCHORS, {}),
    ("pmsn_loss", "PMSNCustomLoss", _ANCHORS, {"target_distribution": uniform}),
    ("capi_loss", "CAPILoss", {"teacher_logits": tokens, "student_logits": tokens}, {}),
    ("lejepa_loss", "SIGReg", {"proj": rows}, {}),
    ("lejepa_loss", "LeJEPALoss", _STACKED, {}),
    ("visreg_loss", "VISRegLoss", _STACKED, {}),
    ("lewm_loss", "LeWMLoss", {"predicted": tokens, "target": tokens, "embeddings": tokens}, {}),
    ("regularizer.co2", "CO2Regularizer", _TWO, {}),
    ("regularizer.co2", "CO2Regularizer", _TWO, {"memory_bank_size": (16, WIDTH)}),
    ("regularizer.dse", "DSERegularizer", {"representations": tokens}, {"local_clusters": 2, "global_clusters": 4}),
)

_SCHEDULE = {"warmup_teacher_temp": 0.04, "teacher_temp": 0.07, "warmup_teacher_temp_epochs": 0, "num_epochs": 2}
_SOLO: tuple[Row, ...] = (
    ("barlow", "barlow_loss_func", {"z1": rows, "z2": rows}, {}),
    ("byol", "byol_loss_func", {"p": rows, "z": rows}, {}),
    ("dino", "DINOLoss", {"student_output": rows, "teacher_output": targets}, {"num_prototypes": WIDTH, **_SCHEDULE}),
    ("moco", "moco_loss_func", {"query": unit_rows, "key": unit_rows, "queue": shared(WIDTH, 16)}, {}),
    ("nnclr", "nnclr_loss_func", {"nn": rows, "p": rows}, {}),
    ("ressl", "ressl_loss_func", {"q": unit_rows, "k": unit_rows, "queue": shared(16, WIDTH)}, {}),
    ("simclr", "simclr_loss_func", {"z1": rows, "z2": rows}, {}),
    ("simsiam", "simsiam_loss_func", {"p": rows, "z": rows}, {}),
    ("swav", "swav_loss_func", {"preds": listed(2), "assignments": listed(2, 0, probabilities)}, {}),
    ("vicreg", "vicreg_loss_func", {"z1": rows, "z2": rows}, {}),
    ("wmse", "wmse_loss_func", {"z1": rows, "z2": rows}, {}),
)

_STABLE: tuple[Row, ...] = (
    ("joint_embedding", "BYOLLoss", {"online_pred": rows, "target_proj": targets}, {}),
    ("joint_embedding", "BarlowTwinsLoss", {"z_i": rows, "z_j": rows}, {}),
    ("joint_embedding", "NTXEntLoss", {"z_i": rows, "z_j": rows}, {}),
    ("joint_embedding", "VICRegLoss", {"z_i": rows, "z_j": rows}, {}),
    ("multimodal", "CLIPLoss", {"feats_i": rows, "feats_j": rows}, {}),
    ("multimodal", "CLIPLoss", {"feats_i": rows, "feats_j": rows, "logit_scale": scale}, {}),
    ("utils", "VCRegLoss", {"z_i": rows}, {}),
    ("utils", "NegativeCosineSimilarity", {"z_i": rows, "z_j": targets}, {}),
    ("dino", "DINOv1Loss", {"student_logits": stack(3), "teacher_probs": stack_of_probabilities}, {}),
    ("dino", "iBOTPatchLoss", {"student_patch_logits": rows, "teacher_patch_probs": probabilities}, {}),
)

_TOWERS = {"image_features": unit_rows, "text_features": unit_rows}
_TEACHER = {"dist_image_features": unit_rows, "dist_text_features": unit_rows, "dist_logit_scale": scale}
_WEIGHTS = {"caption_loss_weight": 2.0, "clip_loss_weight": 1.0}
_CAPTIONS = {"logits": captions, "labels": caption_labels}
_OPEN_CLIP: tuple[Row, ...] = (
    ("loss", "ClipLoss", {**_TOWERS, "logit_scale": scale}, {}),
    ("loss", "ClipLoss", {**_TOWERS, "logit_scale": scale, "logit_bias": bias}, {"cache_labels": True}),
    (
        "loss",
        "CoCaLoss",
        {**_TOWERS, **_CAPTIONS, "logit_scale": scale},
        _WEIGHTS,
    ),
    ("loss", "DistillClipLoss", {**_TOWERS, "logit_scale": scale, **_TEACHER}, {}),
    ("loss", "SigLipLoss", {**_TOWERS, "logit_scale": scale, "logit_bias": bias}, {}),
)

_PAIR = {"query_embeddings": unit_rows, "doc_embeddings": unit_rows}
_LATE = {"query_embeddings": unit_tokens, "doc_embeddings": unit_tokens}
_NEGATIVES, _LATE_NEGATIVES = {"neg_doc_embeddings": documents}, {"neg_doc_embeddings": long_documents}
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
_DISTILLED = {"sentence_features": queries_and_documents, "labels": several_scores}
_PYLATE: tuple[Row, ...] = (
    ("contrastive", "Contrastive", {"sentence_features": triples}, _MODEL),
    ("contrastive", "Contrastive", {"sentence_features": triples}, {**_MODEL, "gather_across_devices": True}),
    ("distillation", "Distillation", _DISTILLED, _MODEL),
)

_QUERIES = {"query": rows, "positive_key": rows}
_INFO_NCE: tuple[Row, ...] = (
    ("__init__", "InfoNCE", _QUERIES, {}),
    ("__init__", "InfoNCE", {**_QUERIES, "negative_keys": rows}, {}),
    ("__init__", "InfoNCE", {**_QUERIES, "negative_keys": shared(5, WIDTH)}, {}),
    ("__init__", "InfoNCE", {**_QUERIES, "negative_keys": documents}, {"negative_mode": "paired"}),
)


def _sentences(name: str, count: int, of: Argument, **settings: Any) -> Row:
    takes = {"sentence_features": sentences(count), "labels": of}
    return "sentence_transformer.losses", name, takes, {**_MODEL, **settings}


_SENTENCES: tuple[Row, ...] = (
    _sentences("MultipleNegativesRankingLoss", 3, labels),
    _sentences("MultipleNegativesRankingLoss", 3, labels, gather_across_devices=True),
    _sentences("CosineSimilarityLoss", 2, scores),
    _sentences("CoSENTLoss", 2, scores),
    _sentences("AnglELoss", 2, scores),
    _sentences("ContrastiveLoss", 2, pairs),
    _sentences("OnlineContrastiveLoss", 2, pairs),
    _sentences("TripletLoss", 3, labels),
    _sentences("MarginMSELoss", 3, differences),
    _sentences("SoftmaxLoss", 2, labels, embedding_dimension=WIDTH, num_labels=CLASSES),
    *(_sentences(f"Batch{kind}TripletLoss", 1, labels) for kind in ("All", "Hard", "HardSoftMargin", "SemiHard")),
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
