"""SogCLR and iSogCLR: a moving average for each sample of the data set takes the place of a large batch."""

import math
from collections.abc import Sequence
from typing import Annotated

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.cost import Entry, Gathered, Local, Pairs, Shared
from contrastive_zoo.engine.pairs import sums_over_other_samples
from contrastive_zoo.engine.plan import Needs
from contrastive_zoo.loss_base.loss import CallInputs, Inputs, Loss
from contrastive_zoo.loss_base.settings import Bounds, Momentum, Reduction, Size, Temperature, field, is_number
from contrastive_zoo.loss_base.state import Stateful
from contrastive_zoo.loss_base.temperature import bounded
from contrastive_zoo.ranks.devices import state_problem
from contrastive_zoo.ranks.row_checks import described, range_rule, safe_index


class SogCLR(Loss, Stateful, engine="softmax"):
    r"""Compute the global contrastive loss: each sample's mean over negatives is a moving average over its calls.

    Called as ``loss(view1, view2, ids)``, [n, d] twice and [n] integers, places in the data set of all ranks.
    With z the unit embeddings of all ranks, s_ik = z_i·z_k, N(i) the embeddings of other samples, p the other view of
    embedding i, and v_i and u_i its sample's average before and after the call,

        g_i = mean_{k∈N(i)} exp(s_ik / t),       u_i = (1 − γ) v_i + γ g_i
        loss = mean_i [ t (log u_i + ρ)  −  s_ip ]

    In a sample's first call u_i = g_i. The gradient is the authors' estimate: g_i / u_i for log u_i, with a constant u_i.
    ``bimodal``, as FastCLIP: N(i) is of the other tower, each has averages, s_ip is subtracted from s_ik.
    ``temperature_range``, as iSogCLR: t is the sample's in ``temperatures``, a parameter, view 1 first.

    Every rank has the averages of one process: the buffer ``log_u``, [1 or 2, num_samples], 4 bytes each. In training mode a
    call moves them. If a step has several calls, use :func:`contrastive_zoo.one_step`.

    Args:
        num_samples: the data set's.
        temperature: t > 0; a tensor or module is learnable, with ρ > 0.
        temperature_range: bounds of each sample's t, which starts at ``temperature``.
        gamma: γ, 0 … 1.
        gamma_decay_epochs: epochs in which γ falls from 1 along a cosine.
        steps_per_epoch: γ is constant within.
        rho: ρ ≥ 0.
        bimodal: views are images and texts.
        normalize: normalise embeddings first.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``, over samples.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> eye, ids = torch.eye(2), torch.arange(2)
        >>> SogCLR(2, temperature=1.0)(eye, eye, ids)   # log 1 − 1
        tensor(-1.)

    Source: Yuan et al. 2022, https://arxiv.org/abs/2202.12387; iSogCLR: Qiu et al. 2023,
    https://arxiv.org/abs/2305.11965; FastCLIP: Wei et al. 2024, https://arxiv.org/abs/2407.01445
    """

    num_samples: Size = field(kw_only=False)
    temperature: Temperature = 0.1
    temperature_range: Sequence[float] | None = None
    gamma: Momentum = 0.9
    gamma_decay_epochs: Annotated[int, Bounds(low=0, whole=True)] = 0
    steps_per_epoch: Size = 1
    rho: Annotated[float, Bounds(low=0, constant=True)] = 0.0
    bimodal: bool = False
    normalize: bool = True
    reduction: Reduction = "mean"

    log_u: Tensor = field(init=False)
    steps: Tensor = field(init=False)
    temperatures: nn.Parameter = field(init=False)

    def settings_problem(self) -> str | None:
        t, bounds, problem = self.temperature, self.temperature_range, super().settings_problem()
        is_range = isinstance(bounds, Sequence) and len(bounds) == 2 and all(is_number(x, above=0) for x in bounds)
        if problem or bounds is None or (is_range and isinstance(t, (int, float)) and bounds[0] <= t <= bounds[1]):
            return problem
        rule = "temperature_range is a tuple of two numbers, with a constant temperature between them"
        return f"{rule}, got {described(bounds)} with temperature={described(t)}."

    def __post_init__(self) -> None:
        self.log_u = nn.Buffer(torch.zeros(1 + self.bimodal, self.num_samples))  # 0 for a sample without a call
        self.steps = nn.Buffer(torch.zeros((), dtype=torch.int64))
        if self.temperature_range is not None and isinstance(self.temperature, (int, float)):
            self.temperatures = nn.Parameter(torch.full([self.log_u.numel()], float(self.temperature)))

    def inputs(self, view1: Float[Tensor, "n d"], view2: Float[Tensor, "n d"], ids: Int[Tensor, " n"]) -> Inputs:
        problem, samples = state_problem("averages", self.log_u, view1), self.num_samples
        if self.log_u.shape != (1 + self.bimodal, samples):
            problem = f"log_u is {[1 + self.bimodal, samples]}, got {described(self.log_u)}. Construct another loss."
        if self.temperature_range is not None and not hasattr(self, "temperatures"):
            problem = "a loss that was made without temperature_range has no temperatures. Construct another loss."
        rule = f"ids are the samples' places in the data set, 0 … {samples - 1}"
        values = range_rule(ids, 0, samples - 1, lambda *ends: f"{rule}, got {ends[0]} … {ends[1]}. Check num_samples.")
        return Inputs({"view 0": view1, "view 1": view2, "ids": ids}, problem, values=[values])

    def needs(self, inputs: Inputs) -> Needs:
        needs = super().needs(inputs)
        return needs._replace(anchors=("view 0",), candidates=("view 1",)) if self.bimodal else needs

    def entries(self, stated: CallInputs) -> list[Entry]:
        views, compared = [["view 0"], ["view 1"]], super().entries(stated)
        if self.temperature_range is not None:
            others = views[::-1] if self.bimodal else [["view 0", "view 1"]] * 2
            pairs = [Pairs(x, y, 1.0, False, False, False) for x, y in zip(views, others, strict=True)]
            compared = [Shared(len(self.log_u) * self.temperatures.itemsize, views[0]), *pairs, *self.reduced()]
            compared.append(stated.held(5))  # of each direction, scaled by temperatures
        stored = [Gathered(views[0], len(self.log_u) * stated.wide)] if self.training else []
        return [Gathered(["ids"], 8), Local(bytes=self.log_u.nbytes), *compared, *stored]

    def compute(self, batch: Batch) -> Tensor:
        ids = batch.gather_detached(safe_index(batch.rows["ids"].long(), self.num_samples))
        batch.note_ids(ids, _REPEATED_IDS)
        t = batch.settings.temperature
        if self.temperature_range is not None:
            low, high = self.temperature_range
            of_samples = bounded(self.temperatures.view(len(self.log_u), -1)[:, ids], low=low, high=high)
            t = batch.shared(of_samples)[:, batch.samples.local]
        t, sums, positive = sums_over_other_samples(batch, t, self.normalize, two_towers=self.bimodal)
        log_g = sums - math.log(max(1, batch.total - 1)) - (positive if self.bimodal else math.log(2))
        log_g = log_g.masked_fill(log_g == -torch.inf, 0)
        with torch.no_grad():
            gamma = self._gamma(batch.settings.gamma, log_g.dtype)
            log_u = _moved(self.log_u[:, ids[batch.samples.local]].to(log_g), log_g, gamma)
            of_samples = log_g if self.bimodal else log_g.logsumexp(0, keepdim=True) - math.log(2)
        ratio = (log_g - log_u).exp()  # g / u, whose derivative takes the place of that of log u
        losses = t * (log_u + ratio - ratio.detach() + batch.settings.rho - (0 if self.bimodal else positive))
        has_negatives = torch.full_like(losses[0], batch.total > 1)
        loss = batch.reduce(losses.mean(0), has_negatives, reduction=self.reduction)
        if self.moves and batch.total > 1:
            self.record((ids, batch.gather_detached(of_samples.T), gamma))
        return loss

    def move(self, calls: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        ids, log_g = (torch.cat(x) for x in list(zip(*calls, strict=True))[:2])
        moved = _moved(self.log_u[:, ids].to(log_g), log_g.T, calls[-1][2]).to(self.log_u)
        moved = moved.where(moved.isfinite(), self.log_u[:, ids])
        # of a sample that occurs several times, as samplers fill the last batch, the largest: no order changes its bits
        self.log_u.scatter_reduce_(1, ids.expand_as(moved), moved, "amax", include_self=False)
        self.steps += 1

    def _gamma(self, least: float | Tensor, dtype: torch.dtype) -> Tensor:
        """Return γ of this step."""
        least, epochs = least * torch.ones_like(self.steps, dtype=dtype), self.gamma_decay_epochs
        progress = (self.steps // self.steps_per_epoch).clamp(max=epochs).to(dtype) / max(1, epochs)
        return least + (1 - least) * (1 + (math.pi * progress).cos()) / 2 if epochs else least


_REPEATED_IDS = (
    "each id of this rank's first batch was also another rank's, and samples with equal ids share an average. If each rank "
    "numbers its own samples, number those of all ranks: ids + rank * samples_per_rank."
)


def _moved(log_u: Tensor, log_g: Tensor, gamma: Tensor) -> Tensor:
    """Return the logarithm of (1 − γ) u + γ g, or of g at a sample's first call; it is never 0."""
    moved = log_g.where(log_u == 0, torch.logaddexp((1 - gamma).log() + log_u, gamma.log() + log_g))
    return moved.masked_fill(moved == 0, torch.finfo(torch.float32).tiny)
