"""A progress bar that one rank shows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar(total: int, *, wanted: bool, shown: bool) -> Iterator[Callable[[int], object]]:
    """Yield a function that is called with the number of queries that are done.

    Every rank that wants a bar imports tqdm, so that all of them raise if it is missing.

    Raises:
        ImportError: tqdm is not installed.
    """
    if not wanted:
        yield lambda number: None
        return
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError("progress=True needs tqdm. Install it: pip install contrastive_zoo[mining]") from error
    with tqdm(total=total, desc="Mining hard negatives", unit=" queries", disable=not shown) as shown_bar:
        yield shown_bar.update
