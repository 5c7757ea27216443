"""Two hosts on one machine: network namespaces with an address each, joined by virtual interfaces."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "eth0"  # the name of the interface of each host, for ``GLOO_SOCKET_IFNAME``
CUT = ("ip", "link", "set", INTERFACE, "down")  # the command that cuts the link, run on either host

_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Host:
    """A network namespace, its IPv4 address, and the process that keeps it."""

    address: str
    pid: int

    @property
    def namespace(self) -> Path:
        return Path(f"/proc/{self.pid}/ns/net")

    def command(self, *arguments: str) -> list[str]:
        return ["nsenter", f"--net={self.namespace}", *arguments]

    def enter(self) -> None:
        with self.namespace.open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")

    def processes(self) -> list[int]:
        own, found = os.readlink(self.namespace), []
        for path in Path("/proc").glob("[0-9]*/ns/net"):
            with suppress(OSError):  # it has ended
                if os.readlink(path) == own:
                    found.append(int(path.parts[2]))
        return [pid for pid in found if pid != self.pid]

    def end_processes(self) -> None:
        while pids := self.processes():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make two hosts with a link between them; at the end, kill their processes and remove them."""
    with ExitStack() as stack:
        one, other = (stack.enter_context(_host(f"192.0.2.{number}")) for number in (1, 2))
        pair = ("type", "veth", "peer", "name", INTERFACE, "netns", str(other.pid))
        _run("ip", "link", "add", INTERFACE, "netns", str(one.pid), *pair)
        for host in (one, other):
            _run(*host.command("ip", "link", "set", "lo", "up"))
            _run(*host.command("ip", "address", "add", f"{host.address}/24", "dev", INTERFACE))
            _run(*host.command("ip", "link", "set", INTERFACE, "up"))
        yield one, other


@contextmanager
def _host(address: str) -> Iterator[Host]:
    """Make a host that lasts until the end of the block or of this process, whose pipe its keeper reads."""
    command, pipe = ["unshare", "--net", "sh", "-c", "echo ready; exec cat"], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True) as keeper:
        assert keeper.stdout is not None
        if (answer := keeper.stdout.readline()) != "ready\n":
            raise OSError(f"no network namespace: {answer.strip()}")
        host = Host(address, keeper.pid)
        try:
            yield host
        finally:
            host.end_processes()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
