"""Print the table of native equivalents of pytorch-metric-learning's losses: ``python -m tools.pml_native_page``."""

from pytorch_metric_learning import losses

from contrastive_zoo.wrapper.pml.table import LOSSES


def as_markdown() -> str:
    """Return a table of the exports of ``pytorch_metric_learning.losses``: native equivalent and sharding, or why not.

    Examples:
        >>> print("\\n".join(as_markdown().splitlines()[:3]))
        | pytorch-metric-learning | native | sharded |
        |---|---|---|
        | `AngularLoss` | it compares unit rows with negatives that are not normalised, this library's all unit rows. | yes |
    """
    composites = {
        losses.MultipleLosses: ("`WeightedSum`", "as its losses"),
        losses.SelfSupervisedLoss: ("`NTXent`, `InfoNCE`, or what its loss is, called with views", "as its losses"),
    }
    rows = composites | {
        kind: (
            native if isinstance(native, str) else f"`{native.__name__}`",
            evaluate if isinstance(evaluate, str) else "yes",
        )
        for kind, (evaluate, native, *_) in LOSSES.items()
    }
    lines = ["| pytorch-metric-learning | native | sharded |", "|---|---|---|"]
    lines += [f"| `{kind.__name__}` | {' | '.join(rows[kind])} |" for kind in sorted(rows, key=lambda x: x.__name__)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")
