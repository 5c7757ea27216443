"""A progress bar that is shown on one rank."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar(total: int, shown: bool) -> Iterator[Callable[[int], object]]:
    """Yield a function that is called with the number of queries that are done."""
    if not shown:
        yield lambda number: None
        return
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError("progress=True needs tqdm. Install it: pip install contrastive_zoo[mining]") from error
    with tqdm(total=total, desc="Mining hard negatives", unit=" queries") as bar:
        yield bar.update
