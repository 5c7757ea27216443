"""Call a project's loss as its trainer does: each function takes the loaded module and returns the loss of one rank.

``projects.json`` names the adapter of each loss, and its settings. A loss takes two views, or embeddings and labels, and
what its trainer's model learns for it: a scale, and a bias. Its result is the loss, or a tuple or dict that begins with it.
"""

from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from contrastive_zoo.ranks.collectives import all_reduce
from tools.gallery.recipe import rank_and_size

TEMPERATURE = 0.3
Loss = Callable[..., Any]


def unit(x: Tensor) -> Tensor:
    """Return embeddings of length 1."""
    return F.normalize(x, dim=-1)


def bare(cls: Any, **attributes: Any) -> Any:
    """Return an object of a class whose constructor builds a whole model, with these attributes only."""
    result = cls.__new__(cls)
    if isinstance(result, nn.Module):
        nn.Module.__init__(result)
    for name, value in attributes.items():
        setattr(result, name, value)
    return result


# --- of several projects -----------------------------------------------------------------------------------------------


def instance(m: Any, name: str, **settings: Any) -> Loss:
    """Return an object of the class of this name."""
    loss: Loss = getattr(m, name)(**settings)
    return loss


def instance_of_rank(m: Any, name: str, **settings: Any) -> Loss:
    """Return an object of a class that is told the rank: open_clip's losses, and their copies."""
    rank, size = rank_and_size()
    return instance(m, name, rank=rank, world_size=size, **settings)


def instance_by_world_size(m: Any, one: str, several: str, **settings: Any) -> Loss:
    """Return an object of the class that the trainers take on one process, or on several."""
    return instance(m, several if rank_and_size()[1] > 1 else one, **settings)


def function(m: Any, name: str, detached_keys: bool = False) -> Loss:
    """Return the function of this name; its second argument may be keys, which have no gradient."""
    return lambda view1, view2: getattr(m, name)(view1, view2.detach() if detached_keys else view2)


def statistic(m: Any, name: str, **settings: Any) -> Loss:
    """Return a statistic of embeddings, which need no labels."""
    loss = getattr(m, name)(**settings).double()
    return lambda embeddings, labels: loss(embeddings).mean()


def of_outputs(m: Any, name: str, outputs: Sequence[str]) -> Loss:
    """Adapt a loss of a model's dict of outputs; the second view stands for all others."""
    loss = getattr(m, name)()

    def of_views(view1: Tensor, view2: Tensor, scale: Tensor) -> Any:
        return loss(dict.fromkeys(outputs, view2) | {outputs[0]: view1, "logit_scale": scale})

    return of_views


def model_with_loss(m: Any, name: str, encoders: Sequence[str], arguments: Sequence[str]) -> Loss:
    """Adapt a bi-encoder that computes its loss: tevatron's, in training, and those that come from it."""
    rank, size = rank_and_size()
    model = bare(getattr(m, name), temperature=TEMPERATURE, is_ddp=size > 1, process_rank=rank, world_size=size)
    model.cross_entropy = nn.CrossEntropyLoss()
    for encoder in encoders:
        setattr(model, encoder, lambda inputs: inputs["x"])

    def loss(queries: Tensor, documents: Tensor) -> Any:
        output = model(**dict(zip(arguments, ({"x": queries}, {"x": documents}), strict=True)))
        return getattr(output, "loss", output)

    return loss


def script(m: Any, name: str, **settings: Any) -> Loss:
    """Adapt a model of a training script; its batch_size is that of all ranks, its BatchNorm is synchronised."""

    def loss(view1: Tensor, view2: Tensor) -> Any:
        args = SimpleNamespace(batch_size=len(view1) * rank_and_size()[1], **settings)
        model = bare(getattr(m, name), args=args, backbone=nn.Identity(), projector=nn.Identity())
        model.bn, model.num_features = synchronised_norm, view1.shape[1]
        return model(view1, view2)

    return loss


def synchronised_norm(x: Tensor) -> Tensor:
    """Normalise as SyncBatchNorm without parameters, which has no implementation for CPU."""
    n = all_reduce(torch.tensor(float(len(x))))
    centred = x - all_reduce(x.sum(0)) / n
    return centred / (all_reduce(centred.square().sum(0)) / n + 1e-5).sqrt()


# --- text encoders -----------------------------------------------------------------------------------------------------


def gritlm(m: Any) -> Loss:
    return instance(
        m, "DistributedContrastiveLoss", temperature=TEMPERATURE, negatives_cross_device=rank_and_size()[1] > 1
    )


