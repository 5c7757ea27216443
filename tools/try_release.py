"""Install the wheel into an empty environment and try it outside of the checkout: ``python tools/try_release.py dist``.

It also compares the files of the sdist with those of the repository.
"""

import argparse
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

VALUE = """
import torch, contrastive_zoo as cz
loss = cz.DistributedLoss(cz.NTXent(temperature=1.0))(torch.eye(2), torch.eye(2))
assert f"{loss.item():.4f}" == "0.5514", loss
print("contrastive_zoo", cz.__version__, "NTXent", f"{loss.item():.4f}")
"""

COMMANDS = {
    "": [["python", "-c", VALUE]],
    "cli": [["contrastive-zoo", "--version"], ["contrastive-zoo", "list"]],
    "testing": [["contrastive-zoo", "check", "nt-xent", "--world-size", "1", "2", "--examples", "3"]],
    "pml": [
        ["contrastive-zoo", "check", "pytorch_metric_learning.losses:ContrastiveLoss", "--wrap", "--examples", "3"]
    ],
    "mining": [["python", "-c", "import contrastive_zoo.data, faiss, tqdm"]],
    "plot": [["python", "-c", "import contrastive_zoo.metrics.plots"]],
}
"""What is run after each extra is installed, in this order; the first is the package without extras."""


def missing_files(sdist: Path) -> list[str]:
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted(set(listed.splitlines()) - inside)


def size(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def run(*command: object, folder: Path = ROOT) -> str:
    """Run a command, show what it printed if it failed, and return the last line that it prints."""
    done = subprocess.run([*map(str, command)], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-8000:], done.stderr[-4000:], sep="\n")
    done.check_returncode()
    return (done.stdout.strip().splitlines() or [""])[-1]


def try_wheel(wheel: Path, folder: Path, extras: Iterable[str]) -> None:
    """Install the wheel with each extra into one empty environment, and run its commands there."""
    venv.create(folder / "env", with_pip=True)
    bin_folder = folder / "env" / ("Scripts" if sys.platform == "win32" else "bin")
    for extra in extras:
        start = time.perf_counter()
        target = f"{wheel}[{extra}]" if extra else str(wheel)
        pip = [bin_folder / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run(*pip, "-c", ROOT / ".ci" / "constraints.txt", target)
        print(f"[{extra or 'no extra'}] installed in {time.perf_counter() - start:.0f} s, "
              f"environment {size(folder / 'env'):,.0f} MB", flush=True)  # fmt: skip
        for name, *arguments in COMMANDS[extra]:
            said = run(bin_folder / name, *arguments, folder=folder)
            print(f"  {name} {' '.join(arguments).strip().splitlines()[0]}: {said}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dist", type=Path, help="folder with one wheel and one sdist")
    parser.add_argument("--extras", nargs="*", default=list(COMMANDS), choices=list(COMMANDS))
    options = parser.parse_args()
    (wheel,), (sdist,) = options.dist.glob("*.whl"), options.dist.glob("*.tar.gz")
    if missing := missing_files(sdist):
        sys.exit(f"{sdist.name} lacks {len(missing)} files: {', '.join(missing[:10])}")
    with tempfile.TemporaryDirectory() as folder:
        try_wheel(wheel.resolve(), Path(folder), options.extras)


if __name__ == "__main__":
    main()
