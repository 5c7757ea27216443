"""Install the peers of the GPU benchmarks in a folder of their own, each by itself: one that fails stops no other.

    python benchmarks/gpu_suite/install.py FOLDER

Without their dependencies, which are torch, Triton and NumPy: a peer must not replace the torch and the Triton that this
library is measured with, and all implementations run on the same two. OpenCLIP's losses do not need its torchvision.
"""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

PACKAGES = {
    "inf-cl": "1.2.1",
    "memeff": "0.3.1",
    "siglip-kernel": "0.1.2",
    "cut-cross-entropy": "25.1.1",
    "open_clip_torch": "3.3.0",
}
"""The versions whose source ``implementations.py`` was written for: another one may have other arguments."""

PIP = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--retries=1", "--timeout=15"]
"""A machine without a network is told so by one retry, not by five."""


def installed(folder: str) -> dict[str, str]:
    return {x.name.lower().replace("_", "-"): x.version for x in metadata.distributions(path=[folder])}


def missing(folder: str) -> list[str]:
    found = installed(folder)
    return [f"{x}=={version}" for x, version in PACKAGES.items() if found.get(x.replace("_", "-")) != version]


def install(folder: str) -> list[str]:
    """Install what is missing, and return what could not be installed, each with pip's last line."""
    failed = []
    for requirement in missing(folder):
        command = [sys.executable, *PIP, "--upgrade", "--target", folder, requirement]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            failed.append(f"{requirement}: {(done.stderr.strip().splitlines() or ['pip failed'])[-1]}")
    return failed


if __name__ == "__main__":
    into = sys.argv[1]
    Path(into).mkdir(parents=True, exist_ok=True)
    for line in install(into):
        print("not installed:", line)
