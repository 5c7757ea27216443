"""Release files: one version everywhere, links that a package page can follow."""

import re
import sys
from pathlib import Path

import pytest

import contrastive_zoo

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def package_page() -> str:
    """Return the README as the package page shows it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for rule in PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    return text


def test_the_version_is_written_once() -> None:
    assert "version" in PROJECT["project"]["dynamic"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(r"^version: (.+)$", citation, re.MULTILINE)[1] == contrastive_zoo.__version__  # type: ignore[index]  # None fails the test
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## \[(\d[^\]]*)\]", changes, re.MULTILINE)[1] == contrastive_zoo.__version__  # type: ignore[index]  # None fails the test


def test_the_package_page_has_no_relative_link() -> None:
    targets = re.findall(r"\]\(([^)]+)\)", package_page())
    assert [target for target in targets if not re.match(r"https?://|#", target)] == []
    assert "(`docs/pages/which-all-gather.md`)" in package_page()


def test_the_extras_of_the_readme_exist() -> None:
    listed = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert listed == set(PROJECT["project"]["optional-dependencies"])


def test_top_level_names_are_the_agreed_ones() -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    generated = {"dist", "site", "vectors", "demo-output", "shared"}
    assert folders - generated - {"__pycache__"} == {
        "contrastive_zoo",
        "tests",
        "benchmarks",
        "docs",
        "examples",
        "tools",
    }


def test_the_addresses_of_sources_are_whole() -> None:
    from contrastive_zoo.testing.catalogue import CATALOGUE

    for entry in CATALOGUE.values():
        for url in re.findall(r"https?://\S+", entry.source):
            assert not url.endswith(("/", "-")), (entry.name, url)
            assert re.search(r"abs/\d{4}\.\d{4,5}[,;]?$|(?<!arxiv\.org)/\S+\w[,;]?$", url), (entry.name, url)
