"""One rank of a random training, and beside it the same training on one process: a twin of the loss, on all embeddings."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import contrastive_zoo as cz
from contrastive_zoo.loss_base.loss import Inputs
from contrastive_zoo.testing.catalogue import CATALOGUE
from tests.helpers import EXACT, distance
from tests.zoo import BatchHard

Action = tuple[str, Mapping[str, Any]]
Precision = Literal["float64", "float32", "autocast"]

TIMES = 8
"""In 32 bits and under autocast the error may be so many times that of the dense formula."""
LEAST = 1e-5
"""Or this, where the dense formula happens to be exact; relative to the larger of 1 and what is compared with."""
MOVE = 0.97


@contextlib.contextmanager
def limits(values: Mapping[str, Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name, x in values.items():
            stack.enter_context(patch(name.replace(":", "."), x))
        yield


def play(name: str, thresholds: Mapping[str, int], program: Sequence[Action]) -> list[str]:
    with limits(thresholds), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the twin sees its own embeddings only
        rank = Rank(LOSSES[name])
        for number, (action, arguments) in enumerate(program, 1):
            try:
                getattr(rank, action)(**arguments)
            except Exception as error:
                raise AssertionError(
                    f"action {number}, {action}({', '.join(f'{k}={x!r}' for k, x in arguments.items())}): "
                    f"{type(error).__name__}: {error}"
                ) from error
    return rank.refusals


class Rank:
    """A loss, its wrapper, and a twin that one process calls; every method is an action of all ranks."""

    def __init__(self, kind: Loss) -> None:
        self.kind, self.refusals = kind, []
        self.loss, self.twin = self._made(), self._made(whole=True)
        self.options: dict[str, Any] = {"grad_reduction": "mean"}
        self.precision: Precision = "float64"
        self.budget: int | None = None
        self.hooked = self.called = False
        self.wrapper = self._wrapped()
        self.group: Any = None

    def step(
        self,
        batches: Sequence[tuple[tuple[int, ...], int]],
        *,
        backward: Literal["each", "together", "twice"] = "each",
        reentrant: bool | None = None,
        wrapper: Literal["own", "second", "subgroup"] = "own",
    ) -> None:
        rank, size, call = self._place(wrapper)
        self._zero_grad()
        expected = self._expected(batches, backward, size)
        if expected is not None:
            self._step(batches, backward, reentrant, rank, size, call, expected)
        self._move()
        if wrapper == "subgroup":
            dist.barrier()
            dist.destroy_process_group(self.group)

    def _step(
        self,
        batches: Sequence[Any],
        backward: str,
        reentrant: bool | None,
        rank: int,
        size: int,
        call: Callable[..., Tensor],
        expected: Expected,
    ) -> None:
        values, leaves = [], []
        for shards, seed in batches:
            mine = self._local(shards, seed, rank, size)
            leaves += [x for x in mine if x.is_floating_point()]
            values.append(self._called(call, mine, reentrant))
            if backward == "each":
                values[-1].backward()
        if backward != "each":
            total = sum((i * value for i, value in enumerate(values, 1)), torch.zeros(()))
            total.backward(retain_graph=backward == "twice")
            if backward == "twice":
                total.backward()
        self._compare([x.detach() for x in values], [_gradient(x) for x in leaves], expected, rank, size)

    def evaluate(self, batch: tuple[tuple[int, ...], int], how: Literal["no_grad", "eval"]) -> None:
        rank, size, call = self._place("own")
        grad = contextlib.nullcontext() if how == "eval" else torch.no_grad()
        training = how == "no_grad"
        self.loss.train(training), self.twin.train(training), self.wrapper.train(training)
        with grad:
            expected = self._expected([batch], "none", size)
            if expected is not None:
                value = self._called(call, self._local(*batch, rank, size))
                self._compare([value.detach()], [], expected, rank, size)
        self.loss.train(), self.twin.train(), self.wrapper.train()

    def set_setting(self, value: Any) -> None:
        for loss in (self.loss, self.twin):
            _set(loss, self.kind.setting[0], value)

    def set_option(self, **options: Any) -> None:
        """Other options of the wrapper, on all ranks: those that are attributes are set, for the others it is made anew."""
        self.options |= options
        if set(options) == {"grad_reduction"}:
            self.wrapper.grad_reduction = options["grad_reduction"]
        else:
            self.wrapper, self.called = self._wrapped(), False

    def set_precision(self, precision: Precision) -> None:
        self.precision = precision
        for loss in (self.loss, self.twin):
            loss.to(self._dtype)

    def set_hook(self, on: bool) -> None:
        """The user's code after every call, which sees the value of all ranks' embeddings; or no longer."""
        self.hooked = on
        for loss in (self.loss, self.twin):
            _hook(loss, on)

    def set_budget(self, size: int | None) -> None:
        self.budget = size

    def make_again(
        self, on: Literal["all", "one"], how: Literal["wrapper", "deepcopy", "pickle", "state_dict"]
    ) -> None:
        """Put another object in the wrapper's place, on all ranks or on the last one."""
        if on == "one" and not (_is_last() and self.called):  # a first call meets no wrapper that is made later
            return
        self.called &= on == "one"
        if how == "wrapper":
            self.wrapper = self._wrapped()
        elif how in ("deepcopy", "pickle"):
            duplicated = copy.deepcopy if how == "deepcopy" else lambda x: pickle.loads(pickle.dumps(x))
            self.wrapper = duplicated(self.wrapper)
            self.loss = self.wrapper.loss
        else:
            state, before = self.wrapper.state_dict(), self.loss
            self.loss = self._made().to(self._dtype)
            _hook(self.loss, self.hooked)
            _set(self.loss, self.kind.setting[0], attrgetter(self.kind.setting[0])(before))
            self.wrapper = self._wrapped()
            self.wrapper.load_state_dict(state)

    def differ(
        self, batch: tuple[tuple[int, ...], int], what: Literal["setting", "option", "argument", "hook"]
    ) -> None:
        """One rank has something of its own: every rank raises the same ValueError, and the training goes on."""
        rank, size, call = self._place("own")
        mine, at_fault = self._local(*batch, rank, size), _is_last()
        path, values = self.kind.setting
        setting, option = attrgetter(path)(self.loss), self.wrapper.grad_reduction
        if at_fault and what == "setting":
            _set(self.loss, path, next(x for x in values if x != setting))
        elif at_fault and what == "option":
            self.wrapper.grad_reduction = "sum" if option == "mean" else "mean"
        elif at_fault and what == "hook":
            _hook(self.loss, not self.hooked)
        elif at_fault:
            mine = mine[:-1]
        try:
            value = self._called(call, mine)
        except ValueError as error:
            self.refusals.append(str(error))
        else:
            raise AssertionError(f"the last rank's {what} differs, and this rank returns {value}")
        finally:
            _set(self.loss, path, setting)
            self.wrapper.grad_reduction = option
            _hook(self.loss, self.hooked)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "float64" else torch.float32

    def _made(self, *, whole: bool = False) -> nn.Module:
        torch.manual_seed(0)
        loss = self.kind.make(whole=whole) if self.kind.sharded else self.kind.make()
        return loss.double()

    def _wrapped(self, **options: Any) -> nn.Module:
        return cz.DistributedLoss(self.loss, **{**self.kind.wrapper(), **self.options, **options})

    def _place(self, wrapper: str) -> tuple[int, int, Callable[..., Tensor]]:
        """Rank and size among those who share the batch, and what to call."""
        if wrapper == "subgroup":  # one rank by itself, all others together
            world = dist.get_world_size()
            groups = [dist.new_group(ranks) for ranks in ([0], list(range(1, world)))]
            self.group = group = groups[dist.get_rank() > 0]
            return dist.get_rank(group), dist.get_world_size(group), self._wrapped(process_group=group)
        call = self._wrapped() if wrapper == "second" else self.wrapper
        return dist.get_rank(), dist.get_world_size(), call

    def _local(self, shards: Sequence[int], seed: int, rank: int, size: int) -> list[Tensor]:
        shards = _among(shards, size)
        rows = global_rows(self.kind.compares, sum(shards), seed, self._dtype)
        mine = local_rows(self.kind.compares, rows, sum(shards[:rank]), shards[rank])
        return [x.clone().requires_grad_(x.is_floating_point()) for x in mine]

    def _called(self, call: Callable[..., Tensor], rows: list[Tensor], reentrant: bool | None = None) -> Tensor:
        budget = contextlib.nullcontext() if self.budget is None else cz.engine.memory_budget(self.budget)
        with budget, torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "autocast"):
            run = functools.partial(called, call, self.kind.compares)
            value = run(*rows) if reentrant is None else checkpoint(run, *rows, use_reentrant=reentrant)
        self.called |= call is self.wrapper
        assert isinstance(value, Tensor)
        return value

    def _zero_grad(self) -> None:
        for parameter in (*self.loss.parameters(), *self.twin.parameters()):
            parameter.grad = None

    def _move(self) -> None:
        with torch.no_grad():
            for parameter in (*self.loss.parameters(), *self.twin.parameters()):
                parameter.mul_(MOVE)

    def _expected(self, batches: Sequence[Any], backward: str, size: int) -> Expected | None:
        """What one process computes, and the error of the dense formula; None if it cannot compute it."""
        exact = copy.deepcopy(self.twin).double() if self.precision != "float64" else None
        try:
            found = self._one_process(self.twin, batches, backward, size, self._dtype)
        except (ValueError, RuntimeError, IndexError):
            return None
        if exact is None:
            return found
        with torch.autocast("cpu", enabled=False):
            truth = self._one_process(exact, batches, backward, size, torch.float64)
        return truth.with_error(found)

    def _one_process(
        self, loss: nn.Module, batches: Sequence[Any], backward: str, size: int, dtype: torch.dtype
    ) -> Expected:
        values, leaves = [], []
        autocast = self.precision == "autocast" and dtype == torch.float32
        for shards, seed in batches:
            total = sum(_among(shards, size))
            rows = global_rows(self.kind.compares, total, seed, self._dtype)  # rounded alike in either dtype
            rows = [x.to(dtype).requires_grad_() if x.is_floating_point() else x for x in rows]
            with cz.engine.plain_formulas(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                miner = self.kind.wrapper().get("miner")
                values.append(called(loss, self.kind.compares, *rows, *([miner(*rows)] if miner else [])))
            leaves.append([x for x in rows if x.is_floating_point()])
        if backward != "none":
            together = backward != "each"
            total_value = sum((i * x if together else x for i, x in enumerate(values, 1)), torch.zeros(()))
            (total_value * (2 if backward == "twice" else 1)).backward()
        rows_of = [[_among(shards, size)] * len(xs) for (shards, _), xs in zip(batches, leaves, strict=True)]
        return Expected(
            [x.detach() for x in values],
            [_gradient(x) for xs in leaves for x in xs] if backward != "none" else [],
            [shards for of in rows_of for shards in of],
            [_gradient(x) for x in loss.parameters()] if backward != "none" else [],
        )

    def _compare(self, values: list[Tensor], rows: list[Tensor], expected: Expected, rank: int, size: int) -> None:
        averaged = self.options["grad_reduction"] == "mean"
        for found, wanted in zip(values, expected.values, strict=True):
            expected.close(found, wanted, "value")
        for found, wanted, shards in zip(rows, expected.rows, expected.shards, strict=bool(rows)):
            mine = wanted[sum(shards[:rank]) :][: shards[rank]]
            expected.close(found, mine * (size if averaged else 1), "gradient of the embeddings")
        parameters = list(self.loss.parameters()) if expected.parameters else []
        for parameter, wanted in zip(parameters, expected.parameters, strict=True):
            if self.kind.sharded:
                expected.close(_gradient(parameter), wanted.tensor_split(size)[rank], "gradient of sharded weights")
            else:
                factor = 1 if averaged else 1 / size
                expected.close(_gradient(parameter), wanted * factor, "gradient of the loss's parameters")


class Expected:
    """What one process computes, and how near to it the ranks must come."""

    def __init__(
        self, values: list[Tensor], rows: list[Tensor], shards: list[tuple[int, ...]], parameters: list[Tensor]
    ) -> None:
        self.values, self.rows, self.shards, self.parameters = values, rows, shards, parameters
        self.tolerance = EXACT

    def with_error(self, found: Expected) -> Expected:
        """This one, to be compared with up to a multiple of the error of ``found``."""
        ours, theirs = (x.values + x.rows + x.parameters for x in (self, found))
        errors = [distance(y, x) for x, y in zip(ours, theirs, strict=True)]
        self.tolerance = max(LEAST, TIMES * max(errors))
        return self

    def close(self, found: Tensor, wanted: Tensor, what: str) -> None:
        assert found.shape == wanted.shape, f"{what}: shape {list(found.shape)}; one process's: {list(wanted.shape)}"
        error = distance(found, wanted)
        assert error <= self.tolerance, f"{what}: error {error:.2g} > {self.tolerance:.2g}; {found}, expected {wanted}"


def _gradient(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad.clone()


def _among(shards: Sequence[int], size: int) -> tuple[int, ...]:
    """Shard sizes of the ranks that share a batch: all, or those of a subgroup, of which someone has something."""
    few = list(shards[-size:])
    few[-1] += not sum(few)
    return tuple(few)


def _hook(loss: nn.Module, on: bool) -> None:
    loss._forward_hooks.clear()
    if on:
        loss.register_forward_hook(_tripled)


def _tripled(module: nn.Module, args: Any, value: Any) -> Any:
    return 3 * value


def _is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def _set(loss: Any, path: str, value: Any) -> None:
    before, _, last = path.rpartition(".")
    setattr(attrgetter(before)(loss) if before else loss, last, value)


D, CLASSES = 4, 5
Compares = Literal["views", "three views", "stacked views", "labels", "whole numbers", "mask", "teachers", "ids", "texts",
                   "tokens", "mined"]  # fmt: skip
"""Two or three views; three in one tensor; embeddings with labels, also of whole numbers, many of whose dot products are
equal; embeddings with a mask of positives; two towers with those of a teacher; two towers with ids; videos with two texts
each; queries and documents of tokens, with a mask each; or queries, documents, hard negatives and the queries that these
were mined for."""


@dataclass(frozen=True)
class Loss:
    make: Callable[..., Any]  # returns the loss; with a process group, of that group
    compares: Compares = "views"  # what it is called with
    # path of an attribute that may change, and its values
    setting: tuple[str, tuple[Any, ...]] = ("temperature", (0.5, 0.3, 0.02))
    wrapper: Callable[[], dict[str, Any]] = dict  # further arguments of DistributedLoss
    third_party: bool = False  # from another library
    remembers: bool = False  # whether it keeps embeddings from step to step
    sharded: bool = False  # whether each rank keeps its part of the class weights; ``make(whole=True)`` keeps all


class MaskedMNRL(cz.MNRL):
    """Ids that meet by chance, of values, and a margin, in all directions."""

    directions = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
    false_negative_margin = 0.1
    hardness_mode = "hard_negatives"
    hardness_strength = 2.0

    def inputs(self, q: Tensor, d: Tensor, negatives: Tensor, owners: Tensor) -> Inputs:
        return super().inputs(
            q, d, negatives, owners, *(x[:, 0].detach().floor().long() for x in (d, negatives, 3 * q))
        )


class MaskedGIST(cz.GIST):
    """Ids that meet by chance, of values; negatives are the positives in reverse."""

    def inputs(self, a: Tensor, p: Tensor, guide_a: Tensor, guide_p: Tensor) -> Inputs:
        ids = (x[:, 0].detach().floor().long() for x in (p, 2 * p, 3 * a))
        return super().inputs(a, p, guide_a, guide_p, p.flip(1), guide_p.flip(1), *ids)


def learnt() -> cz.LearnableTemperature:
    return cz.LearnableTemperature(0.5)


def bias() -> nn.Parameter:
    return nn.Parameter(torch.tensor([-1.0]))


def arc_face(*, whole: bool = True) -> nn.Module:
    return cz.ArcFace(CLASSES, D, scale=4.0, shard_over=None if whole else cz.World.of())


def weighted_sum() -> nn.Module:
    temperature = learnt()
    return cz.WeightedSum([cz.NTXent(temperature=temperature), cz.InfoNCE(temperature=0.5)], weights=[1.0, 0.5])


def mnrl(other: str = "doc_to_doc") -> nn.Module:
    return cz.MNRL(temperature=learnt(), directions=("query_to_doc", other))  # type: ignore[arg-type]  # why: a direction


def pml(name: str, *args: Any, **settings: Any) -> nn.Module:
    from pytorch_metric_learning import losses

    return getattr(losses, name)(*args, **settings)


def mined() -> dict[str, Any]:
    from pytorch_metric_learning import miners

    return {"miner": miners.TripletMarginMiner(margin=0.2, type_of_triplets="semihard")}


MARGIN, ARC, NORMALIZE = ("margin", (0.2, 0.3)), ("margin", (0.5, 0.3)), ("normalize", (True, False))
LOSSES = {
    "SigLIP, sum": Loss(lambda: cz.SigLIP(temperature=learnt(), reduction="sum"), setting=NORMALIZE),
    "Triplet, soft": Loss(
        lambda: cz.Triplet(mining="hard", metric="similarity", soft=True), "labels", ("margin", (0.05, 0.3))
    ),
    "Triplet, ties": Loss(
        lambda: cz.Triplet(mining="hard", metric="squared distance", soft=True, normalize=False),
        "whole numbers",
        ("margin", (0.05, 0.3)),
    ),
    "SupCon, first views": Loss(lambda: cz.SupCon(temperature=0.5, contrast_mode="one"), "stacked views"),
    "SupCon, mask": Loss(lambda: cz.SupCon(temperature=0.5), "mask"),
    "MNRL with negatives": Loss(
        lambda: cz.MNRL(temperature=0.5, directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction"),
        "three views",
        NORMALIZE,
    ),
    "SupCon, in": Loss(lambda: cz.SupCon(temperature=0.5, variant="in"), "labels"),
    "NCA": Loss(lambda: cz.NCA(temperature=learnt()), "labels", NORMALIZE),
    "TupletMargin": Loss(lambda: cz.TupletMargin(temperature=0.5), "labels"),
    "NPairs": Loss(lambda: cz.NPairs(temperature=0.5), "labels"),
    "DCLW": Loss(lambda: cz.DCLW(temperature=0.5)),
    "HCL": Loss(lambda: cz.HCL(temperature=0.5)),
    "Debiased": Loss(lambda: cz.Debiased(temperature=0.5)),
    "AlignUniform": Loss(cz.AlignUniform, setting=("t", (2.0, 1.0))),
    "MNRL of pairs": Loss(lambda: mnrl("doc_to_query"), setting=("partition_mode", ("joint", "per_direction"))),
    "MILNCE": Loss(lambda: cz.MILNCE(temperature=2.0), "texts", ("denominator", ("exact", "reference"))),
    "MaxSim": Loss(
        lambda: cz.MaxSim(temperature=learnt(), symmetric=True), "tokens", ("token_reduction", ("sum", "mean"))
    ),
    "MaxSimPairwise": Loss(lambda: cz.MaxSimPairwise(temperature=0.5), "tokens"),
    "MultiPositive": Loss(
        lambda: cz.MultiPositive(temperature=0.5), "ids", ("duplicates", ("positive", "ignore", "negative"))
    ),
    "ClipDistillation": Loss(lambda: cz.ClipDistillation(temperature=0.5), "teachers"),
    "GIST": Loss(lambda: MaskedGIST(temperature=learnt()), "teachers", ("margin", (0.0, 0.2))),
    "SignalToNoise": Loss(cz.SignalToNoise, "labels", ("neg_margin", (1.0, 0.8))),
    "Circle": Loss(lambda: cz.Circle(gamma=3.0), "labels", ("m", (0.4, 0.3))),
    "LiftedStructure": Loss(cz.LiftedStructure, "labels", ("neg_margin", (1.0, 0.8))),
    "GeneralizedLiftedStructure": Loss(cz.GeneralizedLiftedStructure, "labels", ("neg_margin", (1.0, 0.8))),
    "Margin": Loss(lambda: cz.Margin(nu=0.3), "labels", MARGIN),
    "RankedList": Loss(lambda: cz.RankedList(t_p=2.0, epsilon=1e-3), "labels", NORMALIZE),
    "FastAP": Loss(cz.FastAP, "labels", ("num_bins", (10, 5))),
    "NTXent": Loss(lambda: cz.NTXent(temperature=0.5)),
    "NTXent, learnt": Loss(lambda: cz.NTXent(temperature=learnt()), setting=NORMALIZE),
    "NTXent of three views": Loss(lambda: cz.NTXent(temperature=0.3), "three views"),
    "InfoNCE with negatives": Loss(lambda: cz.InfoNCE(temperature=0.3), "three views", NORMALIZE),
    "InfoNCE": Loss(lambda: cz.InfoNCE(temperature=learnt()), setting=("symmetric", (False, True))),
    "Clip": Loss(lambda: cz.Clip(temperature=learnt()), setting=NORMALIZE),
    "SupCon": Loss(lambda: cz.SupCon(temperature=0.5), "labels"),
    "SigLIP": Loss(lambda: cz.SigLIP(temperature=learnt(), logit_bias=bias()), setting=NORMALIZE),
    "SupSigmoid": Loss(lambda: cz.SupSigmoid(temperature=learnt(), logit_bias=bias()), "labels", NORMALIZE),
    "Contrastive": Loss(cz.Contrastive, "labels", ("neg_margin", (1.0, 0.8))),
    "MultiSimilarity": Loss(lambda: cz.MultiSimilarity(epsilon=0.1), "labels", ("base", (0.5, 0.3))),
    "Triplet": Loss(lambda: cz.Triplet(mining="hard"), "labels", ("margin", (0.05, 0.3))),
    "SINCERE": Loss(lambda: cz.SINCERE(temperature=learnt()), "labels", NORMALIZE),
    "DCL": Loss(lambda: cz.DCL(temperature=0.5)),
    "RowLoss": Loss(BatchHard, "labels", NORMALIZE),
    "MNRL": Loss(mnrl, "mined", ("partition_mode", ("joint", "per_direction"))),
    "MNRL, masked": Loss(lambda: MaskedMNRL(temperature=learnt()), "mined", ("false_negative_margin", (0.1, -0.05))),
    "WeightedSum": Loss(weighted_sum, setting=("losses.1.temperature", (0.5, 0.3))),
    "WeightedSum of MNRL": Loss(
        lambda: cz.WeightedSum([mnrl()]), "mined", ("losses.0.partition_mode", ("joint", "per_direction"))
    ),
    "Matryoshka": Loss(
        lambda: cz.Matryoshka(cz.InfoNCE(temperature=learnt()), (2, D)),
        setting=("loss.symmetric", (False, True)),
    ),
    "CrossBatchMemory": Loss(
        lambda: cz.CrossBatchMemory(cz.InfoNCE(temperature=0.5), 7, D),
        setting=("loss.temperature", (0.5, 0.3)),
        remembers=True,
    ),
    "ArcFace": Loss(arc_face, "labels", ARC),
    "ArcFace, sharded": Loss(arc_face, "labels", ARC, sharded=True),
    "WeightedSum of ArcFace, sharded": Loss(
        lambda *, whole=True: cz.WeightedSum([arc_face(whole=whole)]),
        "labels",
        ("losses.0.margin", (0.5, 0.3)),
        sharded=True,
    ),
    "PML triplet with a miner": Loss(
        lambda: pml("TripletMarginLoss", margin=0.2), "labels", MARGIN, mined, third_party=True
    ),
    "PML proxies": Loss(
        lambda: pml("ProxyAnchorLoss", CLASSES, D, alpha=4), "labels", ("margin", (0.1, 0.2)), third_party=True
    ),
}


@functools.cache
def can_ring(name: str) -> bool:
    if LOSSES[name].third_party or name in ("SupCon, mask", "MNRL", "WeightedSum of MNRL"):  # of their arguments
        return False
    return LOSSES[name].make().ring_problem() is None


def _others() -> dict[str, Loss]:
    """Losses of the catalogue that the table lacks, which may ring, and which can be called as their entry says."""
    made = {type(loss.make()) for loss in LOSSES.values() if not loss.third_party}
    entries = [x for x in CATALOGUE.values() if x.loss not in made and "normalize" in x.loss.fields]
    return {
        x.name: Loss(x.make, x.call, NORMALIZE)
        for x in entries
        if x.call != "other" and x.make().ring_problem() is None
    }


LOSSES |= _others()


def global_rows(compares: Compares, total: int, seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def embeddings() -> Tensor:
        return torch.randn(total, D, dtype=torch.float64, generator=generator).to(dtype)

    if (count := {"views": 2, "three views": 3, "teachers": 4}.get(compares)) is not None:
        return [embeddings() for _ in range(count)]
    if compares == "texts":
        return [embeddings(), torch.stack([embeddings(), embeddings()], 1)]
    if compares == "tokens":
        towers = [torch.stack([embeddings() for _ in range(length)], 1) for length in (2, 3)]
        valid = [torch.randint(2, x.shape[:2], generator=generator) for x in towers]
        return [*towers, *(x.index_fill(1, torch.tensor(0), 1) for x in valid)]  # one token is always there
    if compares == "stacked views":
        return [torch.stack([embeddings() for _ in range(3)], 1)]
    if compares == "mask":
        return [embeddings(), torch.rand(total, total, generator=generator) < 0.3]
    if compares in ("labels", "ids", "whole numbers"):
        towers = [embeddings() for _ in range(2 if compares == "ids" else 1)]
        towers = [x.round() for x in towers] if compares == "whole numbers" else towers
        return [*towers, torch.randint(CLASSES, (total,), generator=generator)]
    owners = torch.arange(total).where(torch.rand(total, generator=generator) < 0.7, -1)
    return [embeddings(), embeddings(), embeddings(), owners]


def local_rows(compares: Compares, rows: list[Tensor], start: int, size: int) -> list[Tensor]:
    mine = [x[start : start + size] for x in rows]
    if compares == "mined":
        mine[3] = torch.where(mine[3] < 0, -1, mine[3] - start)
    return mine


def called(loss: Callable[..., Tensor], compares: Compares, *rows: Tensor) -> Tensor:
    names = ("mask",) if compares == "mask" else ()
    return loss(*rows[: 1 if names else None], **dict(zip(names, rows[1:], strict=False)))
