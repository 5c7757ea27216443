"""Bad input is one clear sentence, the same on every rank, and the next step finds every rank ready."""

import random
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.data.miner import DistributedMiner
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.testing.worlds import Worlds
from contrastive_zoo.wrapper.arguments import GlobalIndices
from tests.helpers import assert_says, close, drawn, error_message, later, numbers, refused

Wrap = Callable[..., Callable[..., Any]]
Mistake = Callable[[bool, Wrap], Any]
"""A call that is bad where the first argument is true; the second is DistributedLoss, or nothing on one process."""


def z(
    n: int = 4, d: int = 3, *, learnt: bool = True, dtype: torch.dtype = torch.float32, of_rank: int | None = None
) -> Tensor:
    """Embeddings as an encoder makes them, on each rank others."""
    if of_rank is None:
        of_rank = dist.get_rank() if dist.is_initialized() else 0
    return numbers(n, d, seed=7 + of_rank).to(dtype).requires_grad_(learnt)


def y(n: int = 4) -> Tensor:
    return torch.arange(n) % 2


def spoilt(value: float, rows: tuple[int, ...] = (2,)) -> Tensor:
    x = z().detach()
    x[list(rows), 1] = value
    return x.requires_grad_()


def third_party(embeddings: Tensor, labels: Tensor) -> Tensor:
    return embeddings[labels == 0].square().sum()


def lenient(embeddings: Tensor, labels: Tensor | None = None, indices_tuple: Any = None) -> Tensor:
    return embeddings.square().sum()


def in_plain_formulas(is_bad: bool, wrap: Wrap) -> None:
    with cz.engine.plain_formulas() if is_bad else nullcontext():
        wrap(cz.InfoNCE())(z(), z())


class MyRows(cz.RowLoss):
    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        return (similarity * negative).sum(1), negative.any(1)


@dataclass
class Pair:
    z: Tensor


