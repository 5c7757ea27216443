"""Your data and your encoder. Here: scikit-learn's digits, 1,500 to train with and 297 to test with."""

import os

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.set_default_dtype(torch.float64)  # so that you can compare many digits; your training does not need it
pixels, classes = (torch.tensor(x) for x in load_digits(return_X_y=True))
pixels = pixels / 16 - 0.3
SAMPLES = int(os.environ.get("SAMPLES", "1500"))


def make_encoder():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 32))


def batches(epoch):
    """Return the image numbers of each batch of 250. The order depends on the epoch only."""
    return torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).split(250)


def views(numbers, epoch):
    """Return two moved and noisy copies of each image. Each image has its own seed, so all runs draw the same."""
    generators = [torch.Generator().manual_seed(10_000 * epoch + i) for i in numbers.tolist()]
    return [torch.stack([augment(pixels[i], g) for i, g in zip(numbers, generators, strict=True)]) for _ in range(2)]


def augment(image, generator):
    shift = torch.randint(-1, 2, (2,), generator=generator).tolist()
    noise = torch.randn(64, generator=generator)
    return image.view(8, 8).roll(shift, (0, 1)).flatten() + 0.1 * noise
