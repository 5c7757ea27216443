"""What this process uses of the machine."""


def resident(what: str) -> float:
    """Return the resident memory of this process in MB: current (VmRSS) or peak (VmHWM)."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(what)) / 1024
