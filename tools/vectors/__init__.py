"""Write conformance vectors: inputs, splits, values and gradients that any implementation of a loss must reproduce."""

import copy
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import torch
from torch import Tensor, nn

import contrastive_zoo
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.testing.catalogue import CATALOGUE
from tools.docstrings import formula, source
from tools.vectors.cases import CASES, LEFT_OUT, SAMPLES, SPLITS, Array, Case

FORMAT = 1  # number of the format; it changes when a reader must change
TOLERANCE = 1e-10  # largest relative error of an implementation in float64, see the conventions

CONVENTIONS = {
    "argument.*": "the global batch, in the order of the call: the shards of all ranks, in rank order",
    "splits": "shard sizes of each argument along its first dimension; value and gradients are the same for every split",
    "value": "the loss of the global batch, on every rank",
    "gradient.argument.*": "of the value with respect to the argument; rank r holds the rows of its shard",
    "gradient.parameter.*": "of the value with respect to a parameter of the loss, complete on every rank",
    "no gradient": "an argument without gradient.argument.* is constant: labels, scores, targets",
    "parameter.temperature": "the setting of this name, as a variable; its .log_scale is log(1 / temperature)",
    "buffer.*": "state of the loss before the call, buffer_after.* after it",
    "reduction": "mean is the global sum divided by the global count",
    "error": "max |found - expected| / max(1, max |expected|), of each array",
}


def write_vectors(folder: Path) -> int:
    """Write a ``.npz`` file per case, ``vectors.json`` and its JSON schema into a folder; return the number of cases.

    Examples:
        >>> import tempfile
        >>> write_vectors(Path(tempfile.mkdtemp())) > 80
        True
    """
    folder.mkdir(parents=True, exist_ok=True)
    index = []
    for case in CASES.values():
        entry, arrays = evaluate(case)
        np.savez(folder / entry["file"], allow_pickle=False, **arrays)
        index.append(entry)
    document = {
        "$schema": "schema.json",
        "format": FORMAT,
        "library": f"contrastive_zoo {contrastive_zoo.__version__}",
        "tolerance": TOLERANCE,
        "conventions": CONVENTIONS,
        "left_out": LEFT_OUT,
        "cases": index,
    }
    (folder / "vectors.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    shutil.copyfile(Path(__file__).with_name("schema.json"), folder / "schema.json")
    return len(index)


def evaluate(case: Case) -> tuple[dict[str, Any], dict[str, Array]]:
    arguments = case.arguments()
    with _float64():
        loss = make_loss(case)
        if any(True for _ in loss.buffers()):  # a first call moves the state away from zero
            with contrastive_zoo.engine.plain_formulas():
                loss(*map(torch.from_numpy, case.arguments(draw=1).values()))
        arrays = {f"argument.{name}": x for name, x in arguments.items()}
        arrays |= {f"parameter.{name}": _array(x) for name, x in loss.named_parameters()}
        arrays |= {f"buffer.{name}": _array(x) for name, x in loss.named_buffers()}
        tensors = {name: torch.tensor(x, requires_grad=x.dtype == np.float64) for name, x in arguments.items()}
        with contrastive_zoo.engine.plain_formulas():
            value = loss(*tensors.values())
        value.backward()
    arrays["value"] = _array(value)
    found = {f"argument.{name}": x.grad for name, x in tensors.items()}
    found |= {f"parameter.{name}": x.grad for name, x in loss.named_parameters()}
    arrays |= {f"gradient.{name}": _array(x) for name, x in found.items() if x is not None}
    arrays |= {f"buffer_after.{name}": _array(x) for name, x in loss.named_buffers()}
    return _entry(case, loss, arguments), arrays


def make_loss(case: Case) -> Loss:
    cls = getattr(contrastive_zoo, case.loss)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        loss: Loss = cls(**copy.deepcopy(case.settings))
    may_be_learnt = "Tensor" in str(get_type_hints(cls).get("temperature"))
    by_sample = hasattr(loss, "temperatures")  # each sample has its own
    if may_be_learnt and not by_sample and isinstance(loss.temperature, float):
        loss.temperature = nn.Parameter(torch.tensor(loss.temperature))
    return loss.double()


def error(found: Array, expected: Array) -> float:
    """Return the largest difference, relative to the largest expected element if that exceeds 1.

    Examples:
        >>> error(np.array([1.0, 10.0]), np.array([1.0, 20.0]))
        0.5
    """
    return float(np.max(np.abs(found - expected), initial=0) / max(1.0, np.max(np.abs(expected), initial=0)))


def _entry(case: Case, loss: Loss, arguments: dict[str, Array]) -> dict[str, Any]:
    of_loss = next(entry for entry in CATALOGUE.values() if entry.cls == case.loss)
    lengths = {name: len(x) for name, x in arguments.items()}
    return {
        "name": case.name,
        "loss": case.loss,
        "file": f"{case.name}.npz",
        "formula": formula(of_loss.loss),
        "source": source(of_loss.loss),
        "settings": all_settings(loss),
        "arguments": list(arguments),
        "parameters": [name for name, _ in loss.named_parameters()],
        "buffers": [name for name, _ in loss.named_buffers()],
        "splits": [{name: SPLITS[n][i] for name, n in lengths.items()} for i in range(len(SPLITS[SAMPLES]))],
    }


def all_settings(loss: Loss) -> dict[str, Any]:
    """Return the constructor arguments of a loss with their defaults, but those that are parameters of it."""
    learnt = {name.partition(".")[0] for name, _ in loss.named_parameters()}
    left_out = {"check_finite", "shard_over", *learnt}
    return {name: getattr(loss, name) for name, x in loss.fields.items() if x.init and name not in left_out}


@contextmanager
def _float64() -> Iterator[None]:
    """Make float64 the default, so that a number in a formula is not rounded to float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _array(x: Tensor) -> Array:
    return x.detach().numpy().copy()
