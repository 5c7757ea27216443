"""Call a project's loss as its trainer does: each function takes the loaded module and returns the loss of one rank."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from contrastive_zoo.ranks.collectives import all_reduce

TEMPERATURE = 0.3
Loss = Callable[[Tensor, Tensor], Any]
"""A function of two views, or of embeddings and labels; its result is the loss, or a tuple or dict that begins with it."""

Adapter = Callable[[Any], Loss]


class Scaled(nn.Module):
    """A loss of two views and of a learnable scale, which the trainers keep in the model."""

    def __init__(self, loss: Callable[[Tensor, Tensor, Tensor], Any], biased: bool = False) -> None:
        super().__init__()
        self.log_scale, self.loss = nn.Parameter(torch.tensor(math.log(3.0))), loss
        self.bias = nn.Parameter(torch.tensor(-2.0)) if biased else None

    def forward(self, view1: Tensor, view2: Tensor) -> Any:
        more = () if self.bias is None else (self.bias,)
        return self.loss(unit(view1), unit(view2), self.log_scale.exp(), *more)


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the world size: (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def unit(x: Tensor) -> Tensor:
    """Return embeddings of length 1."""
    return F.normalize(x, dim=-1)


def bare(cls: Any, **attributes: Any) -> Any:
    """Return an object of a class whose constructor builds a whole model, with these attributes only."""
    made = cls.__new__(cls)
    if isinstance(made, nn.Module):
        nn.Module.__init__(made)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def of(name: str, *args: Any, **settings: Any) -> Adapter:
    """Adapt a class of this name whose objects are losses of two views."""
    return lambda m: getattr(m, name)(*args, **settings)


def function(name: str, **settings: Any) -> Adapter:
    """Adapt a function of two views of this name."""
    return lambda m: lambda view1, view2: getattr(m, name)(view1, view2, **settings)


# --- text encoders -----------------------------------------------------------------------------------------------------


def grad_cache(m: Any) -> Loss:
    """Adapt DistributedContrastiveLoss; on one process the trainers take SimpleContrastiveLoss."""
    settings = (
        {"temperature": TEMPERATURE} if "temperature" in m.SimpleContrastiveLoss.__init__.__code__.co_varnames else {}
    )
    loss = (m.DistributedContrastiveLoss if rank_and_size()[1] > 1 else m.SimpleContrastiveLoss)(**settings)
    return lambda queries, documents: loss(unit(queries), unit(documents))


def gritlm(m: Any) -> Loss:
    loss = m.DistributedContrastiveLoss(TEMPERATURE, negatives_cross_device=rank_and_size()[1] > 1)
    return lambda queries, documents: loss(unit(queries), unit(documents))


def flag_embedding(m: Any) -> Loss:
    rank, size = rank_and_size()
    model = SimpleNamespace(process_rank=rank, world_size=size, compute_loss=F.cross_entropy)
    model.compute_score = lambda queries, documents: queries @ documents.T / TEMPERATURE
    model._dist_gather_tensor = lambda x: m.AbsEmbedderModel._dist_gather_tensor(model, x)
    compute = m.AbsEmbedderModel._compute_cross_device_neg_loss
    return lambda queries, documents: compute(model, unit(queries), unit(documents))[1]


def encoder_model(m: Any) -> Loss:
    """Adapt tevatron's EncoderModel, in training."""
    rank, size = rank_and_size()
    model = bare(m.EncoderModel, temperature=TEMPERATURE, is_ddp=size > 1, process_rank=rank, world_size=size)
    model.cross_entropy = nn.CrossEntropyLoss()
    model.encode_query = model.encode_passage = lambda x: unit(x["x"])
    return lambda queries, documents: model({"x": queries}, {"x": documents}).loss


def mmeb_model(m: Any) -> Loss:
    """Adapt VLM2Vec's MMEBModel, in training."""
    rank, size = rank_and_size()
    model = bare(m.MMEBModel, temperature=TEMPERATURE, is_ddp=size > 1, process_rank=rank, world_size=size)
    model.cross_entropy = nn.CrossEntropyLoss()
    model.encode_input = lambda x: unit(x["x"])
    return lambda queries, targets: model(qry={"x": queries}, tgt={"x": targets})


