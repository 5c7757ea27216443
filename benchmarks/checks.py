"""Cost of what DistributedLoss checks, in a small real training on two ranks; interleaved, as a share of the step.

python benchmarks/checks.py [--seconds 30] [--docs]    # seconds for each encoder

A step of DDP on scikit-learn's digits: two noisy views of 256 images per rank, an encoder, embeddings of 256 dimensions,
NT-Xent, backward pass and SGD. Implementations of the loss take turns in the same processes, one thread each, one step at a
time, of which the slower rank counts. "Nothing agreed" is the engine alone: no handshake, no check, shard sizes known
beforehand. Times are the 10th percentile, which other programs on the machine disturb less than the median. The cost is the
difference to "nothing agreed": of the loss alone, from given embeddings, as a share of the step.
"""

from argparse import Namespace
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from suite.cases import Case, nt_xent, recipe
from suite.harness import in_rounds, program, seconds_of, step_of
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.ranks.adjoints import scale_gradient
from contrastive_zoo.ranks.session import Session
from contrastive_zoo.ranks.world import Shards, World
from contrastive_zoo.testing.worlds import Worlds
from examples.losses import images as digits
from tools.pages import table

RANKS, ROWS, WIDTH, TEMPERATURE = 2, 256, 256, 0.2
PIXELS = 8

Loss = Callable[[Tensor, Tensor], Tensor]


class Block(nn.Module):
    """Two convolutions beside a shortcut, as in a ResNet; groups are normalised, since batches differ between ranks."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.straight = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        normalized = nn.GroupNorm(4, inputs), nn.GroupNorm(4, outputs)
        self.residual = nn.Sequential(normalized[0], nn.ReLU(), first, normalized[1], nn.ReLU(), second)

    def forward(self, x: Tensor) -> Tensor:
        return self.straight(x) + self.residual(x)


def small_resnet() -> nn.Module:
    stem = nn.Conv2d(1, 32, 3, padding=1, bias=False)
    head = nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, WIDTH))
    return nn.Sequential(stem, Block(32, 32, 1), Block(32, 64, 2), head)


def mlp() -> nn.Module:
    """Return three layers, the smallest encoder that learns anything here."""
    layers = nn.Linear(PIXELS**2, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, WIDTH)
    return nn.Sequential(nn.Flatten(), *layers)


ENCODERS: dict[str, Callable[[], nn.Module]] = {"small ResNet": small_resnet, "MLP": mlp}
ONE_PROCESS = "the loss alone"  # forward and backward pass of the loss from given embeddings


def nothing_agreed() -> Loss:
    """Return the loss as the engine computes it between ranks that need not agree on anything."""
    world, nt_xent_loss = World.of(), cz.NTXent(temperature=TEMPERATURE)

    def loss(a: Tensor, b: Tensor) -> Tensor:
        session = Session.of(world, check_finite=False)
        rows = {"view 0": scale_gradient(a, RANKS), "view 1": scale_gradient(b, RANKS)}
        shards = {name: Shards((len(x),) * RANKS, world.rank) for name, x in rows.items()}
        return nt_xent_loss.compute(Batch(rows, shards, nt_xent_loss.evaluated().values, session))

    return loss


def ours(**options: bool) -> Loss:
    return cz.DistributedLoss(cz.NTXent(temperature=TEMPERATURE), **options)  # type: ignore[arg-type]  # by name


REFERENCE = "nothing agreed, nothing checked"
LOSSES: dict[str, Callable[[], Loss]] = {
    REFERENCE: nothing_agreed,
    "DistributedLoss, checks off": partial(
        ours, check_finite=False, check_equal=False, check_distinct=False, static_shapes=True
    ),
    "DistributedLoss, all checks": ours,
    "by hand": lambda: recipe(nt_xent)(Case("ranks", "NT-Xent", 0, WIDTH, temperature=TEMPERATURE)),
}


def training_step(encoder: Callable[[], nn.Module], loss: Loss) -> Callable[[], object]:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(encoder())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    images = digits()[0].float().unsqueeze(1)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())

    def step() -> None:
        batch = images[torch.randint(len(images), (ROWS,), generator=generator)]
        views = [batch + 0.5 * torch.randn(batch.shape, generator=generator) for _ in range(2)]
        value = loss(*model(torch.cat(views)).chunk(2))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()

    return step


def loss_step(loss: Loss) -> Callable[[], object]:
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    return step_of(loss, [torch.randn(ROWS, WIDTH, generator=generator).requires_grad_() for _ in range(2)])


def measure(encoder: str, seconds: float) -> dict[str, float]:
    """Return the 10th percentile of the seconds per step of each loss; runs on a rank."""
    step = loss_step if encoder == ONE_PROCESS else partial(training_step, ENCODERS[encoder])
    runners = {name: step(construct()) for name, construct in LOSSES.items()}
    return seconds_of(in_rounds(runners, seconds=seconds), 0.1)


def lines(encoder: str, step: dict[str, float], alone: dict[str, float]) -> list[list[str]]:
    found = []
    for name in LOSSES:
        cost = 100 * (alone[name] - alone[REFERENCE]) / step[REFERENCE]
        shown = "" if name == REFERENCE else f"{cost:+.2f} %"
        times = f"{1000 * step[name]:,.1f}", f"{1000 * alone[name]:.2f}"
        found.append(["" if found else encoder, name, *times, shown])
    return found


def main(given: Namespace) -> dict[str, str]:
    found = []
    with Worlds() as worlds:
        alone = worlds.run(RANKS, measure, ONE_PROCESS, given.seconds, timeout=600.0)[0]
        for encoder in ENCODERS:
            found += lines(encoder, worlds.run(RANKS, measure, encoder, given.seconds, timeout=600.0)[0], alone)
    return {"checks": table(["encoder", "loss", "step, ms", "loss alone, ms", "cost"], found)}


if __name__ == "__main__":
    program(main, __doc__, page="when-a-rank-fails.md", seconds=30.0)
