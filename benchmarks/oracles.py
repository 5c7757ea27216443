"""Largest differences in float64 between lightly's and open_clip's loss modules and this library's: value and gradient.

pip install --no-deps --target peers lightly open_clip_torch
python benchmarks/oracles.py peers

Their packages import torchvision, which their losses do not need; the files of the losses are loaded alone. Folders may
be left out if both are installed. Every comparison sees random rows, two of them equal and two of them opposite.
"""

import importlib
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from suite.harness import command_line
from torch import Tensor

import contrastive_zoo as cz
from tools.peer_losses.packages import opened

PACKAGES = ("lightly", "open_clip")
SEEDS, ROWS, WIDTH = range(5), 9, 4
LIMIT = 1e-10


@dataclass(frozen=True)
class Oracle:
    """A peer's class, how our equivalent is written, and a function from the class to both losses of views, theirs first."""

    home: str
    name: str
    ours: str
    pair: Callable[[Any], tuple[Callable[..., Tensor], Callable[..., Tensor]]]
    views: int = 2

    def differences(self) -> tuple[float, float]:
        """Return the largest errors of value and gradient over all seeds, relative to the larger of 1 and the peer's."""
        theirs, ours = self.pair(getattr(importlib.import_module(self.home), self.name))
        worst = [0.0, 0.0]
        for seed in SEEDS:
            views = [rows(seed=10 * seed + view) for view in range(self.views)]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # DCLWLoss copies a tensor in a way that torch advises against
                values = [loss(*views) for loss in (ours, theirs)]
            slopes = [torch.stack(torch.autograd.grad(value, views)) for value in values]
            for index, (found, expected) in enumerate([values, slopes]):
                off = (found - expected).abs().max() / expected.abs().max().clamp(min=1)
                worst[index] = max(worst[index], off.item())
        return worst[0], worst[1]


def rows(seed: int) -> Tensor:
    z = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    z[1], z[3] = z[0], -z[2]
    return z.requires_grad_()


def unit(*views: Tensor) -> list[Tensor]:
    """Normalise, as open_clip's models do before the loss."""
    return [F.normalize(view, dim=1) for view in views]


def same(ours: Any, *numbers: float) -> tuple[str, Callable[[Any], Any]]:
    """Return how our loss is written, and the pair of it and a peer that takes unit rows, and these numbers, or views."""

    def pair(cls: Any) -> Any:
        return (lambda *views: cls()(*unit(*views), *numbers)) if numbers else cls(), ours

    return repr(ours), pair


def both_directions(cls: Any) -> Any:
    """Compare the sum of both views' predictions of the other one."""
    loss = cz.NegativeCosine()
    return (
        lambda a, b: cls()(a, b.detach()) + cls()(b, a.detach()),
        lambda a, b: loss(a, b) + loss(b, a),
    )


def frossl(cls: Any) -> Any:
    """Compare with the peer's loss of a list of views."""
    return lambda *views: cls()(list(views)), cz.FroSSL()


def swav(cls: Any) -> Any:
    """Apply the prototypes, which are a layer before the peer's loss."""
    prototypes = rows(seed=99).detach()
    crops, (c,) = cls(), unit(prototypes)

    def theirs(*views: Tensor) -> Tensor:
        scores = [z @ c.T for z in unit(*views)]
        return crops(scores[:2], scores[2:]).squeeze()

    loss = cz.SwAV(len(prototypes), WIDTH).double()
    loss.prototypes.data.copy_(prototypes)
    return theirs, loss


def dino(cls: Any) -> Any:
    """Compare after a step that changed the centre; the first two views have a student and a teacher output."""
    t = 2**-5  # theirs rounds it to 32 bits
    losses = cls(output_dim=WIDTH, teacher_temp=t).double(), cz.DINO(WIDTH, teacher_temperature=t).double()
    teacher = [rows(seed=98).detach(), rows(seed=97).detach()]

    return (
        lambda *views: losses[0](teacher, list(views)),
        lambda *views: losses[1](torch.stack(views, 1), torch.stack(teacher, 1)),
    )


def distilled(cls: Any) -> Any:
    """Return the sum of the two values that the peer returns."""
    teacher = [rows(seed=98).detach(), rows(seed=97).detach()]

    loss = cz.ClipDistillation(temperature=0.2, teacher_temperature=0.1)
    return (
        lambda *views: sum(cls()(*unit(*views), 5.0, *unit(*teacher), 10.0)),
        lambda *views: 2 * loss(*views, *teacher),
    )


def one_view(ours: Callable[..., Tensor], theirs: Callable[..., Tensor]) -> Any:
    return lambda *views: sum(theirs(x) for x in views), lambda *views: sum(ours(x) for x in views)


def tico(cls: Any) -> Any:
    """Compare the second step, whose covariance holds the first one's."""
    losses = cz.TiCo(WIDTH).double(), cls()
    for loss in losses:
        loss(rows(seed=98).detach(), rows(seed=97).detach())
    return lambda *views: losses[1](*views, update_covariance_matrix=False), losses[0].eval()


