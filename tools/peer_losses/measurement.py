"""The comparison of a loss under DistributedLoss with the same loss on one process."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from contrastive_zoo.loss_base.loss_modules import LossModules
from contrastive_zoo.testing.measurement import Encoder
from contrastive_zoo.testing.worlds import Worlds
from contrastive_zoo.wrapper.distributed import DistributedLoss
from tools.peer_losses.arguments import CLASSES, WIDTH, Batch
from tools.peer_losses.losses import PeerLoss

STEPS: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((12,), (12,), (8,)),
    2: ((3, 9), (12, 0), (5, 3)),
    3: ((5, 0, 7), (1, 8, 3), (0, 6, 2)),
}
"""Samples of each rank at each step by world size: uneven, and with empty ranks."""

GROUPS = ("value", "encoder", "parameter", "buffer")

Results = dict[str, Tensor]
"""Tensors by name, which begins with one of :data:`GROUPS`."""

Wrap = Callable[..., Any]


def results(peer: PeerLoss, size: int, grad_reduction: str, wrap: Wrap | None) -> Results | str:
    """Train for a few steps; return values, gradients and buffers, or the error; runs on every rank."""
    torch.set_default_dtype(torch.float64)
    with warnings.catch_warnings(), redirect_stdout(StringIO()):  # what the libraries say
        warnings.simplefilter("ignore")
        try:
            return _trained(peer, size, grad_reduction, wrap)
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def _trained(peer: PeerLoss, size: int, grad_reduction: str, wrap: Wrap | None) -> Results:
    rank, tensors = dist.get_rank(), Results()
    loss = peer.construct()
    loss_fn = loss if wrap is None else wrap(loss, grad_reduction=grad_reduction, **peer.options)
    module = loss if isinstance(loss, nn.Module) else nn.Module()
    encoder, start = Encoder(WIDTH), {"scale": torch.tensor(2.0), "bias": torch.tensor(-1.0)}
    numbers = nn.ParameterDict(
        start | {"prototypes": torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(9))}
    )
    for step, shards in enumerate(STEPS[size]):
        torch.manual_seed(step + 100 * rank)  # ranks draw other random numbers, which must not change the result
        batch = Batch(step, shards, rank, encoder, dict(numbers))
        value = loss_fn(**{name: of.value(batch, view) for view, (name, of) in enumerate(peer.takes.items())})
        values = [x for x in tree_leaves(value) if isinstance(x, Tensor)]
        tensors[f"value {step}"] = torch.cat([x.detach().double().flatten() for x in values])
        if learns := [x.sum() for x in values if x.requires_grad]:
            torch.stack(learns).sum().backward()
        learnt = {"encoder": encoder.weight, **{f"parameter {name}": x for name, x in module.named_parameters()}}
        learnt |= {f"parameter {name}": x for name, x in numbers.items() if x.grad is not None}
        for name, x in learnt.items():
            gradient = torch.zeros_like(x) if x.grad is None else x.grad
            if name == "encoder":
                dist.all_reduce(gradient)
                gradient = gradient / size if grad_reduction == "mean" else gradient
            elif grad_reduction == "sum":  # each rank holds 1/W of the gradient, which the trainer sums
                gradient = gradient * size
            tensors[f"{name} {step}"] = gradient.clone()
            x.data -= 0.01 * gradient
            x.grad = None
    return tensors | {f"buffer {name}": x.detach().double() for name, x in LossModules(module).shared_state()}


@dataclass(frozen=True)
class Compared:
    """The largest differences of a loss on several ranks from one process, by group; None where nothing is compared.

    ``words`` is the error of all ranks, or in which way the results cannot be compared.
    """

    differences: Mapping[str, float]
    words: str | None = None

    def wrong(self, peer: PeerLoss) -> str | None:
        """Return in words what differs, unless it is what is said of the loss; None if nothing does."""
        if peer.refused is not None:
            return None if peer.refused in (self.words or "") else f"is not refused: {self.words or self.differences}"
        return self.words or next(
            (f"{x} differs by {y:.1e}" for x, y in self.differences.items() if y > peer.tolerance), None
        )


def compare(found: Results | str, expected: Results | str) -> Compared:
    """Return how the results of a rank differ from those of one process."""
    if isinstance(expected, str):
        return Compared({}, f"one process raises {expected}")
    if isinstance(found, str):
        return Compared({}, found)
    if found.keys() != expected.keys():
        return Compared({}, f"differs in {sorted(found.keys() ^ expected.keys())}")
    differences: dict[str, float] = {}
    for name, x in expected.items():
        group = name.partition(" ")[0]
        difference = (found[name] - x).abs().amax() / x.abs().amax().clamp(min=1) if x.numel() else torch.zeros(())
        differences[group] = max(differences.get(group, 0.0), difference.nan_to_num(torch.inf).item())
    return Compared(differences)


def measure(
    worlds: Worlds, peers: Sequence[PeerLoss], sizes: Iterable[int] = (2, 3), wrap: Wrap = DistributedLoss
) -> list[dict[int, Compared]]:
    """Compare losses with one process for each number of ranks, under trainers that average and that sum."""
    expected = [worlds.run(1, results, peer, 1, "mean", None)[0] for peer in peers]
    rows: list[dict[int, Compared]] = [{} for _ in peers]
    for size in sizes:
        for peer, reference, row in zip(peers, expected, rows, strict=True):
            by_rank = [x for how in ("mean", "sum") for x in worlds.run(size, results, peer, size, how, wrap)]
            compared = [compare(x, reference) for x in by_rank]
            words = next((x.words for x in compared if x.words is not None), None)
            groups = {group for x in compared for group in x.differences}
            row[size] = Compared(
                {x: max(y.differences[x] for y in compared) for x in groups} if not words else {}, words
            )
    return rows