def nemo_bi_encoder(detach: bool) -> Adapter:
    """Adapt NeMo's gather to the scores of its recipe: local queries, passages of all ranks."""

    def build(m: Any) -> Loss:
        def loss(queries: Tensor, passages: Tensor) -> Tensor:
            gathered = m.dist_gather_tensor(unit(passages), preserve_grad=not detach)
            labels = torch.arange(len(queries)) + rank_and_size()[0] * len(queries)
            return F.cross_entropy(unit(queries) @ gathered.T / TEMPERATURE, labels)

        return loss

    return build


def pylate(m: Any) -> Loss:
    model = nn.Module()
    model.forward = lambda x: {"token_embeddings": x}
    vars(model).update(skiplist=[], do_query_expansion=True)

    def score(queries: Tensor, documents: Tensor, **_: Any) -> Tensor:
        return (queries.squeeze(1) @ documents.flatten(1).T).reshape(len(queries), -1)

    m.extract_skiplist_mask = lambda sentence_features, skiplist: [torch.ones(len(x), 1) for x in sentence_features]
    loss = m.Contrastive(model, score_metric=score, gather_across_devices=True, temperature=TEMPERATURE)
    return lambda queries, documents: loss([queries[:, None], documents[:, None]])


def contrastors(bidirectional: bool) -> Adapter:
    return lambda m: Scaled(
        lambda queries, documents, scale: m.clip_loss(
            queries, documents, lambda x: scale * x, gather_enabled=True, bidirectional=bidirectional
        )
    )


def sentence_transformers(m: Any) -> Loss:
    loss = m.MultipleNegativesRankingLoss(nn.Identity(), scale=3.0, gather_across_devices=True, similarity_fct=cosine)
    return lambda anchors, positives: loss.compute_loss_from_embeddings([anchors, positives], torch.empty(0))


def gist(margin: float) -> Adapter:
    """Adapt GISTEmbedLoss, whose guide agrees with the model here."""

    def build(m: Any) -> Loss:
        settings = {"temperature": TEMPERATURE, "margin_strategy": "absolute", "margin": margin}
        settings |= {"contrast_anchors": True, "contrast_positives": True, "gather_across_devices": True}
        loss = bare(m.GISTEmbedLoss, must_retokenize=False, **settings)
        loss.similarity_fct, loss.cross_entropy_loss = nn.CosineSimilarity(dim=-1), nn.CrossEntropyLoss()
        loss.model = loss.guide = lambda x: x
        return lambda anchors, positives: loss(
            [{"sentence_embedding": x} for x in (anchors, positives)], torch.empty(0)
        )

    return build


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return unit(a) @ unit(b).T


def sim_cse(m: Any) -> Loss:
    """Adapt cl_forward of SimCSE and DiffCSE, in training, with a pooler that returns embeddings."""
    model = SimpleNamespace(training=True, device=torch.device("cpu"), pooler_type="avg", sim=m.Similarity(TEMPERATURE))
    model.model_args = SimpleNamespace(pooler_type="avg", do_mlm=False)
    model.config = SimpleNamespace(use_return_dict=True)
    model.pooler = lambda mask, outputs: outputs

    def loss(view1: Tensor, view2: Tensor) -> Any:
        pairs = torch.stack([view1, view2], dim=1)
        tokens = torch.zeros(len(view1), 2, 1, dtype=torch.int64)
        mask = torch.ones_like(tokens)
        model.pooler = lambda *_: pairs.flatten(0, 1)
        encoder = lambda *_, **__: SimpleNamespace(last_hidden_state=pairs, hidden_states=None, attentions=None)  # noqa: E731 - it is one line
        m.SequenceClassifierOutput = lambda **outputs: outputs["loss"]
        return m.cl_forward(model, encoder, input_ids=tokens, attention_mask=mask, return_dict=True)

    return loss


