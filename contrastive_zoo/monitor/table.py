"""The figures of one measurement as a table."""

from rich.console import Console
from rich.table import Table

from contrastive_zoo.monitor.figures import Measurement

_MEANINGS = {
    "positive_similarity": "mean cosine of positive pairs",
    "negative_similarity": "mean cosine of negative pairs",
    "top1_forward": "anchors whose nearest candidate is positive",
    "top1_backward": "the same from the second view or encoder to the first",
    "anchors_without_positive": "share of anchors",
    "likely_false_negatives": "negative pairs as similar as positive ones",
    "alignment": "mean squared distance of positive pairs",
    "uniformity": "log mean Gaussian potential; lower is more uniform",
    "effective_rank": "dimensions in use",
    "variance_min": "smallest variance of a dimension",
    "variance_mean": "mean variance; 1 / d if nothing has collapsed",
    "variance_max": "largest variance of a dimension",
    "temperature": "of the loss",
    "loss_drift": "distance of a rank's parameters from rank 0's",
    "encoder_drift": "distance of a rank's parameters from rank 0's",
}


def table(measurement: Measurement) -> str:
    """Return the figures with their meaning, one a line.

    Examples:
        >>> import torch, contrastive_zoo as cz
        >>> loss_fn = cz.DistributedLoss(cz.NTXent(temperature=0.1))
        >>> monitor = cz.Monitor(loss_fn)
        >>> _ = loss_fn(torch.eye(4), torch.eye(4))
        >>> print(monitor)
        call 0                        value  meaning
        positive_similarity               1  mean cosine of positive pairs
        positive_similarity_q5       0.9995  5 % quantile
        ...
        temperature                     0.1  of the loss
    """
    found = Table(box=None, padding=(0, 2, 0, 0), header_style="")
    found.add_column(f"call {measurement.call}")
    found.add_column("value", justify="right")
    found.add_column("meaning")
    for name, value in measurement.figures.items():
        plain, _, quantile = name.rpartition("/")[2].partition("_q")
        meaning = f"{quantile} % quantile" if quantile else _MEANINGS[plain]
        found.add_row(name, f"{value:.4g}", meaning)
    console = Console(width=120, color_system=None)
    with console.capture() as capture:
        console.print(found)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
