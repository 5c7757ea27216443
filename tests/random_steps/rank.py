"""One rank of random steps, and beside it the same steps on one process: a twin of the loss, called with all embeddings."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import contrastive_zoo as cz
from tests.helpers import EXACT, distance
from tests.random_steps.changes import Change, Rows, changes_of, of_user_code
from tests.random_steps.losses import LOSSES, Loss, global_rows, local_rows

Action = tuple[str, Mapping[str, Any]]
Batch = tuple[int, ...]
"""Shard sizes."""
How = Literal["", "second wrapper", "subgroup", "one step", "checkpoint", "reentrant checkpoint", "no_grad", "eval"]
Backward = Literal["each", "together", "twice", "none"]
Precision = Literal["float64", "float32", "autocast"]
Swapped = Literal["first calls", "later calls", "backward passes"]
Numbers = dict[str, list[Tensor]]
Run, Local = Callable[..., Tensor], Callable[[list[Tensor], Batch], list[Tensor]]

TIMES = 8
"""In 32 bits and under autocast the error may be so many times that of the dense formula."""
LEAST = 1e-5
"""Or this, where the dense formula happens to be exact; relative to the larger of 1 and what is compared with."""
KEPT = {"hides in rows": "tiling", "hides in compute": "PAYLOAD"}
"""Thresholds that a loss keeps: one draws by block, and the samples of one always fit."""
MOVE = 0.97
SEED = torch.default_generator.manual_seed  # torch.manual_seed also records the caller's stack, which takes long
VALUE, ROWS, PARAMETERS = "value", "gradient of the embeddings", "gradient of the loss's parameters"


@contextmanager
def limits(values: Mapping[str, Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for name, x in values.items():
            stack.enter_context(patch(name.replace(":", "."), x))
        yield


class Played(NamedTuple):
    actions: int  # that ran
    ends: list[str]  # what each change came to: the words of all ranks' error, or "right"


def play(name: str, thresholds: Mapping[str, Any], program: Sequence[Action]) -> Played:
    """Run a program on this rank; a step that is wrong is an error."""
    thresholds = {key: x for key, x in thresholds.items() if KEPT.get(name, "-") not in key}
    with limits(thresholds), warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")  # that the twin sees its own embeddings only
        rank, number = Rank(LOSSES[name], stack), 0
        for number, (action, arguments) in enumerate(program, 1):
            try:
                getattr(rank, action)(**arguments)
            except Exception as error:
                told = ", ".join(f"{k}={x!r}" for k, x in arguments.items())
                raise AssertionError(f"action {number}, {action}({told}): {type(error).__name__}: {error}") from error
            if rank.is_over:
                break
        dist.barrier()
        dist.destroy_process_group(rank.judges)  # its threads would outlive the program
        return Played(number, rank.ends)


class Rank:
    """A loss, its wrapper, and a twin that one process calls; every method is an action of all ranks."""

    def __init__(self, kind: Loss, stack: ExitStack) -> None:
        self.kind, self.stack = kind, stack  # the stack undoes changes of all ranks at the end
        self.ends: list[str] = []
        self.loss, self.twin = self._made(), self._made(whole=True)
        self.options: dict[str, Any] = {"grad_reduction": "mean"}
        self.precision: Precision = "float64"
        self.budget: int | None = None
        self.hooked = self.called = self.is_over = False
        self.wrapper = self.wrapped()
        self.seed = 0
        self.judges = dist.new_group()  # whatever becomes of the group of the loss

    def step(self, batches: Sequence[Batch], *, how: How = "", backward: Backward = "each") -> None:
        """One or several calls, whose numbers are those of one process."""
        group = None
        if how == "subgroup":  # one rank by itself, all others together
            groups = [dist.new_group(ranks) for ranks in ([0], list(range(1, dist.get_world_size())))]
            group = groups[dist.get_rank() > 0]
        calls = Calls(self, self._seeded(batches), how, "none" if how in ("no_grad", "eval") else backward, group)
        self._train(how != "eval")
        wanted = calls.on_one_process()
        if wanted is not None:
            problem = calls.problem(calls.on_ranks(), *wanted)
            assert problem is None, problem
        self._train(True)
        self._move()
        if group:
            dist.barrier()
            dist.destroy_process_group(group)

    def set_setting(self, value: Any) -> None:
        for loss in (self.loss, self.twin) if self.kind.setting else ():
            path, _, name = self.kind.setting[0].rpartition(".")
            setattr(loss.get_submodule(path), name, value)

    def set_option(self, **options: Any) -> None:
        """Other options of the wrapper, on all ranks: those that are attributes are set, for the others it is made anew."""
        self.options |= options
        if set(options) == {"grad_reduction"}:
            self.wrapper.grad_reduction = options["grad_reduction"]
        else:
            self.wrapper, self.called = self.wrapped(), False

    def set_precision(self, precision: Precision) -> None:
        self.precision = precision
        for loss in (self.loss, self.twin):
            loss.to(self.dtype)
        if self.kind.remembers:  # the state of 32 bits is rounded otherwise on ranks
            for of_one, of_ranks in zip(self.twin.buffers(), self.loss.buffers(), strict=True):
                of_one.copy_(of_ranks)

    def set_hook(self, on: bool) -> None:
        """The user's code after every call, which sees the value of all ranks' embeddings; or no longer."""
        self.hooked = on
        for loss in (self.loss, self.twin):
            loss._forward_hooks.clear()
            if on:
                loss.register_forward_hook(lambda module, args, value: 3 * value)

    def set_budget(self, size: int | None) -> None:
        self.budget = size

    def make_again(self, on: Literal["all", "one"], how: Literal["wrapper", "deepcopy", "state_dict"]) -> None:
        """Put another object in the wrapper's place, on all ranks or on the last one."""
        if on == "one" and not (_is_last() and self.called):  # a first call meets no wrapper that is made later
            return
        self.called &= on == "one"
        if how == "deepcopy":
            self.wrapper = copy.deepcopy(self.wrapper)
            self.loss = self.wrapper.loss
            return
        state = self.wrapper.state_dict()
        self.wrapper.trainer = [self.wrapper]  # a reference cycle, as trainers make them
        if how == "state_dict":
            self.loss = copy.deepcopy(self.loss)
            for x in (*self.loss.parameters(), *self.loss.buffers()):
                x.data = torch.zeros_like(x)
        self.wrapper = self.wrapped()
        self.wrapper.load_state_dict(state)

    def change(
        self, batches: Sequence[Batch], *, group: int = 0, number: int = 0, what: str = "", everywhere: bool = False
    ) -> None:
        """The last rank, or every rank and the twin, changes something before the first of these steps.

        All ranks are right, or refuse it with the same words: at once, or soon if they cannot read it. After a refusal at
        once the change is undone, and the training goes on.
        """
        groups = [[*of_user_code(self.loss)]] if everywhere else changes_of(self.wrapper)
        drawn = groups[group % len(groups)]
        change = next((x for of in groups for x in of if x.what == what), drawn[number % len(drawn)])
        assert what in ("", change.what), f"no such change; these are there: {[x.what for of in groups for x in of]}"
        undo = self.stack.enter_context(ExitStack())
        if everywhere:
            undo.enter_context(next(x.made for x in of_user_code(self.twin) if x.what == change.what)())
        moves = self.kind.user_code and self.kind.remembers  # a state, on every rank, in unknown ways
        may_be_late, wrong = change.hidden or self.hooked or moves, ""
        with patch("contrastive_zoo.wrapper.call_history._FIRST_CALLS", 10**9):  # of which ranks compare the behaviour
            for index, batch in enumerate(batches):
                made = change if index == 0 and (everywhere or _is_last()) else Change("")
                ends = self._ends(batch, made, undo, everywhere)
                kinds, texts = {kind for kind, _ in ends}, [text for _, text in ends]
                if kinds == {"refused"}:
                    assert len(set(texts)) == 1, f"{change.what}: ranks refuse with different words: {texts}"
                    assert index == 0 or may_be_late, f"{change.what}: refused {index} steps late: {texts[0]}"
                    is_right = everywhere and change.right
                    assert not is_right, f"{change.what}: equal on all ranks, and refused: {texts[0]}"
                    self.ends.append(texts[0])
                    self.is_over = moves or index > 0 or not texts[0].startswith(("ValueError", "TypeError"))
                    undo.close()
                    return
                assert "refused" not in kinds, f"{change.what}: only some ranks refuse: {ends}"
                assert may_be_late or "wrong" not in kinds, f"{change.what}: {ends}"
                wrong = wrong or max(texts)
        assert not wrong, f"{change.what}: never refused: {wrong}"
        self.ends.append("right")
        self.is_over = not everywhere
        if everywhere:
            undo.close()

    def swap(self, what: Swapped) -> None:
        """The last rank calls the second of two wrappers first, or runs its backward pass first: all ranks are told so."""
        group, order = dist.new_group(), slice(None, None, -1 if _is_last() else 1)  # the group is lost
        with patch("contrastive_zoo.wrapper.call_history._made", 0):
            wrappers = [self.wrapped(process_group=group) for _ in range(2)]
        shards = (4,) * dist.get_world_size()
        whole = global_rows(self.kind, sum(shards), self.seed, self.dtype)
        rows = [x.requires_grad_(x.is_floating_point()) for x in local_rows(self.kind, whole, shards, dist.get_rank())]
        try:
            values = [call(*rows) for call in wrappers] if what != "first calls" else []
            for x in (values if what == "backward passes" else wrappers)[order]:
                x.backward() if what == "backward passes" else x(*rows)
        except cz.CommunicationError as error:
            self.ends.append(str(error))
        self.is_over = True

    def _ends(self, batch: Batch, change: Change, undo: ExitStack, everywhere: bool) -> list[tuple[str, str]]:
        """Make the change and take a step; return how it ended on each rank: right, wrong or refused, and the words."""
        before = self.twin if everywhere else copy.deepcopy(self.twin)
        calls, end = Calls(self, self._seeded([batch]), draws="noise" in change.what), ("right", "")
        wanted = calls.on_one_process()
        undo.enter_context(change.made())
        if wanted is not None:
            try:
                problem = calls.problem(calls.on_ranks(change.of_rows), *wanted)
                end = ("wrong", problem) if problem else end
            except (ValueError, TypeError, RuntimeError) as error:  # the last is autograd's, if no rank has a gradient
                end, self.twin = ("refused", f"{type(error).__name__}: {error}"), before
        ends: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ends, end, self.judges)
        if end[0] != "refused":
            self._move()
        return ends

    def _seeded(self, batches: Sequence[Batch]) -> list[tuple[Batch, int]]:
        first, self.seed = self.seed, self.seed + len(batches)
        SEED(first)  # of the twin and of rank 0, by which all ranks draw
        return [(shards, first + index) for index, shards in enumerate(batches)]

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "float64" else torch.float32

    def _made(self, *, whole: bool = False) -> Any:
        SEED(0)
        loss = self.kind.make(whole=whole) if self.kind.sharded else self.kind.make()
        return loss.double() if isinstance(loss, nn.Module) else loss

    def wrapped(self, **options: Any) -> cz.DistributedLoss:
        return cz.DistributedLoss(self.loss, **{**self.kind.wrapper(), **self.options, **options})

    def _train(self, training: bool) -> None:
        for module in (self.wrapper, self.twin):
            if isinstance(module, nn.Module):
                module.train(training)

    def _move(self) -> None:
        with torch.no_grad():
            for parameter in (*parameters_of(self.loss), *parameters_of(self.twin)):
                parameter.mul_(MOVE)