def colpali(m: Any) -> Loss:
    """Adapt the trainer's part before the loss, with the loss of single vectors."""
    rank, size = rank_and_size()
    trainer = SimpleNamespace(accelerator=SimpleNamespace(num_processes=size, process_index=rank, sync_gradients=True))
    trainer.accelerator.pad_across_processes = lambda x, **_: x

    def loss_func(query_embeddings: Tensor, doc_embeddings: Tensor, offset: int) -> Tensor:
        labels = torch.arange(len(query_embeddings)) + offset
        return F.cross_entropy(query_embeddings @ doc_embeddings.T / TEMPERATURE, labels)

    trainer.loss_func = loss_func
    compute = m.ContrastiveTrainer._compute_loss_from_outputs
    return lambda queries, documents: compute(trainer, unit(queries), unit(documents))


# --- images and texts --------------------------------------------------------------------------------------------------


def clip_loss(**settings: Any) -> Adapter:
    """Adapt ClipLoss of open_clip, and its copies."""

    def build(m: Any) -> Loss:
        rank, size = rank_and_size()
        return Scaled(m.ClipLoss(rank=rank, world_size=size, **settings))

    return build


def siglip_loss(m: Any) -> Loss:
    rank, size = rank_and_size()
    return Scaled(m.SigLipLoss(rank=rank, world_size=size), biased=True)


def embeds(name: str, *keys: str) -> Adapter:
    """Adapt a loss of a dict of embeddings; the second view stands for all others."""

    def build(m: Any) -> Loss:
        loss = getattr(m, name)()
        return Scaled(
            lambda a, b, scale: loss(dict(zip(keys, (a, *[b] * len(keys)), strict=False)) | {"logit_scale": scale})
        )

    return build


def clip4clip(m: Any) -> Loss:
    """Adapt AllGather and CrossEn as the model combines them."""
    cross_entropy = m.CrossEn()

    def loss(texts: Tensor, videos: Tensor, scale: Tensor) -> Tensor:
        rank, size = rank_and_size()
        task = SimpleNamespace(rank=rank, world_size=size)
        a, b = (unit(m.AllGather.apply(x, task)) for x in (texts, videos))
        similarity = scale * a @ b.T
        return (cross_entropy(similarity) + cross_entropy(similarity.T)) / 2

    return Scaled(loss)


def declip(m: Any) -> Loss:
    """Adapt CLIP of DeCLIP, whose logits are compared with targets that have the offset of the rank."""
    m.link.get_rank, m.link.get_world_size = dist.get_rank, dist.get_world_size
    m.link.allgather, m.link.allreduce = dist.all_gather, dist.all_reduce
    model = bare(m.CLIP, use_allgather=True, encode_image=lambda x: x, encode_text=lambda x: x)
    model.sample_captions, model.logit_scale = lambda x: x, nn.Parameter(torch.tensor([math.log(3.0)]))

    def loss(images: Tensor, texts: Tensor) -> Tensor:
        labels = torch.arange(len(images)) + rank_and_size()[0] * len(images)
        return sum(F.cross_entropy(x, labels) for x in model({"images": images, "captions": texts})) / 2  # type: ignore[return-value]  # two logits

    model.encode_image = lambda x: x
    return _with_parameters(loss, logit_scale=model.logit_scale)


def _with_parameters(loss: Loss, **parameters: nn.Parameter) -> Loss:
    """Return a module with these parameters, whose forward is the loss."""
    module = nn.Module()
    for name, x in parameters.items():
        module.register_parameter(name, x)
    module.forward = loss
    return module


# --- views of images ---------------------------------------------------------------------------------------------------


def spijkervet(m: Any) -> Loss:
    return lambda view1, view2: m.NT_Xent(len(view1), TEMPERATURE, rank_and_size()[1])(view1, view2)


class SyncNorm(nn.Module):
    """SyncBatchNorm without parameters, on CPU."""

    def forward(self, x: Tensor) -> Tensor:
        n = all_reduce(torch.tensor(float(len(x))))
        centred = x - all_reduce(x.sum(0)) / n
        return centred / (all_reduce(centred.square().sum(0)) / n + 1e-5).sqrt()


def barlow_twins(m: Any) -> Loss:
    """Adapt BarlowTwins; its setting batch_size is that of all ranks, and the script converts BatchNorm to SyncBatchNorm."""

    def loss(view1: Tensor, view2: Tensor) -> Any:
        args = SimpleNamespace(batch_size=len(view1) * rank_and_size()[1], lambd=0.1)
        model = bare(m.BarlowTwins, args=args, backbone=nn.Identity(), projector=nn.Identity())
        model.bn = SyncNorm()
        return model(view1, view2)

    return loss


