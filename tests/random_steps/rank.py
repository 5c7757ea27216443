"""One rank of random steps, and beside it the same steps on one process: a twin of the loss, called with all embeddings."""

import copy
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import contrastive_zoo as cz
from tests.helpers import EXACT, distance, groups
from tests.random_steps.changes import Change, Rows, changes_of, of_user_code
from tests.random_steps.losses import LOSSES, Loss, global_rows, local_rows

Action = tuple[str, Mapping[str, Any]]
Batch = tuple[int, ...]  # shard sizes
How = Literal["", "second wrapper", "subgroup", "one step", "checkpoint", "reentrant checkpoint", "no_grad", "eval"]
Backward = Literal["each", "together", "twice", "none"]
Precision = Literal["float64", "float32", "autocast"]
Numbers = dict[str, list[Tensor]]
Run, Local = Callable[..., Tensor], Callable[[list[Tensor], Batch], list[Tensor]]

TIMES, LEAST = 8, 1e-5
"""In 32 bits and under autocast the error may be so many times that of the dense formula, or this, where that is exact."""
KEPT = {"hides in rows": "tiling", "hides in compute": "PAYLOAD"}
"""Thresholds that a loss keeps: one draws by block, and the samples of one always fit."""
SEED = torch.default_generator.manual_seed  # torch.manual_seed also records the caller's stack, which takes long
ROWS, PARAMETERS = "gradient of the embeddings", "gradient of the loss's parameters"


def play(name: str, patches: Mapping[str, Any], program: Sequence[Action]) -> list[str]:
    """Run a program on this rank, with other thresholds or functions of the package; a step that is wrong is an error.

    Return what each change came to: the words of all ranks' error, or "right".
    """
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")  # that the twin sees its own embeddings only
        for path, x in patches.items():
            if KEPT.get(name, "-") not in path:
                stack.enter_context(patch(f"contrastive_zoo.{path}", x))
        rank = Rank(LOSSES[name])
        for number, (action, named) in enumerate(program, 1):
            try:
                getattr(rank, action)(**named)
            except Exception as error:
                raise AssertionError(f"action {number}, {action}, {named}: {type(error).__name__}: {error}") from error
            if rank.is_over:
                break
        dist.barrier()
        dist.destroy_process_group(rank.judges)  # its threads would outlive the program
        return rank.ends


