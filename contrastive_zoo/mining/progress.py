"""A progress bar that one rank shows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


def progress_problem() -> str | None:
    """Return what to do where tqdm is not installed, in words; None if it is."""
    try:
        import tqdm.auto  # noqa: F401 - whether it can be imported
    except ImportError:
        return "progress=True needs tqdm, which is not installed: pip install contrastive_zoo[mining]."
    return None


@contextmanager
def bar(total: int, *, wanted: bool, shown: bool) -> Iterator[Callable[[int], object]]:
    """Yield a function that is called with the number of queries that are done.

    Args:
        total: number of queries.
        wanted: whether there is a bar at all.
        shown: whether this process shows it.
    """
    if not wanted:
        yield lambda number: None
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, desc="Mining hard negatives", unit=" queries", disable=not shown) as shown_bar:
        yield shown_bar.update
