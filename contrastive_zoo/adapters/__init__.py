"""Adapters for other libraries. Each module imports its library, except open_clip's, when you first use it."""

import importlib
from typing import Any

from contrastive_zoo.ranks.suggestions import missing

_MODULES = ("huggingface", "open_clip", "sentence_transformers")


def __getattr__(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}") if name in _MODULES else missing(__name__, _MODULES)(name)
