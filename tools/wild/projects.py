"""The table of projects: where the loss stands, what the trainer calls, and how we call it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from contrastive_zoo.testing.measurement import Call
from tools.wild import adapters as use
from tools.wild.adapters import Adapter


@dataclass(frozen=True)
class Entry:
    """A loss of a public trainer."""

    project: str  # owner/name
    commit: str  # that was read
    file: str
    at: str  # text of the line, without which a line would be another one after the next commit
    about: str
    adapter: Adapter | None  # None where it cannot run here
    source: str = ""  # folder in which the project's packages begin
    call: Call = "views"
    why_not: str = ""  # it cannot run here

    @property
    def name(self) -> str:
        return f"{self.project}: {self.about}"

    @property
    def module(self) -> str:
        """The dotted name of the file."""
        return Path(self.file).relative_to(self.source).with_suffix("").as_posix().replace("/", ".")

    def clone(self, folder: Path) -> Path:
        """Return the project's folder among clones, which are named owner+name."""
        return folder / self.project.replace("/", "+")

    def line(self, folder: Path) -> int:
        """Return the number of the line, 0 if the file has none with this text."""
        path = self.clone(folder) / self.file
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        return next((number for number, line in enumerate(lines, 1) if self.at in line), 0)


def entries() -> Iterator[Entry]:
    """Yield the entries, by kind of trainer."""
    yield from _text()
    yield from _image_and_text()
    yield from _images()


def _text() -> Iterator[Entry]:
    yield Entry(
        "luyug/GradCache",
        "906f038",
        "src/grad_cache/loss.py",
        "class DistributedContrastiveLoss",
        "DistributedContrastiveLoss",
        use.grad_cache,
        "src",
    )
    yield Entry(
        "ContextualAI/gritlm",
        "9710681",
        "gritlm/training/model.py",
        "class DistributedContrastiveLoss",
        "DistributedContrastiveLoss, negatives_cross_device",
        use.gritlm,
    )
    yield Entry(
        "FlagOpen/FlagEmbedding",
        "7ed43d6",
        "FlagEmbedding/abc/finetune/embedder/AbsModeling.py",
        "def _compute_cross_device_neg_loss",
        "cross-device negatives",
        use.flag_embedding,
    )
    yield Entry(
        "texttron/tevatron",
        "dd06310",
        "src/tevatron/retriever/modeling/encoder.py",
        "loss = loss * self.world_size",
        "EncoderModel, loss × W",
        use.encoder_model,
        "src",
    )
    yield Entry(
        "TIGER-AI-Lab/VLM2Vec",
        "6e1e1d4",
        "src/model/model.py",
        "loss = loss * self.world_size",
        "MMEBModel, loss × W",
        use.mmeb_model,
    )
    yield Entry(
        "TIGER-AI-Lab/VLM2Vec",
        "6e1e1d4",
        "src/loss.py",
        "class DistributedContrastiveLoss",
        "DistributedContrastiveLoss, scale_loss",
        use.grad_cache,
    )
    yield Entry(
        "McGill-NLP/llm2vec",
        "312adcf",
        "llm2vec/loss/HardNegativeNLLLoss.py",
        "class HardNegativeNLLLoss",
        "HardNegativeNLLLoss",
        use.of("HardNegativeNLLLoss", scale=3.0),
    )
    yield Entry(
        "NVIDIA-NeMo/Automodel",
        "36044ad",
        "nemo_automodel/components/loss/infonce.py",
        "class InfoNCELoss",
        "InfoNCELoss, learnable temperature",
        use.of("InfoNCELoss", temperature=use.TEMPERATURE, learnable_temperature=True),
    )
    for detach in (True, False):
        yield Entry(
            "NVIDIA-NeMo/Automodel",
            "36044ad",
            "nemo_automodel/components/models/common/inbatch_neg_utils.py",
            "def _all_gather_tensor",
            f"bi-encoder, detach_distributed_inbatch_negatives={detach}",
            use.nemo_bi_encoder(detach),
        )
    yield Entry(
        "lightonai/pylate",
        "1f1f47c",
        "pylate/losses/contrastive.py",
        "loss *= get_world_size()",
        "Contrastive, gather_across_devices",
        use.pylate,
    )
    for both in (False, True):
        yield Entry(
            "nomic-ai/contrastors",
            "613ddfd",
            "src/contrastors/loss.py",
            "def clip_loss",
            f"clip_loss, gather_enabled, bidirectional={both}",
            use.contrastors(both),
            "src",
        )
    yield Entry(
        "UKPLab/sentence-transformers",
        "85ec645",
        "sentence_transformers/losses/MultipleNegativesRankingLoss.py",
        "offset = rank * batch_size",
        "MultipleNegativesRankingLoss, gather_across_devices",
        use.sentence_transformers,
    )
    for margin in (0.0, 0.2):
        yield Entry(
            "UKPLab/sentence-transformers",
            "85ec645",
            "sentence_transformers/losses/GISTEmbedLoss.py",
            "positive_mask = torch.eye",
            f"GISTEmbedLoss, gather_across_devices, margin={margin}",
            use.gist(margin),
        )
    yield Entry(
        "princeton-nlp/SimCSE",
        "49fa580",
        "simcse/models.py",
        "z1_list[dist.get_rank()] = z1",
        "cl_forward",
        use.sim_cse,
    )
    yield Entry(
        "voidism/DiffCSE",
        "f724b2c",
        "diffcse/models.py",
        "z1_list[dist.get_rank()] = z1",
        "cl_forward",
        None,
        why_not="the loss is a part of a function that also runs a generator and a discriminator",
    )
    yield Entry(
        "illuin-tech/colpali",
        "9be8f19",
        "colpali_engine/trainer/contrastive_trainer.py",
        "pos_target_outputs = concat_all_gather",
        "ContrastiveTrainer, single vectors",
        use.colpali,
    )
    yield Entry(
        "facebookresearch/DPR",
        "a31212d",
        "train_dense_encoder.py",
        "global_q_vector.append(local_q_vector)",
        "_calc_loss",
        use.dpr,
    )
    yield Entry(
        "modelscope/ms-swift",
        "3602360",
        "swift/loss/embedding.py",
        "all_sentences[idx] = all_sentences[idx].det",
        "InfonceLoss",
        use.ms_swift,
    )


