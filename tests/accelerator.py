"""Run losses on an accelerator that holds no values: reading one raises, as does mixing devices.

    python -m tests.accelerator [NAME ...]    prints as JSON what each loss of the zoo reads, None if nothing

The device is registered for the whole process, so this is a program and not a test.
"""

import inspect
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import contrastive_zoo as cz
from contrastive_zoo.ranks import devices
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.trial import whole_batch
from contrastive_zoo.wrapper import call_history
from tests.losses import zoo_compositions, zoo_margins, zoo_pairs, zoo_softmax, zoo_statistics, zoo_tokens, zoo_weights
from tests.zoo import ZOO, Entry

DEVICE = "pretended"
FAMILIES = (zoo_softmax, zoo_margins, zoo_pairs, zoo_weights, zoo_statistics, zoo_compositions, zoo_tokens)
LEFT_OUT = {"MNRL", "MNRL, all directions", "MNRL, symmetric"}
"""The zoo's draws its negatives from values."""
PACKAGE = Path(inspect.getfile(cz)).parent


def rows_of(entry: Entry) -> list[torch.Tensor]:
    """Return a batch of 9 samples in float32."""
    return [x.float() if x.is_floating_point() else x for x in whole_batch(entry.case(), GlobalBatch((9,), d=4))]


def read_by(make: Callable[[], torch.nn.Module], rows: list[torch.Tensor], *, check_finite: bool) -> str | None:
    """Return what two training steps read from the device and where; None if nothing."""
    try:
        loss = cz.DistributedLoss(make(), static_shapes=True, check_finite=check_finite)
        with move(loss):
            on_device = [
                torch.empty(x.shape, dtype=x.dtype, device=DEVICE, requires_grad=x.is_floating_point()) for x in rows
            ]
            for _ in range(2):
                value = loss(*on_device)
                value.backward()
            assert value.device.type == on_device[0].device.type
    except Exception as error:  # whatever it raises is the answer
        frames = [x for x in traceback.extract_tb(error.__traceback__) if Path(x.filename).is_relative_to(PACKAGE)]
        where = f"{Path(frames[-1].filename).relative_to(PACKAGE)}:{frames[-1].name}" if frames else "outside"
        return f"{where}: {type(error).__name__}: {str(error).splitlines()[0][:100]}"
    return None


def move(module: torch.nn.Module) -> FakeTensorMode:
    """Move parameters and buffers to the device, and return the mode in which it has no values."""
    mode = FakeTensorMode()

    def moved(x: torch.Tensor) -> torch.Tensor:
        fake = mode.from_tensor(x.detach())
        with mode:
            return fake.to(DEVICE)

    for part in module.modules():
        for name, x in part._parameters.items():
            if x is not None:
                part._parameters[name] = torch.nn.Parameter(moved(x), requires_grad=x.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = moved(buffer)
    return mode


def all_directions() -> cz.MNRL:
    """Return the loss with every comparison it can make."""
    return cz.MNRL(directions=("query_to_doc", "doc_to_query", "query_to_query", "doc_to_doc"))


def main() -> None:
    """Print what each loss reads."""
    warnings.simplefilter("ignore")
    _setup_privateuseone_for_python_backend(DEVICE)
    getattr(torch, DEVICE).get_amp_supported_dtype = lambda: [torch.bfloat16]
    if "--as-cpu" in sys.argv:
        devices.on_cpu = lambda x: True
    entries = [*ZOO, *(entry for family in FAMILIES for entry in family.ENTRIES)]
    cases = {str(entry): (entry.make, rows_of(entry)) for entry in entries if str(entry) not in LEFT_OUT}
    ones = torch.ones(9, 4)
    cases["MNRL"] = (
        all_directions,
        [ones, ones, ones[:5], torch.arange(5)],
    )  # the zoo's draws its negatives from values
    call_history.read_later = lambda x: lambda: [1.0] * x.numel()  # the copy that a later call reads has no values here
    check_finite = "--check-finite" in sys.argv
    named = {x for x in sys.argv[1:] if not x.startswith("--")} or cases.keys()
    found = {name: read_by(*x, check_finite=check_finite) for name, x in cases.items() if name in named}
    print(json.dumps(found, indent=1), flush=True)
    os._exit(0)  # torch may abort when it takes the device down


if __name__ == "__main__":
    main()