def vicreg(m: Any) -> Loss:
    """Adapt VICReg; its setting batch_size is that of all ranks."""

    def loss(view1: Tensor, view2: Tensor) -> Any:
        args = SimpleNamespace(
            batch_size=len(view1) * rank_and_size()[1], sim_coeff=25.0, std_coeff=25.0, cov_coeff=1.0
        )
        model = bare(m.VICReg, args=args, backbone=nn.Identity(), projector=nn.Identity())
        model.num_features = view1.shape[1]
        return model(view1, view2)

    return loss


def moco_v3(m: Any) -> Loss:
    """Adapt MoCo's contrastive_loss of both pairs of views; the momentum encoder's views are keys without gradient."""
    compute = m.MoCo.contrastive_loss
    model = SimpleNamespace(T=TEMPERATURE)
    return lambda view1, view2: compute(model, view1, view2.detach()) + compute(model, view2, view1.detach())


def keys(name: str, **settings: Any) -> Adapter:
    """Adapt a function of queries and of keys without gradient."""
    return lambda m: lambda view1, view2: getattr(m, name)(view1, view2.detach(), **settings)


def mocov3_head(m: Any) -> Loss:
    _mmengine(m)
    head = bare(m.MoCoV3Head, temperature=TEMPERATURE, loss_module=F.cross_entropy, predictor=lambda x: x)
    return lambda view1, view2: head.loss(view1, view2.detach())


def cross_correlation_head(m: Any) -> Loss:
    _mmengine(m)

    def loss(view1: Tensor, view2: Tensor) -> Any:
        head = bare(m.LatentCrossCorrelationHead, world_size=rank_and_size()[1])
        head.bn = nn.BatchNorm1d(view1.shape[1], affine=False)
        head.loss_module = lambda c: (c - torch.eye(len(c))).square().sum()
        return head.loss(view1, view2)

    return loss


def mm_simclr(m: Any) -> Loss:
    _mmengine(m)
    model = bare(m.SimCLR, backbone=lambda x: x.flatten(1), neck=lambda x: [x])
    model.head = SimpleNamespace(
        loss=lambda positive, negative: F.cross_entropy(
            torch.cat([positive, negative], 1) / TEMPERATURE, torch.zeros(len(positive), dtype=torch.int64)
        )
    )
    return lambda view1, view2: model.loss([view1[..., None, None], view2[..., None, None]], [])["loss"]


def _mmengine(m: Any) -> None:
    """Give a module of mmpretrain the collectives of mmengine, which returns the tensors of all ranks in a list."""

    def all_gather(x: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(x) for _ in range(rank_and_size()[1])]
        dist.all_gather(gathered, x.contiguous())
        return gathered

    m.all_gather, m.all_reduce, m.get_rank = all_gather, dist.all_reduce, lambda: rank_and_size()[0]


def dino(m: Any) -> Loss:
    """Adapt DINOLoss: the views of the student against those of the teacher, without gradient."""

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loss: Any = None

        def forward(self, view1: Tensor, view2: Tensor) -> Any:
            if self.loss is None:
                self.loss = m.DINOLoss(view1.shape[1], 2, 0.3, 0.3, 0, 1).to(view1.dtype)
            both = torch.cat([view1, view2])
            return self.loss(both, both.detach(), 0)

    return Views()


def koleo(m: Any) -> Loss:
    loss = m.KoLeoLoss()
    return lambda embeddings, labels: loss(embeddings)


def sup_contrast(m: Any) -> Loss:
    loss = m.SupConLoss(temperature=TEMPERATURE, base_temperature=TEMPERATURE)
    return lambda embeddings, labels: loss(unit(embeddings)[:, None], labels)


def sup_contrast_views(m: Any) -> Loss:
    loss = m.SupConLoss(temperature=TEMPERATURE, base_temperature=TEMPERATURE)
    return lambda view1, view2: loss(torch.stack([unit(view1), unit(view2)], dim=1))


