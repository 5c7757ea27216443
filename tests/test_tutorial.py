"""The tutorial and the recipes of the trainers: what they print is what the page says, and the same on many processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interpreter import python, torchrun

pytest.importorskip("sklearn")
pytest.importorskip("nbformat")

from tools.notebook import ROOT, as_notebook

pytestmark = [pytest.mark.pages, pytest.mark.filterwarnings("ignore")]

PAGE = ROOT / "docs" / "pages" / "from-one-gpu-to-many.md"
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.py"))

LIBRARIES = {
    "accelerate_loop": "accelerate",
    "deepspeed_engine": "deepspeed",
    "fabric": "lightning",
    "huggingface": "transformers",
    "lightning_module": "lightning",
    "sentence_transformers_trainer": "sentence_transformers",
}
OF_TEXTS = ("huggingface", "sentence_transformers_trainer")
PROCESSES = {"hsdp": 4, "tensor_parallel": 4}
TOLERANCES = {
    "amp": 1e-3,  # bfloat16 rounds embeddings and their gradients to 2⁻⁹
    "deepspeed_engine": 1e-6,  # computes in float32
    "huggingface": 1e-6,  # the Trainer adds losses in float32
    "sentence_transformers_trainer": 1e-6,
}
PROGRAM = """
import sys, torch
from contrastive_zoo.testing.auditing.launch import run_script
torch.set_default_dtype(torch.{})
sys.argv.pop(0)
run_script(sys.argv[0], is_module=False)
"""


def run(command: str) -> str:
    """Run a command of the page in the current folder and return its output."""
    program, *words = command.split()
    with pytest.MonkeyPatch.context() as patch:
        while "=" in program:
            patch.setenv(*program.split("="))
            program, *words = words
        if program == "torchrun":
            *_, processes = words[:3]
            done = torchrun(int(processes), "-c", PROGRAM.format("float32"), *words[3:])
        elif program == "python":
            done = python(*words)
        else:
            arguments = [sys.executable, "-m", "contrastive_zoo", *words]
            done = subprocess.run(arguments, text=True, capture_output=True, timeout=600, check=False)
    assert program == "contrastive-zoo" or done.returncode == 0, done.stderr
    return "\n".join(line.rstrip() for line in done.stdout.splitlines() if not line.startswith("[Gloo]"))


def without_measurements(text: str) -> str:
    """Return a text without seconds and errors, which differ from machine to machine."""
    return re.sub(r"\d+\.\d s|\d+e[+-]\d+", "#", text)


def test_the_tutorial_prints_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    cells = [x for x in as_notebook(PAGE.read_text(encoding="utf-8")).cells if x.cell_type == "code"]
    outputs = 0
    for cell in cells:
        if cell.source.startswith("%%writefile"):
            first, _, text = cell.source.partition("\n")
            (tmp_path / first.split()[1]).write_text(text + "\n", encoding="utf-8")
        elif cell.outputs:
            commands = cell.source.replace("!", "").splitlines()
            printed = without_measurements("\n".join(map(run, commands)))
            parts = without_measurements(cell.outputs[0].text.strip()).split("\n…\n")
            missing = [part for part in parts if part not in printed]
            assert not missing, f"{cell.source} printed\n{printed}"
            outputs += 1
    assert outputs == 12
    assert cells[-1].source == "!python same.py one.pt many.pt"
    assert cells[-1].outputs[0].text == "same\n"


def test_the_page_is_short_and_every_recipe_is_a_file_to_copy() -> None:
    assert len(PAGE.read_text(encoding="utf-8").split()) <= 2500
    assert {x.stem for x in RECIPES} >= LIBRARIES.keys() | PROCESSES.keys()
    for path in RECIPES:
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 60, path.name
        assert "examples" not in text, path.name
        page = ROOT / "docs" / "pages" / "trainers" / f"{path.stem}.md"
        assert f'--8<-- "examples/recipes/{path.name}"' in page.read_text(encoding="utf-8")


def losses(recipe: Path, processes: int, edits: dict[str, str] | None = None) -> list[float]:
    """Return the numbers that a recipe prints, in float64 where its trainer computes in it; run in the current folder."""
    text = recipe.read_text(encoding="utf-8")
    for old, new in (edits or {}).items():
        assert old in text
        text = text.replace(old, new)
    Path(recipe.name).write_text(text, encoding="utf-8")
    dtype = "float32" if recipe.stem == "deepspeed_engine" else "float64"
    done = torchrun(processes, "-c", PROGRAM.format(dtype), recipe.name)
    assert done.returncode == 0, done.stderr
    return [float(x) for x in re.findall(r"loss (\d\S+)$", done.stdout, re.MULTILINE)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of the digits on one process, which all recipes but those of texts must print."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("one"))
        return losses(ROOT / "examples" / "recipes" / "ddp.py", 1)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda x: x.stem)
def test_a_recipe_prints_on_many_processes_what_one_prints(
    recipe: Path, expected: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(LIBRARIES.get(recipe.stem, "torch"))
    monkeypatch.chdir(tmp_path)
    alone = losses(recipe, 1) if recipe.stem in OF_TEXTS else expected
    assert alone
    tolerance = TOLERANCES.get(recipe.stem, 1e-10)
    assert losses(recipe, PROCESSES.get(recipe.stem, 2)) == pytest.approx(alone, rel=tolerance)


SUMMED = """for module in (model, loss_fn):
    fully_shard(module)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction
