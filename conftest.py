"""What the examples in all docstrings use."""

from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def examples_import_torch(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace["torch"] = torch
