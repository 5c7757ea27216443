"""Corresponding patches of a pair of stereo photographs with known disparity (scikit-image's motorcycle).

Disturbed patches show the right photograph turned about the point, out of focus, noisy and at another exposure.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import ndimage
from skimage.data import stereo_motorcycle
from torch import Tensor

SIZE = 16  # side of a patch in pixels
MARGIN = 12  # pixels between a point and the border of the photograph: a turned patch lies within it

TEST_ROWS = 0.7
"""Points below this share of the photograph's height are for the test: no test patch overlaps a patch of the training."""

SPACING = 4  # pixels between two test points: a shift by one pixel is no mistake that the test should count
VERSIONS = 24  # right photographs in the training: the undisturbed one, and others with random disturbances

Image = NDArray[np.float64]
Points = NDArray[np.float64]


class Disturbance(NamedTuple):
    """What a second camera may do to a photograph."""

    degrees: float = 0.0
    blur: float = 0.0  # standard deviation in pixels
    gamma: float = 1.0
    noise: float = 0.0  # standard deviation, where white is 1
    seed: int = 0


UNDISTURBED = Disturbance()
TEST_DISTURBANCE = Disturbance(degrees=15.0, blur=1.0, gamma=0.7, noise=0.03, seed=99)


class Pairs(NamedTuple):
    """Patches of points that both cameras see: ``left[i]`` and ``right[i]`` show the same point."""

    left: Tensor  # [n, SIZE, SIZE], grey, 0 … 1
    right: Tensor
    points: Points  # [n, 2] row and column in the left photograph
    partners: Points  # [n, 2] row and column in the right photograph


class Stereo(NamedTuple):
    """Pairs for training and for the test."""

    train: Pairs  # every pair is from one of the versions of the right photograph
    test: Pairs
    disturbed: Pairs  # the points of the test, with ``TEST_DISTURBANCE``


@cache
def photographs() -> tuple[Image, Image, Image]:
    """Return the left and the right photograph, grey, 0 … 1, and the disparity of the left one's pixels in pixels."""
    left, right, disparity = stereo_motorcycle()
    grey = np.array([0.299, 0.587, 0.114]) / 255
    return left @ grey, right @ grey, disparity.astype(np.float64)


def stereo_pairs(train: int = 20_000, test: int = 400) -> Stereo:
    """Return pairs at random points with some texture, the same on every rank."""
    rng = np.random.default_rng(0)
    usable = _usable()
    border = int(TEST_ROWS * len(usable))
    usable[border - SIZE : border] = False
    points = rng.permutation(np.argwhere(usable))
    chosen, spaced = points[points[:, 0] < border][:train], _spaced(points[points[:, 0] >= border])[:test]
    versions = [UNDISTURBED, *random_disturbances(VERSIONS - 1, seed=0)]
    parts = [pairs_at(chosen[i::VERSIONS], how) for i, how in enumerate(versions)]
    left, right = (torch.cat(x) for x in zip(*((x.left, x.right) for x in parts), strict=True))
    positions = (np.concatenate(x) for x in zip(*((x.points, x.partners) for x in parts), strict=True))
    return Stereo(Pairs(left, right, *positions), pairs_at(spaced), pairs_at(spaced, TEST_DISTURBANCE))


def random_disturbances(number: int, seed: int) -> list[Disturbance]:
    """Return disturbances between none and somewhat more than that of the test."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(number):
        degrees, blur, gamma, noise = rng.uniform((-1, 0, -1, 0), 1) * rng.uniform()
        found.append(Disturbance(20 * degrees, 1.5 * blur, 1.5**gamma, 0.04 * noise, int(rng.integers(2**32))))
    return found


def pairs_at(points: NDArray[np.int64], how: Disturbance = UNDISTURBED) -> Pairs:
    """Return the patches at pixels of the left photograph, and those of the same points in the disturbed right one."""
    left, right, disparity = photographs()
    places = points.astype(np.float64)
    partners: Points = np.stack([places[:, 0], places[:, 1] - disparity[points[:, 0], points[:, 1]]], 1)
    return Pairs(_patches(left, places), _patches(disturbed(right, how), partners, how.degrees), places, partners)


def disturbed(image: Image, how: Disturbance) -> Image:
    """Return the photograph out of focus, at another exposure and with noise."""
    noise = np.random.default_rng(how.seed).standard_normal(image.shape)
    return ndimage.gaussian_filter(image, how.blur) ** how.gamma + how.noise * noise


def normalized(patches: Tensor) -> Tensor:
    """Return patches as rows with mean 0 and variance 1: their cosine is the normalised cross-correlation."""
    centred = patches.flatten(1) - patches.flatten(1).mean(1, keepdim=True)
    return centred / centred.square().mean(1, keepdim=True).sqrt().clamp(min=1e-6)


def reoriented(patches: Tensor, number: int) -> Tensor:
    """Return patches in one of eight orientations: mirrored or not, in both directions, rows and columns swapped or not."""
    patches = patches.flip([dim for dim in (1, 2) if number & dim])
    return patches.transpose(1, 2) if number & 4 else patches


def _usable() -> NDArray[np.bool_]:
    """Return the pixels with texture, away from the border, that the right camera sees, too.

    The true disparity is also known where a nearer object hides the point from the right camera: it is left out if a pixel
    with a disparity larger by more than 1.5 falls on the same column, or the next one, of the right photograph.
    """
    left, _, disparity = photographs()
    height, width = left.shape
    known = np.isfinite(disparity)
    partner = np.arange(width) - np.where(known, disparity, 0)
    column = np.clip(np.rint(partner), 0, width - 1).astype(np.int64)
    row = np.broadcast_to(np.arange(height)[:, None], column.shape)
    front = np.zeros_like(disparity)
    np.maximum.at(front, (row[known], column[known]), disparity[known])
    visible = known & (disparity >= ndimage.maximum_filter(front, size=(1, 3))[row, column] - 1.5)
    inside = (partner >= MARGIN) & (partner < width - MARGIN)
    inside[:MARGIN] = inside[-MARGIN:] = inside[:, :MARGIN] = inside[:, -MARGIN:] = False
    contrast = np.hypot(*np.gradient(left))
    return visible & inside & (contrast > np.quantile(contrast, 0.75))


def _spaced(points: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return points of which no two are within ``SPACING`` pixels in row and column, earlier ones first."""
    taken = np.zeros(photographs()[0].shape, bool)
    found = []
    for row, column in points.tolist():
        if not taken[row, column]:
            found.append((row, column))
            taken[row - SPACING : row + SPACING + 1, column - SPACING : column + SPACING + 1] = True
    return np.array(found)


def _patches(image: Image, centres: Points, degrees: float = 0.0) -> Tensor:
    """Return patches [n, SIZE, SIZE] around real-valued centres, of a camera that is turned about each of them."""
    offsets = np.arange(SIZE) - (SIZE - 1) / 2
    down, right = np.meshgrid(offsets, offsets, indexing="ij")
    cosine, sine = np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))
    rows = centres[:, 0, None, None] + cosine * down - sine * right
    columns = centres[:, 1, None, None] + sine * down + cosine * right
    return torch.from_numpy(ndimage.map_coordinates(image, [rows, columns], order=1))