def flag_embedding(m: Any) -> Loss:
    rank, size = rank_and_size()
    model = SimpleNamespace(process_rank=rank, world_size=size, compute_loss=F.cross_entropy)
    model.compute_score = lambda queries, documents: queries @ documents.T / TEMPERATURE
    model._dist_gather_tensor = lambda x: m.AbsEmbedderModel._dist_gather_tensor(model, x)
    compute = m.AbsEmbedderModel._compute_cross_device_neg_loss
    return lambda queries, documents: compute(model, queries, documents)[1]


def nemo_bi_encoder(m: Any, detach: bool) -> Loss:
    """Adapt NeMo's gather to the scores of its recipe: local queries, passages of all ranks."""

    def loss(queries: Tensor, passages: Tensor) -> Tensor:
        gathered = m.dist_gather_tensor(passages, preserve_grad=not detach)
        labels = torch.arange(len(queries)) + rank_and_size()[0] * len(queries)
        return F.cross_entropy(queries @ gathered.T / TEMPERATURE, labels)

    return loss


def pylate(m: Any) -> Loss:
    def score(queries: Tensor, documents: Tensor, **_: Any) -> Tensor:
        return (queries.squeeze(1) @ documents.flatten(1).T).reshape(len(queries), -1)

    model = nn.Module()
    model.forward = lambda x: {"token_embeddings": x}
    vars(model).update(skiplist=[], do_query_expansion=True)
    m.extract_skiplist_mask = lambda sentence_features, skiplist: [torch.ones(len(x), 1) for x in sentence_features]
    loss = m.Contrastive(model, score_metric=score, gather_across_devices=True, temperature=TEMPERATURE)
    return lambda queries, documents: loss([queries[:, None], documents[:, None]])


def contrastors(m: Any, bidirectional: bool) -> Loss:
    def loss(queries: Tensor, documents: Tensor, scale: Tensor) -> Any:
        settings = {"gather_enabled": True, "bidirectional": bidirectional}
        return m.clip_loss(queries, documents, lambda logits: scale * logits, **settings)

    return loss


def sentence_transformers(m: Any) -> Loss:
    settings = {"scale": 3.0, "gather_across_devices": True, "similarity_fct": lambda a, b: unit(a) @ unit(b).T}
    loss = m.MultipleNegativesRankingLoss(nn.Identity(), **settings)
    return lambda anchors, positives: loss.compute_loss_from_embeddings([anchors, positives], torch.empty(0))


def gist(m: Any, margin: float) -> Loss:
    """Adapt GISTEmbedLoss, whose guide agrees with the model here."""
    settings = {"temperature": TEMPERATURE, "margin_strategy": "absolute", "margin": margin}
    settings |= {"contrast_anchors": True, "contrast_positives": True, "gather_across_devices": True}
    loss = bare(m.GISTEmbedLoss, must_retokenize=False, **settings)
    loss.similarity_fct, loss.cross_entropy_loss = nn.CosineSimilarity(dim=-1), nn.CrossEntropyLoss()
    loss.model = loss.guide = lambda x: {"sentence_embedding": x}
    return lambda anchors, positives: loss([anchors, positives], torch.empty(0))


def sim_cse(m: Any) -> Loss:
    """Adapt cl_forward in training, with a pooler that returns embeddings."""
    model = SimpleNamespace(training=True, device=torch.device("cpu"), pooler_type="avg", sim=m.Similarity(TEMPERATURE))
    model.model_args = SimpleNamespace(pooler_type="avg", do_mlm=False)
    model.config = SimpleNamespace(use_return_dict=True)
    m.SequenceClassifierOutput = lambda **outputs: outputs["loss"]

    def loss(view1: Tensor, view2: Tensor) -> Any:
        pairs = torch.stack([view1, view2], dim=1)
        outputs = SimpleNamespace(last_hidden_state=pairs, hidden_states=None, attentions=None)
        model.pooler = lambda *_: pairs.flatten(0, 1)
        tokens = torch.ones(len(view1), 2, 1, dtype=torch.int64)
        return m.cl_forward(model, lambda *_, **__: outputs, tokens, attention_mask=tokens, return_dict=True)

    return loss