@dataclass
class Calls:
    """One or several calls, on the ranks and on one process."""

    of: Rank
    batches: Sequence[tuple[Batch, int]]  # with seeds
    how: How = ""
    backward: Backward = "each"
    group: Any = None
    draws: bool = False  # private random numbers, which plain formulas draw in another order

    def __post_init__(self) -> None:
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)

    def on_ranks(self, of_rows: Rows = lambda rows: rows) -> Numbers:
        of, is_other = self.of, self.how in ("second wrapper", "subgroup")
        call = of.wrapped(process_group=self.group) if is_other else of.wrapper

        def run(*rows: Tensor) -> Tensor:
            with ExitStack() as stack:
                if of.budget is not None:
                    stack.enter_context(cz.engine.memory_budget(of.budget))
                if of.precision == "autocast":
                    stack.enter_context(torch.autocast("cpu", torch.bfloat16))
                rows = tuple(of_rows([*rows]))
                if "checkpoint" in self.how:
                    value = checkpoint(call, *rows, use_reentrant=self.how != "checkpoint")
                else:
                    value = call(*rows)
            of.called |= call is of.wrapper
            assert isinstance(value, Tensor)
            return value

        return self._numbers(run, call, of.loss, of.dtype, lambda x, y: local_rows(of.kind, x, y, self.rank))

    def on_one_process(self) -> tuple[Numbers, float] | None:
        """Return the numbers of one process, and how near to them ranks must come; None if it refuses these samples."""
        of = self.of
        before = copy.deepcopy(of.twin) if of.kind.remembers else of.twin
        exact = copy.deepcopy(of.twin) if of.precision != "float64" else None
        try:
            found = self._of_twin(of.twin, of.dtype)
        except (ValueError, RuntimeError, IndexError):
            of.twin = before
            return None
        if exact is None:
            return found, EXACT
        truth = self._of_twin(exact.double(), torch.float64)
        errors = [distance(x, y) for what in found for x, y in zip(found[what], truth[what], strict=True)]
        return truth, max(LEAST, TIMES * max(errors))

    def _of_twin(self, loss: Any, dtype: torch.dtype) -> Numbers:
        autocast = self.of.precision == "autocast" and dtype == torch.float32
        formulas = nullcontext if self.draws else cz.engine.plain_formulas
        miner = self.of.kind.wrapper().get("miner")

        def run(*rows: Tensor) -> Tensor:
            with formulas(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                value: Tensor = loss(*rows, *([miner(*rows)] if miner else []))
            return value

        with torch.random.fork_rng(devices=[]):
            return self._numbers(run, loss, loss, dtype, lambda rows, _: rows)

    def _numbers(self, run: Run, call: Any, loss: Any, dtype: torch.dtype, local: Local) -> Numbers:
        """Call ``run`` once a batch, with what ``local`` leaves of it; return all numbers."""
        values, leaves, calls = [], [], []
        for parameter in parameters_of(loss):
            parameter.grad = None
        repeated = cz.one_step(call) if self.how == "one step" else nullcontext()
        with torch.no_grad() if self.how == "no_grad" else nullcontext(), repeated as step:
            for shards, seed in self.batches:
                shards = _among(shards, self.size)
                rows = local(global_rows(self.of.kind, sum(shards), seed, self.of.dtype), shards)  # rounded alike
                rows = [x.to(dtype).requires_grad_() if x.is_floating_point() else x for x in rows]
                leaves += [x for x in rows if x.is_floating_point()]
                values.append(run(*rows))
                calls.append([x.detach() for x in rows])
                if self.backward == "each":
                    values[-1].backward()
            if step is not None:
                with step.again():
                    again = torch.stack([run(*rows).detach() for rows in calls])
                assert distance(again, torch.stack(values).detach()) <= EXACT, "a call differs when it is repeated"
        if self.backward in ("together", "twice"):
            total = sum((i * value for i, value in enumerate(values, 1)), torch.zeros(()))
            for is_last in (False, True)[self.backward == "together" :]:
                total.backward(retain_graph=not is_last)
        state = [*loss.buffers()] if self.of.kind.remembers and not self.of.kind.user_code else []
        return {
            VALUE: [x.detach() for x in values],
            ROWS: [_gradient(x) for x in leaves],
            PARAMETERS: [_gradient(x) for x in parameters_of(loss)],
            "state": [x.detach().to(dtype, copy=True) for x in state],
        }

    def problem(self, found: Numbers, expected: Numbers, tolerance: float) -> str | None:
        """Return which number of this rank is not that of one process."""
        for what, of_rank in found.items():
            for index, (x, whole) in enumerate(zip(of_rank, expected[what], strict=True)):
                y = self._of_rank(what, index, whole)
                if x.shape != y.shape:
                    return f"{what}: shape {list(x.shape)}; one process's: {list(y.shape)}"
                if not distance(x, y) <= tolerance:
                    return f"{what}: error {distance(x, y):.2g} > {tolerance:.2g}; {x}, expected {y}"
        return None

    def _of_rank(self, what: str, index: int, whole: Tensor) -> Tensor:
        """Return what this rank must have where one process has ``whole``."""
        averaged = self.of.options["grad_reduction"] == "mean"
        if what == ROWS:
            shards = _among(self.batches[index // self.of.kind.towers][0], self.size)
            return whole.split([*shards])[self.rank] * (self.size if averaged else 1)
        if what == PARAMETERS and self.of.kind.sharded:
            return whole.tensor_split(self.size)[self.rank]
        return whole / self.size if what == PARAMETERS and not averaged else whole


def parameters_of(loss: Any) -> list[nn.Parameter]:
    return list(loss.parameters()) if isinstance(loss, nn.Module) else []


def _gradient(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad.clone()


def _among(shards: Sequence[int], size: int) -> tuple[int, ...]:
    """Shard sizes of the ranks that share a batch: all, or those of a subgroup, of which someone has something."""
    few = list(shards[-size:])
    few[-1] += not sum(few)
    return tuple(few)


def _is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1
