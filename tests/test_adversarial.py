"""One rank changes one thing at a random step: every rank has one process's numbers, or refuses that very step."""

import contextlib
import functools
import os
import random
from argparse import Namespace
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EXACT
from tests.one_rank import HIDING, LOSSES, SHARDS, STATEFUL, Outcome, alone, largest_error, made, trained

TRIALS = int(os.environ.get("ADVERSARIAL", "5000")) if os.environ.get("HYPOTHESIS_PROFILE") == "long" else 80
IN_ONE_JOB = 20

reference = functools.lru_cache(maxsize=None)(alone)


class Change(NamedTuple):
    """What is changed, in words, and how: of the wrapper, or of the rows of a call."""

    what: str
    apply: Callable[[], Any] = lambda: None
    of_rows: Callable[[list[Tensor]], list[Tensor]] = lambda rows: rows


class Trial(NamedTuple):
    name: str  # of the loss
    splits: bool  # whether ranks split the loss of every batch
    at: int  # the step
    seed: int  # draws the change


def changes_of(wrapper: cz.DistributedLoss, stack: contextlib.ExitStack) -> list[list[Change]]:
    """Everything that can be changed, in groups; ``stack`` undoes what surrounds the call."""
    loss = wrapper.loss
    groups = [_of_call(), _of_surroundings(stack), _of_wrapper(wrapper)]
    if isinstance(loss, nn.Module):
        groups += [_of_module(path or "the loss", module) for path, module in loss.named_modules()]
    else:
        groups.append(_of_function(loss))
    return [*filter(None, map(list, groups))]


def _of_call() -> Iterator[Change]:
    floats: dict[str, Callable[[Tensor], Tensor]] = {
        "float32 rows": lambda x: x.float(),
        "wider rows": lambda x: torch.cat([x, x[:, :1]], 1),
        "rows without gradient": lambda x: x.detach(),
        "NaN rows": lambda x: x * torch.nan,
        "rows of three dimensions": lambda x: x[:, None],
        "an expanded view": lambda x: x.T.contiguous().T,
    }
    for what, change in floats.items():
        yield Change(
            what, of_rows=lambda rows, change=change: [change(x) if x.is_floating_point() else x for x in rows]
        )
    yield Change("short labels", of_rows=lambda rows: [x if x.is_floating_point() else x.int() for x in rows])
    yield Change("labels as floats", of_rows=lambda rows: [x.double() for x in rows])
    yield Change("an argument less", of_rows=lambda rows: rows[:1])


def _of_surroundings(stack: contextlib.ExitStack) -> Iterator[Change]:
    yield Change("autocast", lambda: stack.enter_context(torch.autocast("cpu", torch.bfloat16)))
    yield Change("no gradients", lambda: stack.enter_context(torch.no_grad()))
    yield Change("inference mode", lambda: stack.enter_context(torch.inference_mode()))
    yield Change("plain formulas", lambda: stack.enter_context(cz.engine.plain_formulas()))
    yield Change("a default dtype", lambda: stack.enter_context(_default_dtype()))
    yield Change("random states", lambda: torch.manual_seed(99))


@contextlib.contextmanager
def _default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def _of_wrapper(wrapper: cz.DistributedLoss) -> Iterator[Change]:
    options: dict[str, Any] = {"grad_reduction": "sum", "ring": True}
    options |= dict.fromkeys(["check_finite", "check_equal", "check_distinct"], False)
    for option, value in options.items():
        yield Change(f"{option}={value}", functools.partial(setattr, wrapper, option, value))
    yield Change("evaluation", wrapper.eval)


def _of_module(path: str, module: nn.Module) -> Iterator[Change]:
    for name, x in [*module._parameters.items(), *module._buffers.items()]:
        if x is not None:
            yield from _of_tensor(f"{path}.{name}", x)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield Change(f"{path}.{name} is frozen", functools.partial(parameter.requires_grad_, False))
            other = nn.Parameter(parameter.detach().float())
            yield Change(f"{path}.{name} in float32", functools.partial(setattr, module, name, other))
    own = {name: x for name, x in vars(module).items() if name not in vars(nn.Module())}
    for name, value in own.items():
        yield from _of_value(f"{path}.{name}", value, functools.partial(setattr, module, name))
    if "noise" in own:
        yield Change(f"{path}.noise", functools.partial(setattr, module, "noise", _a_private_generator()))
    yield Change(f"{path} in evaluation", module.eval)
    yield Change(f"a hook of {path}", lambda: module.register_forward_hook(lambda module, args, value: 2 * value))
    yield Change(f"a pre-hook of {path}", lambda: module.register_forward_pre_hook(lambda module, args: None))
    yield Change(f"a backward hook of {path}", lambda: module.register_full_backward_hook(lambda *_: None))
    yield Change(f"evaluation of {path} alone", functools.partial(setattr, module, "training", False))
    if type(module).forward is not nn.Module.forward:
        yield Change(f"a forward of {path}", functools.partial(setattr, module, "forward", module.forward))


