"""The averages of SogCLR: what each sample has over several steps, on any number of ranks, and what moves them."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import close, local_shard, numbers, peer
from tests.losses.zoo_sogclr import averages, estimated, means
from tests.zoo import unit

SAMPLES, D, RATE = 9, 3, 0.05
STEPS = {
    1: [(5,), (4,), (7,), (3,)],
    2: [(3, 2), (4, 0), (1, 6), (2, 1)],
    3: [(2, 0, 3), (0, 1, 3), (3, 3, 1), (1, 1, 1)],
}
"""The shards of each step; together they have the same samples for each number of ranks."""
LEARNT: dict[str, Any] = {"gamma": 0.6, "temperature_range": (0.2, 0.35), "rho": 0.3}
FORMS: dict[str, dict[str, Any]] = {
    "views": {"gamma": 0.6},
    "towers": {"gamma": 0.6, "bimodal": True, "rho": 0.5},
    "a schedule": {"gamma": 0.2, "gamma_decay_epochs": 2, "steps_per_epoch": 2, "bimodal": True},
    "learnt temperatures": LEARNT,
    "learnt temperatures of towers": {**LEARNT, "bimodal": True},
}


def batch(step: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(step))
    return numbers(n, D, seed=2 * step), numbers(n, D, seed=2 * step + 1), order[:n]


def gamma_of(step: int, gamma: float, gamma_decay_epochs: int = 0, steps_per_epoch: int = 1, **_: Any) -> float:
    epoch, last = step // steps_per_epoch, gamma_decay_epochs
    return gamma if epoch >= last else gamma + (1 - gamma) * (1 + math.cos(math.pi * epoch / last)) / 2


def by_hand(form: str) -> tuple[list[tuple[Tensor, ...]], Tensor]:
    """Return the value of each step and the gradients of embeddings and temperatures, and u after all."""
    settings = FORMS[form]
    bimodal, rho, learns = settings.get("bimodal", False), settings.get("rho", 0.0), "temperature_range" in settings
    u, steps = torch.zeros(1 + bimodal, SAMPLES, dtype=torch.float64), []
    t = torch.full_like(u, torch.tensor(0.3, dtype=torch.float32).item() if learns else 0.3)
    for step, (n,) in enumerate(STEPS[1]):
        a, b, ids = batch(step, n)
        within = t.clamp(*LEARNT["temperature_range"]) if learns else t
        leaves = [x.requires_grad_() for x in (a, b, within)]
        gamma, views, of_samples = gamma_of(step, **settings), (unit(a), unit(b)), within[:, ids].expand(2, -1)
        loss = estimated(*views, u[:, ids].expand(2, -1), of_samples, gamma, rho, bimodal).mean()
        *gradients, dt = torch.autograd.grad(loss, leaves)
        leads_back = (t == within) | ((t - within) * dt > 0)
        gradients.append(dt.where(leads_back, 0))
        steps.append((loss.detach(), *gradients) if learns else (loss.detach(), *gradients[:2]))
        g = means(*views, of_samples, bimodal).detach()
        u[:, ids] = averages(g if bimodal else g.mean(0, keepdim=True), u[:, ids], gamma)
        t = (t - RATE * gradients[2]).detach() if learns else t.detach()
    return steps, u


class OfLocalSamples(cz.SogCLR):
    """Each rank moves the averages of its own samples only."""

    def compute(self, batch: Batch) -> Tensor:
        self.local = batch.samples.local
        return super().compute(batch)

    def record(self, statistics: Any) -> None:
        ids, log_g, gamma = statistics
        super().record((ids[self.local], log_g[self.local], gamma))


class WithoutEstimate(cz.SogCLR):
    """It differentiates log u, whose derivative by g is γ / u."""

    def compute(self, batch: Batch) -> Tensor:
        value = super().compute(batch)
        return value.detach() + self.gamma * (value - value.detach())


def trained(form: str, steps: Sequence[int], state: dict[str, Tensor] | None, kind: type[cz.SogCLR]) -> Any:
    """Return the value of each step and the gradients of this rank's embeddings, and the state after them."""
    loss, world_size, found = kind(SAMPLES, temperature=0.3, **FORMS[form]).double(), dist.get_world_size(), []
    loss.load_state_dict(state or loss.state_dict())
    loss_fn, parameters = cz.DistributedLoss(loss, check_equal=False), [*loss.parameters()]
    for step in steps:
        shards = STEPS[world_size][step]
        a, b, ids = (local_shard(x, shards) for x in batch(step, sum(shards)))
        with splitting(always=world_size == 3):  # two ranks compute such small batches whole
            value, leaves = loss_fn(a.requires_grad_(), b.requires_grad_(), ids), [a, b, *parameters]
            da, db, *dt = torch.autograd.grad(value, leaves)
        found.append([value.detach(), da / world_size, db / world_size, *(x.view_as(loss.log_u) for x in dt)])
        for x, dx in zip(parameters, dt, strict=True):
            x.data -= RATE * dx
    loss_fn.eval()(a, b, ids)  # moves nothing
    return found, loss.state_dict()


