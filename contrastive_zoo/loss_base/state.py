"""The state of a loss: when it moves, and how a call that fails leaves it as it was."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from contrastive_zoo.ranks.compat import in_backward
from contrastive_zoo.ranks.row_checks import described


class OpenStep:
    """A step in the body of :func:`one_step`: the statistics of its calls, in their order."""

    def __init__(self) -> None:
        self.calls: list[tuple[Stateful, Any]] = []
        self._repeats = False

    def add(self, module: "Stateful", statistics: Any) -> None:
        if not self._repeats:
            self.calls.append((module, statistics))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context manager: calls repeat earlier ones of the step, on the same samples, and move no state."""
        self._repeats = True
        try:
            yield
        finally:
            self._repeats = False


class Stateful(nn.Module):
    """A module whose state moves once a call; in the body of :func:`one_step`, once for all calls."""

    one_step: OpenStep | None = None

    @property
    def moves(self) -> bool:
        """Whether a call in this mode, with these settings, moves the state."""
        return self.training and bool(self._buffers)

    def move(self, calls: Sequence[Any]) -> None:
        """Move the state by the statistics of the calls of one step."""
        raise NotImplementedError(f"{type(self).__name__} must define move(calls).")

    def record(self, statistics: Any) -> None:
        """Move the state by the statistics of a call, equal on every rank: now, or at the end of an open step."""
        if self.one_step is None:
            with torch.no_grad():
                self.move([statistics])
        else:
            self.one_step.add(self, statistics)

    @property
    def recorded(self) -> list[Any]:
        """The statistics of earlier calls of an open step."""
        return [x for module, x in self.one_step.calls if module is self] if self.one_step else []


class Averages(Stateful):
    """A module with buffers that are moving averages over samples; a call records its momentum and sums of all ranks."""

    def averages(self, sums: Tensor) -> dict[str, Tensor]:
        """Return the averages of the samples of these sums, by the buffers that move towards them."""
        raise NotImplementedError(f"{type(self).__name__} must define averages(sums).")

    def moved(self, momentum: float | Tensor, sums: Tensor) -> list[Tensor]:
        """Return what a call makes of the buffers, in the precision of its sums."""
        averages = self.averages(sums).items()
        return [momentum * self.get_buffer(name).to(x) + (1 - momentum) * x for name, x in averages]

    def move(self, calls: Sequence[tuple[float | Tensor, Tensor]]) -> None:
        momenta, sums = zip(*calls, strict=True)
        for name, average in self.averages(torch.stack(sums).sum(0)).items():
            buffer = self.get_buffer(name)  # which a scaler that skips the step after an overflow cannot restore
            move_towards(buffer, average.where(average.isfinite(), buffer.to(average)), 1 - momenta[-1])


