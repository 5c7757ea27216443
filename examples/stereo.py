"""Corresponding patches of a pair of stereo photographs, with their true disparity (scikit-image's motorcycle)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from skimage.data import stereo_motorcycle
from torch import Tensor

SIZE = 16
"""Side of a patch in pixels."""

TEST_ROWS = 0.7
"""Patches below this share of the photograph's height are for the test: no test patch overlaps a patch of the training."""


class Pairs(NamedTuple):
    """Patches of points that both cameras see: ``left[i]`` and ``right[i]`` show the same point."""

    left: Tensor
    """[n, 1, SIZE, SIZE], grey, 0 … 1."""
    right: Tensor
    place: NDArray[np.int64]
    """[n, 2] row and column of the left patch's centre."""
    disparity: NDArray[np.float64]
    """[n] columns by which the point is further left in the right photograph."""


def stereo_pairs(train: int = 1500, test: int = 400, seed: int = 0) -> tuple[Pairs, Pairs]:
    """Return pairs for training and pairs for the test, at random points with some texture, the same on every rank."""
    left, right, disparity = stereo_motorcycle()
    grey = [image @ np.array([0.299, 0.587, 0.114]) / 255 for image in (left, right)]
    half = SIZE // 2
    height, width = disparity.shape
    column = np.arange(width)
    partner = column - np.where(np.isfinite(disparity), disparity, np.inf)
    inside = (partner >= half) & (partner < width - half) & (column >= half) & (column < width - half)
    inside &= ((np.arange(height) >= half) & (np.arange(height) < height - half))[:, None]
    contrast = np.hypot(*np.gradient(grey[0]))
    inside &= contrast > np.quantile(contrast, 0.75)
    border = int(TEST_ROWS * height)
    rows = np.arange(height)[:, None]
    rng = np.random.default_rng(seed)
    found = []
    for region, number in ((rows < border - half, train), (rows >= border + half, test)):
        points = np.argwhere(inside & region)
        place = points[rng.permutation(len(points))[:number]]
        shift = disparity[place[:, 0], place[:, 1]].astype(np.float64)
        moved = np.stack([place[:, 0], np.rint(place[:, 1] - shift).astype(np.int64)], 1)
        found.append(Pairs(_patches(grey[0], place), _patches(grey[1], moved), place, shift))
    return found[0], found[1]


def normalized_patches(patches: Tensor) -> Tensor:
    """Return patches as rows with mean 0: their cosine is the normalised cross-correlation."""
    flat = patches.flatten(1)
    return flat - flat.mean(1, keepdim=True)


def _patches(image: NDArray[np.float64], centres: NDArray[np.int64]) -> Tensor:
    offsets = np.arange(SIZE) - SIZE // 2
    rows, columns = (centres[:, axis, None] + offsets for axis in (0, 1))
    return torch.from_numpy(image[rows[:, :, None], columns[:, None, :]])[:, None]
