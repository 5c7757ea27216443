"""One rank of random steps, and beside it the same steps on one process: a twin of the loss, called with all embeddings."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import contrastive_zoo as cz
from contrastive_zoo.loss_base.loss_modules import is_third_party
from tests.helpers import EXACT, distance
from tests.random_steps.changes import Change, Rows, changes_of, of_user_code
from tests.random_steps.losses import LOSSES, D, Loss, global_rows, local_rows

Action = tuple[str, Mapping[str, Any]]
Batch = tuple[int, ...]
"""Shard sizes."""
Precision = Literal["float64", "float32", "autocast"]
Backward = Literal["each", "together", "twice", "none"]

TIMES = 8
"""In 32 bits and under autocast the error may be so many times that of the dense formula."""
LEAST = 1e-5
"""Or this, where the dense formula happens to be exact; relative to the larger of 1 and what is compared with."""
KEPT = {"a counter": "tiling", "hides in rows": "tiling", "hides in compute": "PAYLOAD"}
"""Thresholds that a loss keeps: one counts its blocks, one draws by block, and the samples of one always fit."""
MOVE = 0.97


@contextlib.contextmanager
def limits(values: Mapping[str, Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name, x in values.items():
            stack.enter_context(patch(name.replace(":", "."), x))
        yield


class Played(NamedTuple):
    actions: int  # that ran
    ends: list[str]  # what each change came to: the words of all ranks' error, or "right"


def play(name: str, thresholds: Mapping[str, Any], program: Sequence[Action]) -> Played:
    """Run a program on this rank; a step that is wrong is an error."""
    thresholds = {key: x for key, x in thresholds.items() if KEPT.get(name, "-") not in key}
    with limits(thresholds), warnings.catch_warnings(), contextlib.ExitStack() as stack:
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

    def __init__(self, kind: Loss, stack: contextlib.ExitStack) -> None:
        self.kind, self.stack = kind, stack  # the stack undoes changes of all ranks at the end
        self.ends: list[str] = []
        self.loss, self.twin = self._made(), self._made(whole=True)
        self.options: dict[str, Any] = {"grad_reduction": "mean"}
        self.precision: Precision = "float64"
        self.budget: int | None = None
        self.hooked = self.called = self.is_over = False
        self.wrapper = self._wrapped()
        self.seed = 0
        self.judges = dist.new_group()  # whatever becomes of the group of the loss

    def step(
        self,
        batches: Sequence[Batch],
        *,
        backward: Backward = "each",
        reentrant: bool | None = None,
        wrapper: Literal["own", "second", "subgroup"] = "own",
        encoder: Literal["", "plain", "GradCache"] = "",
        together: bool = False,
    ) -> None:
        """One or several calls, ``together`` those of one step, whose numbers are those of one process."""
        group = None
        if wrapper == "subgroup":  # one rank by itself, all others together
            groups = [dist.new_group(ranks) for ranks in ([0], list(range(1, dist.get_world_size())))]
            group = groups[dist.get_rank() > 0]
        call = self.wrapper if wrapper == "own" else self._wrapped(**({"process_group": group} if group else {}))
        place = dist.get_rank(group), dist.get_world_size(group)
        step = Step(self, self._seeded(batches), backward, *place, encoder, together=together)
        expected = step.expected()
        if expected is not None:
            problem = step.problem(step.on_ranks(call, reentrant), expected)
            assert problem is None, problem
        self._move()
        if group:
            dist.barrier()
            dist.destroy_process_group(group)

    def evaluate(self, batch: Batch, how: Literal["no_grad", "eval"]) -> None:
        self._train(how == "no_grad")
        with contextlib.nullcontext() if how == "eval" else torch.no_grad():
            self.step([batch], backward="none")
        self._train(True)

    def set_setting(self, value: Any) -> None:
        for loss in (self.loss, self.twin) if self.kind.setting else ():
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
            loss.to(self.dtype)
        if self.kind.remembers:  # the state of 32 bits is rounded otherwise on ranks
            for of_one, of_ranks in zip(self.twin.buffers(), self.loss.buffers(), strict=True):
                of_one.copy_(of_ranks)

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
            self.loss = self._made().to(self.dtype)
            _hook(self.loss, self.hooked)
            if self.kind.setting:
                _set(self.loss, self.kind.setting[0], attrgetter(self.kind.setting[0])(before))
            self.wrapper = self._wrapped()
            self.wrapper.load_state_dict(state)

    def change(
        self, batches: Sequence[Batch], *, group: int = 0, number: int = 0, what: str = "", everywhere: bool = False
    ) -> None:
        """The last rank, or every rank and the twin, changes something before the first of these steps.

        All ranks are right, or refuse it with the same words: at once, or soon if they cannot read it. After a refusal at
        once the change is undone, and the training goes on.
        """
        changes = [[*of_user_code(self.loss)]] if everywhere else changes_of(self.wrapper)
        of_group = changes[group % len(changes)]
        change = next((x for of in changes for x in of if x.what == what), of_group[number % len(of_group)])
        assert what in ("", change.what), f"no such change; these are there: {[x.what for of in changes for x in of]}"
        undo = self.stack.enter_context(contextlib.ExitStack())
        sees_embeddings = self.hooked or (self.kind.user_code and self.kind.remembers)  # on every rank, in unknown ways
        # buffers of a class of the user's are compared from the second call on
        unwritten = (
            not self.called and isinstance(self.loss, nn.Module) and any(map(_is_user_state, self.loss.modules()))
        )
        hidden, wrong = change.hidden or sees_embeddings or unwritten, ""
        if everywhere:
            undo.enter_context(next(x.made for x in of_user_code(self.twin) if x.what == change.what)())
        with patch("contrastive_zoo.wrapper.call_history._FIRST_CALLS", 10**9):  # of which ranks compare the behaviour
            for index, batch in enumerate(batches):
                made = change if index == 0 and (everywhere or _is_last()) else Change("")
                ends = self._ends(batch, made, undo, everywhere)
                kinds, texts = {kind for kind, _ in ends}, [text for _, text in ends]
                if kinds == {"refused"}:
                    assert len(set(texts)) == 1, f"{change.what}: ranks refuse with different words: {texts}"
                    assert index == 0 or hidden, f"{change.what}: refused {index} steps late: {texts[0]}"
                    assert not (everywhere and change.right), (
                        f"{change.what}: equal on all ranks, and refused: {texts[0]}"
                    )
                    self.ends.append(texts[0])
                    moved = self.kind.user_code and self.kind.remembers  # a state that the refused call moved
                    self.is_over = moved or index > 0 or not texts[0].startswith(("ValueError", "TypeError"))
                    undo.close()
                    return
                assert "refused" not in kinds, f"{change.what}: only some ranks refuse: {ends}"
                assert hidden or "wrong" not in kinds, f"{change.what}: {ends}"
                wrong = wrong or max(texts)
        assert not wrong, f"{change.what}: never refused: {wrong}"
        self.ends.append("right")
        self.is_over = not everywhere
        if everywhere:
            undo.close()

    def _ends(
        self, batch: Batch, change: Change, undo: contextlib.ExitStack, everywhere: bool
    ) -> list[tuple[str, str]]:
        """Make the change and take a step; return how it ended on each rank: right, wrong or refused, and the words."""
        before = self.twin if everywhere else copy.deepcopy(self.twin)
        step = Step(
            self, self._seeded([batch]), "each", dist.get_rank(), dist.get_world_size(), draws="noise" in change.what
        )
        expected = step.expected()
        end = "right", ""
        undo.enter_context(change.made())
        if expected is not None:
            try:
                problem = step.problem(step.on_ranks(self.wrapper, of_rows=change.of_rows), expected)
                end = ("wrong", problem) if problem else end
            except (
                ValueError,
                TypeError,
                RuntimeError,
            ) as error:  # the last is autograd's, where no rank has a gradient
                end, self.twin = ("refused", f"{type(error).__name__}: {error}"), before
        ends: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ends, end, self.judges)
        if end[0] != "refused":
            self._move()
        return ends

    def _seeded(self, batches: Sequence[Batch]) -> list[tuple[Batch, int]]:
        first, self.seed = self.seed, self.seed + len(batches)
        torch.manual_seed(first)  # of the twin and of rank 0, by which all ranks draw
        return [(shards, first + index) for index, shards in enumerate(batches)]

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "float64" else torch.float32

    def _made(self, *, whole: bool = False) -> Any:
        torch.manual_seed(0)
        loss = self.kind.make(whole=whole) if self.kind.sharded else self.kind.make()
        return loss.double() if isinstance(loss, nn.Module) else loss

    def _wrapped(self, **options: Any) -> cz.DistributedLoss:
        return cz.DistributedLoss(self.loss, **{**self.kind.wrapper(), **self.options, **options})

    def _train(self, training: bool) -> None:
        self.wrapper.train(training)
        if isinstance(self.twin, nn.Module):
            self.twin.train(training)

    def _move(self) -> None:
        with torch.no_grad():
            for parameter in (*parameters_of(self.loss), *parameters_of(self.twin)):
                parameter.mul_(MOVE)


def _is_user_state(module: nn.Module) -> bool:
    return bool(module._buffers) and is_third_party(type(module))


@dataclass
class Step:
    """One or several calls, on the ranks and on one process."""

    of: Rank
    batches: Sequence[tuple[Batch, int]]  # with seeds
    backward: Backward
    rank: int
    size: int
    encoder: Literal["", "plain", "GradCache"] = ""
    draws: bool = False  # private random numbers, which plain formulas draw in another order
    together: bool = False  # whether the calls are one step, which is then repeated

    def on_ranks(
        self, call: Callable[..., Any], reentrant: bool | None = None, of_rows: Rows = lambda rows: rows
    ) -> Results:
        of, encoder = self.of, self._encoder(self.of.dtype)
        encode = cz.GradCache(encoder, 2) if self.encoder == "GradCache" else encoder

        def run(*rows: Tensor) -> Tensor:
            with contextlib.ExitStack() as stack:
                if of.budget is not None:
                    stack.enter_context(cz.engine.memory_budget(of.budget))
                if of.precision == "autocast":
                    stack.enter_context(torch.autocast("cpu", torch.bfloat16))
                rows = tuple(of_rows([*rows]))
                value = call(*rows) if reentrant is None else checkpoint(call, *rows, use_reentrant=reentrant)
            of.called |= call is of.wrapper
            assert isinstance(value, Tensor)
            return value

        found = self._results(run, call, of.loss, of.dtype, encode, lambda x, y: local_rows(of.kind, x, y, self.rank))
        if self.encoder:
            dist.all_reduce(found.rows[0], group=None)
        return found

    def _results(
        self,
        run: Callable[..., Tensor],
        call: Any,
        loss: Any,
        dtype: torch.dtype,
        encode: Callable[..., Any],
        local: Callable[[list[Tensor], Batch], list[Tensor]],
    ) -> Results:
        """Call ``run`` once a batch, with what ``local`` leaves of it; return all numbers."""
        values, leaves, calls = [], [], []
        for parameter in parameters_of(loss):
            parameter.grad = None
        with cz.one_step(call) if self.together else contextlib.nullcontext() as step:
            for shards, seed in self.batches:
                shards = _among(shards, self.size)
                rows = local(global_rows(self.of.kind, sum(shards), seed, self.of.dtype), shards)  # rounded alike
                rows = [x.to(dtype).requires_grad_(not self.encoder) if x.is_floating_point() else x for x in rows]
                leaves += [x for x in rows if x.is_floating_point()]
                rows = [encode(x) if x.is_floating_point() and self.encoder else x for x in rows]
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
        model = encode.parameters() if isinstance(encode, nn.Module) and self.encoder else leaves
        state = [*loss.buffers()] if self.of.kind.remembers and not self.of.kind.user_code else []
        return Results(
            [x.detach() for x in values],
            [_gradient(x) for x in model],
            [_gradient(x) for x in parameters_of(loss)],
            [x.detach().to(dtype, copy=True) for x in state],
        )

    def _encoder(self, dtype: torch.dtype) -> nn.Linear:
        encoder = nn.Linear(D, D, bias=False, dtype=dtype)
        generator = torch.Generator().manual_seed(1)
        encoder.weight.data = torch.randn(D, D, dtype=torch.float64, generator=generator).to(dtype)
        return encoder

    def expected(self) -> Expected | None:
        """What one process computes, and how near to it ranks must come; None if it refuses these samples."""
        of = self.of
        before = copy.deepcopy(of.twin) if of.kind.remembers else of.twin
        exact = copy.deepcopy(of.twin) if of.precision != "float64" else None
        try:
            with torch.random.fork_rng(devices=[]):
                found = self._on_one_process(of.twin, of.dtype)
        except (ValueError, RuntimeError, IndexError):
            of.twin = before
            return None
        if exact is None:
            return Expected(found, EXACT)
        with torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[]):
            truth = self._on_one_process(exact.double(), torch.float64)
        errors = [distance(x, y) for x, y in zip(itertools.chain(*found), itertools.chain(*truth), strict=True)]
        return Expected(truth, max(LEAST, TIMES * max(errors)))

    def _on_one_process(self, loss: Any, dtype: torch.dtype) -> Results:
        autocast = self.of.precision == "autocast" and dtype == torch.float32
        formulas = contextlib.nullcontext if self.draws else cz.engine.plain_formulas
        miner = self.of.kind.wrapper().get("miner")

        def run(*rows: Tensor) -> Tensor:
            with formulas(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                value: Tensor = loss(*rows, *([miner(*rows)] if miner else []))
            return value

        return self._results(run, loss, loss, dtype, self._encoder(dtype), lambda rows, _: rows)

    def problem(self, found: Results, expected: Expected) -> str | None:
        """Return which number of this rank is not that of one process."""
        averaged, wanted = self.of.options["grad_reduction"] == "mean", expected.of
        pairs = [("value", *pair) for pair in zip(found.values, wanted.values, strict=True)]
        if self.backward != "none":
            of_batch = [_among(shards, self.size) for shards, _ in self.batches]
            towers = len(wanted.rows) // len(of_batch)
            for index, (x, y) in enumerate(zip(found.rows, wanted.rows, strict=True)):
                shards = of_batch[index // towers]
                mine = y if self.encoder else y[sum(shards[: self.rank]) :][: shards[self.rank]]
                pairs.append(("gradient of the embeddings", x, mine * (self.size if averaged else 1)))
            for x, y in zip(found.parameters, wanted.parameters, strict=True):
                part = y.tensor_split(self.size)[self.rank] if self.of.kind.sharded else y
                scaled = part if averaged or self.of.kind.sharded else part / self.size
                pairs.append(("gradient of the loss's parameters", x, scaled))
        pairs += [("state", *pair) for pair in zip(found.state, wanted.state, strict=True)]
        for what, x, y in pairs:
            if x.shape != y.shape:
                return f"{what}: shape {list(x.shape)}; one process's: {list(y.shape)}"
            if not distance(x, y) <= expected.tolerance:
                return f"{what}: error {distance(x, y):.2g} > {expected.tolerance:.2g}; {x}, expected {y}"
        return None


class Results(NamedTuple):
    values: list[Tensor]
    rows: list[Tensor]  # gradients of the embeddings, or of the encoder
    parameters: list[Tensor]  # gradients of the loss's
    state: list[Tensor]  # buffers of the loss


class Expected(NamedTuple):
    of: Results
    tolerance: float


def parameters_of(loss: Any) -> list[nn.Parameter]:
    return list(loss.parameters()) if isinstance(loss, nn.Module) else []


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
