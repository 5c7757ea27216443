"""The parts of a loss's docstring: summary, formula and source."""

import inspect
import re

from contrastive_zoo.loss_base.loss import Loss

_SECTION = re.compile(r"^(?:Args|Raises|Examples|Source):", re.MULTILINE)


def _docs(cls: type[Loss]) -> list[str]:
    """Return the docstrings of a class and its bases, where it leaves to them what it does not say."""
    return [inspect.cleandoc(vars(x).get("__doc__") or "") for x in cls.__mro__]


def summary(cls: type[Loss]) -> str:
    return re.sub(r":\w+:`(\w+)`", r"\1", _docs(cls)[0].partition("\n")[0])


def formula(cls: type[Loss]) -> str:
    result = (_SECTION.split(doc)[0].split("\n") for doc in _docs(cls))
    formulas = ("\n".join(line[4:] for line in lines if line.startswith("    ")).strip("\n") for lines in result)
    return next(filter(None, formulas), "")


def source(cls: type[Loss]) -> str:
    return next(filter(None, (" ".join(doc.partition("Source:")[2].split()) for doc in _docs(cls))), "")
