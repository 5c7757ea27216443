"""Right and wrong trainings of the audit: the cross product of the parts of tests/audit_parts.py."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from tests.audit_loops import Parts
from tests.audit_parts import AUGMENTATIONS, ENCODERS, SCHEDULES, VALIDATIONS

PLAIN, LOW = ("residual", "dropout"), "mixed, reduced in bfloat16"

# For each trainer the precisions and encoders that people use with it
FORMS: dict[str, list[tuple[str, str]]] = {
    "DDP": [
        *product([""], [x for x in ENCODERS if x != "BatchNorm"]),
        *product(["autocast"], [*PLAIN, "unused parameters"]),
        *product(["GradScaler"], PLAIN),
    ],
    "average_gradients": [
        *product([""], [*ENCODERS][:8]),
        *product(["autocast", "GradScaler"], [*PLAIN, "unused parameters", "casts by hand"]),
    ],
    "accumulation": [*product([""], PLAIN), ("autocast", "residual"), ("", "casts by hand")],
    "GradCache": [
        *product([""], [x for x in [*ENCODERS][:8] if x not in ("unused parameters", "LayerDrop")]),
        ("autocast", "dropout"),
    ],
    "FGSM": [*product([""], [*PLAIN, "autocast inside of forward"])],
    "LBFGS": [*product([""], PLAIN)],
    "FSDP2": [*product([""], PLAIN), *product(["mixed", LOW], ["residual"]), ("mixed", "dropout")],
    "FSDP1": [*product(["", "mixed"], ["residual"]), (LOW, "dropout")],
    "Accelerate": [
        *product(["", "bf16"], PLAIN),
        *product([""], ["autocast inside of forward", "bfloat16 parameters"]),
    ],
    "Hugging Face": [*product(["", "bf16"], PLAIN), ("", "LayerDrop")],
    "Lightning": [("", "residual"), *product(["bf16-mixed"], PLAIN), ("bf16-true", "residual")],
    "Lightning, two optimizers": [*product(["", "bf16-mixed"], ["residual"])],
    "Fabric": [("", "dropout"), *product(["bf16-mixed", "bf16-true"], ["residual"])],
}


def right() -> Iterator[Parts]:
    """Yield every trainer in each of its precisions; the other parts take turns."""
    for trainer, forms in FORMS.items():
        for precision, encoder in forms:
            yield Parts(trainer, precision, encoder)
    for precision, encoder in FORMS["accumulation"]:
        yield Parts("DDP", precision, encoder, loss="OpenCLIP")


def in_turn(setups: Iterator[Parts]) -> Iterator[Parts]:
    for index, x in enumerate(setups):
        turns = {"augmentation": [*AUGMENTATIONS], "validation": [*VALIDATIONS], "schedule": [*SCHEDULES]}
        chosen = {key: names[index % len(names)] for key, names in turns.items()}  # of 5, 4 and 3: every combination
        is_low = x.encoder == "bfloat16 parameters" or x.precision == "bf16-true"
        chosen["optimizer"] = "AdamW" if is_low or index % 3 == 2 else "SGD"
        yield replace(x, **chosen)


RIGHT = [*in_turn(right())]

MISTAKES: list[tuple[str, dict[str, str]]] = [
    ("times W", {"loss": "loss × W"}),
    ("divided by W", {"loss": "loss / W"}),
    ("local negatives", {"loss": "local loss"}),
    ("own slice", {"loss": "own slice"}),
    ("detached", {"loss": "detached"}),
    ("gathered first", {"loss": "gathered first"}),
    ("unequal parameters", {"loss": "loss parameters seeded per rank"}),
    ("trainer averages", {"loss": "sum with a trainer that averages"}),
    ("batch statistics", {"encoder": "BatchNorm"}),
    ("same shard", {"sampler": "one shard"}),
    ("sampler seeded per rank", {"sampler": "a seed per rank"}),
    ("repeated samples", {"sampler": "padded"}),
    ("not optimized", {"clears": "not optimized"}),
    ("never zeroed", {"clears": "the model"}),
    ("accumulation not divided", {"trainer": "accumulation, not divided"}),
    ("accumulation divided twice", {"trainer": "accumulation, divided twice"}),
    ("not reduced", {"trainer": "no average"}),
]


def wrong() -> Iterator[Parts]:
    """Yield every mistake on top of right trainings: in float32, under autocast, and with all that a loop may do."""
    for index, (mistake, changes) in enumerate(MISTAKES):
        augmentation, validation = [*AUGMENTATIONS][1 + index % 4], [*VALIDATIONS][1 + index % 3]
        for base in (
            Parts("DDP"),
            Parts("DDP", "autocast", "dropout", validation=validation),
            Parts("DDP", augmentation=augmentation, schedule="warm-up from 0", optimizer="AdamW"),
        ):
            yield replace(base, **changes, mistake=mistake)


WRONG = [*wrong()]
TRAININGS = {f"{x}{' (wrong)' * bool(x.mistake)}": x for x in [*RIGHT, *WRONG]}


def run(name: str) -> None:
    TRAININGS[name].train()
