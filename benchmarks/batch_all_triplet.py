"""Batch-all triplets: value against pytorch-metric-learning, then memory and seconds with 10⁹ triplets.

Run: python benchmarks/batch_all_triplet.py [rows] [classes] [d]
"""

import resource
import sys
import time

import torch
from pytorch_metric_learning.losses import TripletMarginLoss
from torch import Tensor

from contrastive_zoo.losses.triplet import Triplet


def batch(rows: int, classes: int, d: int) -> tuple[Tensor, Tensor]:
    """Draw Gaussian embeddings around class centres."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(rows) % classes
    centres = torch.randn(classes, d, generator=generator)
    return (centres[labels] + torch.randn(rows, d, generator=generator)).requires_grad_(), labels


def step(loss: torch.nn.Module, z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return value and gradient."""
    value = loss(z, labels)
    return value.detach(), torch.autograd.grad(value, z)[0]


def peak_bytes() -> int:
    """Return the peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main(rows: int = 8192, classes: int = 512, d: int = 128) -> None:
    ours, theirs = Triplet(margin=0.2), TripletMarginLoss(margin=0.2)
    step(ours, *batch(256, 16, d))  # whatever loads, loads now
    z, labels = batch(rows, classes, d)
    before, start = peak_bytes(), time.perf_counter()
    value, gradient = step(ours, z, labels)
    seconds, extra = time.perf_counter() - start, peak_bytes() - before
    members = labels.bincount()
    triplets = int((members * (members - 1) * (rows - members)).sum())
    print(f"{rows} × {d}, {classes} classes, {triplets:.3g} triplets, {torch.get_num_threads()} threads")
    print(f"  forward + backward {seconds:.2f} s, {extra / 1e6:.0f} MB extra at the peak")
    print(f"  value {value:.6f}, gradient's norm {gradient.norm():.6g}")

    small, small_labels = batch(512, 64, d)
    found, expected = step(ours, small, small_labels), step(theirs, small, small_labels)
    errors = [((x - y).norm() / y.norm()).item() for x, y in zip(found, expected, strict=True)]
    print(f"512 × {d}, 64 classes: {found[0]:.6f}, pytorch-metric-learning {expected[0]:.6f}")
    print(f"  off by {errors[0]:.1e} (value) and {errors[1]:.1e} (gradient), relative, float32")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
