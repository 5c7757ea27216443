"""The recipes of the trainers and the tutorial: files to copy, whose numbers on many processes are those of one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interpreter import python, torchrun

pytest.importorskip("sklearn")

pytestmark = [pytest.mark.pages, pytest.mark.filterwarnings("ignore")]  # trainers warn when they are imported

ROOT = Path(__file__).parent.parent
FOLDER, PAGES = ROOT / "examples" / "recipes", ROOT / "docs" / "pages"
RECIPES = sorted(x.stem for x in FOLDER.glob("*.py"))

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
from torch.distributed._composable.contract import generate_state_key as draw
from contrastive_zoo.testing.auditing.launch import run_script
torch.set_default_dtype(torch.{})
draw.__globals__["STATE_KEY"] = draw()  # forked processes share one, those of torchrun do not
sys.argv.pop(0)
run_script(sys.argv[0], is_module=False)
"""


def test_every_recipe_is_a_file_to_copy() -> None:
    assert set(RECIPES) >= LIBRARIES.keys() | PROCESSES.keys()
    for name in RECIPES:
        text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 60, name
        assert "examples" not in text, name
        page = (PAGES / "trainers" / f"{name}.md").read_text(encoding="utf-8")
        assert f'--8<-- "examples/recipes/{name}.py"' in page


