"""The base of losses with a moving average for each sample of the data set."""

import math
from collections.abc import Sequence
from typing import Annotated

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.cost import Entry, Gathered, Local
from contrastive_zoo.engine.plan import Needs
from contrastive_zoo.loss_base.loss import CallInputs, Inputs, Loss
from contrastive_zoo.loss_base.settings import Bounds, Momentum, Reduction, Size, field
from contrastive_zoo.loss_base.state import Stateful
from contrastive_zoo.ranks.devices import state_problem
from contrastive_zoo.ranks.row_checks import described, range_rule, safe_index


class SampleAverages(Loss, Stateful):
    """A loss of two views of samples, whose averages over calls are the buffer ``log_u``, [1 or 2, num_samples].

    Both views share an average, or each has its own and is compared with the other view only if it is ``bimodal``.
    """

    num_samples: Size = field(kw_only=False)
    gamma: Momentum = 0.9
    gamma_decay_epochs: Annotated[int, Bounds(low=0, whole=True)] = 0
    steps_per_epoch: Size = 1
    bimodal: bool = False
    reduction: Reduction = "mean"

    log_u: Tensor = field(init=False)
    steps: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.log_u = nn.Buffer(torch.zeros(1 + self.bimodal, self.num_samples))  # 0 for a sample without a call
        self.steps = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def inputs(self, view1: Float[Tensor, "n d"], view2: Float[Tensor, "n d"], ids: Int[Tensor, " n"]) -> Inputs:
        problem, samples = state_problem("averages", self.log_u, view1), self.num_samples
        if self.log_u.shape != (1 + self.bimodal, samples):
            problem = f"log_u is {[1 + self.bimodal, samples]}, got {described(self.log_u)}. Construct another loss."
        rule = f"ids are the samples' places in the data set, 0 … {samples - 1}"
        values = [range_rule(ids, 0, samples - 1, rule, "Check num_samples.")]
        return Inputs({"view 0": view1, "view 1": view2, "ids": ids}, problem, values=values)

    def needs(self, inputs: Inputs) -> Needs:
        needs = super().needs(inputs)
        return needs._replace(anchors=("view 0",), candidates=("view 1",)) if self.bimodal else needs

    def entries(self, stated: CallInputs) -> list[Entry]:
        stored = [Gathered(["view 0"], len(self.log_u) * stated.wide)] if self.training else []
        return [Gathered(["ids"], 8), Local(bytes=self.log_u.nbytes), *super().entries(stated), *stored]

    def places(self, batch: Batch) -> Int[Tensor, " N"]:
        """Return the ids of the samples of all ranks."""
        ids = batch.gather_detached(safe_index(batch.rows["ids"].long(), self.num_samples))
        batch.note_ids(ids, _REPEATED_IDS)
        return ids

    def averaged(self, batch: Batch, ids: Int[Tensor, " N"], log_g: Float[Tensor, "2 n"]) -> tuple[Tensor, Tensor]:
        """Return log u after the call's g of both views, with the gradient of g / u for a constant u, and γ of this step."""
        with torch.no_grad():
            gamma = self._gamma(batch.settings.gamma, log_g.dtype)
            log_u = _moved(self.log_u[:, ids[batch.samples.local]].to(log_g), log_g, gamma)
        ratio = (log_g - log_u).exp()
        return log_u + ratio - ratio.detach(), gamma

    def result(self, batch: Batch, losses: Float[Tensor, " n"], ids: Tensor, log_g: Tensor, gamma: Tensor) -> Tensor:
        """Return the reduced losses of samples; in training mode the state moves."""
        loss = batch.reduce(losses, torch.full_like(losses, batch.total > 1), reduction=self.reduction)
        if self.moves and batch.total > 1:
            log_g = log_g.detach()
            of_samples = log_g if self.bimodal else log_g.logsumexp(0, keepdim=True) - math.log(2)
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