def jagged(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([*x.view(len(x), -1)], layout=torch.jagged)


class Unreadable(cz.SupCon):
    def split_reason(self) -> str | None:
        raise LookupError("no such setting")


class Mining(nn.Module):
    def __init__(self, share: float = 0.5) -> None:
        super().__init__()
        self.share = share

    def forward(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        return INDICES


INDICES = (torch.tensor([0]),) * 3

OWN: dict[str, Mistake] = {
    "NTXent: … row i of view 1 belongs to row i of view 0 … view 0 float32 [4, 3] … view 1 float32 [3, 3]": (
        lambda bad, wrap: wrap(cz.NTXent())(z(4), z(4 - bad))
    ),
    "two or more views … got 1 … loss(view1, view2)": lambda bad, wrap: wrap(cz.NTXent())(*[z()] * (2 - bad)),
    "NTXent: … view 1 … NoneType": lambda bad, wrap: wrap(cz.NTXent())(z(), None if bad else z()),
    "row i of keys belongs to row i of queries … further keys as negatives": (
        lambda bad, wrap: wrap(cz.InfoNCE())(z(4), z(4 + bad))
    ),
    "embeddings must be floating-point [n, d] or floating-point [n, v, d], got float32 [12]": (
        lambda bad, wrap: wrap(cz.SupCon())(z().flatten() if bad else z(), y(12 if bad else 4))
    ),
    "negatives must be floating-point [m, d] with the d of queries … queries float32 [4, 3] … negatives float32 [5, 4]": (
        lambda bad, wrap: wrap(cz.InfoNCE())(z(), z(), z(5, 3 + bad))
    ),
    "labels are missing … call loss": lambda bad, wrap: wrap(cz.SupCon())(z(), *[y()] * (not bad)),
    "one per row, got 5 for 4 rows … own labels": lambda bad, wrap: wrap(cz.SupCon())(z(), y(4 + bad)),
    "labels are one integer per row, got int64 [4, 4] … labels.argmax(1)": (
        lambda bad, wrap: wrap(MyRows())(z(), torch.eye(4).long() if bad else y())
    ),
    "temperature must be positive and finite … got 0.0 … temperature=1/s": (
        lambda bad, wrap: wrap(later(cz.NTXent(), temperature=0.0 if bad else 0.1))(z(), z())
    ),
    "temperature must be positive and finite, got -1.0": (
        lambda bad, wrap: wrap(later(cz.SupCon(), temperature=torch.tensor(-1.0 if bad else 1.0)))(z(), y())
    ),
    "reduction is one of 'mean', 'sum', 'none', got 'average'": (
        lambda bad, wrap: wrap(later(cz.InfoNCE(), reduction="average" if bad else "mean"))(z(), z())
    ),
    "view 1 hold NaN or infinite values in 1 of 4 rows (row 2) … check_finite=False": (
        lambda bad, wrap: wrap(cz.NTXent())(z(), spoilt(-torch.inf) if bad else z())
    ),
}
"""A rank's own mistakes, which one process makes, too, by what is said: parts separated by …."""

BETWEEN: dict[str, Mistake] = {
    "InfoNCE: … 'keys'": lambda bad, wrap: wrap(cz.InfoNCE())(*[z()] * (2 - bad)),
    "SupCon: … 'lables'": lambda bad, wrap: wrap(cz.SupCon())(z(), **{"lables" if bad else "labels": y()}),
    "NTXent: ranks disagree on the width of view 0 … rank 0 brought d=3 … brought d=5 … same encoder head": (
        lambda bad, wrap: wrap(cz.NTXent())(z(4, 3 + 2 * bad), z(4, 3 + 2 * bad))
    ),
    "SupCon: ranks disagree on the dtype of embeddings … float32 … bfloat16 … same precision": (
        lambda bad, wrap: wrap(cz.SupCon())(z(dtype=torch.bfloat16 if bad else torch.float32), y())
    ),
    "ranks disagree on what they bring … view 2 … on every rank or on none": (
        lambda bad, wrap: wrap(cz.NTXent())(*[z()] * (2 + bad))
    ),
    "ranks disagree on what they bring … brought negatives, rank 0 brought none": (
        lambda bad, wrap: wrap(cz.InfoNCE())(z(), z(), *[z()] * bad)
    ),
    "disagree on whether view 0 carry a gradient … rank 0 brought rows with gradient … without gradient … empty batch": (
        lambda bad, wrap: wrap(cz.NTXent())(z(learnt=not bad), z(learnt=not bad))
    ),
    "third_party: … missing a required argument … labels": lambda bad, wrap: wrap(third_party)(z(), *[y()] * (not bad)),
    "lenient: ranks disagree on … labels": lambda bad, wrap: wrap(lenient)(z(), y() if bad else None),
    "labels are one per row, got 5 for 4 rows": lambda bad, wrap: wrap(third_party)(z(), y(4 + bad)),
    "ranks disagree on temperature … rank 0 has 0.1 … has 0.2 … same on every rank": (
        lambda bad, wrap: wrap(cz.NTXent(temperature=0.2 if bad else 0.1))(z(), z())
    ),
    "ranks disagree on the loss: rank 0 has Triplet … has Circle": (
        lambda bad, wrap: wrap(cz.Circle() if bad else cz.Triplet())(z(), y())
    ),
    "ranks disagree on losses.1.margin: rank 0 has 0.1 … has 0.9": (
        lambda bad, wrap: wrap(cz.WeightedSum([cz.SupCon(), cz.Triplet(margin=0.9 if bad else 0.1)]))(z(), y())
    ),
    "ranks disagree on plain_formulas(): rank 0 has False … has True": in_plain_formulas,
    "ranks disagree on ring: rank 0 has False … has True": lambda bad, wrap: wrap(cz.SupCon(), ring=bad)(z(), y()),
    "ranks disagree on grad_reduction: rank 0 has mean … has sum": (
        lambda bad, wrap: wrap(cz.SupCon(), grad_reduction="sum" if bad else "mean")(z(), y())
    ),
    "ranks disagree on margin … 0.5 … 1.5": (
        lambda bad, wrap: wrap(lambda embeddings, margin: embeddings.sum() * margin)(z(), 0.5 + bad)
    ),
    "weight has norm 1 on rank 0 and 2 on rank": (
        lambda bad, wrap: wrap(lambda embeddings, weight: embeddings.sum() * weight)(z(), torch.tensor(1.0 + bad))
    ),
    "third_party: … embeddings hold NaN or infinite values in 1 of 4 rows (row 2)": (
        lambda bad, wrap: wrap(third_party)(spoilt(torch.nan) if bad else z(), y())
    ),
    "NTXent: the global batch is empty": lambda bad, wrap: wrap(cz.NTXent())(z(0), z(0)),
    "third_party: the global batch is empty … skip the step": lambda bad, wrap: wrap(third_party)(z(0), y(0)),
    "indices_tuple was mined on this rank's rows … DistributedLoss(loss, miner=miner) … DistributedMiner(miner)": (
        lambda bad, wrap: wrap(lenient)(z(), y(), indices_tuple=INDICES if bad else None)
    ),
    "indices_tuple was mined on this rank's rows … as it is": (
        lambda bad, wrap: wrap(lenient)(z(), y(), DistributedMiner(Mining())(z(), y())[:2])
    ),
    "ranks disagree on indices_tuple": (
        lambda bad, wrap: wrap(lenient)(z(), y(), GlobalIndices(INDICES) if bad else None)
    ),
    "indices_tuple came along … has a miner": (
        lambda bad, wrap: wrap(lenient, miner=Mining())(z(), y(), GlobalIndices(INDICES))
    ),
    "ranks disagree on miner.share": lambda bad, wrap: wrap(lenient, miner=Mining(0.5 if bad else 0.25))(z(), y()),
    "a miner returns a tuple of indices … got Tensor": (
        lambda bad, wrap: DistributedMiner(lambda embeddings, labels: labels)(z(), y())
    ),
    "Mining: … labels are one per row, got 3 for 4 rows": lambda bad, wrap: DistributedMiner(Mining())(z(), y(4 - bad)),
    "Mining: … embeddings hold NaN or infinite values": (
        lambda bad, wrap: DistributedMiner(Mining())(z() / (0 if bad else 1), y())
    ),
    "embeddings are rows, one a label, got float32 []": (
        lambda bad, wrap: DistributedMiner(Mining())(torch.tensor(1.0) if bad else z(), y())
    ),
    "LookupError: no such setting": lambda bad, wrap: wrap(Unreadable() if bad else cz.SupCon())(z(), y()),
    "pair must be a tensor, or a tuple … got a Pair": lambda bad, wrap: wrap(lambda pair: pair.z.sum())(Pair(z())),
    "gradients cannot be scaled inside a Pair … tuples, lists and dicts": (
        lambda bad, wrap: wrap(lambda rows: Pair(rows.sum()), grad_reduction="sum")(z())
    ),
    **{
        f"{name} must {said}": lambda bad, wrap, name=name, spoil=spoil: CALLS[name](
            wrap, spoil if bad else Tensor.clone
        )
        for name in ("labels", "view 0", "weight", "embeddings")
        for spoil, said in (
            (Tensor.to_sparse, "be a dense tensor, got sparse"),
            (jagged, "be a dense tensor, got nested"),
            (lambda x: x.to("meta"), "hold values"),
        )
    },
}
"""Mistakes that take two ranks, by what is said."""

CALLS: dict[str, Callable[[Wrap, Callable[[Tensor], Tensor]], Any]] = {
    "labels": lambda wrap, change: wrap(cz.SupCon())(z(), change(y())),
    "view 0": lambda wrap, change: wrap(cz.NTXent())(change(z().detach()), z()),
    "weight": lambda wrap, change: wrap(lambda rows, weight: (rows[:, 0] * weight).sum())(
        z(), change(z()[:, 1].detach())
    ),
    "embeddings": lambda wrap, change: DistributedMiner(Mining())(change(z().detach()), y()),
}


def on_the_last_rank(mistake: Mistake) -> None:
    mistake(dist.get_rank() == dist.get_world_size() - 1, cz.DistributedLoss)


@pytest.mark.parametrize("words", OWN)
def test_a_mistake_of_one_rank_of_all_and_of_one_process(words: str, worlds: Worlds) -> None:
    for wrap in (lambda loss: loss, cz.DistributedLoss):
        with pytest.raises(ValueError, match=r"\w+: .*\w") as raised:
            OWN[words](True, wrap)
        assert_says(str(raised.value), words)
        assert "rank 0: " not in str(raised.value)
    assert "rank 1: " in refused(worlds, 2, lambda: on_the_last_rank(OWN[words]), words)
    assert "rank 2: " not in refused(worlds, 3, lambda: OWN[words](True, cz.DistributedLoss), words)


@pytest.mark.parametrize(("words", "world_size"), drawn(BETWEEN, [2, 3], one_in=2))
def test_every_rank_says_the_same_and_goes_on(words: str, world_size: int, worlds: Worlds) -> None:
    refused(worlds, world_size, lambda: on_the_last_rank(BETWEEN[words]), words)


def test_all_failing_ranks_are_named(worlds: Worlds) -> None:
    words = "rank 1: labels are one per row, got 5 … rank 2: labels are one per row, got 6"
    text = refused(worlds, 3, lambda: cz.DistributedLoss(cz.SupCon())(z(), y(4 + dist.get_rank())), words)
    assert "rank 0" not in text


def test_check_finite_can_be_turned_off(worlds: Worlds) -> None:
    def job() -> list[float]:
        wrappers = [cz.DistributedLoss(loss, check_finite=False) for loss in (cz.SupCon(), third_party)]
        losses = [*wrappers, cz.DistributedLoss(cz.SupCon(check_finite=False)), cz.SupCon(check_finite=False)]
        return [loss(spoilt(torch.nan, (0, 1, 2, 3)), y()).item() for loss in losses]

    assert np.isnan(worlds.run(2, job)).all()


class HoldsALoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loss = cz.NTXent()

    def forward(self, view1: Tensor, view2: Tensor) -> Tensor:
        return self.loss(view1, view2)


class OverridesForward(cz.NTXent):
    def forward(self, *args: Any, **named: Any) -> Tensor:
        return 1.0 * super().forward(*args, **named)


def hooked() -> cz.NTXent:
    loss = cz.NTXent()
    loss.register_forward_hook(lambda module, args, value: value + 0 * torch.rand(()))
    return loss


CALLS_A_LOSS: dict[str, Callable[[], Any]] = {
    "a loss": cz.NTXent,
    "a module that holds one": HoldsALoss,
    "a function that calls one": lambda: lambda view1, view2: cz.NTXent()(view1, view2),
    "a forward of its own": OverridesForward,
    "a hook": hooked,
    "a member with a forward of its own": lambda: cz.WeightedSum([cz.NTXent(), OverridesForward()], weights=[0.5, 0.5]),
    "a member with a hook": lambda: cz.WeightedSum([cz.NTXent(), hooked()], weights=[0.5, 0.5]),
    "prefixes of a loss with a hook": lambda: cz.Matryoshka(hooked(), dims=(3,)),
}


@pytest.mark.parametrize("name", CALLS_A_LOSS)
def test_a_wrapped_loss_is_that_of_all_rows_and_does_not_warn(name: str, worlds: Worlds) -> None:
    def job() -> tuple[Tensor, bool]:
        Loss._warned_about_local_negatives = False
        rows, loss = z(4 + dist.get_rank()), CALLS_A_LOSS[name]()
        before = [{*vars(x)} for x in loss.modules()] if isinstance(loss, nn.Module) else []
        value = cz.DistributedLoss(loss)(rows, rows + 1)
        after = [{*vars(x)} for x in loss.modules()] if isinstance(loss, nn.Module) else []
        return value, Loss._warned_about_local_negatives or before != after

    rows = torch.cat([z(4 + rank, of_rank=rank) for rank in range(2)])
    for value, is_touched in worlds.run(2, job):
        close(value, cz.NTXent()(rows, rows + 1), 1e-6)
        assert not is_touched


def test_a_loss_may_insist_on_what_its_miner_finds(worlds: Worlds) -> None:
    def job() -> float:
        def loss(embeddings: Tensor, labels: Tensor, indices_tuple: Tensor) -> Tensor:
            return embeddings[indices_tuple].sum()

        return cz.DistributedLoss(loss, miner=lambda embeddings, labels: labels)(z(), y()).item()

    on_one_process = torch.cat([z(), z()])[torch.cat([y(), y()])].sum().item()
    assert worlds.run(2, job) == pytest.approx([on_one_process] * 2)


def draws() -> list[float]:
    """From every stream there is; an odd number of Gaussians, of which generators keep one in hand."""
    return [torch.rand(()).item(), np.random.rand(), np.random.randn(), random.random(), random.gauss()]


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def drawn_alone(seed: int, times: int) -> list[list[float]]:
    seed_all(seed)
    return [draws() for _ in range(times)]


def in_loss(embeddings: Tensor, labels: Tensor) -> tuple[Tensor, list[float]]:
    return embeddings.sum(), draws()


def after_miner(embeddings: Tensor, labels: Tensor, indices_tuple: Any = None) -> tuple[Tensor, list[float]]:
    return embeddings.sum(), indices_tuple


def broken(embeddings: Tensor, labels: Tensor) -> Tensor:
    draws()
    raise ZeroDivisionError


@pytest.mark.parametrize(("where", "world_size"), drawn(["loss", "miner"], [1, 2, 3], one_in=2))
def test_chance_is_rank_0s_everywhere_and_the_other_ranks_keep_their_own(where, world_size, worlds: Worlds) -> None:
    """Also after a loss that has drawn and raised."""

    def job() -> list[list[float]]:
        seed_all(100 + dist.get_rank())
        found, miner = [draws()], (lambda embeddings, labels: draws()) if where == "miner" else None
        loss_fn = cz.DistributedLoss(after_miner if miner else in_loss, miner=miner)
        found += [loss_fn(z(), y())[1] for _ in range(2)]
        with pytest.raises(ZeroDivisionError):
            cz.DistributedLoss(broken)(z(), y())
        return [*found, draws()]

    ((first, *of_calls, _, last),) = worlds.run(1, drawn_alone, 100, 5)
    found = worlds.run(world_size, job)
    assert found[0] == [first, *of_calls, last]
    for rank in range(1, world_size):
        ((own_first, own_last),) = worlds.run(1, drawn_alone, 100 + rank, 2)
        assert found[rank] == [own_first, *of_calls, own_last]


Z, OTHERS = numbers(6, 3, seed=0), numbers(6, 3, seed=1)
LABELS = torch.tensor([0, 1, 0, 2, 1, 0])
ONE_HOT = torch.nn.functional.one_hot(LABELS)

EXPRESSION = re.compile(r"(?:Use|Pass|such as) (\w+(?:\[[^\]]*\])?(?:\.\w+(?:\([^()]*\))?)*(?:\([^()]*\))?)")
SETTING = re.compile(r"(?:Use|Pass|pass) (\w+)=([\w.'/]*[\w'])")


TENSORS: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "a column of labels": (lambda labels: cz.SupCon()(Z, labels), LABELS[:, None], LABELS),
    "a row of labels": (lambda labels: cz.SupCon()(Z, labels), LABELS[None], LABELS),
    "one-hot labels": (lambda labels: cz.SupCon()(Z, labels), ONE_HOT, LABELS),
    "one-hot labels as floats": (lambda labels: cz.SupCon()(Z, labels), ONE_HOT.double(), LABELS),
    "labels as floats": (lambda labels: cz.SupCon()(Z, labels), LABELS.double(), LABELS),
    "a column of labels as floats": (lambda labels: cz.SupCon()(Z, labels), LABELS.double()[:, None], LABELS),
    "one label": (lambda labels: cz.ArcFace(3, 3).double()(Z[:1], labels), torch.tensor(1), torch.tensor([1])),
    "sparse embeddings": (lambda embeddings: cz.SupCon()(embeddings, LABELS), Z.to_sparse(), Z),
    "nested embeddings": (
        lambda embeddings: cz.SupCon()(embeddings, LABELS),
        jagged(Z),
        Z,
    ),
    "short floats": (
        lambda embeddings: cz.SupCon()(embeddings, LABELS),
        Z.to(torch.float8_e4m3fn),
        Z.to(torch.float8_e4m3fn).bfloat16(),
    ),
    "a single number to gather": (cz.collectives.all_gather, torch.tensor(3.0), torch.tensor([3.0])),
    "a learnable constant": (
        lambda tau_plus: cz.Debiased(tau_plus=tau_plus)(Z, OTHERS),
        torch.tensor(0.1, requires_grad=True),
        torch.tensor(0.1),
    ),
}
"""A call of a tensor, a wrong one, and the one that is meant."""


def obeyed(text: str, x: Any) -> Any:
    """Return what the error's expression makes of the argument, whatever name it has there."""
    (expression, *_) = [found for found in EXPRESSION.findall(text) if re.search(r"[.(\[]", found)]
    name = re.match(r"\w+", expression).group()  # type: ignore[union-attr]  # it begins with one
    return eval(expression.replace(name, "x", 1) if name != "torch" else expression, {"x": x, "torch": torch})


@pytest.mark.parametrize("name", TENSORS)
def test_an_expression_is_right(name: str) -> None:
    call, bad, right = TENSORS[name]
    torch.manual_seed(0)
    text = error_message(lambda: call(bad))
    assert text is not None
    corrected = obeyed(text, bad)
    torch.manual_seed(0)
    found = call(corrected)
    torch.manual_seed(0)
    close(found.double(), call(right).double())


def test_the_advice_on_logit_scales_is_right() -> None:
    text = error_message(lambda: cz.InfoNCE(temperature=-20.0))
    assert text is not None
    ((name, value),) = SETTING.findall(text)
    scale = 20.0
    loss = cz.InfoNCE(**{name: eval(value, {"s": scale})})
    rows = [x / x.norm(dim=1, keepdim=True) for x in (Z, OTHERS)]
    close(loss(Z, OTHERS), torch.nn.functional.cross_entropy(scale * rows[0] @ rows[1].T, torch.arange(6)))