def losses(name: str, processes: int, edits: dict[str, str] | None = None, dtype: str = "float64") -> list[float]:
    """Return the numbers that a recipe prints; run in the current folder."""
    pytest.importorskip(LIBRARIES.get(name, "torch"))
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    for old, new in (edits or {}).items():
        assert old in text
        text = text.replace(old, new)
    Path(f"{name}.py").write_text(text, encoding="utf-8")
    done = torchrun(processes, "-c", PROGRAM.format(dtype), f"{name}.py")
    assert done.returncode == 0, done.stderr
    return [float(x) for x in re.findall(r"loss (\d\S+)$", done.stdout, re.MULTILINE)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of the digits on one process, which all recipes but those of texts must print."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("one"))
        return losses("ddp", 1)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


SUMMED = """for module in (model, loss_fn):
    fully_shard(module)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction
optimizer = """
OF_A_SUM = {"(0.5))": '(0.5)), grad_reduction="sum"'}
IN_FLOAT64 = {"enabled=False": "enabled=True", 'torch.autocast("cpu", torch.bfloat16)': "torch.enable_grad()"}

RIGHT = [
    *((name, {}) for name in RECIPES),
    ("amp", IN_FLOAT64),
    ("fabric", {"loss_fn.to(fabric.device)": "fabric.setup_module(loss_fn)"}),
    *(("fsdp", {"optimizer = ": f"fully_shard({x})\noptimizer = "}) for x in ("loss_fn", "loss_fn.loss.temperature")),
    ("fsdp", {"fully_shard(model)": "", "optimizer = ": SUMMED, **OF_A_SUM}),
    ("fsdp", {"fully_shard(model)": "", "optimizer = ": SUMMED.replace("loss_fn", "loss_fn.loss"), **OF_A_SUM}),
    ("ddp", {"\noptimizer": "\nfrom torch.distributed._composable import replicate as r\nr(loss_fn.loss)\noptimizer"}),
    *(("deepspeed_engine", {'"stage": 2': f'"stage": {stage}'}) for stage in (0, 1, 3)),
]
"""Recipes, and other ways to write them, as edits of their text."""


@pytest.mark.parametrize(("name", "edits"), RIGHT)
def test_a_recipe_prints_on_many_processes_what_one_prints(name, edits, expected: list[float], folder: Path) -> None:
    dtype = "float32" if name == "deepspeed_engine" else "float64"  # initial parameters differ, too
    of_itself = name if name in OF_TEXTS else "ddp"
    alone = expected if (of_itself, dtype) == ("ddp", "float64") else losses(of_itself, 1, dtype=dtype)
    assert alone
    tolerance = 1e-10 if edits is IN_FLOAT64 else TOLERANCES.get(name, 1e-10)
    assert losses(name, PROCESSES.get(name, 2), edits, dtype) == pytest.approx(alone, rel=tolerance)


LOOP = """        loss = loss_fn(model(x), y)  # local embeddings in, the loss of all processes out
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
NO_SYNC = """        with model.no_sync() if i % 3 < 2 else torch.enable_grad():
            loss = loss_fn(model(x), y)
            (loss / 3).backward()
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
"""
ACCUMULATION = {
    "ddp": {"for x, y in loader": "for i, (x, y) in enumerate(loader)", LOOP: NO_SYNC},
    "lightning_module": {"max_epochs=2": "max_epochs=2, accumulate_grad_batches=3"},
}


@pytest.mark.parametrize("name", ACCUMULATION)
def test_an_accumulation_prints_on_two_processes_what_one_prints(name, expected: list[float], folder: Path) -> None:
    alone = losses("ddp", 1, ACCUMULATION["ddp"])
    assert alone[-1] != pytest.approx(expected[-1], rel=1e-4)
    assert losses(name, 2, ACCUMULATION[name]) == pytest.approx(alone, rel=1e-10)


A_LOSS_FOR_EACH_CHUNK = "sum(loss_fn(*part) for part in zip(encode(x).split(50), y.split(50))) / 2"
WRONG = [
    ("ddp", {"cz.DistributedLoss(": "("}, "each process compares only its own samples"),
    ("ddp", {", *loss_fn.parameters()": ""}, "the loss's parameters are not in the optimizer"),
    ("ddp", {"optimizer.zero_grad()": "model.zero_grad()"}, "the loss's parameters are never zeroed"),
    ("ddp", {"loss.backward()": "(2 * loss).backward()"}, "the loss is multiplied by W"),
    ("ddp", {"    sampler.set_epoch(epoch)\n": ""}, "no `set_epoch`"),
    ("ddp", OF_A_SUM, '`grad_reduction="sum"` with a trainer that averages'),
    ("fsdp", {"fully_shard(model)": "", "optimizer = ": SUMMED}, ""),
    ("gradient_cache", {"loss_fn(encode(x), y)": A_LOSS_FOR_EACH_CHUNK}, "a loss for each chunk"),
    ("hsdp", {"(0.5))": '(0.5)), process_group=mesh["shard"]'}, ""),
    ("huggingface", {"cz.DistributedLoss(": "("}, ""),
    ("lightning_module", {"cz.DistributedLoss(": "("}, ""),
    ("sentence_transformers_trainer", {"DistributedSentenceLoss(losses": "(losses"}, ""),
]
"""Mistakes as edits of a recipe, each with its row in the table of the page, if it has one."""


@pytest.mark.parametrize(("name", "edits", "row"), WRONG)
def test_a_mistake_changes_what_is_printed(name, edits, row: str, expected: list[float], folder: Path) -> None:
    alone = losses(name, 1) if name in OF_TEXTS else expected
    found = losses(name, PROCESSES.get(name, 2), edits)
    assert found != pytest.approx(alone, rel=1e-4)
    page = (PAGES / "trainers.md").read_text(encoding="utf-8")
    assert f"| nothing | {expected[-1]:.3f} |" in page
    assert not row or f"| {row} | {found[-1]:.3f} |" in page


REFUSED = [
    ("0 and 1 brought the very same", "tensor_parallel", {'(0.5)), process_group=mesh["dp"])': "(0.5)))"}),
    ("gathered before", "ddp", {"(model(x), y)": "(*map(cz.collectives.all_gather, (model(x), y)))"}),
    ("differ between ranks", "ddp", {"LearnableTemperature(0.5": "LearnableTemperature(0.5 + 0.1 * dist.get_rank()"}),
]


@pytest.mark.parametrize(("words", "name", "edits"), REFUSED)
def test_a_mistake_that_ranks_can_see_is_refused(words: str, name: str, edits: dict[str, str], folder: Path) -> None:
    with pytest.raises(AssertionError, match=words):
        losses(name, PROCESSES.get(name, 2), edits)


def printed_by(command: str) -> str:
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


def test_the_tutorial_is_short_and_prints_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nbformat")
    from tools.notebook import as_notebook

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    page = (PAGES / "from-one-gpu-to-many.md").read_text(encoding="utf-8")
    assert len(page.split()) <= 2500
    cells = [x for x in as_notebook(page).cells if x.cell_type == "code"]
    outputs = 0
    for cell in cells:
        if cell.source.startswith("%%writefile"):
            first, _, text = cell.source.partition("\n")
            (tmp_path / first.split()[1]).write_text(text + "\n", encoding="utf-8")
        elif cell.outputs:
            commands = cell.source.replace("!", "").splitlines()
            printed = without_measurements("\n".join(map(printed_by, commands)))
            parts = without_measurements(cell.outputs[0].text.strip()).split("\n…\n")
            missing = [part for part in parts if part not in printed]
            assert not missing, f"{cell.source} printed\n{printed}"
            outputs += 1
    assert outputs == 12
    assert cells[-1].source == "!python same.py one.pt many.pt"
    assert cells[-1].outputs[0].text == "same\n"