def in_64_bits(theirs: Any, ours: cz.SIGReg) -> None:
    """Give the peer's SIGReg the directions of ours, and the constants that it rounds to 32 bits."""
    drawn = torch.nn.functional.normalize(ours.directions().double(), dim=0)
    theirs._generate_unit_vectors = lambda *_: drawn
    t = torch.linspace(0, 3, 17, dtype=torch.float64)
    theirs.t, theirs.phi = t, (-t.square() / 2).exp()
    theirs.weights = theirs.phi * torch.tensor([1.0, *[2.0] * 15, 1.0], dtype=torch.float64) * (3 / 16)


def sigreg(cls: Any) -> Any:
    theirs, ours = cls(num_vectors=64), cz.SIGReg(WIDTH, num_slices=64).eval()
    in_64_bits(theirs, ours)
    return one_view(ours, theirs)


def lejepa(cls: Any) -> Any:
    """Compare with the same directions; the first two views are global."""
    theirs, ours = cls(lambda_param=0.3, sigreg_num_vectors=64), cz.LeJEPA(WIDTH, lambda_=0.3, num_slices=64).eval()
    in_64_bits(theirs.sigreg, ours)

    return lambda *views: theirs(global_proj=torch.stack(views[:2]), local_proj=torch.stack(views[2:])), ours


def mmcr(cls: Any) -> Any:
    """Normalise before the peer's loss, and leave out the smoothing of ours."""
    return lambda *views: cls(lmda=0.5)(*torch.stack(unit(*views), 1).chunk(2, 1)), cz.MMCR(lambda_=0.5, eps=1e-24)


ORACLES = [
    Oracle("lightly.loss.ntx_ent_loss", "NTXentLoss", *same(cz.NTXent(temperature=0.5))),
    Oracle("lightly.loss.dcl_loss", "DCLLoss", *same(cz.DCL(temperature=0.1))),
    Oracle("lightly.loss.dcl_loss", "DCLWLoss", *same(cz.DCLW(temperature=0.1))),
    Oracle("lightly.loss.barlow_twins_loss", "BarlowTwinsLoss", *same(cz.BarlowTwins(lambda_=5e-3))),
    Oracle("lightly.loss.vicreg_loss", "VICRegLoss", *same(cz.VICReg())),
    Oracle("lightly.loss.hypersphere_loss", "HypersphereLoss", *same(cz.AlignUniform(t=1.0))),
    Oracle("lightly.loss.negative_cosine_similarity", "NegativeCosineSimilarity", "NegativeCosine()", both_directions),
    Oracle("lightly.loss.tico_loss", "TiCoLoss", "TiCo(d)", tico),
    Oracle("lightly.loss.frossl_loss", "FroSSLLoss", "FroSSL()", frossl, views=3),
    Oracle("lightly.loss.lejepa_loss", "SIGReg", "SIGReg(d)", sigreg),
    Oracle("lightly.loss.lejepa_loss", "LeJEPALoss", "LeJEPA(d, lambda_=0.3)", lejepa, views=3),
    Oracle("lightly.loss.mmcr_loss", "MMCRLoss", "MMCR(lambda_=0.5, eps=1e-24)", mmcr, views=4),
    Oracle("lightly.loss.swav_loss", "SwaVLoss", "SwAV(k, d)(a, b, small)", swav, views=3),
    Oracle("lightly.loss.dino_loss", "DINOLoss", "DINO(d, teacher_temperature=2**-5)", dino, views=3),
    Oracle("open_clip.loss", "ClipLoss", *same(cz.Clip(temperature=0.2), 5.0)),
    Oracle("open_clip.loss", "SigLipLoss", *same(cz.SigLIP(temperature=0.2, logit_bias=-3.0), 5.0, -3.0)),
    Oracle("open_clip.loss", "DistillClipLoss", "2 * ClipDistillation(…)", distilled),
]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("folders", nargs="*", help="where lightly and open_clip lie unpacked")
    sys.path[:0] = parser.parse_args().folders
    there = {package for package in PACKAGES if opened(package)}
    table, wrong = Table("theirs", "ours", "value", "gradient", box=None), []
    for oracle in ORACLES:
        package = oracle.home.partition(".")[0]
        if package not in there:
            continue
        value, gradient = oracle.differences()
        table.add_row(f"{package} {oracle.name}", oracle.ours, f"{value:.1e}", f"{gradient:.1e}")
        if not max(value, gradient) <= LIMIT:
            wrong.append(oracle.name)
    Console(width=110).print(table)
    if missing := sorted(set(PACKAGES) - there):
        sys.exit(f"not found: {', '.join(missing)}. See --help.")
    if wrong:
        sys.exit(f"more than {LIMIT} apart: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
