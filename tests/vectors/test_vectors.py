"""The written vectors: the NumPy formulas and this library on live ranks agree with them, and a wrong loss does not."""

import json
import random
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import contrastive_zoo as cz
from tools.vectors import TOLERANCE, Summary, error, error_of_formula, make_loss, oracle, write_vectors
from tools.vectors.cases import CASES, LEFT_OUT

Arrays = dict[str, Any]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Summary]:
    folder = tmp_path_factory.mktemp("vectors")
    return folder, write_vectors(folder)


@pytest.fixture(scope="module")
def index(written: tuple[Path, Summary]) -> dict[str, Any]:
    return json.loads((written[0] / "vectors.json").read_text(encoding="utf-8"))


def arrays_of(folder: Path, case: dict[str, Any]) -> Arrays:
    with np.load(folder / case["file"]) as file:
        return dict(file)


def test_every_loss_of_the_catalogue_has_a_case() -> None:
    from contrastive_zoo.testing.catalogue import CATALOGUE

    assert set(CATALOGUE) - set(CASES) == set(LEFT_OUT)


def test_numpy_formulas_repeat_the_vectors(written: tuple[Path, Summary], index: dict[str, Any]) -> None:
    errors = {
        case["name"]: error_of_formula(case, arrays_of(written[0], case))
        for case in index["cases"]
        if case["loss"] in oracle.FORMULAS
    }
    assert len(errors) == written[1].repeated >= 45
    assert max(errors.values()) < 1e-12


def test_a_formula_that_is_not_a_number_is_an_error(
    written: tuple[Path, Summary], index: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's max() leaves NaN out unless it comes first."""
    case = next(case for case in index["cases"] if case["loss"] == "NTXent")
    of_loss = oracle.value_and_gradients

    def spoilt(*given: Any) -> Any:
        value, gradients = of_loss(*given)
        last = list(gradients)[-1]
        return value, {**gradients, last: gradients[last] * np.nan}

    monkeypatch.setattr(oracle, "value_and_gradients", spoilt)
    assert np.isnan(error_of_formula(case, arrays_of(written[0], case)))


def test_every_array_is_finite_and_in_64_bits(written: tuple[Path, Summary], index: dict[str, Any]) -> None:
    for case in index["cases"]:
        for name, x in arrays_of(written[0], case).items():
            assert x.dtype in (np.float64, np.int64), (case["name"], name)
            assert np.isfinite(x).all(), (case["name"], name)


def test_the_index_follows_its_schema(written: tuple[Path, Summary], index: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((written[0] / "schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(index, schema)


def test_files_and_names_are_those_of_the_index(written: tuple[Path, Summary], index: dict[str, Any]) -> None:
    assert {path.name for path in written[0].glob("*.npz")} == {case["file"] for case in index["cases"]}
    for case in index["cases"]:
        named = {f"{kind}.{x}" for kind in ("argument", "parameter", "buffer") for x in case[f"{kind}s"]}
        optional = {f"gradient.{x}" for x in named} | {f"buffer_after.{x}" for x in case["buffers"]}
        found = set(arrays_of(written[0], case))
        assert named | {"value"} <= found <= named | optional | {"value"}
        assert all(f"gradient.parameter.{x}" in found for x in case["parameters"])
        for split in case["splits"]:
            lengths = {name: len(arrays_of(written[0], case)[f"argument.{name}"]) for name in case["arguments"]}
            assert {name: sum(sizes) for name, sizes in split.items()} == lengths


def test_the_same_vectors_are_written_again(written: tuple[Path, Summary], tmp_path: Path) -> None:
    write_vectors(tmp_path)
    for path in (x for x in written[0].rglob("*") if x.is_file() and "__pycache__" not in x.parts):
        assert path.read_bytes() == (tmp_path / path.relative_to(written[0])).read_bytes(), path.name


def test_the_formulas_run_without_this_library(written: tuple[Path, Summary]) -> None:
    script = "import oracle, sys; print(len(oracle.FORMULAS), 'torch' in sys.modules, 'contrastive_zoo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=written[0], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(oracle.FORMULAS)), "False", "False"]


def errors_on_ranks(folder: Path, drawn: list[tuple[str, int]], planted: str = "") -> dict[str, float]:
    """Return the error of this rank's value and gradients for each case; runs on every rank."""
    torch.set_default_dtype(torch.float64)
    rank, cases = (
        torch.distributed.get_rank(),
        json.loads((folder / "vectors.json").read_text(encoding="utf-8"))["cases"],
    )
    errors = {}
    for name, number in drawn:
        case = next(x for x in cases if x["name"] == name)
        arrays, split = arrays_of(folder, case), case["splits"][number]
        loss = make_loss(CASES[name])
        loss.load_state_dict({x: torch.from_numpy(arrays[f"{kind}.{x}"]) for kind in ("parameter", "buffer")
                              for x in case[f"{kind}s"]}, strict=True)  # fmt: skip
        wrapped = cz.DistributedLoss(loss, grad_reduction="mean")
        local, places = {}, {}
        for argument, sizes in split.items():
            places[argument] = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
            x = torch.from_numpy(arrays[f"argument.{argument}"])[places[argument]].clone()
            local[argument] = x.requires_grad_(x.is_floating_point())
        value = wrapped(*local.values())
        value.backward()
        found = [(value.detach().numpy(), arrays["value"])]
        for argument, x in local.items():
            if f"gradient.argument.{argument}" in arrays:
                gradient = x.grad / (1 if planted else len(split[argument]))  # the trainer divides by W
                found.append((gradient.numpy(), arrays[f"gradient.argument.{argument}"][places[argument]]))
        found += [(x.grad.numpy(), arrays[f"gradient.parameter.{p}"]) for p, x in loss.named_parameters()]
        found += [(x.numpy(), arrays[f"buffer_after.{b}"]) for b, x in loss.named_buffers()]
        errors[name] = float(np.max([error(np.asarray(a), b) for a, b in found]))  # NaN if one is
    return errors


@pytest.mark.parametrize("number", [2, 3])
def test_this_library_conforms_on_live_ranks(
    worlds: Any, written: tuple[Path, Summary], index: dict[str, Any], number: int
) -> None:
    ranks = len(next(iter(index["cases"][0]["splits"][number].values())))
    drawn = [(name, number) for name in sorted(random.Random(number).sample(sorted(CASES), 30))]
    for errors in worlds.run(ranks, errors_on_ranks, written[0], drawn, timeout=60):
        assert {name: x for name, x in errors.items() if not x <= TOLERANCE} == {}


def test_a_gradient_w_times_too_large_does_not_conform(worlds: Any, written: tuple[Path, Summary]) -> None:
    errors = worlds.run(2, errors_on_ranks, written[0], [("nt-xent", 1)], "the factor of the trainer is forgotten")
    assert all(x["nt-xent"] > 1e-3 for x in errors)


def test_the_command_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for options in ([], ["--json"]):
        monkeypatch.setattr("sys.argv", ["vectors", str(tmp_path), *options])
        runpy.run_module("tools.vectors", run_name="__main__")
        out = capsys.readouterr().out
        assert json.loads(out)["cases"] == len(CASES) if options else f"{len(CASES)} cases in" in out
    assert (tmp_path / "vectors.json").exists()


def test_the_page_counts_the_formulas() -> None:
    page = (Path(__file__).parents[2] / "docs" / "pages" / "conformance-vectors.md").read_text(encoding="utf-8")
    assert f"formulas of {len(oracle.FORMULAS)} losses in NumPy" in page
