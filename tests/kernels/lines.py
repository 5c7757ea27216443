"""The table of what kernels take of a chip: its head, and the line of a kernel."""

from typing import Any

EDGES = {0: "inner", 1: "edge", 2: "all"}
"""The tiles of a launch: those without masks, those with, or all."""

HEAD = "| chip | rows | kernel | tiles | registers | spills | shared memory, KiB | matrix instructions |"


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    rows = row["dtype"] + (f", {row['precision']}" if row["dtype"] == "fp32" else "")
    matrix = f"{row['wgmma']} wgmma" if row["wgmma"] else f"{row['mma']} mma"
    cells = [row["chip"], rows, row["kernel"], EDGES[row["edge"]], row["registers"], row["spills"]]
    return "| " + " | ".join(map(str, [*cells, round(row["shared"] / 1024), matrix])) + " |"
