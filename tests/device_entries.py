"""Everything public besides losses, as functions of how a tensor is put on a device: not at all, or simulated."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from pytorch_metric_learning import losses, miners
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.ranks.world import World
from tests.simulated import Put, value_and_gradients


def samples(n: int = 8, d: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    draw = torch.Generator().manual_seed(seed + 7 * rank)
    return torch.randn(n + rank, d, generator=draw), torch.randint(3, (n + rank,), generator=draw)


def searched(put: Put) -> Any:
    (x, labels), (y, _) = samples(), samples(seed=1)
    a, b, first, metrics = put(x), put(y), put(torch.zeros(len(x), 1, dtype=torch.int64)), cz.metrics
    return [
        tuple(metrics.top_k(a, b, k=3)),
        tuple(metrics.top_k(a, k=2, excluded=first)),
        metrics.evaluate(a, labels=labels, metrics=["map", "knn_accuracy@3"]),
        metrics.evaluate(a, labels=put(labels)),
        metrics.recall_at_k(a, b, k=2),
        metrics.cross_modal_recall(a, b, k=[1, 2]),
        tuple(metrics.top_k(a, b, k=2, index=metrics.ApproximateIndex("IVF2,Flat"))),
    ]


def monitored(put: Put) -> list[dict[str, float]]:
    (a, labels), (b, _) = samples(), samples(seed=1)
    views, classes = cz.DistributedLoss(put(cz.NTXent())), cz.DistributedLoss(put(cz.SupCon()))
    monitors = [cz.Monitor(views, every=1), cz.Monitor(classes, every=1, encoder=put(nn.Linear(4, 4)))]
    views(put(a), put(b))
    classes(put(a), labels)
    return [{name: x for name, x in monitor.take().items() if "drift" not in name} for monitor in monitors]


def collected(put: Put) -> Any:
    x, labels = samples()
    metric = cz.metrics.RetrievalMetrics()
    metric.update(put(x), labels)
    metric.update(put(x + 1), put(labels))
    return metric.compute()


def judged(put: Put) -> Any:
    x, _ = samples()
    rank = dist.get_rank() if dist.is_initialized() else 0
    ids = 100 * rank + torch.arange(len(x))
    judgements = (ids[:3], ids[1:4], torch.tensor([1.0, 2.0, 1.0]))
    return cz.metrics.evaluate(
        put(x), put(x + 0.1), ids=put(ids), gallery_ids=ids, judgements=judgements, metrics=["ndcg@3"]
    )


def remembered(put: Put) -> Any:
    x, labels = samples()
    memory, on_cpu = put(cz.MemoryQueue(11, embedding_size=4)), cz.MemoryQueue(11, embedding_size=4)
    slots = memory.enqueue(put(x), labels), on_cpu.enqueue(put(x), put(labels))
    more = memory.enqueue(put(x), put(labels), enqueue_mask=labels > 0)
    return slots, more, memory.rows, memory.labels, on_cpu.rows, on_cpu.labels


def compared_with_memory(put: Put) -> Any:
    x, labels = samples()
    loss = put(cz.CrossBatchMemory(cz.SupCon(), size=20, embedding_size=4))
    negatives = put(cz.CrossBatchMemory(cz.InfoNCE(), size=20, embedding_size=4))
    found = [cz.DistributedLoss(loss)(put(x), labels) for _ in range(2)]
    return found, [cz.DistributedLoss(negatives)(put(x), put(x + 1)) for _ in range(2)]


def momentum(put: Put) -> Any:
    torch.manual_seed(0)
    encoder = put(nn.Linear(4, 3))
    teacher = cz.MomentumEncoder(encoder, momentum=0.5)
    with torch.no_grad():
        encoder.weight.add_(1)
    teacher.update(encoder)
    return teacher(put(samples()[0]))


def cached(put: Put) -> Any:
    torch.manual_seed(0)
    x, labels = samples()
    encoder, loss = put(nn.Linear(4, 3)), cz.DistributedLoss(put(cz.SupCon()))
    value = cz.cached_step(encoder, put(x).split(3), loss, labels)
    cz.average_gradients(encoder)
    return value, encoder.weight.grad


def messages(put: Put) -> Any:
    x, labels = samples()
    x = put(x).requires_grad_()
    gathered = cz.collectives.all_gather(x)
    scattered = cz.collectives.reduce_scatter(gathered)
    total = (
        cz.collectives.all_reduce(gathered.sum(0))
        + cz.collectives.broadcast(x[:1].sum(0))
        + cz.collectives.all_reduce(x.sum(0), "max")
    )
    (gradient,) = torch.autograd.grad(scattered.sum() + total.square().sum(), x)
    collated = cz.data.CollateEmptyBatches({"x": put(torch.ones(2)), "y": 5})([])
    return gathered, scattered, total, gradient, cz.engine.pair_masks(put(labels)).positive, collated


def mined(put: Put) -> Any:
    x, _ = samples()
    labels = torch.arange(len(x)) % 3
    found = cz.data.mine_hard_negatives(put(x), put(x + 0.1), put(torch.arange(len(x))), num_negatives=2,
                                   query_labels=labels, corpus_labels=put(labels))  # fmt: skip
    return {name: x.tolist() for name, x in found.items()}


def mined_by_pml(put: Put) -> Any:
    x, labels = samples()
    return tuple(cz.data.DistributedMiner(miners.BatchHardMiner())(put(x), put(labels)))


def messages_of_one_rank(put: Put) -> Any:
    x = put(samples()[0]).requires_grad_()
    gathered = cz.collectives.gather(x)
    parts = cz.collectives.scatter(gathered if len(gathered) else x[:0])
    total = cz.collectives.reduce(x.sum(0), op="mean")
    shared = cz.collectives.replicated(x.mean().detach().requires_grad_())
    (gradient,) = torch.autograd.grad(gathered.square().sum() + parts.sum() + total.sum(), x)
    return gathered, parts, total, gradient, shared, cz.engine.global_sample_ids(len(x), views=2)


def in_a_ring(put: Put) -> Any:
    (a, labels), (b, _) = samples(), samples(seed=1)
    towers = cz.DistributedLoss(put(cz.Clip()), ring=True)
    classes = cz.DistributedLoss(put(cz.SupCon()), ring=True, grad_reduction="sum")
    return value_and_gradients(towers, [put(a), put(b)]), value_and_gradients(classes, [put(a), labels])


def functions(put: Put) -> Any:
    (a, _), (b, _) = samples(), samples(seed=1)
    a, b = put(a).requires_grad_(), put(b)
    value = cz.NTXent()(a, b, world=World.of()) + cz.VICReg()(a, b, world=World.of())
    return value, *torch.autograd.grad(value, a)


def third_party(put: Put) -> Any:
    torch.manual_seed(0)
    x, labels = samples()
    proxies = cz.DistributedLoss(put(losses.ProxyAnchorLoss(3, 4)))
    native = cz.DistributedLoss(losses.NTXentLoss(), prefer_native=True, grad_reduction="sum")
    return [value_and_gradients(f, [put(x), labels]) for f in (proxies, proxies, native)]


def labelled_on_rank_0(put: Put) -> Any:
    """Labels on the device on rank 0 alone."""
    torch.manual_seed(0)
    x, labels = samples()
    labels = labels if dist.is_initialized() and dist.get_rank() else put(labels)
    wrapped = [
        cz.DistributedLoss(put(cz.SupCon(temperature=0.3))),
        cz.DistributedLoss(put(cz.SupSigmoid()), ring=True),
        cz.DistributedLoss(put(cz.IntraPairVariance()), check_finite=False),
        cz.DistributedLoss(put(cz.Triplet()), grad_reduction="sum"),
        cz.DistributedLoss(put(cz.ProxyAnchor(num_classes=4, embedding_size=4))),
        cz.DistributedLoss(losses.TripletMarginLoss(), miner=miners.BatchHardMiner()),
    ]
    return [value_and_gradients(loss, [put(x), labels]) for loss in wrapped for _ in range(2)]


def padded(put: Put) -> Any:
    x = samples()[0][:, None].expand(-1, 3 + (dist.get_rank() if dist.is_initialized() else 0), -1).contiguous()
    mask = torch.ones(x.shape[:2], dtype=torch.bool)
    pooled = cz.DistributedLoss(lambda z, mask: (z * mask[..., None]).sum(1).std(), pad_dims={"z": 1, "mask": 1})
    return value_and_gradients(nn.ModuleList([pooled])[0], [put(x), put(mask)])


def remembered_by_losses(put: Put) -> Any:
    x = samples()[0].abs()
    nnclr, ressl = (cz.DistributedLoss(put(make(size=20, embedding_size=4))) for make in (cz.NNCLR, cz.ReSSL))
    a, b = put(x), put(x + 1)
    signs = (1, -1, -1)  # all that the second call compares is farther than an empty slot
    return [(value_and_gradients(nnclr, [s * y for y in (a, b, b, a)]), ressl(s * a, s * b)) for s in signs]


def cached_module(put: Put) -> Any:
    torch.manual_seed(0)
    encoder, loss = put(nn.Linear(4, 3)), cz.DistributedLoss(put(cz.Clip()))
    encode = cz.GradCache(encoder, chunk_size=3)
    value = loss(encode(put(samples()[0])), encode(put(samples(seed=1)[0])))
    value.backward()
    cz.average_gradients(encoder)
    return value, encoder.weight.grad, [p.grad for p in loss.parameters()]


def sampled(put: Put) -> Any:
    x = put(samples()[0])
    wrong = put(torch.zeros(len(x), 1, dtype=torch.int64))
    settings: dict[str, Any] = {"num_neighbours": 2, "batch_size": 4, "group_size": 2}
    sampler = cz.data.HardNegativeBatchSampler.from_embeddings(x, positives=wrong, **settings)
    classes = cz.data.MPerClassBatchSampler(put(torch.arange(12) % 3), m=2, classes_per_batch=2)
    return [[list(map(int, batch)) for batch in of] for of in (sampler, classes)]


def compared(put: Put) -> Any:
    x, labels = samples()
    values = cz.metrics.evaluate_queries(put(x), labels=put(labels), metrics=["map"])["map"].float()
    return values, cz.metrics.paired_bootstrap(put(values), values / 2, resamples=20)


def by_torchmetrics(put: Put) -> Any:
    from contrastive_zoo.adapters.torchmetrics import RetrievalMetric

    x, labels = samples()
    metric = RetrievalMetric("map@r")
    metric.update(put(x), labels)
    metric.update(put(x + 1), put(labels))
    return metric.compute()


class Embed(nn.Module):
    """An encoder of numbers instead of words."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": self.linear(features["x"])}


def sentences(put: Put) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import losses as of_sentences

    from contrastive_zoo.adapters.sentence_transformers import DistributedSentenceLoss

    torch.manual_seed(0)
    (a, labels), (b, _), found = samples(), samples(seed=1), []
    model = SentenceTransformer(modules=[Embed()], device="cpu")
    for make, targets in (
        (of_sentences.MultipleNegativesRankingLoss, None),
        (of_sentences.CosineSimilarityLoss, labels),
    ):
        loss = DistributedSentenceLoss(put(make(model)))
        value = loss([{"x": put(a)}, {"x": put(b)}], targets if targets is None else put(targets.float()))
        found.append((value, torch.autograd.grad(value, list(loss.model.parameters()))))
    return found


ENTRIES: dict[str, Callable[[Put], Any]] = {
    entry.__name__: entry
    for entry in (
        searched, compared, collected, judged, mined, mined_by_pml, monitored, remembered, compared_with_memory, momentum,
        cached, cached_module, messages, messages_of_one_rank, in_a_ring, functions, third_party, labelled_on_rank_0, padded,
        remembered_by_losses, sampled, by_torchmetrics, sentences,
    )
}  # fmt: skip
"""What it returns is the same on a CPU and on a device, on one process and on several ranks."""
