"""Memory and time of a rank with and without a ring, beside open_clip's SigLIP (Linux, gloo ranks of one thread).

python benchmarks/ring.py [--docs] [--ranks 4] [--rows 8192] [--width 512] [name …]

Stores what it measures in benchmarks/results/ring.json, from which --docs writes the tables of the page.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from suite.cases import peer
from suite.harness import Absent, command_line, memory_and_time
from suite.report import number
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.testing.catalogue import CATALOGUE
from contrastive_zoo.testing.worlds import Worlds
from tools.pages import PAGES, fill, table

RESULTS = Path(__file__).parent / "results" / "ring.json"
CLASSES = 512
STEPS = 3

VIEWS = ("SigLIP", "Clip", "InfoNCE", "NTXent", "MNRL", "DCL", "DCLW", "HCL", "Debiased", "AlignUniform")
LABELLED = (
    "SupSigmoid", "SupCon", "SINCERE", "NCA", "TupletMargin", "NPairs", "Contrastive", "SignalToNoise", "MultiSimilarity",
    "Circle", "LiftedStructure", "GeneralizedLiftedStructure", "Margin", "RankedList", "FastAP",
)  # fmt: skip
LOSSES: dict[str, tuple[Callable[[], Any], str]] = {
    **{name: (getattr(cz, name), "views") for name in VIEWS},
    **{name: (getattr(cz, name), "labels") for name in LABELLED},
    "MILNCE": (partial(cz.MILNCE, normalize=True, temperature=0.1), "texts"),
    "MultiPositive": (cz.MultiPositive, "ids"),
    "ClipDistillation": (cz.ClipDistillation, "teachers"),
    "SupCon, in": (partial(cz.SupCon, variant="in"), "labels"),
    "MultiSimilarity, mined": (partial(cz.MultiSimilarity, epsilon=0.1), "labels"),
    "Triplet, hard": (partial(cz.Triplet, mining="hard"), "labels"),
}
"""By name: the loss, and what it is called with."""
SIGLIP = ("gathered", "ring", "open_clip")


def open_clip_loss(folders: Sequence[str]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return open_clip's SigLIP with its bidirectional exchange, on unit embeddings."""
    sys.path += [x for x in folders if x not in sys.path]
    loss = peer("open_clip.loss").SigLipLoss(rank=dist.get_rank(), world_size=dist.get_world_size())
    scale, bias = torch.tensor(10.0, requires_grad=True), torch.tensor(-10.0, requires_grad=True)

    def call(x: Tensor, y: Tensor) -> Tensor:
        x, y = (torch.nn.functional.normalize(z, dim=1) for z in (x, y))
        value: Tensor = loss(x, y, scale, bias)
        return value

    return call


def arguments(compares: str, count: int, width: int) -> list[Tensor]:
    towers = {"labels": 1, "teachers": 4}.get(compares, 2)
    rows = [torch.randn(count, width, requires_grad=True) for _ in range(towers)]
    if compares == "texts":
        return [rows[0], torch.randn(count, 2, width, requires_grad=True)]
    return [*rows, *([torch.arange(count) % CLASSES] if compares in ("labels", "ids") else [])]


def refusals() -> list[list[str]]:
    """Return the losses of the catalogue that refuse a ring, by their reason."""
    found: dict[str, list[str]] = {}
    for entry in CATALOGUE.values():
        loss = entry.make()
        reason = loss.ring_problem() if isinstance(loss, Loss) else None
        if reason:
            settings = ", ".join(
                f"{name}={value!r}" for name, value in entry.settings.items() if isinstance(value, str)
            )
            found.setdefault(reason, []).append(f"{entry.cls}({settings})" if settings else entry.cls)
    return [[", ".join(dict.fromkeys(names)), reason] for reason, names in found.items()]


def measured(name: str, option: Any, steps: int, rows: int, width: int, folders: Sequence[str]) -> tuple[float, float]:
    """Return the extra MB of the largest step and the median seconds of so many steps, on a rank."""
    make, compares = LOSSES[name]
    loss = open_clip_loss(folders) if option == "open_clip" else cz.DistributedLoss(make(), ring=option == "ring")

    def draw(count: int) -> list[Tensor]:
        torch.manual_seed(dist.get_rank())
        return arguments(compares, count, width)

    sizes = 64, rows // dist.get_world_size()
    megabytes, seconds, _ = memory_and_time(draw, lambda *inputs: loss(*inputs).backward(), sizes, steps)
    return megabytes, seconds


def on_ranks(ranks: int, name: str, option: str, steps: int, given: argparse.Namespace) -> list[float]:
    """Return MB and seconds of the worst rank, in new processes."""
    with Worlds(threads=1, timeout=600) as worlds:
        found = worlds.run(ranks, measured, name, option, steps, given.rows, given.width, given.peers)
    worst = [max(column) for column in zip(*found, strict=True)]
    print(f"{name:28s} W={ranks} {option:10s} {worst[0]:8.0f} MB {worst[1]:8.2f} s", file=sys.stderr, flush=True)
    return worst


def measure_all(names: Sequence[str], given: argparse.Namespace) -> dict[str, Any]:
    """Measure losses with and without the ring, and SigLIP beside open_clip's; return all figures that are stored.

    Each loss is stored as soon as it is measured, beside those of earlier runs of the same size.
    """
    size = {"rows": given.rows, "width": given.width, "ranks": given.ranks}
    stored = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    if {name: stored.get(name) for name in size} != size:
        stored = {**size, "losses": {}, "siglip": {}}
    for name in names:
        stored["losses"][name] = {x: on_ranks(given.ranks, name, x, 1, given) for x in SIGLIP[:2]}
        RESULTS.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    for ranks in (1, 2, 4) if "SigLIP" in names else ():
        found = stored["siglip"].setdefault(str(ranks), {})
        for option in SIGLIP:
            try:
                found[option] = on_ranks(ranks, "SigLIP", option, STEPS, given)
            except (Absent, RuntimeError) as error:  # on a rank a RuntimeError
                print(str(error).splitlines()[-1], file=sys.stderr)
        RESULTS.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    return stored


def columns(found: dict[str, list[float]], options: Sequence[str]) -> list[str]:
    """Return MB of each option, then seconds."""
    return [number(found[x][index]) if x in found else "" for index in (0, 1) for x in options]


def tables(results: dict[str, Any]) -> dict[str, str]:
    measured = results["losses"]
    lines = [[name, *columns(measured[name], SIGLIP[:2])] for name in LOSSES if name in measured]
    siglip = [[ranks, *columns(x, SIGLIP)] for ranks, x in results["siglip"].items()]
    size = f"{results['rows']:,} samples of width {results['width']} in total, {results['ranks']} ranks:"
    head = [f"{unit} {x}" for unit in ("MB,", "s,") for x in SIGLIP]
    return {
        "refusals": table(["loss", "reason"], refusals()),
        "times": f"{size}\n\n{table(['loss', *(x for x in head if 'open_clip' not in x)], lines)}",
        "siglip": table(["ranks W", *head], siglip),
    }


def main() -> None:
    parser = command_line(__doc__, ranks=4, rows=8192, width=512, docs=False)
    parser.add_argument("names", nargs="*", choices=[[], *LOSSES], default=[], help="losses; all by default")
    parser.add_argument("--peers", action="append", default=[], metavar="FOLDER", help="folder with packages of peers")
    given = parser.parse_args()
    assert math.gcd(given.rows, 4) == 4, "rows are a multiple of 4"
    results = measure_all(given.names or list(LOSSES), given)
    if given.docs:
        fill(PAGES / "ring.md", tables(results))


if __name__ == "__main__":
    main()
