"""All outcomes of a job on a pool of worlds; after each, the next job runs in a working world."""

import contextlib
import dataclasses
import itertools
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import contrastive_zoo as cz
from contrastive_zoo.testing.thread_group import BACKEND
from contrastive_zoo.testing.worlds import RankError, Worlds, WorldTimeout


@pytest.fixture(scope="module")
def processes() -> Iterator[Worlds]:
    with Worlds(timeout=300.0, grace=2.0) as pool:
        yield pool


@pytest.fixture(scope="module", params=["processes", "threads"])
def worlds(request: pytest.FixtureRequest) -> Iterator[Worlds]:
    if request.param == "processes":
        yield request.getfixturevalue("processes")
        return
    with Worlds(timeout=300.0, grace=2.0, threads=True) as pool:
        yield pool


def total(start: float = 1.0) -> float:
    x = torch.tensor(start)
    dist.all_reduce(x)
    return x.item()


def who(worlds: Worlds, size: int) -> list[tuple[int, int]]:
    """The process and the thread of each rank."""
    return worlds.run(size, lambda: (os.getpid(), threading.get_native_id()))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may end between opening and reading
        return False


def end_soon(processes: list[int]) -> bool:
    deadline = time.monotonic() + 300
    while any(map(alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, processes))


def test_worlds_of_several_sizes_live_side_by_side_and_on(worlds):
    worlds.start(1, 2, 3)
    processes = {size: who(worlds, size) for size in (1, 2, 3)}
    assert len({(os.getpid(), threading.get_native_id()), *itertools.chain(*processes.values())}) == 7
    for size, before in processes.items():
        assert worlds.run(size, lambda: (dist.get_rank(), dist.get_world_size(), dist.get_backend())) == [
            (rank, size, BACKEND if worlds.threads else "gloo") for rank in range(size)
        ]
        assert worlds.run(size, total, 2.0) == [2.0 * size] * size
        assert who(worlds, size) == before


def test_a_closure_keywords_and_arguments_of_each_rank_are_sent(worlds):
    scale = torch.tensor(3)

    def job(common, local, *, offset):
        return (scale * (common + local) + offset).item()

    assert worlds.run(2, job, 10, each=[(1,), (2,)], offset=1, timeout=math.inf) == [34, 37]


def test_tensors_are_returned_detached_and_by_value(worlds):
    def job(x):
        assert x.requires_grad
        y = 2 * x
        y.register_hook(print)
        return {"leaf": x, "graph": y}, y[:1], y.bfloat16(), y[:0], torch.nn.Linear(1, 1)

    ((nested, row, half, none, layer),) = worlds.run(1, job, torch.arange(3.0, requires_grad=True))
    assert [x.requires_grad for x in nested.values()] == [False, False]
    assert nested["graph"].tolist() == [0.0, 2.0, 4.0]
    assert row.untyped_storage().nbytes() == 4
    assert half.dtype == torch.bfloat16
    assert none.shape == (0,)
    assert isinstance(layer.weight, torch.nn.Parameter)


@dataclasses.dataclass
class Case:
    value: int


def test_objects_of_classes_of_the_test_are_returned_with_their_class(worlds):
    Case.seen = 5  # by value, cloudpickle would put the attributes of the rank's copy back onto the original
    (returned,) = worlds.run(1, lambda case: Case(case.value + 1), Case(1))
    assert returned == Case(2)
    assert Case.seen == 5

    @dataclasses.dataclass
    class Local:
        value: int

    assert worlds.run(1, lambda: Local(3)) == [Local(3)]


def test_a_module_added_to_the_path_later_is_imported_on_ranks(processes, tmp_path, monkeypatch):
    processes.run(1, os.getpid)
    (tmp_path / "made_just_now.py").write_text("def answer():\n    return __name__")
    monkeypatch.syspath_prepend(tmp_path)
    import made_just_now

    assert processes.run(1, made_just_now.answer) == ["made_just_now"]


def test_every_job_starts_in_the_same_modes(worlds):
    def spoil():
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)

    worlds.run(1, spoil)
    assert worlds.run(1, lambda: (torch.is_grad_enabled(), torch.get_default_dtype())) == [(True, torch.float32)]


def test_ranks_have_the_pools_threads_and_the_callers_environment(monkeypatch):
    monkeypatch.setenv("ONLY_JUST_SET", "yes")
    before = dict(os.environ)
    with Worlds(torch_threads=2) as pool:
        (seen,) = pool.run(1, lambda: (torch.get_num_threads(), *map(os.environ.get, ("ONLY_JUST_SET", "PYTHONPATH"))))
    assert seen == (2, "yes", os.environ.get("PYTHONPATH"))
    assert dict(os.environ) == before