optimizer = """
IN_FSDP = {
    "import contrastive_zoo as cz": "import contrastive_zoo as cz\nfrom torch.distributed.fsdp import fully_shard",
    "DistributedDataParallel(nn": "fully_shard(nn",
    "momentum=0.9": "momentum=0.9, foreach=False",
}
DDP_AROUND = {
    "(nn.Sequential(": "(cz.GradCache(nn.Sequential(",
    "nn.Linear(128, 32))": "nn.Linear(128, 32)), 16)",
    "cz.GradCache(model, chunk_size=16)": "model",
}
A_LOSS_FOR_EACH_CHUNK = "sum(loss_fn(*part) for part in zip(encode(x).split(50), y.split(50))) / 2"

RIGHT = [
    ("fsdp", {"optimizer = ": "fully_shard(loss_fn)\noptimizer = "}),
    ("fsdp", {"fully_shard(model)": "", "optimizer = ": SUMMED, "(0.5))": '(0.5)), grad_reduction="sum"'}),
    ("gradient_cache", DDP_AROUND),
    ("gradient_cache", IN_FSDP),
    *(("deepspeed_engine", {'"stage": 2': f'"stage": {stage}'}) for stage in (0, 1, 3)),
]
"""Other ways to write a recipe, as edits of its text."""

WRONG = [
    ("ddp", {"cz.DistributedLoss(": "("}),
    ("ddp", {", *loss_fn.parameters()": ""}),
    ("ddp", {"loss.backward()": "(2 * loss).backward()"}),
    ("fsdp", {"fully_shard(model)": "", "optimizer = ": SUMMED}),
    ("gradient_cache", {"loss_fn(encode(x), y)": A_LOSS_FOR_EACH_CHUNK}),
    ("hsdp", {"(0.5))": '(0.5)), process_group=mesh["shard"]'}),
    ("huggingface", {"cz.DistributedLoss(": "("}),
    ("lightning_module", {"cz.DistributedLoss(": "("}),
    ("sentence_transformers_trainer", {"DistributedSentenceLoss(losses": "(losses"}),
]
"""Mistakes, as edits of a recipe."""


@pytest.mark.parametrize(("name", "edits", "is_right"), [*((*x, True) for x in RIGHT), *((*x, False) for x in WRONG)])
def test_an_edit_of_a_recipe_is_right_or_noticed(
    name: str,
    edits: dict[str, str],
    is_right: bool,
    expected: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip(LIBRARIES.get(name, "torch"))
    monkeypatch.chdir(tmp_path)
    recipe = ROOT / "examples" / "recipes" / f"{name}.py"
    alone = losses(recipe, 1) if name in OF_TEXTS else expected
    tolerance = TOLERANCES.get(name, 1e-10) if is_right else 1e-4
    assert (losses(recipe, PROCESSES.get(name, 2), edits) == pytest.approx(alone, rel=tolerance)) is is_right


def test_samples_of_one_tensor_parallel_group_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = ROOT / "examples" / "recipes" / "tensor_parallel.py"
    with pytest.raises(AssertionError, match="brought the very same embeddings"):
        losses(recipe, 4, {'(0.5)), process_group=mesh["dp"])': "(0.5)))"})