def colpali(m: Any) -> Loss:
    """Adapt the trainer's part before the loss, with the loss of single vectors."""

    def loss_func(query_embeddings: Tensor, doc_embeddings: Tensor, offset: int) -> Tensor:
        labels = torch.arange(len(query_embeddings)) + offset
        return F.cross_entropy(query_embeddings @ doc_embeddings.T / TEMPERATURE, labels)

    rank, size = rank_and_size()
    accelerator = SimpleNamespace(num_processes=size, process_index=rank, sync_gradients=True)
    accelerator.pad_across_processes = lambda x, **_: x
    trainer = SimpleNamespace(accelerator=accelerator, loss_func=loss_func)
    compute = m.ContrastiveTrainer._compute_loss_from_outputs
    return lambda queries, documents: compute(trainer, queries, documents)


def dpr(m: Any) -> Loss:
    """Adapt _calc_loss of the trainer; one process has local_rank -1."""

    def all_gather_list(data: Any, max_size: int) -> list[Any]:
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, data)
        return gathered

    def nll(questions: Tensor, contexts: Tensor, positives: list[int], *_: Any, **__: Any) -> Any:
        return F.cross_entropy(questions @ contexts.T / TEMPERATURE, torch.tensor(positives, dtype=torch.int64)), 0

    rank, size = rank_and_size()
    m.all_gather_list, criterion = all_gather_list, SimpleNamespace(calc=nll)
    cfg = SimpleNamespace(distributed_world_size=size, local_rank=rank if size > 1 else -1, n_gpu=1)
    cfg.global_loss_buf_sz = 0

    def loss(questions: Tensor, contexts: Tensor) -> Any:
        positives = list(range(len(questions)))
        return m._calc_loss(cfg, criterion, questions, contexts, positives, [[] for _ in positives])

    return loss


def ms_swift(m: Any) -> Loss:
    """Adapt InfonceLoss; sentences are interleaved, and a label of 1 begins each pair."""

    def gather_object(x: Tensor) -> list[Any]:
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, [row.detach() for row in x])
        return [row for of_rank in gathered for row in of_rank]

    rank, size = rank_and_size()
    m.gather_object, m.get_dist_setting = gather_object, lambda: (rank, rank, size, size)
    m.strtobool = lambda text: int(text == "True")
    m.sequence_parallel.dp_group = None
    loss = m.InfonceLoss(None, None)

    def of_pairs(queries: Tensor, documents: Tensor) -> Any:
        sentences = torch.stack([queries, documents], 1).flatten(0, 1)
        return loss({"last_hidden_state": sentences}, torch.ones(len(queries), dtype=torch.int64))

    return of_pairs


# --- images and texts --------------------------------------------------------------------------------------------------


def clip4clip(m: Any) -> Loss:
    """Adapt AllGather and CrossEn as the model combines them."""
    rank, size = rank_and_size()
    cross_entropy, task = m.CrossEn(), SimpleNamespace(rank=rank, world_size=size)

    def loss(texts: Tensor, videos: Tensor, scale: Tensor) -> Any:
        a, b = (m.AllGather.apply(x, task) for x in (texts, videos))
        similarity = scale * a @ b.T
        return (cross_entropy(similarity) + cross_entropy(similarity.T)) / 2

    return loss