def test_invalid_arguments_raise(worlds):
    with pytest.raises(ValueError, match="at least one rank, got W=0"):
        worlds.run(0, total)
    for each, got in (([(1.0,)], "'tuple'"), ([1.0, 2.0], "'float', 'float'")):
        with pytest.raises(ValueError, match=f"got .{got}. for W=2"):
            worlds.run(2, total, each=each)
    with pytest.raises(TypeError, match="must be made inside the function"):
        worlds.run(1, lambda: worlds.timeout)


def test_a_closed_pool_raises_and_can_be_closed_again():
    pool = Worlds()
    processes = pool.run(2, os.getpid)
    pool.close()
    pool.close()
    assert not any(map(alive, processes))
    with pytest.raises(ValueError, match="pool is closed"):
        pool.run(1, total)


class Boom(Exception):
    def __init__(self, left, right):  # its pickle does not load: Exception keeps one argument, this wants two
        super().__init__(f"{left} and {right}")


def raise_on(*ranks, error=ValueError):
    if dist.get_rank() in ranks:
        raise error(f"from {dist.get_rank()}")


def raise_at_different_steps():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True)
    raise ValueError


def raise_boom():
    if dist.get_rank() == 1:
        raise Boom("this", "that")


def raise_while_another_rank_waits():
    raise_on(0, error=KeyError)
    dist.all_gather_object([None, None], 1)  # calls other collectives, which are not named


def die(how):
    if dist.get_rank() == 1:
        how()
    total()


def skip_a_collective():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))


PLACE = f"test_worlds.py:{skip_a_collective.__code__.co_firstlineno + 2} in skip_a_collective"
FAILURES = {
    # job, words of the error, its ranks with the type of what they raised, the ranks that wait; whether the world is kept
    "every rank": (lambda: raise_on(0, 1), "W=2: rank 0 raised ValueError: from 0; rank 1 raised ValueError: from 1",
                   {0: ValueError, 1: ValueError}, {}, True),
    "different steps": (raise_at_different_steps, "rank 0 raised ValueError", {0: ValueError, 1: ValueError}, {}, False),
    "one rank": (raise_boom, "W=2: rank 1 raised Boom: this and that", {1: RuntimeError}, {}, False),
    "another waits": (raise_while_another_rank_waits, "rank 0 raised KeyError: 'from 0'; rank 1 waits in all_gather_o",
                      {0: KeyError}, {1: "all_gather_object"}, False),
    "no pickle": (lambda: (x for x in ()), "rank 0 raised TypeError: cannot pickle 'generator' object",
                  {0: TypeError, 1: TypeError}, {}, True),
    "death": (lambda: die(lambda: os._exit(7)), "W=2: rank 1 died (exit code 7)", {1: ChildProcessError}, None, False),
    "a skipped collective": (
        skip_a_collective,
        f"W=2: no answer within 3 s. rank 0 waits in all_reduce ({PLACE}); rank 1 has returned. "
        "Rank 1 never entered all_reduce.",
        {}, {0: "all_reduce"}, False),
    "a skipped message": (lambda: dist.get_rank() or cz.collectives.all_reduce(torch.ones(1)),
                          "rank 0 waits in a message of contrastive_zoo (test_worlds.py:",
                          {}, {0: "a message of contrastive_zoo"}, False),
    "two collectives": (lambda: dist.barrier() if dist.get_rank() else dist.all_reduce(torch.ones(1)),
                        "Rank 1 never entered all_reduce. Rank 0 never entered barrier.",
                        {}, {0: "all_reduce", 1: "barrier"}, False),
    "a slow job": (lambda: time.sleep(60), "No rank waits in a collective", {}, {0: None, 1: None}, False),
    "a wait in C++": (lambda: dist.get_rank() or dist.all_reduce(torch.ones(1), async_op=True).wait(),
                      "rank 1 has returned. No Python frame shows a collective", {}, {0: None}, False),
}  # fmt: skip


