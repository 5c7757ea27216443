"""SogCLR and iSogCLR: a moving average for each sample of the data set takes the place of a large batch."""

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor, nn

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.cost import Entry, Pairs, Shared
from contrastive_zoo.engine.pairs import means_over_other_samples
from contrastive_zoo.loss_base.loss import CallInputs
from contrastive_zoo.loss_base.sample_averages import SampleAverages
from contrastive_zoo.loss_base.settings import Bounds, Temperature, are_numbers, field
from contrastive_zoo.loss_base.temperature import bounded
from contrastive_zoo.ranks.row_checks import described


class SogCLR(SampleAverages, engine="softmax"):
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
        gamma: γ, 0 … 1.
        gamma_decay_epochs: epochs in which γ falls from 1 along a cosine.
        steps_per_epoch: γ is constant within.
        bimodal: views are images and texts.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``, over samples.
        temperature: t > 0; a tensor or module is learnable, with ρ > 0.
        temperature_range: bounds of each sample's t, which starts at ``temperature``.
        rho: ρ ≥ 0.
        normalize: normalise embeddings first.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> eye, ids = torch.eye(2), torch.arange(2)
        >>> SogCLR(2, temperature=1.0)(eye, eye, ids)   # log 1 − 1
        tensor(-1.)

    Source: Yuan et al. 2022, https://arxiv.org/abs/2202.12387; iSogCLR: Qiu et al. 2023,
    https://arxiv.org/abs/2305.11965; FastCLIP: Wei et al. 2024, https://arxiv.org/abs/2407.01445
    """

    temperature: Temperature = 0.1
    temperature_range: Sequence[float] | None = None
    rho: Annotated[float, Bounds(low=0, constant=True)] = 0.0
    normalize: bool = True

    temperatures: nn.Parameter = field(init=False)

    def settings_problem(self) -> str | None:
        t, bounds, problem = self.temperature, self.temperature_range, super().settings_problem()
        if bounds is not None and "log_u" in self._buffers and "temperatures" not in self._parameters:
            return "a loss that was made without temperature_range has no temperatures. Construct another loss."
        is_range = are_numbers(bounds, above=0) and len(bounds) == 2
        if problem or bounds is None or (is_range and isinstance(t, (int, float)) and bounds[0] <= t <= bounds[1]):
            return problem
        rule = "temperature_range is a tuple of two numbers, with a constant temperature between them"
        return f"{rule}, got {described(bounds)} with temperature={described(t)}."

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature_range is not None and isinstance(self.temperature, (int, float)):
            self.temperatures = nn.Parameter(torch.full([self.log_u.numel()], float(self.temperature)))

    def entries(self, stated: CallInputs) -> list[Entry]:
        entries, views = super().entries(stated), [["view 0"], ["view 1"]]
        if self.temperature_range is None:
            return entries
        others = views[::-1] if self.bimodal else [["view 0", "view 1"]] * 2
        pairs = [Pairs(x, y, 1.0, False, False, False) for x, y in zip(views, others, strict=True)]
        of_temperatures = Shared(len(self.log_u) * self.temperatures.itemsize, views[0])
        scaled = stated.held(5)  # of each direction, by temperatures
        return [of_temperatures, *pairs, scaled, *(x for x in entries if not isinstance(x, Pairs))]

    def compute(self, batch: Batch) -> Tensor:
        ids, t = self.places(batch), batch.settings.temperature
        if self.temperature_range is not None:
            low, high = self.temperature_range
            of_samples = bounded(self.temperatures.view(len(self.log_u), -1)[:, ids], low=low, high=high)
            t = batch.shared(of_samples)[:, batch.samples.local]
        t, log_g, positive = means_over_other_samples(batch, t, self.normalize, two_towers=self.bimodal)
        log_u, gamma = self.averaged(batch, ids, log_g)
        losses = t * (log_u + batch.settings.rho - positive)
        return self.result(batch, losses.mean(0), ids, log_g, gamma)