def _image_and_text() -> Iterator[Entry]:
    copies = (
        ("mlfoundations/open_clip", "89fb801", "src/open_clip/loss.py", "src"),
        ("UCSC-VLAA/CLIPA", "3800508", "clipa_torch/open_clip/loss.py", "clipa_torch"),
        ("beichenzbc/Long-CLIP", "3966af9", "open_clip_long/loss.py", ""),
        ("salesforce/LAVIS", "506965b", "lavis/models/clip_models/loss.py", ""),
    )
    for project, commit, file, source in copies:
        yield Entry(
            project, commit, file, "gathered_image_features[rank] = image_features", "ClipLoss", use.clip_loss(), source
        )
    for settings in ({"local_loss": True}, {"gather_with_grad": True}, {"local_loss": True, "gather_with_grad": True}):
        yield Entry(
            *copies[0][:3], "if self.local_loss", f"ClipLoss, {', '.join(settings)}", use.clip_loss(**settings), "src"
        )
    yield Entry(
        "mlfoundations/open_clip",
        "89fb801",
        "src/open_clip/loss.py",
        "class SigLipLoss",
        "SigLipLoss",
        use.siglip_loss,
        "src",
    )
    yield Entry(
        "facebookresearch/SLIP",
        "c6faf5d",
        "losses.py",
        "utils.all_gather_batch([image_embed",
        "CLIPLoss",
        use.embeds("CLIPLoss", "image_embed", "text_embed"),
    )
    yield Entry(
        "facebookresearch/SLIP",
        "c6faf5d",
        "losses.py",
        "utils.all_gather_batch_with_grad",
        "SIMCLRLoss",
        use.embeds("SIMCLRLoss", "aug1_embed", "aug2_embed"),
    )
    yield Entry(
        "salesforce/LAVIS",
        "506965b",
        "lavis/models/ulip_models/losses.py",
        "utils.all_gather_batch(",
        "ULIPWithImageLoss",
        use.embeds("ULIPWithImageLoss", "pc_embed", "text_embed", "image_embed"),
    )
    for project, commit in (("ArrowLuo/CLIP4Clip", "508ffa3"), ("xuguohai/X-CLIP", "6b5344f")):
        yield Entry(
            project,
            commit,
            "modules/until_module.py",
            "grad_output[ctx.batch_size * ctx.rank",
            "AllGather and CrossEn",
            use.clip4clip,
        )
    yield Entry(
        "Sense-GVT/DeCLIP", "5d99a85", "prototype/model/clip.py", "class AllGather", "CLIP, use_allgather", use.declip
    )
    yield Entry(
        "lucidrains/x-clip",
        "0c72f6e",
        "x_clip/distributed.py",
        "return grads_by_rank[rank]",
        "CLIP with several ranks",
        None,
        why_not="it uses names that it does not import (F, exists)",
    )
    for project, commit, file in (
        ("salesforce/ALBEF", "b9727e4", "models/model_pretrain.py"),
        ("salesforce/BLIP", "056a169", "models/blip_pretrain.py"),
    ):
        yield Entry(
            project,
            commit,
            file,
            "image_feats = concat_all_gather",
            "contrastive part, with queues",
            None,
            why_not="the loss is a part of the forward of the whole model",
        )
    yield Entry("kakaobrain/coyo-align", "8cea82e", "trainer.py", "all_gather", "ALIGN", None, why_not="TensorFlow")


