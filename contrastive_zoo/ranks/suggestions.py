"""Hints for users: the right name for a wrong one, a missing package, and warnings that come once."""

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., None])

NAMES_ELSEWHERE = {
    "angle": "CoSENT",
    "byol": "NegativeCosine",
    "cachedmultiplenegativesranking": "GradCache",
    "centersperclass": "sub_centers",
    "criterion": "loss",
    "debiased": "HCL",
    "distributedlosswrapper": "DistributedLoss",
    "featdim": "embedding_size",
    "features": "embeddings",
    "group": "process_group",
    "m": "margin",
    "memorysize": "size",
    "minibatchsize": "chunk_size",
    "moco": "MemoryQueue",
    "multiplenegativesranking": "MNRL",
    "pg": "process_group",
    "recallatk": "evaluate",
    "rnc": "RankNContrast",
    "s": "scale",
    "simclr": "NTXent",
    "simsiam": "NegativeCosine",
    "sphereface": "LargeMarginSoftmax",
    "t": "temperature",
    "targets": "labels",
    "tau": "temperature",
    "temp": "temperature",
    "tripletmargin": "Triplet",
    "y": "labels",
}
"""Names of other libraries and of papers, without case, underscores and a final ``Loss``, that are unlike this library's."""

_PACKAGE = str(Path(__file__).parents[1])


def did_you_mean(name: str, names: Collection[str]) -> str:
    """Return a question with the name that was probably meant, after a space; nothing if the name is right, or like none.

    Names may have a room before a dot, as in ``data.GlobalBatchSampler``.
    """
    by_letters = {_letters(x.rpartition(".")[2]): x for x in names}
    word = _letters(name)
    closest = [_letters(NAMES_ELSEWHERE.get(word, word)), *get_close_matches(word, by_letters, n=1)]
    return next((f" Did you mean {by_letters[x]}?" for x in closest if x in by_letters and name not in names), "")


def _letters(name: str) -> str:
    word = name.lower().replace("-", "").replace("_", "")
    return word.removesuffix("loss") or word


def missing(module: str, names: Collection[str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module: its error names the public name that was probably meant."""

    def attribute(name: str) -> Any:
        hint = did_you_mean(name, names)
        text = f"module {module!r} has no attribute {name!r}" + (hint and f".{hint}")
        # in `from module import name` Python drops the text of an AttributeError, and looks for a module of that name
        caller = sys._getframe(1)
        is_import = "_handle_fromlist" in {x.f_code.co_name for x in (caller, caller.f_back or caller)}
        if is_import and hint and find_spec(f"{module}.{name}") is None:
            raise ImportError(text)
        raise AttributeError(text)

    return attribute


def suggests_names(by_position: str) -> Callable[[F], F]:
    """Decorate a constructor: its error names the argument that was meant; ``by_position`` says how to pass more."""

    def decorate(init: F) -> F:
        signature = inspect.signature(init)
        known = [*signature.parameters][1:]

        @functools.wraps(init)
        def wrapper(self: Any, *args: Any, **named: Any) -> None:
            kind = type(self).__name__
            if unknown := named.keys() - {*known}:
                name = min(unknown)
                raise TypeError(f"{kind} has no argument {name!r}.{did_you_mean(name, known)}")
            try:
                signature.bind(self, *args, **named)
            except TypeError as error:
                raise TypeError(f"{kind}: {error}. {by_position}") from None
            init(self, *args, **named)

        return wrapper  # type: ignore[return-value]  # of the same signature

    return decorate


@contextmanager
def needed(user: str, install: str) -> Iterator[None]:
    """Context manager of imports: the error for a package that is missing says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ImportError(f"{user} needs {error.name}: pip install '{install}'") from error


def first_time(key: str) -> bool:
    """Return whether this process has not asked for this key before."""
    is_new = key not in ASKED
    ASKED.add(key)
    return is_new


ASKED: set[str] = set()


def warn_once(text: str, key: str | None = None) -> None:
    """Warn at the user's line, once in a process for each text or key."""
    if not first_time(text if key is None else key):
        return
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_inside(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def _is_inside(file: str) -> bool:
    """Return whether code of a file stands between the user's line and a warning: this package's, and torch's."""
    return file.startswith(_PACKAGE) or "/torch/" in file.replace("\\", "/")
