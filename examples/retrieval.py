"""Sample, train, mine, train on and evaluate a descriptor of patches, on any number of processes, with a stop in between.

``python -m examples.retrieval [FOLDER]`` trains on one process, on two, and on two and then three, and compares weights and
metrics. Pictures are written to the folder.
"""

import math
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from scipy.spatial import cKDTree
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds
from examples.stereo import SIZE, Pairs, Stereo, normalized, reoriented, stereo_pairs

WIDTH, NEGATIVES = 128, 2
APART = 8.0  # pixels between a point and its negatives: nearer patches show nearly the same


class Settings(NamedTuple):
    """How long a training is; the test's is shorter."""

    points: int = 20_000
    batch_size: int = 200
    epochs: int = 4
    mine_from: int = 200  # steps without mined negatives: two epochs
    mine_every: int = 100
    learning_rate: float = 1e-3


FULL = Settings()


class Result(NamedTuple):
    weights: Tensor
    recall: float
    recall_disturbed: float
    checkpoint: dict[str, Any]  # all that a run needs to continue on another number of processes


class Normalized(nn.Module):
    """Patches as rows with mean 0 and variance 1."""

    def forward(self, patches: Tensor) -> Tensor:
        return normalized(patches)


def make_encoder() -> nn.Module:
    """Return the encoder with its initial parameters, the same on every process."""
    torch.manual_seed(0)
    return nn.Sequential(
        Normalized(), nn.Unflatten(1, (1, SIZE, SIZE)), nn.Conv2d(1, 16, 5, stride=2), nn.GELU(),
        nn.Conv2d(16, 32, 3), nn.GELU(), nn.Flatten(), nn.Linear(512, WIDTH),
    ).double()  # fmt: skip


class Training:
    """The objects of a training; every rank has its own."""

    def __init__(self, pairs: Pairs, settings: Settings) -> None:
        self.pairs, self.settings, self.step = pairs, settings, 0
        self.encoder = make_encoder()
        self.optimizer = torch.optim.AdamW(self.encoder.parameters(), weight_decay=1e-4)
        self.loss_fn = cz.DistributedLoss(cz.InfoNCE(temperature=0.07))
        self.sampler = neighbour_sampler(pairs, settings.batch_size)
        self.negatives = torch.full((len(pairs.left), NEGATIVES), -1)
        data = TensorDataset(torch.arange(len(pairs.left)), pairs.left, pairs.right)
        self.loader = DataLoader(data, batch_sampler=self.sampler, collate_fn=cz.data.CollateEmptyBatches(data[0]))
        self.position = self.sampler.state_dict(step=0)

    def run(self, stop: int | None) -> None:
        for epoch in range(self.sampler.epoch, self.settings.epochs):
            self.sampler.set_epoch(epoch)
            for batch, (index, left, right) in enumerate(self.loader, self.sampler.step):
                if self.step == stop:
                    return
                self.train_batch(index, left, right)
                self.position = self.sampler.state_dict(step=batch + 1)

    def train_batch(self, index: Tensor, left: Tensor, right: Tensor) -> None:
        inputs = [self.encode(left), self.encode(right)]
        if self.step >= self.settings.mine_from:
            if (self.step - self.settings.mine_from) % self.settings.mine_every == 0:
                self.mine()
            hard = self.pairs.right[self.negatives[index].flatten()]
            inputs.append(self.encode(hard).view(len(index), NEGATIVES, WIDTH))
        loss = self.loss_fn(*inputs)
        steps = self.settings.epochs * len(self.loader)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * (1 + math.cos(math.pi * self.step / steps)) / 2
        self.optimizer.zero_grad()
        loss.backward()
        cz.average_gradients(self.encoder)
        self.optimizer.step()
        self.step += 1

    def mine(self) -> None:
        """Mine negatives of distant points with the current encoder; each rank encodes and searches for its part."""
        points = torch.from_numpy(self.pairs.points)

        def closeness(query: Tensor, candidate: Tensor) -> Tensor:
            return -(points[query] - points[candidate]).norm(dim=1)

        mined = cz.data.mine_hard_negatives(
            encoded(self.encoder, self.pairs.left), encoded(self.encoder, self.pairs.right),
            own_part(torch.arange(len(points))), num_negatives=NEGATIVES, range_max=50, sampling="random", seed=self.step,
            guide=closeness, guide_margin=APART, output="n-tuple",
        )  # fmt: skip
        query, negatives = (cz.collectives.all_gather(torch.from_numpy(mined[x])) for x in ("query", "negative"))
        self.negatives[query] = negatives

    def encode(self, patches: Tensor) -> Tensor:
        """Return embeddings of patches in the orientation of this step: one scene gives eight kinds of batches."""
        return self.encoder(reoriented(patches, self.step))

    def checkpoint(self) -> dict[str, Any]:
        """Return the state, the same on every rank."""
        states = {"encoder": self.encoder.state_dict(), "optimizer": self.optimizer.state_dict()}
        return states | {"negatives": self.negatives, "sampler": self.position, "step": self.step}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint of any number of processes."""
        for name in ("encoder", "optimizer", "sampler"):
            getattr(self, name).load_state_dict(state[name])
        self.negatives, self.position, self.step = state["negatives"], state["sampler"], state["step"]


def neighbour_sampler(pairs: Pairs, batch_size: int) -> cz.data.HardNegativeBatchSampler:
    """Return a sampler that puts patches that look alike, but are of distant points, into one batch."""
    coarse = F.avg_pool2d(pairs.left, 2)
    return cz.data.HardNegativeBatchSampler.from_embeddings(
        own_part(normalized(coarse)),
        num_neighbours=4,
        positives=own_part(nearby(pairs)),
        batch_size=batch_size,
        group_size=4,
    )


def nearby(pairs: Pairs) -> Tensor:
    """Return for each point the indices of points within APART pixels, −1 where there are fewer: [n, most]."""
    tree = cKDTree(pairs.points)
    found = [torch.tensor(x) for x in tree.query_ball_point(pairs.points, APART)]
    return nn.utils.rnn.pad_sequence(found, batch_first=True, padding_value=-1)


def train(start: dict[str, Any] | None = None, stop: int | None = None, settings: Settings = FULL) -> Result:
    """Train from a checkpoint and up to a step, and evaluate on all ranks; called on every rank."""
    stereo = stereo_pairs(settings.points)
    training = Training(stereo.train, settings)
    if start is not None:
        training.load(start)
    training.run(stop)
    weights = nn.utils.parameters_to_vector(training.encoder.parameters()).detach()
    recalls = [recall(training.encoder, x) for x in (stereo.test, stereo.disturbed)]
    return Result(weights, recalls[0], recalls[1], training.checkpoint())


def own_part(rows: Tensor) -> Tensor:
    """Return this rank's part of embeddings that every rank holds."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return rows.tensor_split(size)[rank]


