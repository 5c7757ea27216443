"""Several ranks that send from an accelerator, as NCCL does: the losses are right, and a steady step can be captured."""

import copy
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.loss_base import loss_modules, row_loss
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.measurement import whole_batch
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EVERY_CASE, error_message
from tests.simulated import device, draws_of_a_device, on_cpu, value_and_gradients
from tests.test_accelerator import ENTRIES as OTHER_ENTRIES
from tests.test_accelerator import LOSSES as ENTRIES
from tests.test_accelerator import may_read, of_cpu, of_device
from tests.zoo import Entry

pytestmark = pytest.mark.kernels

SPLITS = [(4, 4), (5, 3), (0, 8)]
SHARDS = SPLITS[0]
HANDSHAKE = 2 * 8 * 64
"""Bytes that are more than the headers of two ranks in one message."""


UNCHECKED = {"check_finite": False, "check_equal": False, "check_distinct": False}


class Steps(NamedTuple):
    """Results of three steps of one rank, and what the last of them read, copied to the device and sent from the host."""

    found: list[Any]
    reads: list[str]
    copies: list[str]
    host_messages: list[int]


def steps(index: int, *rows: Tensor, splits: bool = True, **options: Any) -> Steps:
    """Compute each rank's part, or all of the small batch on every rank."""
    loss, found = cz.DistributedLoss(ENTRIES[index].case(temperature=0.3).make().loss, **options).double(), []
    with device() as mode, splitting(always=splits), pytest.MonkeyPatch.context() as patch:
        for module in (loss_modules, row_loss):
            patch.setattr(module, "is_third_party", lambda kind: not is_of_this_library(kind))
        loss, *moved = map(mode.put, (loss, *rows))
        for _ in range(3):
            for recorded in (mode.reads, mode.uploads, mode.copies, mode.host_messages):
                recorded.clear()
            on_device = value_and_gradients(loss, moved)
            of_step = [*mode.reads, *mode.uploads], [*mode.copies], [*mode.host_messages]
            found.append(on_cpu(on_device))
    return Steps(found, *of_step)


def is_of_this_library(kind: type) -> bool:
    """Return whether a module sends no state of generators: the library's, and the zoo's variants of them."""
    return kind is torch.nn.ModuleList or kind.__module__.startswith(("contrastive_zoo.", "tests.losses."))


def is_own(entry: Entry) -> bool:
    return all(is_of_this_library(type(x)) for x in entry.case().make().loss.modules())


CASES = list(itertools.product(ENTRIES, [True, False]))
DRAWN = CASES if EVERY_CASE else [(entry, index % 4 > 0) for index, entry in enumerate(ENTRIES[::3])]


@pytest.mark.parametrize(("entry", "splits"), DRAWN, ids=str)
def test_a_steady_step_can_be_captured(entry: Entry, splits: bool, device_worlds: Worlds) -> None:
    index = ENTRIES.index(entry)
    shards = SPLITS[index // 3 % 3]
    rows = whole_batch(entry.case(), GlobalBatch(shards, d=3, labels="mixed", seed=5))
    loss = copy.deepcopy(entry.case(temperature=0.3).make()).double()
    with draws_of_a_device(str(entry)):
        expected = [value_and_gradients(loss, rows) for _ in range(3)]
    each = list(zip(*(x.split(shards) for x in rows), strict=True))
    for rank, done in enumerate(device_worlds.run(2, steps, index, each=each, splits=splits, **UNCHECKED)):
        local = slice(sum(shards[:rank]), sum(shards[: rank + 1]))
        for step, whole in zip(done.found, expected, strict=True):
            count = sum(x.is_floating_point() for x in rows)
            parts = [whole[0], *(2 * x[local] for x in whole[1 : 1 + count]), *whole[1 + count :]]
            torch.testing.assert_close(step, [x.detach() for x in parts], rtol=1e-9, atol=1e-10)
        if not may_read(str(entry)) and is_own(entry):
            assert not [*done.reads, *done.copies]
        assert max(done.host_messages, default=0) <= HANDSHAKE, "the host sends headers only"


def test_what_the_host_does_would_be_noticed(device_worlds: Worlds) -> None:
    """A setting that is copied to the device, a message of the host, and one by a backend without that device."""

    def job() -> tuple[list[str], list[int], str | None]:
        with device() as mode:
            scale, rows = torch.ones(3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
            loss = cz.DistributedLoss(cz.NTXent(), **UNCHECKED)
            loss(*(mode.put(rows + i) * scale.to(mode.place) for i in range(2)))
            cz.World.of().start_gather(torch.ones(1000), from_host=True)()
            error = error_message(lambda: dist.all_reduce(torch.ones(2)), AssertionError)
            return mode.uploads, mode.host_messages, error

    for uploads, sent, text in device_worlds.run(2, job):
        assert uploads
        assert max(sent) > HANDSHAKE
        assert "no backend for device type cpu" in str(text)


def test_every_entry_between_ranks_that_send_from_the_device(device_worlds: Worlds, worlds: Worlds) -> None:
    expected = worlds.run(2, lambda: {x.__name__: of_cpu(x) for x in OTHER_ENTRIES})
    found = device_worlds.run(2, lambda: {x.__name__: of_device(x) for x in OTHER_ENTRIES})
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


PAGE = Path(__file__).parents[1] / "docs" / "pages" / "accelerator.md"
OWN = [str(entry) for entry in ENTRIES if is_own(entry)]

Reads = list[int]
"""Of a step without checks, and of one with the default options: how often the host waits, and reads a step later."""


def of_rank(names: list[str]) -> dict[str, Reads]:
    found = {}
    for index, entry in ((i, x) for i, x in enumerate(ENTRIES) if str(x) in names):
        rows = whole_batch(entry.case(), GlobalBatch(SHARDS, d=3, labels="mixed", seed=5))
        local = [x.split(SHARDS)[dist.get_rank()] for x in rows]
        of_both = steps(index, *local, **UNCHECKED), steps(index, *local)
        found[str(entry)] = [len(x) for done in of_both for x in (done.reads, done.copies)]
    return found


def test_checks_would_be_noticed(device_worlds: Worlds) -> None:
    """The mutant: the host reads values a step later, as checks of NaN and of equal values do."""
    for found in device_worlds.run(2, of_rank, ["NTXent"]):
        assert found["NTXent"][-1]


def stated() -> dict[str, Reads]:
    lines = PAGE.read_text(encoding="utf-8").split("| without checks |")[1].split("\n\n")[0].splitlines()[2:]
    rows = [[x.strip() for x in line.strip("|").split("|")] for line in lines]
    named = {x: [int(n) for n in f"{off} / {on}".split("/")] for off, on, names in rows for x in names.split("; ")}
    others = named.pop("all others")
    assert named.keys() <= set(OWN), f"{PAGE.name} names losses that are in no table tests/losses/zoo_*.py"
    return {name: named.get(name, others) for name in OWN}


@pytest.mark.parametrize("first", range(4) if EVERY_CASE else [0])
def test_the_table_is_true(first: int, device_worlds: Worlds) -> None:
    limits, names = stated(), OWN[first :: 4 if EVERY_CASE else 12]
    for name, found in device_worlds.run(2, of_rank, names)[0].items():
        is_kept = all(x <= limit for x, limit in zip(found, limits[name], strict=True))
        assert is_kept, f"{name} reads {found}: name it in docs/pages/accelerator.md, or read less"
