"""Pictures of a trained descriptor of patches, each one call of ``contrastive_zoo.metrics.plots``."""

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn

import contrastive_zoo as cz
from contrastive_zoo.metrics import plots
from examples.stereo import TEST_DISTURBANCE, Stereo, disturbed, pairs_at, photographs, random_disturbances

DRAWN, SHOWN, NEIGHBOURS = 60, 4, 6
"""Matches on the photographs; strips with a right first neighbour, and as many with a wrong one; neighbours in a strip."""

MAP_POINTS, MAP_PATCHES = 10, 40


@torch.no_grad()
def pictures(encoder: nn.Module, stereo: Stereo) -> dict[str, Figure]:
    pairs = stereo.disturbed
    queries, gallery = encoder(pairs.left), encoder(pairs.right)
    scores, found = cz.metrics.top_k(queries, gallery, k=NEIGHBOURS, process_group=cz.World())
    numbers = torch.arange(len(queries))
    correct = found[:, 0] == numbers
    shown = torch.cat([numbers[correct][:SHOWN], numbers[~correct][:SHOWN]])
    left, right, _ = photographs()
    return {
        "retrieval_histogram": plots.similarity_histogram(
            queries, gallery, labels=numbers, gallery_labels=numbers, process_group=cz.World()
        ),
        "retrieval_strips": plots.retrieval_strips(
            list(pairs.left[shown]), list(pairs.right[found[shown]]),
            relevant=found[shown] == shown[:, None], scores=scores[shown],
        ),
        "retrieval_matches": plots.matches(
            left, disturbed(right, TEST_DISTURBANCE), torch.from_numpy(pairs.points[:DRAWN]),
            torch.from_numpy(pairs.partners[found[:DRAWN, 0]]), correct=correct[:DRAWN],
        ),
        "retrieval_map": embedding_map(encoder, stereo),
    }  # fmt: skip


def embedding_map(encoder: nn.Module, stereo: Stereo) -> Figure:
    """Draw patches of some points of the test under random disturbances, one colour per point."""
    points = stereo.test.points[:MAP_POINTS].astype(np.int64)
    rows = torch.cat([encoder(pairs_at(points, how).right) for how in random_disturbances(MAP_PATCHES, seed=1)])
    title = f"{MAP_POINTS} points, {MAP_PATCHES} disturbed patches each"
    return plots.embedding_map(rows, torch.arange(MAP_POINTS).repeat(MAP_PATCHES), title=title)