@torch.no_grad()
def encoded(encoder: nn.Module, patches: Tensor) -> Tensor:
    """Return the embeddings of this rank's part of the patches, in chunks that fit into memory."""
    return torch.cat([encoder(x) for x in own_part(patches).split(256)])


def recall(encoder: nn.Module, pairs: Pairs) -> float:
    """Return the share of left patches whose nearest right patch is the right one; each rank encodes a part."""
    return cz.metrics.hit_rate_at_k(encoded(encoder, pairs.left), encoded(encoder, pairs.right))


def print_table(stereo: Stereo, runs: dict[str, list[Result]]) -> None:
    """Print the recall of patches without learning and of each run, and how far its weights are from the first run's."""
    print(f"| | recall@1 of {len(stereo.test.left)} patches | the same, disturbed | largest difference of a weight |")
    print("|---|---:|---:|---:|")
    for name, encoder in {
        "raw patches": nn.Flatten(),
        "normalised cross-correlation": Normalized(),
        "descriptor, initial weights": make_encoder(),
    }.items():
        print(f"| {name} | {recall(encoder, stereo.test):.4f} | {recall(encoder, stereo.disturbed):.4f} | |")
    (expected,) = runs["W = 1"]
    for name, results in runs.items():
        deviation = max((x.weights - expected.weights).abs().max().item() for x in results)
        recalls = f"{results[0].recall:.4f} | {results[0].recall_disturbed:.4f}"
        print(f"| descriptor, {name} | {recalls} | {deviation:.0e} |")


def main(folder: str | None = None) -> None:
    begin = time.perf_counter()
    with Worlds(timeout=600.0) as worlds:
        runs = {"W = 1": worlds.run(1, train), "W = 2": worlds.run(2, train)}
        stopped = worlds.run(2, train, None, 250)
        runs["W = 2, from step 250 on W = 3"] = worlds.run(3, train, stopped[0].checkpoint)
    stereo = stereo_pairs()
    print_table(stereo, runs)
    if folder is not None:
        from examples.retrieval_pictures import pictures

        encoder = make_encoder()
        encoder.load_state_dict(runs["W = 1"][0].checkpoint["encoder"])
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, figure in pictures(encoder, stereo).items():
            figure.savefig(Path(folder, f"{name}.png"))
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
