"""The process that holds the folder and the ranks of an audit. It ends both when its parent closes the pipe or is gone.

:mod:`contrastive_zoo.testing.auditing.launch` runs it by its path; it imports no torch, so that it starts at once.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, Popen

Running = tuple[Popen[bytes], threading.Thread]  # a process, and the thread that waits for its end


def main() -> None:
    """Print the folder; end all processes and start those of each line of stdin, whose ids are printed."""
    folder = Path(tempfile.mkdtemp(prefix="contrastive-zoo-audit-"))
    running: list[Running] = []
    try:
        print(folder, flush=True)
        for line in sys.stdin:
            _end(running)
            for name, command, variables in json.loads(line):
                running.append(_start(folder / name, command, variables))
            print(json.dumps([process.pid for process, _ in running]), flush=True)
    finally:
        _end(running)
        shutil.rmtree(folder, ignore_errors=True)


def _start(path: Path, command: list[str], variables: dict[str, str]) -> Running:
    """Start a process in a session of its own, which is ended as a group, with what the process has started."""
    with path.with_suffix(".log").open("wb") as log:
        process = Popen(command, env=variables, stdin=DEVNULL, stdout=log, stderr=log, start_new_session=True)
    watch = threading.Thread(target=_watch, args=(process, path.with_suffix(".ended")))
    watch.start()
    return process, watch


def _watch(process: Popen[bytes], ended: Path) -> None:
    status = process.wait()
    _kill(process)
    ended.write_text(str(status))


def _end(running: list[Running]) -> None:
    for process, watch in running:
        if watch.is_alive():  # the number of one that has ended may be that of another program by now
            _kill(process)
    while running:
        running.pop()[1].join()


def _kill(process: Popen[bytes]) -> None:
    with suppress(OSError):  # the group has ended
        os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
