"""Measure the gallery and write its pages: ``python -m tools.gallery_page``.

Writes the tables of docs/pages/gallery.md, the sections of docs/pages/invariants.md, and the truth table in README.md.
"""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from contrastive_zoo.testing.invariants import INVARIANTS
from contrastive_zoo.testing.worlds import Worlds
from tools.gallery.recipe import GALLERY, PEERS, Recipe
from tools.gallery_measurement import Row, measure_gallery
from tools.pages import PAGES, ROOT, fill, table

TRUTH_TABLE = (
    ("autograd.Function whose backward keeps only this rank's slice (SimCLR re-implementations)", "own slice"),
    ("gather, then overwrite this rank's slice with the live tensor", "overwritten slice"),
    ("the same, loss × W", "own slice × W"),
    ("pytorch-metric-learning's wrapper", "pml wrapper, proxies"),
    ("the same with `efficient=True`", "pml wrapper, efficient"),
    ("local anchors against detached gathered candidates (OpenCLIP `local_loss`)", "detached candidates"),
    ("local anchors, gather with a reduce-scatter backward (lightly, OpenCLIP `gather_with_grad`)", "local loss"),
    ("the same, ranks' means averaged", "mean of means"),
    ("`DistributedLoss(loss)`", "DistributedLoss, any loss"),
)
"""Rows of the truth table, by recipe."""

_GRADIENTS = "encoder gradient", "loss's own parameters"
TRUTHS = ("what people write", *_GRADIENTS, "value returned", "what uneven shards change")
MEASUREMENTS = ("what people write", "value", *_GRADIENTS, "uneven shards change", "diagnosis")
DIAGNOSES = ("diagnosis", "what the loss does", "fix")  # heads of the tables


def truth_table(rows: Sequence[Row]) -> str:
    """Return the table of the README: the most common implementations."""
    by_name = {row.recipe.name: row for row in rows}
    lines = []
    for text, name in TRUTH_TABLE:
        if name in by_name:
            row = by_name[name]
            value, encoder, parameters = row.on_even
            proxies = by_name.get(f"{name}, proxies")
            if parameters == "–" and proxies is not None:  # the same recipe with a loss that has parameters
                parameters = proxies.on_even[2]
            lines.append([text, encoder, parameters, value, row.on_uneven])
    return f"""{table(TRUTHS, lines, texts=len(TRUTHS))}

On uneven shards the hand-written recipes pad their shards before they gather. With a plain
`torch.distributed.all_gather` the process dies, as it does in the wrapper (gloo)."""


def gallery(rows: Sequence[Row]) -> dict[str, str]:
    peers = [row for row in rows if row.recipe.name in PEERS]
    hand_written = [row for row in rows if row.recipe.name not in PEERS]
    losses = [row for row in hand_written if not row.recipe.step]
    diagnoses = {row.report.diagnosis.mistake: row.report.diagnosis for row in rows if row.report.diagnosis}
    libraries = {PEERS[row.recipe.name].library for row in peers}
    absent = sorted({peer.library for peer in PEERS.values()} - libraries)
    versions = ", ".join(f"{_distribution(name)} {_version(name)}" for name in ("torch", *sorted(libraries)))
    missing = f" Not installed, so not run: {', '.join(map(_distribution, absent))}." if absent else ""
    return {
        "right": _wide([row for row in losses if row.recipe.mistake is None]),
        "wrong": _wide([row for row in losses if row.recipe.mistake is not None]),
        "training steps": _wide([row for row in hand_written if row.recipe.step]),
        "libraries": f"Run for this page: {versions}.{missing}\n\n{_wide(peers)}",
        "diagnoses": table(DIAGNOSES, [[x.mistake, x.why, x.fix] for x in diagnoses.values()], texts=3),
    }


def invariants() -> str:
    sections = []
    for invariant in INVARIANTS:
        meaning, _, failing = invariant.meaning.partition(" When it fails, ")
        mistake = f"*{invariant.catches}* of [the gallery](gallery.md): {_about(GALLERY[invariant.catches])}."
        parts = f"## `{invariant.name}`", meaning, f"**When it fails,** {failing}", f"**Mistake it catches:** {mistake}"
        sections.append("\n\n".join(parts))
    return "\n\n".join(sections)


def _wide(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        value, encoder, parameters = row.on_even
        diagnosis = row.report.diagnosis.mistake if row.report.diagnosis else "none needed"
        title = f"*{row.recipe.name}*: {_about(row.recipe)}"
        lines.append([title, value, encoder, parameters, row.on_uneven, diagnosis])
    return table(MEASUREMENTS, lines, texts=len(MEASUREMENTS))


def _about(recipe: Recipe) -> str:
    """Return what people write; "the same" is replaced by the recipe that it refers to."""
    about = " ".join(recipe.about.split())
    if not about.startswith("the same"):
        return about
    names = list(GALLERY)
    before = reversed(names[: names.index(recipe.name)])
    reference = next(name for name in before if not GALLERY[name].about.startswith("the same"))
    return f"as *{reference}*{about.removeprefix('the same')}"


def _distribution(library: str) -> str:
    return library.replace("_", "-")


def _version(library: str) -> str:
    try:
        return version(_distribution(library))
    except PackageNotFoundError:
        return ""


def main() -> None:
    with Worlds(timeout=6.0, grace=0.3) as worlds:
        worlds.start(1, 2, 3, 4)
        rows = measure_gallery(worlds)
    fill(PAGES / "gallery.md", gallery(rows))
    fill(PAGES / "invariants.md", {"invariants": invariants()})
    fill(ROOT / "README.md", {"truth table": truth_table(rows)})
    print(truth_table(rows))


if __name__ == "__main__":
    main()
