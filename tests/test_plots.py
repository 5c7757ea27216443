"""Pictures are figures of what was passed; the histogram counts the pairs of all ranks."""

import pytest
import torch
from matplotlib.figure import Figure

from contrastive_zoo.metrics import plots
from contrastive_zoo.ranks.world import World
from tests.helpers import common_error

ROWS = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(30) % 3


def counts(rows, labels):
    return [x.tolist() for x in plots._pair_counts(rows, None, labels, None, 20, World.of())]


def test_the_histogram_counts_every_pair_once(worlds):
    positive, negative = counts(ROWS, LABELS)
    assert (sum(positive), sum(negative)) == (30 * 9, 30 * 20)
    cosines = torch.nn.functional.cosine_similarity(ROWS[:, None].double(), ROWS[None].double(), dim=2)
    same = (LABELS[:, None] == LABELS) & ~torch.eye(30, dtype=torch.bool)
    assert torch.histc(cosines[same].float(), 20, -1, 1).tolist() == positive
    for split in ((10, 20), (0, 29, 1)):
        each = list(zip(ROWS.split(split), LABELS.split(split), strict=True))
        assert worlds.run(len(split), counts, each=each) == [[positive, negative]] * len(split)


def test_every_picture_is_a_figure(tmp_path):
    pictures = {
        "histogram": plots.similarity_histogram(ROWS, ROWS[:5], labels=LABELS, gallery_labels=LABELS[:5]),
        "map": plots.embedding_map(ROWS, LABELS),
        "map without labels": plots.embedding_map(ROWS),
    }
    for name, figure in pictures.items():
        assert isinstance(figure, Figure)
        figure.savefig(tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 2000


def test_mistakes_are_named(worlds):
    with pytest.raises(ValueError, match="3 for 30 rows"):
        plots.embedding_map(ROWS, LABELS[:3])

    def bad():
        rank = torch.distributed.get_rank()
        return plots.similarity_histogram(ROWS, labels=LABELS[: 30 - rank])

    text, _ = common_error(worlds, 2, bad, lambda: None)
    assert "rank 1: labels are one per row, got 29" in text
