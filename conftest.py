"""What the examples in all docstrings use."""

from typing import Any

import pytest
import torch

# They import their libraries, seconds in each worker; tests/adapters/test_huggingface.py runs their examples.
collect_ignore = [f"contrastive_zoo/adapters/{name}.py" for name in ("huggingface", "sentence_transformers")]


@pytest.fixture(autouse=True, scope="session")
def examples_import_torch(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace["torch"] = torch
