"""The written vectors: this library on live ranks agrees with them, and a wrong loss does not."""

import json
import random
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import contrastive_zoo as cz
from contrastive_zoo.testing.catalogue import CATALOGUE
from tests.helpers import local_shard
from tools.vectors import TOLERANCE, error, make_loss, write_vectors
from tools.vectors.cases import CASES, LEFT_OUT


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vectors")
    write_vectors(folder)
    return folder


@pytest.fixture(scope="module")
def index(written: Path) -> dict[str, Any]:
    return json.loads((written / "vectors.json").read_text(encoding="utf-8"))


def arrays_of(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    with np.load(folder / case["file"]) as file:
        return dict(file)


def test_the_index_follows_its_schema(written: Path, index: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((written / "schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(index, schema)


def test_every_loss_has_a_file_of_finite_numbers_in_64_bits(written: Path, index: dict[str, Any]) -> None:
    assert set(CATALOGUE) - set(CASES) == set(LEFT_OUT)
    assert {path.name for path in written.glob("*.npz")} == {case["file"] for case in index["cases"]}
    for case in index["cases"]:
        arrays = arrays_of(written, case)
        named = {f"{kind}.{x}" for kind in ("argument", "parameter", "buffer") for x in case[f"{kind}s"]}
        optional = {f"gradient.{x}" for x in named} | {f"buffer_after.{x}" for x in case["buffers"]}
        found = set(arrays)
        assert named | {"value"} <= found <= named | optional | {"value"}
        assert all(f"gradient.parameter.{x}" in found for x in case["parameters"])
        for name, x in arrays.items():
            assert x.dtype in (np.float64, np.int64), (case["name"], name)
            assert np.isfinite(x).all(), (case["name"], name)
        for split in case["splits"]:
            lengths = {name: len(arrays[f"argument.{name}"]) for name in case["arguments"]}
            assert {name: sum(sizes) for name, sizes in split.items()} == lengths


def errors_on_ranks(folder: Path, drawn: list[tuple[str, int]], planted: str = "") -> dict[str, float]:
    torch.set_default_dtype(torch.float64)
    cases = json.loads((folder / "vectors.json").read_text(encoding="utf-8"))["cases"]
    errors = {}
    for name, number in drawn:
        case = next(x for x in cases if x["name"] == name)
        arrays, split = arrays_of(folder, case), case["splits"][number]
        loss = make_loss(CASES[name])
        loss.load_state_dict({x: torch.from_numpy(arrays[f"{kind}.{x}"]) for kind in ("parameter", "buffer")
                              for x in case[f"{kind}s"]}, strict=True)  # fmt: skip
        local = {x: local_shard(torch.from_numpy(arrays[f"argument.{x}"]), sizes) for x, sizes in split.items()}
        value = cz.DistributedLoss(loss)(*(x.requires_grad_(x.is_floating_point()) for x in local.values()))
        value.backward()
        found = [(value.detach().numpy(), arrays["value"])]
        for argument, x in local.items():
            if (gradient := arrays.get(f"gradient.argument.{argument}")) is not None:
                of_rank = x.grad / (1 if planted else len(split[argument]))  # the trainer divides by W
                found.append((of_rank.numpy(), local_shard(torch.from_numpy(gradient), split[argument]).numpy()))
        found += [(x.grad.numpy(), arrays[f"gradient.parameter.{p}"]) for p, x in loss.named_parameters()]
        found += [(x.numpy(), arrays[f"buffer_after.{b}"]) for b, x in loss.named_buffers()]
        errors[name] = float(np.max([error(np.asarray(a), b) for a, b in found]))  # NaN if one is
    return errors


@pytest.mark.parametrize("number", [2, 3])
def test_this_library_conforms_on_live_ranks(worlds: Any, written: Path, index: dict[str, Any], number: int) -> None:
    ranks = len(next(iter(index["cases"][0]["splits"][number].values())))
    drawn = [(name, number) for name in sorted(random.Random(number).sample(sorted(CASES), 30))]
    for errors in worlds.run(ranks, errors_on_ranks, written, drawn):
        assert {name: x for name, x in errors.items() if not x <= TOLERANCE} == {}


def test_a_gradient_w_times_too_large_does_not_conform(worlds: Any, written: Path) -> None:
    errors = worlds.run(2, errors_on_ranks, written, [("nt-xent", 1)], "the factor of the trainer is forgotten")
    assert all(x["nt-xent"] > 1e-3 for x in errors)


def test_the_command_writes_the_same_vectors_again(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["vectors", str(tmp_path)])
    runpy.run_module("tools.vectors", run_name="__main__")
    assert capsys.readouterr().out == f"{len(CASES)} cases in {tmp_path}.\n"
    for path in written.iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name
