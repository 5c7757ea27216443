"""Packages of ``.ci/peers.txt`` in tests, which are skipped where one is not installed."""

import pytest

from tools.peer_losses import packages


def need(*names: str) -> None:
    pinned, folder = packages.required(), packages.FOLDER.relative_to(packages.ROOT)
    if absent := packages.missing(packages.FOLDER, {name: pinned[name] for name in names}):
        pytest.skip(f"{', '.join(absent)} is not in {folder}; `make test-all` installs it")
