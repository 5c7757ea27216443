"""Install the peers of the GPU benchmarks in a folder of their own, each by itself: one that fails stops no other.

    python benchmarks/gpu_suite/install.py FOLDER

Without their dependencies, which are torch, Triton and NumPy: a peer must not replace the torch and the Triton that this
library is measured with, and all implementations run on the same two. OpenCLIP's losses do not need its torchvision.
"""

import sys
from pathlib import Path

from tools.peer_losses import packages

PACKAGES = {
    "inf-cl": "1.2.1",
    "memeff": "0.3.1",
    "siglip-kernel": "0.1.2",
    "cut-cross-entropy": "25.1.1",
    "open_clip_torch": "3.3.0",
}
"""The versions whose source ``implementations.py`` was written for: another one may have other arguments."""


installed = packages.installed


def missing(folder: str) -> list[str]:
    return packages.missing(folder, PACKAGES)


def install(folder: str) -> list[str]:
    """Install what is missing, and return what could not be installed, each with pip's last line."""
    return packages.install(folder, PACKAGES)


if __name__ == "__main__":
    into = sys.argv[1]
    Path(into).mkdir(parents=True, exist_ok=True)
    for line in install(into):
        print("not installed:", line)
