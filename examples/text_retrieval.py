"""Train a text encoder on docstrings, with batches by tokens, mined negatives and GradCache, and evaluate it.

``python -m examples.text_retrieval [FOLDER]`` trains on one process, on two, and on one with the negatives of a sixteenth of
the batch, and compares all with TF-IDF. The picture is written to the folder.
"""

import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds
from examples.docstrings import BUCKETS, Texts, texts, tokens

METRICS = ("hit_rate@1", "hit_rate@10", "mrr")
LOCAL = 16  # parts of a batch, as on as many ranks that do not gather embeddings


class Settings(NamedTuple):
    """How long a training is; the test's is shorter."""

    epochs: int = 4
    width: int = 256
    mine_every: int = 20  # steps
    learning_rate: float = 2e-3
    chunk_tokens: int = 16_384
    chunks: int = 2  # of a global batch


FULL = Settings()


class Result(NamedTuple):
    weights: Tensor
    losses: list[float]
    scores: list[dict[str, float]]  # before the training, and after each epoch


class Encoder(nn.Module):
    """Texts as weighted sums of their tokens' vectors. At first these are TF-IDF's, projected at random."""

    def __init__(self, weights: Tensor, width: int) -> None:
        super().__init__()
        random = torch.randn(BUCKETS, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.vectors, self.weights = nn.Parameter(random / width**0.5), nn.Parameter(weights)

    def forward(self, ids: Tensor, *, attention_mask: Tensor) -> Tensor:
        weights = F.embedding(ids, self.weights[:, None])[..., 0] * attention_mask
        return F.embedding_bag(ids, self.vectors, per_sample_weights=weights, mode="sum")


def inverse_document_frequencies(documents: Tensor) -> Tensor:
    """Return log((1 + documents) / (1 + documents with the token)) + 1 of each token, as scikit-learn's TF-IDF."""
    counts = documents.flatten().bincount(minlength=BUCKETS).double()
    return torch.log((1 + len(documents)) / (1 + counts)) + 1


class Training:
    """The objects of a training; every rank has its own."""

    def __init__(self, data: Texts, settings: Settings) -> None:
        self.settings, self.step = settings, 0
        self.queries, self.documents, self.document_of = tokens(data.queries), tokens(data.documents), data.document_of
        self.encoder = Encoder(inverse_document_frequencies(self.documents), settings.width)
        self.encode = cz.GradCache(self.encoder, chunk_tokens=settings.chunk_tokens)
        vectors, weights = self.encoder.vectors, self.encoder.weights  # which are between 1 and 10
        self.optimizer = torch.optim.Adam([{"params": vectors, "factor": 1.0}, {"params": weights, "factor": 10.0}])
        lengths = (self.documents > 0).sum(1)[self.document_of]
        self.sampler = cz.data.TokenBatchSampler(
            lengths, chunk_tokens=settings.chunk_tokens, chunks_per_batch=settings.chunks
        )
        self.steps = sum(len(self.sampler.global_batches(epoch)) for epoch in range(settings.epochs))
        self.negatives = torch.full((len(self.queries),), -1)

    @torch.no_grad()
    def mine(self) -> None:
        """Mine a negative of each query with the current encoder, −1 for none; each rank searches for its part."""
        queries, documents, positives = map(own_part, (self.queries, self.documents, self.document_of))
        mined = cz.data.mine_hard_negatives(
            embed(self.encoder, queries), embed(self.encoder, documents), positives, num_negatives=1, range_max=20,
            sampling="random", seed=self.step, relative_margin=0.05,
        )  # fmt: skip
        query, negative = (cz.collectives.all_gather(torch.from_numpy(mined[x])) for x in ("query", "negative"))
        self.negatives.fill_(-1)[query] = negative

    def train_batch(self, pairs: Tensor, loss_fn: Any) -> float:
        if self.step % self.settings.mine_every == 0:
            self.mine()
        documents, mined = self.document_of[pairs], self.negatives[pairs]
        owners = torch.arange(len(pairs))[mined >= 0]
        mined = mined[mined >= 0]
        rows = torch.cat([self.queries[pairs], self.documents[documents], self.documents[mined]])
        q, d, negatives = self.encode(rows, attention_mask=rows > 0).split([len(pairs), len(pairs), len(mined)])
        loss = loss_fn(q, d, negatives, owners, document_ids=documents, negative_ids=mined)
        for group in self.optimizer.param_groups:
            group["lr"] = group["factor"] * self.settings.learning_rate * (1 - self.step / self.steps)
        self.optimizer.zero_grad()
        loss.backward()
        cz.average_gradients(self.encoder)
        self.optimizer.step()
        self.step += 1
        return loss.item()


def own_part(rows: Tensor) -> Tensor:
    """Return this rank's part of what every rank holds."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return rows.tensor_split(size)[rank]


def embed(encoder: nn.Module, ids: Tensor) -> Tensor:
    return encoder(ids, attention_mask=ids > 0)


def local_loss(q: Tensor, d: Tensor, negatives: Tensor, owners: Tensor, **ids: Tensor) -> Tensor:
    """Return the mean over ranks that do not gather embeddings: each has every 16th pair and its negatives."""
    loss_fn, total = cz.MNRL(), q.new_zeros(())
    for part in range(min(LOCAL, len(q))):
        pairs, mined = torch.arange(len(q)) % LOCAL == part, owners % LOCAL == part
        arguments = q[pairs], d[pairs], negatives[mined], owners[mined] // LOCAL
        of_part = {"document_ids": ids["document_ids"][pairs], "negative_ids": ids["negative_ids"][mined]}
        total = total + loss_fn(*arguments, **of_part) * pairs.sum() / len(q)
    return total


def train(data: Texts, settings: Settings = FULL, *, local: bool = False) -> Result:
    """Train, and evaluate after each epoch; called on every rank."""
    training, test = Training(data.train(), settings), data.test()
    loss_fn = local_loss if local else cz.DistributedLoss(cz.MNRL())
    losses, scores = [], [evaluate(training.encoder, test)]
    for epoch in range(settings.epochs):
        training.sampler.set_epoch(epoch)
        losses += [training.train_batch(torch.tensor(part, dtype=torch.long), loss_fn) for part in training.sampler]
        scores.append(evaluate(training.encoder, test))
    return Result(nn.utils.parameters_to_vector(training.encoder.parameters()).detach(), losses, scores)


@torch.no_grad()
def evaluate(encoder: nn.Module, test: Texts) -> dict[str, float]:
    """Return the metrics of summaries that search documents; each rank encodes a part of both."""
    labels = own_part(test.document_of), own_part(torch.arange(len(test.documents)))
    queries, documents = (own_part(tokens(x)) for x in (test.queries, test.documents))
    found = embed(encoder, queries), embed(encoder, documents)
    return cz.metrics.evaluate(*found, labels=labels[0], gallery_labels=labels[1], metrics=METRICS)


def tf_idf(data: Texts, **settings: Any) -> dict[str, float]:
    """Return the metrics of scikit-learn's TF-IDF, fitted on all documents; of equal scores wrong ones come first."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    test, vectorizer = data.test(), TfidfVectorizer(sublinear_tf=True, **settings).fit(data.documents)
    scores = (vectorizer.transform(test.queries) @ vectorizer.transform(test.documents).T).toarray()
    right = scores[np.arange(len(scores)), test.document_of.numpy()]
    place = (scores >= right[:, None]).sum(1)
    return {"hit_rate@1": (place == 1).mean(), "hit_rate@10": (place <= 10).mean(), "mrr": (1 / place).mean()}


def main(folder: str | None = None) -> None:
    if folder is not None:
        # a folder that cannot be written is an error before the training
        Path(folder).mkdir(parents=True, exist_ok=True)
    begin, data = time.perf_counter(), texts()
    letters = tf_idf(data, analyzer="char_wb", ngram_range=(3, 5))
    baselines = {"TF-IDF of words": tf_idf(data), "TF-IDF of 3 to 5 letters": letters}
    with Worlds(timeout=600.0) as worlds:
        (one,), several = worlds.run(1, train, data), worlds.run(2, train, data)
        (local,) = worlds.run(1, lambda: train(data, local=True))
    print_table(one, several, local, baselines)
    print(
        f"{len(data.queries)} pairs, {len(data.test().queries)} of them in the test; {time.perf_counter() - begin:.0f} s"
    )
    if folder is not None:
        draw(one, several[0], local, baselines).savefig(Path(folder, "text_retrieval.png"))


def print_table(one: Result, several: list[Result], local: Result, baselines: dict[str, dict[str, float]]) -> None:
    """Print the metrics of all methods, and how far the weights of two processes are from those of one."""
    deviation = max((x.weights - one.weights).abs().max().item() for x in several)
    trained = {"W = 1": one, "W = 2": several[0], f"negatives of 1/{LOCAL} of the batch": local}
    scores = baselines | {"encoder, before training": one.scores[0]}
    scores |= {f"encoder, {name}": x.scores[-1] for name, x in trained.items()}
    print("| | hit rate@1 | hit rate@10 | MRR |\n|---|---:|---:|---:|")
    for name, of in scores.items():
        print(f"| {name} | " + " | ".join(f"{of[x]:.3f}" for x in METRICS) + " |")
    print(f"largest difference of a weight, W = 2 from W = 1: {deviation:.0e}")


def draw(one: Result, several: Result, local: Result, baselines: dict[str, dict[str, float]]) -> Any:
    """Draw the losses on one process and on two, and MRR by epoch beside TF-IDF."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), dpi=80, layout="constrained")
    curve, quality = figure.subplots(1, 2)
    curve.plot(one.losses, lw=6, alpha=0.4, label="W = 1")
    curve.plot(several.losses, color="black", ls="--", lw=1.2, label="W = 2")
    curve.set(xlabel="step", ylabel="loss (nats)")
    for name, result, colour in [("global negatives", one, "C0"), (f"negatives of 1/{LOCAL}", local, "C1")]:
        quality.plot([x["mrr"] for x in result.scores], marker="o", color=colour, label=name)
    for (name, of), style in zip(baselines.items(), ("--", ":"), strict=True):
        quality.axhline(of["mrr"], color="gray", ls=style, label=name)
    quality.set(xlabel="epoch", ylabel="MRR on the test")
    for axes in (curve, quality):
        axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    main(*sys.argv[1:])