class Rank:
    """A loss, its wrapper, and a twin that one process calls; every method is an action of all ranks."""

    def __init__(self, kind: Loss) -> None:
        self.kind, self.ends, self.seed = kind, list[str](), 0
        self.loss, self.twin = self._made(), self._made(whole=True)
        self.options: dict[str, Any] = {"grad_reduction": "mean"}
        self.precision, self.dtype = "float64", torch.float64
        self.budget: int | None = None
        self.hooked = self.called = self.is_over = False
        self.is_last = dist.get_rank() == dist.get_world_size() - 1
        self.wrapper = self.wrapped()
        self.judges = dist.new_group()  # whatever becomes of the group of the loss

    def step(self, batches: Sequence[Batch], *, how: How = "", backward: Backward = "each") -> None:
        """One or several calls, whose numbers are those of one process."""
        with groups([0], range(1, dist.get_world_size())) if how == "subgroup" else nullcontext() as group:
            calls = Calls(self, batches, how, "none" if how in ("no_grad", "eval") else backward, group)
            modules = [x for x in (self.wrapper, self.twin) if isinstance(x, nn.Module)]
            for module in modules:
                module.train(how != "eval")
            wanted = calls.on_one_process()
            problem = wanted and calls.problem(*wanted)
            assert not problem, problem
        for module in modules:
            module.train()
        self._move()

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
        self.precision, self.dtype = precision, torch.float64 if precision == "float64" else torch.float32
        for loss in (self.loss, self.twin):
            loss.to(self.dtype)
        if self.kind.remembers:  # the state of 32 bits is rounded otherwise on ranks
            self.twin.load_state_dict(self.loss.state_dict())

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
        if on == "one" and not (self.is_last and self.called):  # a first call meets no wrapper that is made later
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

    def change(self, batches: Sequence[Batch], *, number: int = 0, what: str = "", everywhere: bool = False) -> None:
        """The last rank, or every rank and the twin, changes something before the first of these steps.

        All ranks are right, or refuse it with the same words: at once, or soon if they cannot read it. Then the change is
        undone; after a refusal at once the training goes on.
        """
        found = [*(of_user_code(self.loss) if everywhere else changes_of(self.wrapper))]
        change = next((x for x in found if x.what == what), found[number % len(found)])
        assert what in ("", change.what), f"no such change; these are there: {[x.what for x in found]}"
        moves = self.kind.user_code and self.kind.remembers  # a state, on every rank, in unknown ways
        may_be_late, wrong = change.hidden or self.hooked or moves, ""
        first_calls = patch("contrastive_zoo.wrapper.call_history._FIRST_CALLS", 10**9)  # ranks compare their behaviour
        with first_calls, ExitStack() as undo:
            if everywhere:
                undo.enter_context(next(x.made for x in of_user_code(self.twin) if x.what == change.what)())
            # the last step may be the first that shares the work, which ranks compare up to two steps later
            for late, batch in enumerate([*batches, *batches[-1:] * 2]):
                made = change if late == 0 and (everywhere or self.is_last) else Change("")
                refused, texts = zip(*self._ends(batch, made, undo), strict=True)
                if any(refused):
                    assert all(refused), f"{change.what}: only some ranks refuse: {texts}"
                    assert len({*texts}) == 1, f"{change.what}: ranks refuse with different words: {texts}"
                    assert late == 0 or may_be_late, f"{change.what}: refused {late} steps late: {texts[0]}"
                    assert not (everywhere and change.right), f"{change.what} on all ranks is refused: {texts[0]}"
                    self.is_over = moves or late > 0 or not texts[0].startswith(("ValueError", "TypeError"))
                    self.ends.append(texts[0])
                    return
                wrong = wrong or max(texts)
                assert may_be_late or not wrong, f"{change.what}: not refused at once: {wrong}"
        assert not wrong, f"{change.what}: never refused: {wrong}"
        self.is_over = not everywhere
        self.ends.append("right")

    def _ends(self, batch: Batch, change: Change, undo: ExitStack) -> list[tuple[bool, str]]:
        """Make the change and take a step; return for each rank whether it refuses, and the error or what is wrong."""
        calls, end = Calls(self, [batch], draws="noise" in change.what), (False, "")
        wanted = calls.on_one_process()
        undo.enter_context(change.made())
        if wanted is not None:
            try:
                end = False, calls.problem(*wanted, change.of_rows)
            except (ValueError, TypeError, RuntimeError) as error:  # the last is autograd's, if no rank has a gradient
                end, self.twin = (True, f"{type(error).__name__}: {error}"), calls.before
        ends: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ends, end, self.judges)
        if not end[0]:
            self._move()
        return ends

    def _made(self, *, whole: bool = False) -> Any:
        SEED(0)
        loss = self.kind.make(whole=whole) if self.kind.sharded else self.kind.make()
        return loss.double() if isinstance(loss, nn.Module) else loss

    def wrapped(self, **options: Any) -> cz.DistributedLoss:
        return cz.DistributedLoss(self.loss, miner=self.kind.miner(), **self.options, **options)

    @torch.no_grad()
    def _move(self) -> None:
        for parameter in (*parameters_of(self.loss), *parameters_of(self.twin)):
            parameter.mul_(0.97)


