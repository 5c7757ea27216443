"""Ctrl-C ends the command line without a traceback, also while torch is imported or ranks start."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.audit

ROOT = Path(__file__).parent.parent.parent
COMMAND = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have the suite ignore it

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.optim" and "INTERRUPTED" in os.environ:
            os.kill(os.getpid(), signal.SIGINT)
            print("still imports", file=sys.stderr)  # an import that is called from C swallows the interrupt

sys.meta_path.insert(0, Interrupt())
from contrastive_zoo.__main__ import main
main()
"""


def started(tmp_path: Path, arguments: list[str], **variables: str) -> "subprocess.Popen[str]":
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, "-c", COMMAND, *arguments]
    return subprocess.Popen(
        command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def test_an_interrupt_of_the_import_of_torch_ends_the_command(tmp_path: Path) -> None:
    with started(tmp_path, ["check", "nt-xent"], INTERRUPTED="yes") as command:
        _, error = command.communicate()
    assert command.returncode == 130, error
    assert "still imports" in error
    assert "Traceback" not in error


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the fork server is found in /proc")
def test_an_interrupt_while_ranks_start_prints_no_traceback(tmp_path: Path) -> None:
    def imports_in_fork_server(pid: int) -> bool:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        servers = [x for x in children if "forkserver" in Path(f"/proc/{x}/cmdline").read_text()]
        return any("libtorch" in Path(f"/proc/{x}/maps").read_text() for x in servers)

    with started(tmp_path, ["check", "nt-xent"]) as command:
        while command.poll() is None and not imports_in_fork_server(command.pid):
            time.sleep(0.01)
        os.killpg(command.pid, signal.SIGINT)  # as the terminal does
        _, error = command.communicate()
    assert command.returncode == 130, error
    assert "Traceback" not in error
