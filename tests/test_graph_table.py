"""The table of docs/pages/accelerator.md: what torch.compile keeps in one graph, and why it breaks elsewhere."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_metric_learning import losses
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.loss_base.families import TwoViewLoss
from contrastive_zoo.loss_base.graph_operator import IN_ORDER
from contrastive_zoo.ranks import compat
from contrastive_zoo.ranks.world import World
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EVERY_CASE
from tests.zoo import Tempered

PAGE = Path(__file__).parents[1] / "docs" / "pages" / "accelerator.md"


class OfCompute(TwoViewLoss):
    """A user's loss with a formula of its own."""

    def compute(self, batch: Batch) -> Tensor:
        a, b = batch.rows.values()
        return batch.reduce((a - b).square().mean(1))


class OfForward(cz.NTXent):
    """A user's variant of a loss."""

    def forward(self, *views: Any, world: World | None = None) -> Tensor:
        return 2 * super().forward(*views, world=world)


def hooked() -> cz.NTXent:
    loss = cz.NTXent()
    loss.register_forward_hook(lambda module, rows, value: 2 * value)
    return loss


def wrapped(*make: Callable[[], Any], **options: Any) -> list[Callable[[], nn.Module]]:
    return [lambda x=x: cz.DistributedLoss(x(), **options) for x in make]


TABLE: dict[str, list[Callable[[], Any]]] = {
    "losses with views, two towers or labels": wrapped(cz.NTXent, cz.Clip, cz.SigLIP, cz.SupCon, cz.Triplet, cz.VICReg),
    "compositions: `WeightedSum`, `Matryoshka`": wrapped(
        lambda: cz.WeightedSum([cz.NTXent(), cz.Clip()]), lambda: cz.Matryoshka(cz.NTXent(), dims=(2, 4))
    ),
    "losses with a state: `DINO`, `TiCo`, `LeJEPA`, `DynamicSoftMargin`, `NNCLR`, `ReSSL`, `CrossBatchMemory`": wrapped(
        lambda: cz.DINO(4),
        lambda: cz.TiCo(4),
        lambda: cz.LeJEPA(4),
        lambda: cz.DynamicSoftMargin(8),
        lambda: cz.NNCLR(9, 4),
        lambda: cz.ReSSL(9, 4),
        lambda: cz.CrossBatchMemory(cz.InfoNCE(), 9, 4),
    ),
    "your own `RowLoss`, also with submodules": wrapped(Tempered),
    "a loss without `DistributedLoss`": [cz.NTXent, cz.Clip],
    "a loss that is called with `world=`": [lambda: partial(cz.NTXent(), world=World.of())],
    '`reduction="none"`': wrapped(
        lambda: cz.NTXent(reduction="none"), lambda: cz.WeightedSum([cz.Clip(reduction="none")])
    ),
    "third-party losses": wrapped(losses.TripletMarginLoss, lambda: torch.dist),
    "`prefer_native=True`": wrapped(losses.TripletMarginLoss, prefer_native=True),
    "a loss with a `compute` or `forward` of your own, or with hooks": wrapped(OfCompute, OfForward, hooked),
    "a state and float16": wrapped(lambda: cz.DINO(4)),
}
"""The first column, and what is tried."""

REASONS = {
    "a loss that is called with `world=`": "DistributedLoss",
    '`reduction="none"`': "one value per anchor",
    "third-party losses": "third-party loss",
    "`prefer_native=True`": "third-party loss",
    "a loss with a `compute` or `forward` of your own, or with hooks": "may return anything",
    "a state and float16": "float16 gradients",
}
"""What the compiler says where the graph breaks."""

SAYS_WHY = compat._TORCH >= (2, 7)
"""Whether the compiler's error holds the reason."""

LABELLED = ("Triplet", "SupCon", "TripletMarginLoss")


def stated() -> dict[str, list[str]]:
    """Return the other columns by the first."""
    lines = PAGE.read_text().split("| in one graph? |")[1].split("\n\n")[0].splitlines()[2:]
    cells = ([x.strip() for x in line.strip("|").split("|")] for line in lines)
    return {first: rest for first, *rest in cells}


def tried(make: Callable[[], Any], name: str) -> str | None:
    """Return why the compiler breaks the graph; None if there is one graph."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
        torch.manual_seed(int(torch.distributed.is_initialized() and torch.distributed.get_rank()))
        loss = make()
        kind = type(getattr(loss, "loss", loss)).__name__
        dtype = torch.float16 if "float16" in name else torch.float32
        rows = [torch.randn(5, 4, dtype=dtype, requires_grad=True) for _ in range(4 if kind == "NNCLR" else 2)]
        if kind in LABELLED:
            rows[1:] = [torch.arange(5) // 2]
        try:
            torch.compile(loss, fullgraph=True, backend="aot_eager")(*rows).backward()
        except torch._dynamo.exc.Unsupported as error:
            return str(error)
        finally:
            torch._dynamo.reset()
    return None


def all_tried(name: str) -> list[str | None]:
    """Where there is one graph a third of the losses are tried: test_graph_operator.py compiles every one."""
    return [tried(make, name) for make in TABLE[name][:: 1 if EVERY_CASE or name in REASONS else 3]]


def test_the_table_has_these_rows() -> None:
    assert list(stated()) == list(TABLE)


def break_of(name: str, column: str, several_ranks: bool) -> str | None:
    """Return what the compiler says; None if there is one graph."""
    if column == "no":
        return REASONS[name]
    return "from 2.10 on" if not IN_ORDER and (several_ranks or "a state" in name) else None


@pytest.mark.parametrize("name", TABLE)
def test_the_table_is_true(name: str, worlds: Worlds) -> None:
    found = all_tried(name), worlds.run(2, all_tried, name, timeout=60)[0]
    for several_ranks, (column, reasons) in enumerate(zip(stated()[name], found, strict=True)):
        expected = break_of(name, column, bool(several_ranks))
        for reason in reasons:
            assert (reason is None) == (expected is None), reason
            assert reason is None or not SAYS_WHY or expected in reason