@dataclass
class Calls:
    """One or several calls, on the ranks and on one process."""

    of: Rank
    batches: Sequence[Batch]
    how: How = ""
    backward: Backward = "each"
    group: Any = None
    draws: bool = False  # private random numbers, which plain formulas draw in another order

    def __post_init__(self) -> None:
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.seed, self.of.seed = self.of.seed, self.of.seed + len(self.batches)
        SEED(self.seed)  # of the twin and of rank 0, by which all ranks draw
        self.before = copy.deepcopy(self.of.twin) if self.of.kind.remembers else self.of.twin

    def _on_ranks(self, of_rows: Rows) -> Numbers:
        of, is_other = self.of, self.how in ("second wrapper", "subgroup")
        call = of.wrapped(process_group=self.group) if is_other else of.wrapper

        repeated = functools.partial(checkpoint, call, use_reentrant="reentrant" in self.how)

        def run(*rows: Tensor) -> Tensor:
            with nullcontext() if of.budget is None else cz.engine.memory_budget(of.budget):
                value: Tensor = (repeated if "checkpoint" in self.how else call)(*of_rows([*rows]))
            of.called |= call is of.wrapper
            return value

        return self._numbers(run, call, of.dtype, lambda x, y: local_rows(of.kind, x, y, self.rank))

    def on_one_process(self) -> tuple[Numbers, float] | None:
        """Return the numbers of one process, and how near to them ranks must come; None if it refuses these samples."""
        of = self.of
        try:
            found = self._of_twin(of.twin, of.dtype)
        except (ValueError, RuntimeError, IndexError):
            of.twin = self.before
            return None
        if of.precision == "float64":
            return found, EXACT
        truth = self._of_twin(copy.deepcopy(self.before).double(), torch.float64)
        errors = [distance(x, y) for what in found for x, y in zip(found[what], truth[what], strict=True)]
        return truth, max(LEAST, TIMES * max(errors))

    def _of_twin(self, loss: Any, dtype: torch.dtype) -> Numbers:
        miner = self.of.kind.miner()
        run = (lambda *rows: loss(*rows, miner(*rows))) if miner else loss
        with torch.random.fork_rng(devices=[]), nullcontext() if self.draws else cz.engine.plain_formulas():
            return self._numbers(run, loss, dtype, lambda rows, _: rows)

    def _numbers(self, run: Run, loss: Any, dtype: torch.dtype, local: Local) -> Numbers:
        """Call ``run`` once a batch, with what ``local`` leaves of it; return all numbers of the loss or its wrapper."""
        values, leaves, calls = [], [], []
        autocast = self.of.precision == "autocast" and dtype == torch.float32
        for parameter in parameters_of(loss):
            parameter.grad = None
        repeated = cz.one_step(loss) if self.how == "one step" else nullcontext()
        with torch.no_grad() if self.how == "no_grad" else nullcontext(), repeated as step:
            for seed, of_all in enumerate(self.batches, self.seed):
                shards = _among(of_all, self.size)
                rows = local(global_rows(self.of.kind, sum(shards), seed, self.of.dtype), shards)  # rounded alike
                rows = [x.to(dtype).requires_grad_() if x.is_floating_point() else x for x in rows]
                leaves += [x for x in rows if x.is_floating_point()]
                with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
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
        found = {"value": [x.detach() for x in values], "state": [x.detach().to(dtype, copy=True) for x in state]}
        for what, of in ((ROWS, leaves), (PARAMETERS, parameters_of(loss))):
            found[what] = [torch.zeros_like(x) if x.grad is None else x.grad.clone() for x in of]
        return found

    def problem(self, expected: Numbers, tolerance: float, of_rows: Rows = lambda rows: rows) -> str:
        """Call on the ranks; return which number of this rank is not that of one process."""
        for what, of_rank in self._on_ranks(of_rows).items():
            for index, (x, whole) in enumerate(zip(of_rank, expected[what], strict=True)):
                y = self._of_rank(what, index, whole)
                if x.shape != y.shape:
                    return f"{what}: shape {list(x.shape)}; one process's: {list(y.shape)}"
                if not distance(x, y) <= tolerance:
                    return f"{what}: error {distance(x, y):.2g} > {tolerance:.2g}; {x}, expected {y}"
        return ""

    def _of_rank(self, what: str, index: int, whole: Tensor) -> Tensor:
        """Return what this rank must have where one process has ``whole``."""
        averaged = self.of.options["grad_reduction"] == "mean"
        if what == ROWS:
            shards = _among(self.batches[index // self.of.kind.towers], self.size)
            return whole.split([*shards])[self.rank] * (self.size if averaged else 1)
        if what == PARAMETERS and self.of.kind.sharded:
            return whole.tensor_split(self.size)[self.rank]
        return whole / self.size if what == PARAMETERS and not averaged else whole


def parameters_of(loss: Any) -> list[nn.Parameter]:
    return list(loss.parameters()) if isinstance(loss, nn.Module) else []


def _among(shards: Batch, size: int) -> Batch:
    """Shard sizes of the ranks that share a batch: all, or those of a subgroup, of which someone has something."""
    *others, last = shards[-size:]
    return *others, last or int(not any(others))
