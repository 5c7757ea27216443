"""Write the table of native equivalents of pytorch-metric-learning's losses: ``python -m tools.pml_native_page``."""

from contrastive_zoo.wrapper.pml.table import LOSSES
from tools.pages import PAGES, fill


def as_markdown() -> str:
    """Return a table of the exports of ``pytorch_metric_learning.losses``: the loss of this library, or why there is none.

    Examples:
        >>> print("\\n".join(as_markdown().splitlines()[:3]))
        | pytorch-metric-learning | native |
        |---|---|
        | `AngularLoss` | it compares unit rows with negatives that are not normalised, this library's all unit rows. |
    """
    rows = {"MultipleLosses": "`WeightedSum`"}
    rows["SelfSupervisedLoss"] = "`NTXent`, `InfoNCE`, or what its loss is, called with views"
    rows |= {
        kind.__name__: native if isinstance(native, str) else f"`{native.kind.__name__}`"
        for kind, native in LOSSES.items()
    }
    lines = [
        "| pytorch-metric-learning | native |",
        "|---|---|",
        *(f"| `{name}` | {rows[name]} |" for name in sorted(rows)),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    fill(PAGES / "pytorch-metric-learning.md", {"native": as_markdown()})
