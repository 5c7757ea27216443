"""What a DistributedLoss remembers from call to call, what it tells the next handshake, and torch's join contexts."""

import functools
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from contrastive_zoo.ranks.devices import DIFFERENTIABLE, ValueCheck, on_cpu, read_later
from contrastive_zoo.ranks.fingerprint import Fingerprint, fingerprint, level_of, norm_and_sketch
from contrastive_zoo.ranks.messages import GroupState
from contrastive_zoo.ranks.session import Findings, Session
from contrastive_zoo.ranks.suggestions import warn_once
from contrastive_zoo.wrapper.graphs import graph_nodes, leaf_of

_made = 0  # how many wrappers this process, or this rank of a world of threads, has made

_FIRST_CALLS, _EVERY = 8, 64

_LABELLED, _SAMPLES = 3, 8  # calls in which to look for positives, and samples that make it likely that there are some

_NO_POSITIVES = (
    f"in {_LABELLED} batches, no two samples had the same label, so that no sample had a positive. Draw several samples "
    "of a class: DataLoader(dataset, batch_sampler=cz.data.MPerClassBatchSampler(labels, m=2, classes_per_batch=16))."
)


_NOTHING = torch.zeros(1)  # the gradient of a parameter that a rank without samples does not reach


def _next_number() -> int:
    global _made
    _made += 1
    return _made


