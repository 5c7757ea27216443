"""Memory and time of a rank with and without a ring, beside open_clip's SigLIP (Linux, gloo ranks of one thread).

python benchmarks/ring.py [--docs] [--ranks 4] [--rows 8192] [--width 512] [--peers FOLDER] [name …]

Stores what it measures in benchmarks/results/ring.json, from which --docs writes the page.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from suite.cases import peer
from suite.harness import Absent
from suite.processes import resident
from suite.report import number, table
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.testing.catalogue import CATALOGUE
from contrastive_zoo.testing.worlds import Worlds

PAGE = Path(__file__).parent.parent / "docs" / "pages" / "ring.md"
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
    """Return open_clip's SigLIP with its bidirectional exchange, on unit rows."""
    sys.path += [x for x in folders if x not in sys.path]
    loss = peer("open_clip", "open_clip.loss").SigLipLoss(rank=dist.get_rank(), world_size=dist.get_world_size())
    scale, bias = torch.tensor(10.0, requires_grad=True), torch.tensor(-10.0, requires_grad=True)

    def call(x: Tensor, y: Tensor) -> Tensor:
        x, y = (torch.nn.functional.normalize(z, dim=1) for z in (x, y))
        value: Tensor = loss(x, y, scale, bias)
        return value

    return call


def arguments(compares: str, count: int, width: int) -> list[Tensor]:
    """Return what a loss is called with, on a rank."""
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
            settings = ", ".join(f"{name}={value!r}" for name, value in entry.settings if isinstance(value, str))
            found.setdefault(reason, []).append(f"{entry.cls}({settings})" if settings else entry.cls)
    return [[", ".join(dict.fromkeys(names)), reason] for reason, names in found.items()]