def simclr_script(m: Any) -> Loss:
    """Adapt info_nce_loss and the cross-entropy that the script takes of it."""

    def loss(view1: Tensor, view2: Tensor) -> Tensor:
        args = SimpleNamespace(batch_size=len(view1), n_views=2, device="cpu", temperature=TEMPERATURE)
        logits, labels = m.SimCLR.info_nce_loss(SimpleNamespace(args=args), torch.cat([view1, view2]))
        return F.cross_entropy(logits, labels)

    return loss


def solo_simclr(m: Any) -> Loss:
    """Adapt simclr_loss_func; the indexes of samples are unique over all ranks, as those of a dataset are."""

    def loss(view1: Tensor, view2: Tensor) -> Any:
        indexes = torch.arange(len(view1)) + 1000 * rank_and_size()[0]
        return m.simclr_loss_func(torch.cat([view1, view2]), indexes.repeat(2), TEMPERATURE)

    return loss


def vissl_simclr(m: Any) -> Loss:
    m.get_rank, m.get_cuda_device_index = (lambda: rank_and_size()[0]), (lambda: -1)
    m.gather_from_all.__globals__.update(  # of the package classy_vision
        is_distributed_training_run=lambda: rank_and_size()[1] > 1,
        convert_to_distributed_tensor=lambda x: (x, "cpu"),
        convert_to_normal_tensor=lambda x, device: x,
    )

    def loss(view1: Tensor, view2: Tensor) -> Any:
        size = rank_and_size()[1]
        settings = SimpleNamespace(
            world_size=size, embedding_dim=view1.shape[1], effective_batch_size=2 * len(view1) * size
        )
        return m.SimclrInfoNCECriterion(settings, TEMPERATURE)(unit(torch.cat([view1, view2])))

    return loss


# --- feature statistics ------------------------------------------------------------------------------------------------


def statistic(build: Callable[[Any], Any]) -> Adapter:
    """Adapt a statistic of embeddings without labels."""

    def adapted(m: Any) -> Loss:
        return _OfEmbeddings(build(m))

    return adapted


class _OfEmbeddings(nn.Module):
    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, embeddings: Tensor, labels: Tensor) -> Any:
        return self.loss(embeddings).mean()


# --- losses that read a whole batch of objects -------------------------------------------------------------------------


def dpr(m: Any) -> Loss:
    """Adapt _calc_loss of DPR's trainer; one process has local_rank -1."""
    rank, size = rank_and_size()

    def all_gather_list(data: Any, max_size: int) -> list[Any]:
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, data)
        return gathered

    m.all_gather_list = all_gather_list
    cfg = SimpleNamespace(
        distributed_world_size=size, local_rank=rank if size > 1 else -1, n_gpu=1, global_loss_buf_sz=0
    )

    def nll(questions: Tensor, contexts: Tensor, positives: list[int], *_: Any, **__: Any) -> Any:
        return F.cross_entropy(questions @ contexts.T / TEMPERATURE, torch.tensor(positives, dtype=torch.int64)), 0

    def loss(questions: Tensor, contexts: Tensor) -> Any:
        positives = list(range(len(questions)))
        return m._calc_loss(
            cfg, SimpleNamespace(calc=nll), unit(questions), unit(contexts), positives, [[] for _ in positives]
        )

    return loss


def ms_swift(m: Any) -> Loss:
    """Adapt InfonceLoss; sentences are interleaved, and a label of 1 begins each pair."""
    rank, size = rank_and_size()

    def gather_object(x: Tensor) -> list[Any]:
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, [row.detach() for row in x])
        return [row for of_rank in gathered for row in of_rank]

    m.gather_object, m.get_dist_setting = gather_object, lambda: (rank, rank, size, size)
    m.strtobool = lambda text: int(text == "True")
    m.sequence_parallel.dp_group = None
    loss = m.InfonceLoss(None, None)

    def of_pairs(queries: Tensor, documents: Tensor) -> Any:
        sentences = torch.stack([unit(queries), unit(documents)], 1).flatten(0, 1)
        return loss({"last_hidden_state": sentences}, torch.ones(len(queries), dtype=torch.int64))

    return of_pairs
