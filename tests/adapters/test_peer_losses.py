"""Losses of other libraries, as they come: on several processes they are what they are on one, or they are refused."""

import ast
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from zlib import crc32

import pytest
import torch
from torch import nn

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EVERY_CASE
from tools.comparison import Compared, compare, measure
from tools.peer_losses import packages
from tools.peer_losses.losses import LEFT_OUT, PeerLoss, runs, table
from tools.peer_losses.trainers import REPLACEMENTS, and_alone, replaced

pytestmark = pytest.mark.peers

PACKAGES = list(dict.fromkeys(peer.package for peer in table()))
ALWAYS = {"NTXentLoss()", "DirectCLRLoss(loss_dim=4)", "CO2Regularizer()"}
"""Losses of lightly that have failed: their buffers are empty, and one is never set."""


def need(package: str) -> None:
    absent = packages.missing(packages.FOLDER, packages.required())
    if requirement := next((x for x in absent if x.startswith(f"{package}==")), None):
        pytest.skip(f"{requirement} is not in {packages.FOLDER.relative_to(packages.ROOT)}; `make test` installs it")
    if package not in packages.required():
        pytest.importorskip(package.replace("-", "_"))


def of_package(package: str) -> list[PeerLoss]:
    need(package)
    return [peer for peer in table() if peer.package == package]


@pytest.mark.parametrize("package", PACKAGES)
def test_losses_are_on_several_ranks_what_they_are_on_one(package: str, worlds: Worlds) -> None:
    losses = of_package(package)
    chosen = [
        x
        for x in losses
        if EVERY_CASE or x is losses[0] or str(x) in ALWAYS or crc32(f"{package} {x}".encode()) % 8 == 0
    ]
    for peer, compared in measure(worlds, chosen, runs):
        assert {len(run.steps[0]) for run in compared} == {2, 3}
        assert [why for of in compared.values() if (why := peer.wrong(of))] == [], (package, str(peer))


def bare(loss: Any, **_: Any) -> Any:
    return loss


def times_size(loss: Any, **_: Any) -> Any:
    loss_fn = cz.DistributedLoss(loss)
    return lambda **named: 2 * loss_fn(**named)


@pytest.mark.parametrize("mutant", [bare, times_size])
def test_a_wrong_wrapper_is_detected(mutant: Callable[..., Any], worlds: Worlds) -> None:
    losses = [x for x in of_package("open-clip-torch") if x.name == "SigLipLoss"]
    ((peer, compared),) = measure(worlds, losses, runs, mutant)
    assert all("differs by" in (peer.wrong(of) or "") for of in compared.values())


@pytest.mark.parametrize("package", dict.fromkeys(x.package.lower() for x in REPLACEMENTS))
def test_what_replaces_a_trainers_loss_is_their_own_code_on_one_process(package: str, worlds: Worlds) -> None:
    need(package)
    chosen = [x for x in REPLACEMENTS if x.package.lower() == package]
    for peer, compared in measure(worlds, chosen, and_alone, replaced):
        assert {len(run.steps[0]) for run in compared} == {1, 2, 3}
        assert [why for of in compared.values() if (why := peer.wrong(of))] == [], str(peer)


def test_another_temperature_than_theirs_is_detected(worlds: Worlds) -> None:
    need("colpali-engine")
    (peer,) = (replace(x, ours=cz.InfoNCE(normalize=False)) for x in REPLACEMENTS if x.name == "BiEncoderLoss")
    ((_, compared),) = measure(worlds, [peer], runs, replaced)
    assert all("differs by" in (peer.wrong(of) or "") for of in compared.values())


SUFFIXES = ("Loss", "Regularizer", "_loss_func", "Contrastive", "Distillation", "InfoNCE")


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


def test_differences_are_told() -> None:
    peer = PeerLoss("lightly", "lightly.loss.x", "X", {})
    x, nan = torch.ones(2), torch.tensor([1.0, torch.nan])
    assert peer.wrong(compare("ValueError: x", {})) == "ValueError: x"
    assert peer.wrong(compare({}, "ValueError: y")) == "one process raises ValueError: y"
    assert peer.wrong(compare("ValueError: y", "ValueError: y")) == "ValueError: y"
    assert compare("ValueError: y", "ValueError: y").wrong(0) is None
    assert compare({"value": x}, {"value": x[:1]}).words == compare({"value": x}, {}).words == "differs in ['value']"
    assert compare({"value 0": nan}, {"value 0": x}).differences == {"value": torch.inf}
    assert compare({"value 0": nan}, {"value 0": nan}).differences == {"value": 0}
    assert peer.wrong(Compared({"value": 1e-3})) == "value differs by 1.0e-03"


def test_the_stand_in_of_a_model_has_no_parameters() -> None:
    models = [x for peer in table() for x in peer.settings.values() if isinstance(x, nn.Module)]
    assert models
    assert not any([*model.parameters()] for model in models)