WAITS = {name for name, (_, _, _, waits, _) in FAILURES.items() if waits}


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.audit] * (x in WAITS)) for x in FAILURES])
def test_a_job_that_fails_says_why_and_the_next_one_runs(worlds, name):
    job, words, errors, waiting, is_kept = FAILURES[name]
    if worlds.threads:
        if name == "death":
            pytest.skip("it ends the process")
        errors = {1: Boom} if name == "one rank" else errors  # nothing is pickled
    before = who(worlds, 2)
    with pytest.raises(RankError) as caught:
        worlds.run(2, job, timeout=None if errors else 3)
    text = str(caught.value)
    said, traceback, _ = text.partition("Traceback")  # which shows the line of a job, words and all
    assert words in said
    assert "_rank.py" not in text
    assert "threads.py" not in text
    assert waiting is None or bool(traceback) == bool(errors)
    assert isinstance(caught.value, WorldTimeout) == (not errors)
    root_causes = [*caught.value.errors.items()][: len(errors)]
    assert {rank: type(error) for rank, error in root_causes} == errors
    assert waiting is None or {rank: x.collective for rank, x in caught.value.stuck.items()} == waiting
    after = who(worlds, 2)
    assert after == before if is_kept else not set(after) & set(before)
    assert worlds.run(2, total) == [2.0, 2.0]


def test_a_signal_of_the_keyboard_is_ignored_and_a_job_that_ends_its_group_ends_its_world(processes):
    before = processes.run(1, os.getpid)
    assert processes.run(1, lambda: signal.raise_signal(signal.SIGINT)) == [None]
    assert processes.run(1, os.getpid) == before
    processes.run(1, dist.destroy_process_group)
    assert processes.run(1, os.getpid) != before
    assert processes.run(1, total) == [1.0]


def test_a_rank_that_died_between_two_jobs_is_replaced(processes):
    _, victim = processes.run(2, os.getpid)
    os.kill(victim, signal.SIGKILL)
    while Path(f"/proc/{victim}").exists():  # a zombie's threads may still hold its pipe: wait for its burial
        time.sleep(0.01)
    assert processes.run(2, total) == [2.0, 2.0]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell that starts the suite in the background has it ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_job_ends_its_world(worlds, tmp_path):
    before, begun = [thread for _, thread in who(worlds, 2)], tmp_path / "begun"

    def job():
        begun.touch()
        while True:
            time.sleep(0.01)

    def interrupt():
        while not begun.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        worlds.run(2, job, timeout=math.inf)
    assert end_soon(before)  # a thread that has been joined may live on in the kernel for a moment
    assert worlds.run(2, total) == [2.0, 2.0]


SCRIPT = """
import os, sys
import torch, torch.distributed as dist
from contrastive_zoo.testing.worlds import Worlds
print("main runs")
class Row:
    def __init__(self, value): self.value = value
def job(rows):
    x = torch.tensor(rows[dist.get_rank()].value); dist.all_reduce(x); return Row(x.item())
worlds = Worlds()
back = worlds.run(2, job, [Row(1), Row(2)])
print([row.value for row in back], all(type(row) is Row for row in back))
print(*worlds.run(2, os.getpid))
"""


@pytest.mark.audit
def test_a_script_without_a_main_guard(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    (tmp_path / "plain.py").write_text(SCRIPT)
    command = [sys.executable, "-W", "error", "plain.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path, check=False)
    assert done.stderr == ""
    *lines, ranks = done.stdout.splitlines()
    assert lines == ["main runs", "[3, 3] True"]
    assert end_soon([int(pid) for pid in ranks.split()])  # the script does not close the pool


@pytest.mark.audit
def test_ranks_in_a_collective_die_with_a_parent_that_is_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    code = textwrap.dedent("""
        import os, signal, tempfile, threading
        import torch, torch.distributed as dist
        from contrastive_zoo.testing.worlds import Worlds
        tempfile.tempdir = os.getcwd()
        os.mkfifo("in the job")
        def job():
            if dist.get_rank() == 0:
                open("in the job", "w").close()
                dist.all_reduce(torch.ones(1))
            while True: pass
        def end():
            open("in the job").read()
            os.kill(os.getpid(), signal.SIGKILL)
        worlds = Worlds()
        print(*worlds.run(2, os.getpid), flush=True)
        threading.Thread(target=end).start()
        worlds.run(2, job)
    """)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=tmp_path) as parent:
        assert parent.stdout is not None
        ranks = [int(pid) for pid in parent.stdout.readline().split()]
        assert parent.wait(600) == -signal.SIGKILL
    assert len(ranks) == 2
    try:
        assert end_soon(ranks)
        assert list(tmp_path.glob("contrastive-zoo-*")) == []
    finally:
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