def check(worlds: Worlds, form: str, sizes: Sequence[int], kind: type[cz.SogCLR] = cz.SogCLR) -> None:
    """Compare the steps of as many ranks as ``sizes`` says, one half after the other, with the equations."""
    (expected, u), state = by_hand(form), None
    for steps, size in zip((range(2), range(2, 4)), sizes, strict=True):
        parts = worlds.run(size, trained, form, steps, state, kind)
        state = parts[-1][1]
        for index, step in enumerate(steps):
            value, a, b, *t = zip(*(found[index] for found, _ in parts), strict=True)
            for tensors, of_step in zip((value, [torch.cat(a)], [torch.cat(b)], *t), expected[step], strict=False):
                for x in tensors:
                    close(x, of_step)
    for _, of_rank in parts:
        close(of_rank["log_u"].exp().where(of_rank["log_u"] != 0, 0), u)
        assert of_rank["steps"] == 4


@pytest.mark.parametrize("sizes", [(1, 1), (2, 3), (3, 1), (3, 3), (1, 2)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_step_is_the_papers_also_resumed_on_other_ranks(form: str, sizes: Sequence[int], worlds: Worlds) -> None:
    check(worlds, form, sizes)


@pytest.mark.parametrize("kind", [OfLocalSamples, WithoutEstimate])
def test_averages_of_local_samples_and_the_derivative_of_the_value_are_caught(kind: Any, worlds: Worlds) -> None:
    with pytest.raises(AssertionError):
        check(worlds, "towers", (2, 3), kind)


def after_a_call(ids: Tensor, shards: Sequence[int]) -> Tensor:
    loss = cz.SogCLR(SAMPLES, temperature=0.3, bimodal=True).double()
    a, b, _ = batch(0, len(ids))
    cz.DistributedLoss(loss)(*(local_shard(x, shards) for x in (a, b, ids)))
    return loss.log_u


def test_a_sample_that_occurs_twice_has_the_larger_average(worlds: Worlds) -> None:
    ids = torch.tensor([1, 0, 4, 1, 2])
    a, b, _ = batch(0, len(ids))
    log_g = means(unit(a), unit(b), torch.full((2, 5), 0.3, dtype=torch.float64), True).log()
    expected = torch.zeros(2, SAMPLES, dtype=torch.float64)
    expected[:, ids] = log_g
    expected[:, 1] = torch.maximum(log_g[:, 0], log_g[:, 3])
    for log_u in (x for shards in ((5,), (3, 2)) for x in worlds.run(len(shards), after_a_call, ids, shards)):
        close(log_u, expected)


def test_calls_of_one_step_see_the_averages_before_it() -> None:
    loss = cz.SogCLR(SAMPLES, gamma=0.5, temperature=1, temperature_range=(0.5, 2)).double()
    loss(*batch(0, 6))
    first, second = copy.deepcopy(loss), copy.deepcopy(loss)
    calls, twice = [batch(1, 5), batch(2, 4)], {*batch(1, 5)[2].tolist()} & {*batch(2, 4)[2].tolist()}
    with cz.one_step(loss):
        values = [loss(*x) for x in calls]
    expected = first.log_u.clone()
    for of_call, x, value in zip((first, second), calls, values, strict=True):
        close(value, of_call(*x))
        expected[:, x[2]] = of_call.log_u[:, x[2]]
    both = torch.tensor([*twice])
    assert len(both)
    expected[:, both] = torch.maximum(first.log_u, second.log_u)[:, both]
    close(loss.log_u, expected)
    assert loss.steps == 2


@pytest.mark.peers
@pytest.mark.parametrize("form", [x for x in FORMS if x != "a schedule"])
def test_it_is_the_authors_loss(form: str) -> None:
    """Its value is another one, and its gradients have factors: of two views, of all negatives, of all samples."""
    settings, n = FORMS[form], 6
    bimodal, learns = "bimodal" in settings, "temperature_range" in settings
    how = {"N": SAMPLES, "tau": 0.3, "gamma": settings["gamma"], "rho": settings.get("rho", 0.0)}
    how |= {"enable_isogclr": learns, "eta": 0.0, "beta": 1.0, "tau_min": 0.1, "tau_max": 0.5}
    how |= {} if bimodal else {"device": torch.device("cpu")}
    theirs = peer(f"libauc.losses.contrastive.GCLoss_v{1 + bimodal}")(**how)
    vars(theirs).update({name: x.double() for name, x in vars(theirs).items() if isinstance(x, Tensor)})
    ours = cz.SogCLR(SAMPLES, temperature=0.3, **settings).double()
    *_, ids = batch(0, n)
    for step in range(2):
        theirs.adjust_gamma(step)
        a, b, _ = batch(step, n)  # another epoch has the same samples
        value, leaves = ours(a.requires_grad_(), b.requires_grad_(), ids), [a, b]
        of_theirs = theirs(unit(a), unit(b), ids)
        gradients = torch.autograd.grad(value, [*leaves, *ours.parameters()])
        expected = torch.autograd.grad(of_theirs[0] if bimodal else of_theirs, leaves)
        for x, y in zip(gradients, expected, strict=False):
            close((n - 1 if bimodal else 2) * x, y)
        for x in gradients[2:]:
            y = torch.cat([theirs.grad_tau_img, theirs.grad_tau_txt] if bimodal else [theirs.grad_tau])[:, 0]
            at = torch.cat([ids + SAMPLES * k for k in range(1 + bimodal)])
            close((1 + bimodal) * n * x[at], y[at])
