"""What this process uses of the machine."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")


def resident(kind: str) -> float:
    """Return the resident memory of this process in MB: current (VmRSS) or peak (VmHWM)."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(kind)) / 1024


def peak(job: Callable[[], Result]) -> tuple[float, Result]:
    """Return the MB at the peak of a job beyond those before it, and its result (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = resident("VmRSS")
    result = job()
    return resident("VmHWM") - before, result