def declip(m: Any) -> Loss:
    """Adapt CLIP of DeCLIP, whose logits are compared with targets that have the offset of the rank."""
    m.link.get_rank, m.link.get_world_size = dist.get_rank, dist.get_world_size
    m.link.allgather, m.link.allreduce = dist.all_gather, dist.all_reduce
    model = bare(m.CLIP, use_allgather=True, encode_image=lambda x: x, encode_text=lambda x: x)
    model.sample_captions = lambda x: x

    def loss(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
        model.logit_scale = scale.log()
        labels = torch.arange(len(images)) + rank_and_size()[0] * len(images)
        by_image, by_text = model({"images": images, "captions": texts})
        return (F.cross_entropy(by_image, labels) + F.cross_entropy(by_text, labels)) / 2

    return loss


# --- views of images ---------------------------------------------------------------------------------------------------


def spijkervet(m: Any) -> Loss:
    return lambda view1, view2: m.NT_Xent(len(view1), TEMPERATURE, rank_and_size()[1])(view1, view2)


def simclr_script(m: Any) -> Loss:
    """Adapt info_nce_loss and the cross-entropy that the script takes of it."""

    def loss(view1: Tensor, view2: Tensor) -> Tensor:
        args = SimpleNamespace(batch_size=len(view1), n_views=2, device="cpu", temperature=TEMPERATURE)
        return F.cross_entropy(*m.SimCLR.info_nce_loss(SimpleNamespace(args=args), torch.cat([view1, view2])))

    return loss


def solo_simclr(m: Any) -> Loss:
    """Adapt simclr_loss_func; the indexes of samples are unique over all ranks, as those of a dataset are."""

    def loss(view1: Tensor, view2: Tensor) -> Any:
        indexes = torch.arange(len(view1)) + 1000 * rank_and_size()[0]
        return m.simclr_loss_func(torch.cat([view1, view2]), indexes.repeat(2), TEMPERATURE)

    return loss


def vissl_simclr(m: Any) -> Loss:
    size = rank_and_size()[1]
    m.get_rank, m.get_cuda_device_index = (lambda: rank_and_size()[0]), (lambda: -1)
    m.gather_from_all.__globals__.update(  # of the package classy_vision
        is_distributed_training_run=lambda: size > 1,
        convert_to_distributed_tensor=lambda x: (x, "cpu"),
        convert_to_normal_tensor=lambda x, device: x,
    )

    def loss(view1: Tensor, view2: Tensor) -> Any:
        settings = SimpleNamespace(world_size=size, embedding_dim=view1.shape[1])
        settings.effective_batch_size = 2 * len(view1) * size
        return m.SimclrInfoNCECriterion(settings, TEMPERATURE)(torch.cat([view1, view2]))

    return loss


def moco_v3(m: Any) -> Loss:
    """Adapt MoCo's contrastive_loss of both pairs of views; the momentum encoder's views are keys without gradient."""
    compute, model = m.MoCo.contrastive_loss, SimpleNamespace(T=TEMPERATURE)
    return lambda view1, view2: compute(model, view1, view2.detach()) + compute(model, view2, view1.detach())


def dino(m: Any) -> Loss:
    """Adapt DINOLoss: the views of the student against those of the teacher, without gradient."""
    of_width = cache(lambda width: m.DINOLoss(width, 2, 0.3, 0.3, 0, 1).double())

    def loss(view1: Tensor, view2: Tensor) -> Any:
        both = torch.cat([view1, view2])
        return of_width(view1.shape[1])(both, both.detach(), 0)

    return loss


def sup_contrast(m: Any) -> Loss:
    loss = m.SupConLoss(temperature=TEMPERATURE, base_temperature=TEMPERATURE)
    return lambda embeddings, labels: loss(embeddings[:, None], labels)


def mean_of_squares(m: Any) -> Loss:
    """Adapt dist_mean, as a univariate test of lejepa calls it."""
    return lambda embeddings, labels: m.UnivariateTest().dist_mean(embeddings.square().mean(0)).square().sum()


# --- mmpretrain --------------------------------------------------------------------------------------------------------


def with_collectives_of_mmengine(m: Any) -> None:
    """Give a module the collectives of mmengine, which returns the tensors of all ranks in a list."""

    def all_gather(x: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(x) for _ in range(rank_and_size()[1])]
        dist.all_gather(gathered, x.contiguous())
        return gathered

    m.all_gather, m.all_reduce, m.get_rank = all_gather, dist.all_reduce, lambda: rank_and_size()[0]


def mm_simclr(m: Any) -> Loss:
    with_collectives_of_mmengine(m)

    def head(positive: Tensor, negative: Tensor) -> Tensor:
        labels = torch.zeros(len(positive), dtype=torch.int64)
        return F.cross_entropy(torch.cat([positive, negative], 1) / TEMPERATURE, labels)

    model = bare(m.SimCLR, backbone=lambda x: x.flatten(1), neck=lambda x: [x], head=SimpleNamespace(loss=head))
    return lambda view1, view2: model.loss([view1[..., None, None], view2[..., None, None]], [])["loss"]


def moco_v3_head(m: Any) -> Loss:
    with_collectives_of_mmengine(m)
    head = bare(m.MoCoV3Head, temperature=TEMPERATURE, loss_module=F.cross_entropy, predictor=lambda x: x)
    return lambda view1, view2: head.loss(view1, view2.detach())


def cross_correlation_head(m: Any) -> Loss:
    with_collectives_of_mmengine(m)

    def loss(view1: Tensor, view2: Tensor) -> Any:
        head = bare(m.LatentCrossCorrelationHead, world_size=rank_and_size()[1])
        head.bn = nn.BatchNorm1d(view1.shape[1], affine=False)
        head.loss_module = lambda c: (c - torch.eye(len(c))).square().sum()
        return head.loss(view1, view2)

    return loss
