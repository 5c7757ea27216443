"""Losses of other libraries, as they come: on several processes they are what they are on one, or they are refused."""

import ast
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EVERY_CASE
from tools.peer_losses import packages
from tools.peer_losses.losses import LEFT_OUT, PeerLoss, table
from tools.peer_losses.measurement import Compared, compare, measure
from tools.peer_losses.page import drawn, page
from tools.peer_losses.trainers import REPLACEMENTS, SIZES, replaced

PAGE = Path(__file__).parents[2] / "docs" / "pages" / "everybody-elses-losses.md"
PACKAGES = list(dict.fromkeys(peer.package for peer in table()))
ALWAYS = {"NTXentLoss()", "DirectCLRLoss(loss_dim=4)", "CO2Regularizer()"}
"""Losses of lightly that have failed: their buffers are empty, and one is never set."""


def need(package: str) -> None:
    """Skip the test if a package is not installed."""
    absent = packages.missing(packages.FOLDER, packages.required())
    if requirement := next((x for x in absent if x.startswith(f"{package}==")), None):
        pytest.skip(f"{requirement} is not in {packages.FOLDER.relative_to(packages.ROOT)}; `make test` installs it")
    if package not in packages.required():
        pytest.importorskip(package.replace("-", "_"))


def of_package(package: str) -> list[PeerLoss]:
    """The losses of a package that is installed."""
    need(package)
    return [peer for peer in table() if peer.package == package]


@pytest.mark.parametrize("package", PACKAGES)
def test_losses_are_on_several_ranks_what_they_are_on_one(package: str, worlds: Worlds) -> None:
    losses = of_package(package)
    chosen = [x for x in losses if EVERY_CASE or x is losses[0] or str(x) in ALWAYS or drawn(x)]
    for peer, compared in zip(chosen, measure(worlds, chosen), strict=True):
        assert {size: of.wrong(peer) for size, of in compared.items()} == {2: None, 3: None}, (package, str(peer))


def bare(loss: Any, **_: Any) -> Any:
    return loss


def times_size(loss: Any, **_: Any) -> Any:
    loss_fn = cz.DistributedLoss(loss)
    return lambda **named: 2 * loss_fn(**named)


@pytest.mark.parametrize("mutant", [bare, times_size])
def test_a_wrong_wrapper_is_detected(mutant: Callable[..., Any], worlds: Worlds) -> None:
    losses = [x for x in of_package("open-clip-torch") if x.name == "SigLipLoss"]
    (compared,) = measure(worlds, losses, (2,), mutant)
    assert "differs by" in (compared[2].wrong(losses[0]) or "")


@pytest.mark.parametrize("package", dict.fromkeys(x.package.lower() for x in REPLACEMENTS))
def test_what_replaces_a_trainers_loss_is_their_own_code_on_one_process(package: str, worlds: Worlds) -> None:
    need(package)
    chosen = [x for x in REPLACEMENTS if x.package.lower() == package]
    for peer, compared in zip(chosen, measure(worlds, chosen, SIZES, replaced), strict=True):
        assert {size: of.wrong(peer) for size, of in compared.items()} == dict.fromkeys(SIZES), str(peer)


def test_another_temperature_than_theirs_is_detected(worlds: Worlds) -> None:
    need("colpali-engine")
    (peer,) = (replace(x, ours=cz.InfoNCE(normalize=False)) for x in REPLACEMENTS if x.name == "BiEncoderLoss")
    (compared,) = measure(worlds, [peer], (2,), replaced)
    assert "differs by" in (compared[2].wrong(peer) or "")


SUFFIXES = ("Loss", "Regularizer", "_loss_func", "Contrastive", "Distillation", "InfoNCE")
"""Of the names of losses."""


def test_every_loss_of_the_files_is_in_the_table_or_left_out_with_a_reason() -> None:
    names = set()
    for package in packages.required():
        for module in {peer.module for peer in of_package(package)}:
            folder = packages.FOLDER.joinpath(*module.split(".")[:-1])
            for path in folder.glob("*.py"):
                for node in ast.parse(path.read_text(encoding="utf-8")).body:
                    if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name.endswith(SUFFIXES):
                        names.add(f"{package} {node.name}")
    known = {f"{peer.package} {peer.name}" for peer in table()} | set(LEFT_OUT)
    assert sorted(names - known) == []


def test_a_package_that_is_absent_is_a_skip_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "FOLDER", packages.ROOT / ".venv" / "no peers")
    with pytest.raises(pytest.skip.Exception, match=r"lightly==.* is not in .venv/no peers; `make test` installs it"):
        of_package("lightly")


def test_each_package_is_installed_by_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        return SimpleNamespace(returncode=len(commands) == 1, stderr="ERROR: no version\n")

    monkeypatch.setattr(subprocess, "run", run)
    failed = packages.install(tmp_path, packages.required())
    assert len(failed) == 1
    assert failed[0].endswith(": ERROR: no version")
    assert len(commands) == len(packages.required())


def test_differences_are_told() -> None:
    peer = PeerLoss("lightly", "lightly.loss.x", "X", {})
    assert compare("ValueError: x", {}).wrong(peer) == "ValueError: x"
    assert compare({}, "ValueError: y").words == "one process raises ValueError: y"
    assert Compared({"value": 1e-3}).wrong(peer) == "value differs by 1.0e-03"
    refused = PeerLoss("lightly", "lightly.loss.x", "X", {}, refused="gathers by itself")
    assert Compared({}, "ValueError: X gathers by itself").wrong(refused) is None
    assert Compared({"value": 0.0}).wrong(refused) == "is not refused: {'value': 0.0}"


def test_the_page_has_every_loss_and_no_difference() -> None:
    part = PAGE.read_text(encoding="utf-8").split("<!-- peers: begin -->")[1].split("<!-- peers: end -->")[0]
    lines = [line for line in part.splitlines() if line.startswith("| ")][2:]
    assert len(lines) == len(table())
    for peer, line in zip(table(), lines, strict=True):
        assert line.startswith(f"| {peer.package} | `{peer}` | `{peer.call}` | ")
        cells = [cell.strip() for cell in line.strip("|").split(" | ")][3:]
        assert ("refused" in cells) == (peer.refused is not None)
        numbers = [float(cell) for cell in cells if cell not in ("", "–", "refused")]
        assert all(x <= peer.tolerance for x in numbers)
    text = page([(PeerLoss("x", "x.y", "Z", {}, refused="w"), {2: Compared({}, "w")})])
    assert "- `Z()` of x is refused: w" in text


def test_the_stand_in_of_a_model_has_no_parameters() -> None:
    models = [x for peer in table() for x in peer.settings.values() if isinstance(x, nn.Module)]
    assert models
    assert not any([*model.parameters()] for model in models)