class CallHistory:
    """One wrapper's calls. No decision that changes messages rests on it: its contents enter the handshake's header."""

    def __init__(self) -> None:
        watch_joins()
        self.made = _next_number()  # how many wrappers this process has made until this one
        self.wrapper = 0  # the number of the handshake of its first call, by which all ranks know it; 0 before
        self._group: weakref.ref[GroupState] | None = None  # of the last call
        self.calls = 0  # how many have been completed between several ranks
        self.draws = False  # whether the loss has drawn random numbers or changed its buffers while it was computed
        self.had_positives: list[bool] = []  # of the first batches with labels
        self.keeps_state = False  # whether the last call changed the loss's buffers
        self._equal: dict[str, int] = {}  # how many calls in a row an argument has been equal on all ranks
        self.due = False  # whether a few samples of all ranks come with the next handshake
        self._results: dict[str, Callable[[], list[float]]] = {}
        self.tolerance = 0.0  # of these: that of the last call's embeddings, on every rank that has results
        self._fingerprint: Callable[[], Fingerprint] | None = None
        self.checks: list[tuple[list[ValueCheck], Callable[[], list[float]]]] = []  # of a device, and their numbers

    def __getstate__(self) -> dict[str, Any]:
        """A copy is another wrapper, without numbers that this one still reads from a device for its next handshake."""
        pending: dict[str, Any] = {"due": False, "_results": {}, "_fingerprint": None, "checks": [], "_group": None}
        return {**vars(self), "made": _next_number(), "wrapper": 0, **pending}

    def enter(self, state: GroupState) -> None:
        """Begin a call in a process group, where nothing is compared that calls in another group have left."""
        watch_joins()  # a wrapper may have come by pickle
        if self._group is None or self._group() is not state:
            held = (number for number, history in state.wrappers.items() if history is self)
            self._group, self.wrapper = weakref.ref(state), max(held, default=0)
            self.due, self._results, self._fingerprint = False, {}, None

    def equal_again(self, paths: Sequence[str]) -> list[str]:
        """Return which arguments, of those that are equal on all ranks, are so at the second call in a row."""
        self._equal = {path: self._equal.get(path, 0) + 1 for path in paths}
        return [path for path, calls in self._equal.items() if calls == 2]

    def compares(self, call: int) -> bool:
        """Whether ranks compare how a user's own loss behaves in a call: in the first eight, and in every 64th."""
        return call < _FIRST_CALLS or call % _EVERY == 0

    def remember_value(self, value: Any) -> None:
        # tensors only: other results, such as a time, may differ between ranks
        if isinstance(value, Tensor) and value.is_cpu and value.is_floating_point():  # the usual case
            self._results["value"] = value.detach().sum()[None].tolist
        elif tensors := [x for x in tree_leaves(value) if isinstance(x, Tensor) and x.is_floating_point()]:
            self._results["value"] = read_later(torch.stack([x.detach().sum() for x in tensors]))

    def remember(self, name: str, number: Tensor) -> None:
        self._results[name] = read_later(number)

    def remember_gradients(self, value: Any, parameters: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> None:
        """Compare in the next handshake what this value, computed from rows, adds to the gradients of parameters."""
        names = {x: name for name, x in parameters.items() if x.requires_grad and x.is_leaf}
        if not names or not isinstance(value, Tensor) or value.ndim or value.grad_fn is None:
            return
        added: dict[str, Tensor] = {}
        of_values: list[Tensor] = []  # of this backward pass, whose other terms may use the parameters, too

        def begin(of_value: Tensor) -> None:
            of_values[:] = [of_value]
            added.clear()

        def add(edges: Sequence[tuple[int, str]], gradients: Sequence[Tensor | None], _: Any) -> None:
            for index, name in edges:
                if (x := gradients[index]) is not None:
                    added[name] = added[name] + x.detach() if name in added else x.detach()

        def level() -> list[float]:
            if not of_values:
                return []
            parts = (norm_and_sketch(added.get(name, _NOTHING) / of_values[0]).tolist() for name in names.values())
            return [level_of([*itertools.chain(*parts)])]

        value.register_hook(begin)
        for node in graph_nodes([value], until=rows.values()):
            ends = [leaf_of(after) for after, _ in node.next_functions]
            if edges := [(index, names[x]) for index, x in enumerate(ends) if x is not None and x in names]:
                node.register_hook(functools.partial(add, edges))
        self._results["gradient"] = level

    def results(self) -> dict[str, float]:
        """What the previous call left to compare, once, by name."""
        reads, self._results = self._results, {}
        return {name: sum(numbers) for name, read in reads.items() if (numbers := read())}

    def fingerprint(self, state: Mapping[str, Tensor] | None, rows: Mapping[str, Tensor]) -> Fingerprint:
        """The fingerprint of this call; that of the previous one if some numbers are on an accelerator."""
        now = fingerprint(state, rows)
        if all(map(on_cpu, [*rows.values(), *(state or {}).values()])):
            return now()
        due, self._fingerprint = self._fingerprint, now
        if due is None:  # the first call waits
            due = Fingerprint if self.calls else now
        return due()

    def look_at_values(self, name: str, findings: Findings, *, positives: bool) -> None:
        """Start to copy what the next call looks at: values of this call, and for ``positives`` if its samples have any."""
        checks = [*(findings.later or ())]
        labels = findings.labels if positives and len(self.had_positives) < _LABELLED else None
        if labels is not None and len(labels) >= _SAMPLES:
            checks.append(_positives_check(name, labels, self.had_positives))
        for device in dict.fromkeys(x.numbers.device for x in checks):  # usually there is one, and so one copy
            here = [x for x in checks if x.numbers.device == device]
            self.checks.append((here, read_later(torch.cat([x.numbers.long() for x in here]))))

    def values_problem(self) -> str | None:
        """What was wrong with the values that the previous call looked at on an accelerator, once; None if nothing was."""
        checks, self.checks = self.checks, []
        for of_device, read in checks:
            numbers = iter(read())
            result = [x.problem([*itertools.islice(numbers, len(x.numbers))]) for x in of_device]
            if reason := next(filter(None, result), None):
                return f"at the previous call (on accelerators values are looked at without waiting): {reason}"
        return None


def _positives_check(name: str, labels: Tensor, had_positives: list[bool]) -> ValueCheck:
    """Return a check that warns if no sample of the first batches shares its label with another one of its batch."""

    # it does not hold the history, whose checks hold it: a cycle would keep a wrapper that the user has replaced
    def note(has_positive: Sequence[float]) -> None:
        had_positives.append(bool(has_positive[0]))
        if len(had_positives) == _LABELLED and not any(had_positives):
            warn_once(f"{name}: {_NO_POSITIVES}")

    in_order = labels.sort().values
    return ValueCheck((in_order[1:] == in_order[:-1]).any()[None], note)


def looking_later(session: Session, rows: Mapping[str, Tensor]) -> Session:
    """The session of a step; NaN and infinite values of embeddings on an accelerator are refused in the next call."""
    if not session.check_finite or all(map(on_cpu, rows.values())) or all(map(attrgetter("is_meta"), rows.values())):
        return session
    if (later := session.findings.later) is not None:
        finite = {name: x.detach().isfinite().all()[None] for name, x in rows.items() if x.dtype in DIFFERENTIABLE}
        later += [ValueCheck(x, functools.partial(_finite_problem, name)) for name, x in finite.items()]
    return replace(session, check_finite=False)


def _finite_problem(name: str, is_finite: Sequence[float]) -> str | None:
    return None if is_finite[0] else _NOT_FINITE.format(name=name)


_NOT_FINITE = (
    "{name} held NaN or infinite values. Look for a diverged encoder, a division by a zero norm or an overflow in half "
    "precision; check_finite=False lets them through."
)


JOINED: list[Any] = []  # the contexts that this process is in


def join_problem() -> str | None:
    return _JOIN_IS_ACTIVE if any(context._enable for context in JOINED) else None


@functools.cache
def watch_joins() -> None:
    """Let torch's join context, in which a loss would wait for ever, tell of its entry, from the first wrapper on."""
    if dist.is_available():
        from torch.distributed.algorithms.join import Join  # imported here: torch may be built without distributed

        Join.__enter__, Join.__exit__ = _counted(Join.__enter__, 1), _counted(Join.__exit__, 0)  # type: ignore[method-assign]  # torch has no hook for it


def _counted(method: Callable[..., Any], held: int) -> Callable[..., Any]:
    @functools.wraps(method)
    def counted(self: Any, *args: Any) -> Any:
        JOINED[:] = [x for x in JOINED if x is not self] + [self] * held
        return method(self, *args)

    return counted


_JOIN_IS_ACTIVE = (
    "DDP's join() is active. A rank that has run out of batches answers DDP's messages there, but not the loss's, and the "
    "others would wait for it. Leave join() out (with Accelerate: join_uneven_inputs), and give all ranks equally many "
    "batches, the last ones empty: GlobalBatchSampler does."
)