def measured(name: str, option: Any, steps: int, rows: int, width: int, folders: Sequence[str]) -> tuple[float, float]:
    """Return the extra MB of the largest step and the median seconds of so many steps, on a rank."""
    make, compares = LOSSES[name]
    loss = open_clip_loss(folders) if option == "open_clip" else cz.DistributedLoss(make(), ring=option == "ring")

    def step(count: int) -> float:
        torch.manual_seed(dist.get_rank())
        rows = arguments(compares, count, width)
        dist.barrier()
        start = time.perf_counter()
        loss(*rows).backward()
        dist.barrier()
        return time.perf_counter() - start

    step(64)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = resident("VmRSS")
    seconds = [step(rows // dist.get_world_size()) for _ in range(steps)]
    return resident("VmHWM") - before, statistics.median(seconds)


def on_ranks(
    ranks: int, name: str, option: str, steps: int, *, rows: int, width: int, folders: Sequence[str]
) -> list[float]:
    """Return MB and seconds of the worst rank, in new processes."""
    with Worlds(threads=1, timeout=600) as worlds:
        found = worlds.run(ranks, measured, name, option, steps, rows, width, folders)
    worst = [max(column) for column in zip(*found, strict=True)]
    print(f"{name:28s} W={ranks} {option:10s} {worst[0]:8.0f} MB {worst[1]:8.2f} s", file=sys.stderr, flush=True)
    return worst


def measure_all(names: Sequence[str], given: argparse.Namespace) -> dict[str, Any]:
    """Measure losses with and without the ring, and SigLIP beside open_clip's; return all figures that are stored.

    Each loss is stored as soon as it is measured, beside those of earlier runs of the same size.
    """
    run = partial(on_ranks, rows=given.rows, width=given.width, folders=given.peers)
    size = {"rows": given.rows, "width": given.width, "ranks": given.ranks}
    stored = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    if {name: stored.get(name) for name in size} != size:
        stored = {**size, "losses": {}, "siglip": {}}
    for name in names:
        stored["losses"][name] = {x: run(given.ranks, name, x, 1) for x in SIGLIP[:2]}
        RESULTS.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    for ranks in (1, 2, 4) if "SigLIP" in names else ():
        found = stored["siglip"].setdefault(str(ranks), {})
        for option in SIGLIP:
            try:
                found[option] = run(ranks, "SigLIP", option, STEPS)
            except (Absent, RuntimeError) as error:  # on a rank a RuntimeError
                print(str(error).splitlines()[-1], file=sys.stderr)
        RESULTS.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    return stored


TEXT = """# The ring

Which losses can be computed without all candidates on every rank, and what does it cost? For people whose gathered
embeddings do not fit into memory, or whose ranks stand in several machines.

**Short answer.** `DistributedLoss(loss, ring=True)` passes candidates from rank to rank. The memory of a rank then depends
on its own rows, not on the number of ranks. Value and gradients are those without the ring.

```python
# world: 4
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import contrastive_zoo as cz

z = torch.eye(4)[[dist.get_rank()]]
loss = cz.SigLIP(temperature=1.0, logit_bias=0.0)
plain = cz.DistributedLoss(loss, ring=True)(z, z)
mesh = init_device_mesh("cpu", (2, 2))                    # machines × ranks of a machine
between_machines = cz.DistributedLoss(loss, ring=mesh)(z, z)
if dist.get_rank() == 0:
    print(plain.detach(), between_machines.detach())      # log(1 + e⁻¹) + 3 log 2
```
```text
tensor(2.3927) tensor(2.3927)
```

```bash
python benchmarks/ring.py --docs --peers peers     # this page
```

## Which losses

How often are candidates sent?

- **Once**: SigLIP and SupSigmoid. The gradient of a pair depends on no other pair, so one sweep computes the loss and all
  gradients.
- **Forward and backward**: InfoNCE, Clip, NTXent, SupCon, MNRL, MILNCE and AlignUniform, whose backward pass needs complete
  log-sum-exps; Contrastive and SignalToNoise, whose two means are known after the forward pass.
- **Twice in the forward pass**: MultiSimilarity, Circle, Triplet with `mining="hard"`, GeneralizedLiftedStructure, Margin,
  NCA, FastAP, DCL, HCL, Debiased, NPairs, MultiPositive, SupCon with `variant="in"`, a mask, or `contrast_mode="one"`. Their
  statistics of a row merge: sums, counts, extremes, log-sum-exps. The second time is for the gradient.
- **Three times**: RankedList and MultiSimilarity with `epsilon`, whose thresholds come first.
- **Four times**: SINCERE, TupletMargin and ClipDistillation, where a second statistic depends on the first one;
  LiftedStructure, which is two sums over anchors.

The constructor refuses the other losses, and says why:

{refusals}
Your own `RowLoss` can use the ring if its `rows` yields statistics that merge:

```python
import contrastive_zoo as cz
from contrastive_zoo.engine.row_statistics import Maximum, Minimum

class BatchHard(cz.RowLoss):
    def rows(self, similarity, positive, negative):
        farthest, nearest = yield Minimum(similarity, positive), Maximum(similarity, negative)
        return (nearest - farthest + 0.5).relu(), farthest.isfinite() & nearest.isfinite()
```

`yield` receives the values over all candidates. Without a ring, the same code sees one block of all candidates. The number
of yields must not depend on data. Equal extremes share the gradient; similarities that are equal up to rounding may be equal
in one of the two ways only.

## Memory and time

{rows:,} samples of width {width} in total, float32, {ranks} gloo ranks of one thread on two cores: extra MB at the peak of a
step, and seconds of it, of the slowest rank, after a small step. Losses with labels have {classes} classes. On these
machines the ranks share cores and memory, so transfers do not overlap with compute.
A ring saves what grows with N: the rows of other ranks and their gradients, 2 N d elements, 32 MB here. The rest is
constant: the blocks of similarities. A loss that mines few pairs, such as the hard triplet, pays for its second pass.

{losses}
## SigLIP beside open_clip

open_clip's `SigLipLoss` exchanges texts with both neighbours at once (`bidir`), and holds one block of logits, with its
graph, for each rank. {steps} steps; the median.

{siglip}
## Between machines

A plain ring takes no notice of machines: most of a shard's W − 1 transfers cross the slow link. With a mesh of M machines of
L ranks, a shard crosses it M − 1 times, once for each other machine, and gradients come back likewise. That divides the
traffic between machines by L. A rank holds four shards in place of two. The rows of the mesh are the machines; it holds all
ranks of the process group. [Scaling](scaling.md) has the predicted times.

Losses that compare one set with itself by softmax (NTXent, SupCon, AlignUniform) compute each pair of ranks once, on one of
the two. So a shard visits half of the other ranks, inside its machine and between machines: of two machines, one sends its
shards to the other, which returns gradients. With an even number of machines, opposite ones also send half of theirs back.

Embeddings of 16 bits are sent in 16 bits, which is half of the traffic. Statistics and gradients are summed and sent in
float32. The gradients are nearer to float64 than those of the plain formula in 16 bits, in 17 losses of all engines.

- **Row losses** (all that are computed from similarities of an anchor: triplet, Circle, NCA, …) send the embeddings as they
  are, and normalise them where they arrive. This rounds nothing; only NPairs and the teachers of ClipDistillation are sent
  in float32.
- **Softmax losses and SigLIP** round unit rows to 16 bits, with and without a ring, because their matmuls take 16 bits. A
  row of bfloat16 has a relative error of up to 2⁻⁹ = 0.002, a logit at temperature t an absolute error of up to 0.004 / t.

Labels and ids are integers: SupSigmoid, NPairs and SupCon gather those, 8 bytes a sample.
"""


def cells(found: dict[str, list[float]], options: Sequence[str], index: int) -> list[str]:
    """Return one column of figures for each option."""
    return [number(found[x][index]) if x in found else "" for x in options]


def write_page(results: dict[str, Any]) -> None:
    """Write the page."""
    head = [f"{what} {x}" for what in ("MB,", "s,") for x in SIGLIP[:2]]
    measured_losses = {name: results["losses"][name] for name in LOSSES if name in results["losses"]}
    lines = [[name, *cells(x, SIGLIP[:2], 0), *cells(x, SIGLIP[:2], 1)] for name, x in measured_losses.items()]
    siglip_head = [f"{what} {x}" for what in ("MB,", "s,") for x in SIGLIP]
    siglip = [[ranks, *cells(x, SIGLIP, 0), *cells(x, SIGLIP, 1)] for ranks, x in results["siglip"].items()]
    tables = {
        "{losses}": table(["loss", *head], lines),
        "{siglip}": table(["ranks W", *siglip_head], siglip),
        "{refusals}": table(["loss", "reason"], refusals()),
    }
    page = TEXT
    for name, text in tables.items():
        page = page.replace(name, text)
    for name, value in {"rows": f"{results['rows']:,}", "width": results["width"], "ranks": results["ranks"]}.items():
        page = page.replace(f"{{{name}}}", str(value)).replace(f"{{{name}:,}}", str(value))
    PAGE.write_text(page.replace("{classes}", str(CLASSES)).replace("{steps}", str(STEPS)), encoding="utf-8")


def main() -> None:
    """Measure, print the figures, and write the page if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *LOSSES], default=[], help="losses; all by default")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8192, help="of all ranks together")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--peers", action="append", default=[], metavar="FOLDER", help="folder with packages of peers")
    parser.add_argument("--docs", action="store_true", help="write the page")
    given = parser.parse_args()
    assert math.gcd(given.rows, 4) == 4, "rows are a multiple of 4"
    results = measure_all(given.names or list(LOSSES), given)
    if given.docs:
        write_page(results)


if __name__ == "__main__":
    main()