def _images() -> Iterator[Entry]:
    yield Entry(
        "Spijkervet/SimCLR", "2738efa", "simclr/modules/nt_xent.py", "GatherLayer.apply(z_i)", "NT_Xent", use.spijkervet
    )
    yield Entry("sthalles/SimCLR", "1848fc9", "simclr.py", "def info_nce_loss", "info_nce_loss", use.simclr_script)
    yield Entry(
        "AndrewAtanov/simclr-pytorch",
        "85e5d54",
        "models/losses.py",
        "z_list = diffdist",
        "NTXent",
        None,
        why_not="its gather is that of the package diffdist",
    )
    yield Entry(
        "HobbitLong/SupContrast",
        "66a8fe5",
        "losses.py",
        "class SupConLoss",
        "SupConLoss",
        use.sup_contrast,
        call="labels",
    )
    yield Entry(
        "HobbitLong/PyContrast",
        "84f94ea",
        "pycontrast/learning/contrast_trainer.py",
        "def _global_gather",
        "memory bank",
        None,
        why_not="the loss is a part of the training loop",
    )
    yield Entry(
        "facebookresearch/barlowtwins",
        "8e8d284",
        "main.py",
        "torch.distributed.all_reduce(c)",
        "BarlowTwins, with synchronised BatchNorm",
        use.barlow_twins,
    )
    yield Entry(
        "facebookresearch/vicreg", "4e12602", "main_vicreg.py", "FullGatherLayer.apply(x)", "VICReg", use.vicreg
    )
    yield Entry(
        "facebookresearch/moco-v3",
        "c349e6e",
        "moco/builder.py",
        "def contrastive_loss",
        "contrastive_loss",
        use.moco_v3,
    )
    yield Entry(
        "facebookresearch/dino", "7c446df", "main_dino.py", "dist.all_reduce(batch_center)", "DINOLoss", use.dino
    )
    yield Entry(
        "facebookresearch/dinov2",
        "b8931f7",
        "dinov2/loss/koleo_loss.py",
        "class KoLeoLoss",
        "KoLeoLoss",
        use.koleo,
        call="labels",
    )
    yield Entry(
        "facebookresearch/vissl",
        "09270ed",
        "vissl/losses/simclr_info_nce_loss.py",
        "embedding_gathered = gather_from_all",
        "SimclrInfoNCECriterion",
        use.vissl_simclr,
    )
    yield Entry(
        "facebookresearch/vissl",
        "09270ed",
        "vissl/losses/barlow_twins_loss.py",
        "all_reduce_mean(corr",
        "BarlowTwinsLoss",
        None,
        why_not="its batch normalisation is that of the package apex",
    )
    yield Entry(
        "facebookresearch/swav",
        "06b1b7c",
        "main_swav.py",
        "dist.all_reduce",
        "SwAV",
        None,
        why_not="the loss is a part of the training loop",
    )
    yield Entry(
        "vturrisi/solo-learn",
        "9187ea3",
        "solo/losses/simclr.py",
        "gathered_z = gather(z)",
        "simclr_loss_func",
        use.solo_simclr,
    )
    yield Entry(
        "vturrisi/solo-learn",
        "9187ea3",
        "solo/losses/barlow.py",
        "dist.all_reduce(corr)",
        "barlow_loss_func",
        use.function("barlow_loss_func"),
    )
    yield Entry(
        "vturrisi/solo-learn",
        "9187ea3",
        "solo/losses/mocov3.py",
        "concat_all_gather_no_grad(key)",
        "mocov3_loss_func",
        use.keys("mocov3_loss_func"),
    )
    yield Entry(
        "vturrisi/solo-learn",
        "9187ea3",
        "solo/losses/vicreg.py",
        "z1, z2 = gather",
        "vicreg_loss_func",
        use.function("vicreg_loss_func"),
    )
    for file, name in (
        ("ntx_ent_loss", "NTXentLoss"),
        ("vicreg_loss", "VICRegLoss"),
        ("barlow_twins_loss", "BarlowTwinsLoss"),
    ):
        yield Entry(
            "lightly-ai/lightly",
            "e8d317f",
            f"lightly/loss/{file}.py",
            "if self.gather_distributed and",
            f"{name}, gather_distributed",
            use.of(name, gather_distributed=True),
        )
    yield Entry(
        "lightly-ai/lightly",
        "e8d317f",
        "lightly/loss/lejepa_loss.py",
        "torch_dist_nn.all_reduce(cos_sum)",
        "SIGReg, gather_distributed",
        use.statistic(lambda m: m.SIGReg(num_vectors=8, gather_distributed=True)),
        call="labels",
    )
    yield Entry(
        "rbalestr-lab/lejepa",
        "eddffdd",
        "lejepa/univariate/epps_pulley.py",
        "cos_mean = all_reduce",
        "EppsPulley",
        use.statistic(lambda m: m.EppsPulley()),
        call="labels",
    )
    yield Entry(
        "rbalestr-lab/lejepa",
        "eddffdd",
        "lejepa/univariate/base.py",
        "def dist_mean",
        "UnivariateTest.dist_mean of squares",
        use.statistic(lambda m: lambda x: m.UnivariateTest().dist_mean(x.square().mean(0)).square().sum()),
        call="labels",
    )
    yield Entry(
        "rbalestr-lab/stable-pretraining",
        "9aa93f8",
        "stable_pretraining/methods/lejepa.py",
        "all_reduce(cos_mean",
        "SlicedEppsPulley",
        use.statistic(lambda m: m.SlicedEppsPulley(num_slices=8)),
        call="labels",
    )
    for name, at in (
        ("NTXEntLoss", "offset = get_rank() * two_n"),
        ("VICRegLoss", "class VICRegLoss"),
        ("BarlowTwinsLoss", "c = all_reduce(c)"),
    ):
        yield Entry(
            "rbalestr-lab/stable-pretraining",
            "9aa93f8",
            "stable_pretraining/losses/joint_embedding.py",
            at,
            name,
            use.of(name),
        )
    yield Entry(
        "rbalestr-lab/stable-pretraining",
        "9aa93f8",
        "stable_pretraining/losses/multimodal.py",
        "candidates_j = torch.cat(all_gather",
        "CLIPLoss",
        use.of("CLIPLoss", temperature=use.TEMPERATURE),
    )
    yield Entry(
        "open-mmlab/mmpretrain",
        "ee7f2e8",
        "mmpretrain/models/selfsup/simclr.py",
        "grad_out[:] = grads",
        "SimCLR",
        use.mm_simclr,
    )
    yield Entry(
        "open-mmlab/mmpretrain",
        "ee7f2e8",
        "mmpretrain/models/heads/mocov3_head.py",
        "target = torch.cat(all_g",
        "MoCoV3Head",
        use.mocov3_head,
    )
    yield Entry(
        "open-mmlab/mmpretrain",
        "ee7f2e8",
        "mmpretrain/models/heads/latent_heads.py",
        "all_reduce(cross_correlation_matrix)",
        "LatentCrossCorrelationHead, with local BatchNorm",
        use.cross_correlation_head,
    )