@contextmanager
def one_step(*modules: nn.Module) -> Iterator[OpenStep]:
    """Context manager: all calls of these losses belong to one optimizer step, and their states move once, at its end.

    Without it a state moves at every call. Use it where a step calls a loss several times, as in gradient accumulation:

        with cz.one_step(loss_fn):
            for view1, view2 in micro_batches:
                (loss_fn(encoder(view1), encoder(view2)) / len(micro_batches)).backward()
        optimizer.step()

    In its body every call sees the state before the step. At its end

    - a centre or covariance moves towards the mean over the samples of all calls, as of one batch;
    - a histogram moves towards that of all calls;
    - the embeddings of all calls enter a memory once, in the order of the calls;
    - the random directions of SIGReg, LeJEPA, VISReg and RDMReg advance by one step.

    A :class:`CrossBatchMemory` with labels compares each call with the memory before the step and the call's own samples.
    ``step.again()`` marks calls that repeat earlier ones, as the second pass of SAM: they move nothing.

        with cz.one_step(loss_fn) as step:
            loss_fn(encoder(view1), encoder(view2)).backward()
            sam.ascend()
            with step.again():
                loss_fn(encoder(view1), encoder(view2)).backward()
            sam.descend()

    If the body raises, no state moves. Use it on every rank.

    Args:
        modules: losses, with or without ``DistributedLoss``; memories, whose ``enqueue`` then stores at the end; and
            :class:`MomentumEncoder`, whose ``update`` then moves once, towards the encoder at the end.

    Raises:
        ValueError: anything but modules, one that is in a step already, or one of another library with buffers, which it
            moves itself. At the call, on every rank: ranks that are not all in a step.

    Examples:
        >>> import contrastive_zoo as cz
        >>> loss, zeros = cz.DINO(1, centre_momentum=0.5), torch.zeros(1, 1)
        >>> with one_step(loss):
        ...     _ = loss(zeros, zeros), loss(zeros, zeros + 4)
        >>> loss.centre   # half of the way to the mean of 0 and 4
        tensor([1.])
    """
    stateful = list(dict.fromkeys(x for module in modules for x in _stateful(module)))
    if any(x.one_step for x in stateful):
        raise ValueError(
            "one_step: this loss is in a step already. Leave out the inner one; step.again() marks a repetition."
        )
    step = OpenStep()
    for module in stateful:
        module.one_step = step
    try:
        yield step
        moves = [(module, module.recorded) for module in stateful]
    finally:
        for module in stateful:
            del module.one_step
    with torch.no_grad():
        for module, calls in moves:
            if calls:
                module.move(calls)


def _stateful(module: Any) -> Iterator[Stateful]:
    if not isinstance(module, nn.Module):
        raise ValueError(f"one_step: losses, memories and momentum encoders are modules, got {described(module)}.")
    if isinstance(module, Stateful):
        yield module
        return
    if any(x is not None for x in module._buffers.values()):
        raise ValueError(
            f"one_step: {type(module).__name__} moves its buffers itself, at every call. Use a loss or memory of this "
            "library in its place, such as CrossBatchMemory, or leave it out."
        )
    for child in module.children():
        yield from _stateful(child)


def computed_again_problem(module: nn.Module) -> str | None:
    """Return why a backward pass must not call a module whose state moves, in words, or None."""
    repeats = in_backward() and any(isinstance(x, Stateful) and x.moves for x in module.modules())
    return COMPUTED_AGAIN if repeats else None


COMPUTED_AGAIN = (
    "a backward pass computes the loss again, as torch.utils.checkpoint does, but its state has moved on since (a memory, a "
    "centre, a running statistic). Put the encoder under the checkpoint and leave the loss out."
)


@contextmanager
def state_kept_on_error(module: nn.Module) -> Iterator[None]:
    """Context manager: if the body raises, every buffer of the module is what it was before.

    Only buffers that have changed are written back: autograd may have saved the others.
    """
    steps = {x.one_step for x in module.modules() if isinstance(x, Stateful) and x.one_step}
    counts = [(step, len(step.calls)) for step in steps]
    places = [(x._buffers, name) for x in module.modules() for name in x._buffers]
    before = [(of, name, x, x.clone()) for of, name in places if (x := of[name]) is not None]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for of, name, x, values in before:
                # by value: batch_norm changes its statistics without a new version
                of[name] = x if torch.equal(x, values) else x.copy_(values)
        for step, count in counts:
            del step.calls[count:]
        raise


def real(x: Any) -> Any:
    """Return a tensor of shape [1] as [], and a Python or NumPy number as float: these would change a loss by promotion."""
    if isinstance(x, Tensor):
        return x.reshape(()) if x.shape == (1,) else x
    is_number = isinstance(x, (int, np.integer, np.floating)) and not isinstance(x, bool)
    return float(x) if is_number else x


def move_towards(state: Tensor, target: Tensor, share: float | Tensor) -> None:
    """Move ``state`` in place by a share of the way to ``target``; a share that is a tensor may have any dtype."""
    state.lerp_(target.to(state), real(share).to(state) if isinstance(share, Tensor) else share)
