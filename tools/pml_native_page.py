"""Print the table of native equivalents of pytorch-metric-learning's losses: ``python -m tools.pml_native_page``."""

from typing import get_type_hints

from pytorch_metric_learning import losses

from contrastive_zoo.wrapper.pml.meaning import COMPOSITES
from contrastive_zoo.wrapper.pml.native.translation import NO_LOSS, REFUSED, TRANSLATED
from contrastive_zoo.wrapper.pml.sharded import sharded_loss


def as_markdown() -> str:
    """Return a table of the exports of ``pytorch_metric_learning.losses``: native equivalent and sharding, or why not.

    Examples:
        >>> print("\\n".join(as_markdown().splitlines()[:3]))
        | pytorch-metric-learning | native | sharded |
        |---|---|---|
        | `AngularLoss` | it compares unit rows with negatives that are not normalised, this library's all unit rows. | yes |
    """
    lines = ["| pytorch-metric-learning | native | sharded |", "|---|---|---|"]
    no_losses = {kind for kind, why in REFUSED.items() if why == NO_LOSS}
    for kind in sorted({*TRANSLATED, *REFUSED} - no_losses, key=lambda x: x.__name__):
        native = f"`{get_type_hints(TRANSLATED[kind])['return'].__name__}`" if kind in TRANSLATED else REFUSED[kind]
        if kind is losses.SelfSupervisedLoss:
            native = "`NTXent`, `InfoNCE`, or what its loss is, called with views"
        sharded = "as its losses" if kind in COMPOSITES else sharded_loss.REFUSED.get(kind, "yes")
        lines.append(f"| `{kind.__name__}` | {native} | {sharded} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")
