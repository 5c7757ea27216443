"""Sample, train, mine, train on and evaluate a descriptor of patches, on any number of processes, with a stop in between.

``python -m examples.retrieval`` trains on one process, on two, and on two and then three, and compares weights and metrics.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds
from examples.stereo import normalized_patches, stereo_pairs

BATCH_SIZE, EPOCHS, NEGATIVES, WIDTH = 100, 6, 2, 32
APART = 8.0
"""Pixels between a point and its negatives: nearer patches show nearly the same."""

MINE_FROM, MINE_EVERY = 30, 15
"""Steps: two epochs without mined negatives, then new ones in every epoch."""


class Checkpoint(NamedTuple):
    """All that a run needs to continue on another number of processes."""

    encoder: dict[str, Tensor]
    optimizer: dict[str, Any]
    sampler: dict[str, Any]
    negatives: dict[str, Any]
    step: int


class Result(NamedTuple):
    """What a run has learnt."""

    weights: Tensor
    recall: float
    checkpoint: Checkpoint


def make_encoder() -> nn.Module:
    """Return the encoder with its initial parameters, the same on every process."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2), nn.GELU(), nn.Conv2d(16, 32, 3, stride=2), nn.GELU(), nn.Flatten(),
        nn.Linear(128, WIDTH),
    ).double()  # fmt: skip


def train(start: Checkpoint | None = None, stop: int | None = None) -> Result:
    """Train this rank's part of every global batch, from a checkpoint and up to a step, and evaluate on all ranks."""
    pairs, test = stereo_pairs()
    encoder = make_encoder()
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.05, momentum=0.9)
    loss_fn = cz.DistributedLoss(cz.InfoNCE(temperature=0.1))
    data = TensorDataset(torch.arange(len(pairs.left)), pairs.left, pairs.right)
    sampler = cz.GlobalBatchSampler(len(data), batch_size=BATCH_SIZE)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=cz.CollateEmpty(data[0]))

    def closeness(query: Tensor, candidate: Tensor) -> Tensor:
        return -(place[query] - place[candidate]).double().norm(dim=1)

    place = torch.from_numpy(pairs.place)
    negatives = cz.RefreshedNegatives(
        lambda i: encoder(pairs.left[i]), lambda i: encoder(pairs.right[i]), torch.arange(len(data)),
        corpus_size=len(data), every=MINE_EVERY, num_negatives=NEGATIVES, range_max=20, sampling="random",
        guide=closeness, guide_margin=APART,
    )  # fmt: skip
    step = 0
    if start is not None:
        encoder.load_state_dict(start.encoder)
        optimizer.load_state_dict(start.optimizer)
        sampler.load_state_dict(start.sampler)
        negatives.load_state_dict(start.negatives)
        step = start.step
    position = sampler.state_dict(step=sampler.step)
    for epoch in range(sampler.epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for batch, (index, left, right) in enumerate(loader, sampler.step):
            if step == stop:
                break
            queries, keys = encoder(left), encoder(right)
            mined = step >= MINE_FROM
            if mined:
                negatives.update(step)
                hard = encoder(pairs.right[negatives[index]].flatten(0, 1)).view(len(index), NEGATIVES, WIDTH)
            loss = loss_fn(queries, keys, hard) if mined else loss_fn(queries, keys)
            optimizer.zero_grad()
            loss.backward()
            cz.average_gradients(encoder)
            optimizer.step()
            step += 1
            position = sampler.state_dict(step=batch + 1)
    checkpoint = Checkpoint(encoder.state_dict(), optimizer.state_dict(), position, negatives.state_dict(), step)
    weights = nn.utils.parameters_to_vector(encoder.parameters()).detach()
    return Result(weights, evaluate(encoder, test.left, test.right), checkpoint)


@torch.no_grad()
def evaluate(encoder: nn.Module, left: Tensor, right: Tensor) -> float:
    """Return the share of left patches whose nearest right patch is the right one; each rank encodes a part."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return cz.recall_at_k(*(encoder(x.tensor_split(size)[rank]) for x in (left, right)))


def baselines() -> dict[str, float]:
    """Return the recall of patches without learning."""
    _, test = stereo_pairs()
    return {
        "raw patches": cz.recall_at_k(test.left.flatten(1), test.right.flatten(1), process_group=cz.ALONE),
        "normalised cross-correlation": cz.recall_at_k(
            *map(normalized_patches, (test.left, test.right)), process_group=cz.ALONE
        ),
    }


def main() -> None:
    """Run all and print a table."""
    begin = time.perf_counter()
    with Worlds(timeout=170.0) as worlds:
        (alone,) = worlds.run(1, train)
        two = worlds.run(2, train)
        stopped = worlds.run(2, train, None, 50)
        resumed = worlds.run(3, train, stopped[0].checkpoint)
    for name, recall in {**baselines(), "initial weights": evaluate(make_encoder(), *stereo_pairs()[1][:2])}.items():
        print(f"{name:32s} recall@1 {recall:.3f}")
    for name, found in {"W = 1": [alone], "W = 2": two, "W = 2, from step 50 on W = 3": resumed}.items():
        deviation = max((x.weights - alone.weights).abs().max().item() for x in found)
        print(f"{name:32s} recall@1 {found[0].recall:.3f}  weights differ from W = 1 by {deviation:.0e}")
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
