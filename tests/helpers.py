"""Helpers of several test files: numbers, comparisons, and jobs that return an error instead of raising it."""

import gc
import itertools
import math
import os
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import contrastive_zoo as cz
from contrastive_zoo.ranks import suggestions
from contrastive_zoo.testing.worlds import Worlds
from tools.peer_losses import packages

EVERY_CASE = os.environ.get("HYPOTHESIS_PROFILE") == "long"
"""Whether tests run every combination of their cases, as ``make search`` does; otherwise a part of them."""

EXACT = 1e-10
"""Largest difference of float64 results, relative to the larger of 1 and the largest expected element."""

TEMPERATURES = st.sampled_from([1.0, 0.5, 0.1, 0.05, 0.01])
"""Down to where exponentials underflow unless their maximum is subtracted."""

R = TypeVar("R")
Value = Callable[..., Tensor]


def drawn(*axes: Iterable[Any], one_in: int) -> list[tuple[Any, ...]]:
    """Return the combinations of these values: all in a search, otherwise one in so many, with every value of each axis."""
    places = itertools.product(*(enumerate(axis) for axis in axes))
    chosen = (pairs for pairs in places if EVERY_CASE or sum(place for place, _ in pairs) % one_in == 0)
    return [tuple(value for _, value in pairs) for pairs in chosen]


class Pools(NamedTuple):
    """Worlds of threads, which start at once, and of processes, which share nothing."""

    threads: Worlds
    processes: Worlds

    def drawn(self, *draw: object) -> Worlds:
        """Return the processes for a tenth of the draws, otherwise the threads."""
        return self.processes if zlib.crc32(repr(draw).encode()) % 10 == 0 else self.threads


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the same tensor on every rank for the same seed: small integers for dtypes that round, otherwise normal."""
    generator = torch.Generator().manual_seed(seed)
    if dtype in (torch.float32, torch.float64):
        return torch.randn(shape, dtype=dtype, generator=generator)
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


def close(found: Tensor, expected: Tensor, tolerance: float = EXACT) -> None:
    """Assert equal dtype and shape, and values equal up to the tolerance, relative to the scale of the whole tensor."""
    assert found.dtype == expected.dtype, (found.dtype, expected.dtype)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert distance(found, expected) <= tolerance, (found, expected)


def distance(found: Tensor, expected: Tensor) -> float:
    if not found.numel():
        return 0.0
    found, expected = found.double(), expected.double()
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1)).item()


def assert_same(ours: Value, theirs: Value, *rows: Tensor, tolerance: float = EXACT) -> None:
    leaves, values = [x for x in rows if x.requires_grad], (ours(*rows), theirs(*rows))
    close(*values, tolerance)
    gradients = (torch.autograd.grad(x, leaves, allow_unused=True, materialize_grads=True) for x in values)
    for x, y in zip(*gradients, strict=True):
        close(x, y, tolerance)


def split(x: Tensor, shards: Sequence[int]) -> list[Tensor]:
    return list(x.split(list(shards)))


def local_shard(x: Tensor, shards: Sequence[int]) -> Tensor:
    return split(x, shards)[dist.get_rank()].detach().clone()


def called(kind: Callable[..., Value], **fixed: Any) -> Value:
    def value(*rows: Tensor, wrap: Callable[[Any], Any] = lambda loss: loss, **settings: Any) -> Tensor:
        return wrap(kind(**{**fixed, **settings}))(*rows)

    return value


def learnt(temperature: float, logit_bias: float | None = None) -> dict[str, Any]:
    settings: dict[str, Any] = {"temperature": cz.LearnableTemperature(temperature, max_scale=math.inf)}
    return settings if logit_bias is None else {**settings, "logit_bias": nn.Parameter(torch.tensor([logit_bias]))}


def later(loss: Any, **settings: Any) -> Any:
    for name, value in settings.items():
        setattr(loss, name, value)
    return loss


def peer(path: str) -> Any:
    """Return a class of a library of which the wheel alone is there."""
    module, _, name = path.rpartition(".")
    if not (packages.FOLDER / path.partition(".")[0]).exists():
        pytest.skip(f"{path} is not in {packages.FOLDER.relative_to(packages.ROOT)}; `make test-all` installs it")
    return getattr(packages.loaded(module), name)


def need(*names: str) -> None:
    """Skip a test if a package of ``.ci/peers.txt`` is not installed."""
    pinned, folder = packages.required(), packages.FOLDER.relative_to(packages.ROOT)
    if absent := packages.missing(packages.FOLDER, {name: pinned[name] for name in names}):
        pytest.skip(f"{', '.join(absent)} is not in {folder}; `make test-all` installs it")


def error_message(job: Callable[[], Any], kind: Any = ValueError) -> str | None:
    try:
        job()
    except kind as error:
        return str(error)
    return None


def warned(*calls: Callable[[], Any], file: str = "") -> list[str]:
    """Return the warnings of these calls, as if none had come before; each points at a line of the file, if one is given."""
    suggestions.ASKED.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in calls:
            call()
    assert not file or {x.filename for x in caught} <= {file}, "a warning points at the user's line"
    return [str(x.message) for x in caught]


def common_error(worlds: Worlds, world_size: int, bad: Callable[[], Any], good: Callable[[], R]) -> tuple[str, list[R]]:
    """Return the message that all ranks raise for ``bad``, and the results of ``good`` in the same world afterwards."""
    found = worlds.run(world_size, lambda: (error_message(bad), good()))
    texts = [text for text, _ in found]
    assert None not in texts, f"some rank did not raise: {texts}"
    assert len(set(texts)) == 1, f"ranks raise different errors: {texts}"
    return texts[0] or "", [value for _, value in found]


def a_step() -> float:
    rows = (numbers(4, 3, seed=seed + dist.get_rank()).requires_grad_() for seed in (0, 9))
    return cz.DistributedLoss(cz.NTXent())(*rows).item()


def refused(worlds: Worlds, world_size: int, bad: Callable[[], Any], words: str) -> str:
    """Assert that all ranks raise one error for ``bad`` and take :func:`a_step` afterwards; return the message."""
    text, after = common_error(worlds, world_size, bad, a_step)
    assert_says(text, words)
    assert "|" not in text, "an error shows the format in which ranks compare notes"
    assert len(set(after)) == 1
    return text


def assert_says(text: str | None, words: str) -> None:
    for part in words.split(" … "):
        assert part in (text or ""), f"{part!r} is not in {text!r}"


@contextmanager
def groups(*of: Sequence[int]) -> Iterator[Any]:
    created = [dist.new_group(list(ranks)) for ranks in of]
    own = next(group for ranks, group in zip(of, created, strict=True) if dist.get_rank() in ranks)
    yield own
    gc.collect()  # a DDP that is collected after its group was destroyed may wait for the group's threads forever
    dist.barrier()  # not after an error: the other ranks may not reach it
    dist.destroy_process_group(own)


def as_torchrun() -> None:
    """Write the variables of torchrun into the environment of this rank."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)


class Largest(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in found if isinstance(found, (tuple, list)) else [found]:
            self.elements = max(self.elements, x.numel() if isinstance(x, Tensor) else 0)
        return found