def _a_private_generator() -> Callable[[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda x: torch.rand(x.shape, generator=generator, dtype=x.dtype)


def _of_function(function: Any) -> Iterator[Change]:
    if isinstance(function, functools.partial):
        for name, value in function.keywords.items():
            yield from _of_value(name, value, functools.partial(function.keywords.__setitem__, name))
    elif isinstance(function, FunctionType):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            yield from _of_value(name, cell.cell_contents, functools.partial(setattr, cell, "cell_contents"))
    else:
        for name, value in vars(function).items():
            yield from _of_value(name, value, functools.partial(setattr, function, name))


def _of_value(name: str, value: Any, put: Callable[[Any], Any]) -> Iterator[Change]:
    if isinstance(value, bool):
        yield Change(f"not {name}", functools.partial(put, not value))
    elif isinstance(value, (int, float)):
        yield Change(f"{name} grows", functools.partial(put, value + 1 if isinstance(value, int) else 1.1 * value))
        yield Change(f"{name} is negated", functools.partial(put, -value))
    elif isinstance(value, (Tensor, np.ndarray)):
        yield from _of_tensor(name, torch.as_tensor(value))
    elif isinstance(value, (SimpleNamespace, Namespace)):
        yield from _of_value(name, vars(value), lambda x: None)
    elif isinstance(value, MutableMapping):
        for key, x in value.items():
            yield from _of_value(f"{name}[{key!r}]", x, functools.partial(value.__setitem__, key))
    elif isinstance(value, MutableSequence):
        for index, x in enumerate(value):
            yield from _of_value(f"{name}[{index}]", x, functools.partial(value.__setitem__, index))


def _of_tensor(name: str, x: Tensor) -> Iterator[Change]:
    if x.numel():
        yield Change(
            f"{name} grows", functools.partial(_in_place, x, lambda y: y + 1 if not y.is_floating_point() else 1.1 * y)
        )
        yield Change(
            f"{name} is negated", functools.partial(_in_place, x, lambda y: ~y if y.dtype == torch.bool else -y)
        )
        yield Change(f"the first number of {name}", functools.partial(_first, x))


@torch.no_grad()
def _in_place(x: Tensor, change: Callable[[Tensor], Tensor]) -> None:
    x.copy_(change(x))


@torch.no_grad()
def _first(x: Tensor) -> None:
    x.view(-1)[0] += 1


def play(trials: list[Trial]) -> list[tuple[str, list[Outcome]]]:
    return [_played(trial) for trial in trials]


def _played(trial: Trial) -> tuple[str, list[Outcome]]:
    wrapper = cz.DistributedLoss(made(trial.name))
    with contextlib.ExitStack() as stack:
        generator = random.Random(trial.seed)
        change = generator.choice(generator.choice(changes_of(wrapper, stack)))
        how = {"splits": trial.splits, "at": trial.at, "change": change.apply, "of_rows": change.of_rows}
        return change.what, trained(trial.name, wrapper, **how)


def verdict(trial: Trial, ranks: list[list[Outcome]]) -> str | None:
    lengths, refusals = {len(x) for x in ranks}, {x[-1].refused for x in ranks}
    if len(lengths) > 1 or len(refusals) > 1:
        return f"ranks end differently: {[(len(x) - 1, x[-1].refused[:200]) for x in ranks]}"
    (length,), (refused,) = lengths, refusals
    late = trial.name in HIDING  # what no rank can read is refused in the next step
    if refused and length - 1 not in (trial.at, trial.at + late):
        return f"refused at step {length - 1}, changed at {trial.at}: {refused[:200]}"
    if not refused and length != len(SHARDS):
        return f"{length} steps"
    whole = reference(trial.name)
    for step in range(length - bool(refused)):
        if late and step == trial.at:
            continue
        if (error := largest_error([x[step] for x in ranks], whole[step])) > EXACT:
            return f"another number, by {error:.2g}, at step {step}, changed at {trial.at}"
    return None


def searched(trials: list[Trial], world_size: int, worlds: Worlds, job: Callable[..., Any]) -> list[str]:
    lines = []
    for trial, *outcomes in zip(trials, *worlds.run(world_size, job, trials, timeout=120), strict=True):
        if (problem := verdict(trial, [x for _, x in outcomes])) is not None:
            lines.append(f"{trial}, {outcomes[0][0]}, W={world_size}: {problem}")
    return lines


def drawn(count: int, seed: int) -> list[Trial]:
    generator, names = random.Random(seed), [x for x in LOSSES if x not in STATEFUL or "annealed" in x]
    return [
        Trial(
            generator.choice(names),
            generator.random() < 0.5,
            generator.randrange(len(SHARDS)),
            generator.randrange(2**31),
        )
        for _ in range(count)
    ]


def blindly(trials: list[Trial]) -> list[tuple[str, list[Outcome]]]:
    """On every rank: the mutant, which looks neither at numbers nor at results."""
    with (
        patch("contrastive_zoo.ranks.fingerprint.level_of", lambda pairs: 0.0),
        patch("contrastive_zoo.ranks.handshake.results_difference", lambda *_: None),
    ):
        return play(trials)


def test_the_search_notices_what_ranks_do_not_compare(worlds: Worlds) -> None:
    trials = [trial._replace(name="Held") for trial in drawn(60, seed=0)]
    assert any("another number" in line for line in searched(trials, 2, worlds, blindly))


def test_whatever_one_rank_changes(worlds: Worlds, capsys: pytest.CaptureFixture[str]) -> None:
    lines = []
    for first in range(0, TRIALS, IN_ONE_JOB):
        lines += searched(drawn(IN_ONE_JOB, seed=first), 2 + first // IN_ONE_JOB % 2, worlds, play)
        if TRIALS > 80 and first % 500 == 0:
            with capsys.disabled():
                print(f"\n{first} of {TRIALS}, {len(lines)} wrong", end="", flush=True)
    assert not lines, "\n".join(lines)
