"""One rank of a random training, and beside it the same training on one process: a twin of the loss, on all embeddings."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import contrastive_zoo as cz
from tests.helpers import EXACT, distance
from tests.stateful_losses import LOSSES, Loss, called, global_rows, local_rows

Action = tuple[str, Mapping[str, Any]]
"""A method of :class:`Rank`, and what it is called with."""
Precision = Literal["float64", "float32", "autocast"]

TIMES = 8
"""In 32 bits and under autocast the error may be so many times that of the dense formula."""
LEAST = 1e-5
"""Or this, where the dense formula happens to be exact; relative to the larger of 1 and what is compared with."""
MOVE = 0.97
"""What every parameter is multiplied by after a step."""


@contextlib.contextmanager
def limits(values: Mapping[str, Any]) -> Iterator[None]:
    """Within it, module constants named ``module:NAME`` have these values."""
    with contextlib.ExitStack() as stack:
        for name, x in values.items():
            stack.enter_context(patch(name.replace(":", "."), x))
        yield


def play(name: str, thresholds: Mapping[str, int], program: Sequence[Action]) -> list[str]:
    """Run on every rank: all actions, one after the other; what was refused on the way."""
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
        """Call the loss once for each batch, (shards, seed), go backward, and compare with the twin."""
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
        """A validation step: the value alone."""
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
        """Another temperature, margin, …, on all ranks."""
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
        """Embeddings of another dtype, or autocast around the loss."""
        self.precision = precision
        for loss in (self.loss, self.twin):
            loss.to(self._dtype)

    def set_hook(self, on: bool) -> None:
        """The user's code after every call, which sees the value of all ranks' embeddings; or no longer."""
        self.hooked = on
        for loss in (self.loss, self.twin):
            _hook(loss, on)

    def set_budget(self, size: int | None) -> None:
        """Bytes of logits that may be held."""
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
            ring = {"ring": True} if isinstance(self.options.get("ring"), tuple) else {}  # of all ranks
            return dist.get_rank(group), dist.get_world_size(group), self._wrapped(process_group=group, **ring)
        call = self._wrapped() if wrapper == "second" else self.wrapper
        return dist.get_rank(), dist.get_world_size(), call

    def _local(self, shards: Sequence[int], seed: int, rank: int, size: int) -> list[Tensor]:
        """This rank's leaves."""
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
