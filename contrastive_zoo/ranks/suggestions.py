"""The right name for one that does not exist: a misspelt one, or the one that another library uses."""

import functools
import inspect
from collections.abc import Callable, Collection
from difflib import get_close_matches
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., None])

NAMES_ELSEWHERE = {
    "byol": "NegativeCosine",
    "cachedmultiplenegativesranking": "GradCache",
    "centersperclass": "sub_centers",
    "embeddim": "embedding_size",
    "embeddingdim": "embedding_size",
    "featdim": "embedding_size",
    "group": "process_group",
    "m": "margin",
    "memorysize": "size",
    "minibatchsize": "chunk_size",
    "moco": "MemoryQueue",
    "multiplenegativesranking": "MNRL",
    "pg": "process_group",
    "queuesize": "size",
    "s": "scale",
    "simclr": "NTXent",
    "simsiam": "NegativeCosine",
    "t": "temperature",
    "tau": "temperature",
    "temp": "temperature",
    "tripletmargin": "Triplet",
}
"""Names of other libraries and of papers, without case, underscores and a final ``Loss``, and this library's."""


def did_you_mean(name: str, names: Collection[str]) -> str:
    """Return a question with the name that was probably meant, after a space; nothing if the name is right, or like none."""
    by_letters = {_letters(x): x for x in names}
    word = _letters(name)
    closest = [_letters(NAMES_ELSEWHERE.get(word, word)), *get_close_matches(word, by_letters, n=1)]
    return next((f" Did you mean {by_letters[x]}?" for x in closest if x in by_letters and name not in names), "")


def _letters(name: str) -> str:
    word = name.lower().replace("-", "").replace("_", "")
    return word.removesuffix("loss") or word


def suggests_names(init: F) -> F:
    """Decorate a constructor: its error about an unknown argument names the one that was probably meant."""
    known = inspect.signature(init).parameters

    @functools.wraps(init)
    def wrapper(self: Any, *args: Any, **named: Any) -> None:
        if unknown := named.keys() - known.keys():
            name = min(unknown)
            raise TypeError(f"{type(self).__name__} has no argument {name!r}.{did_you_mean(name, [*known][1:])}")
        init(self, *args, **named)

    return wrapper  # type: ignore[return-value]  # of the same signature
