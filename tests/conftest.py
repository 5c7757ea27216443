"""One pool of live worlds for the whole run, and how long Hypothesis searches."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from contrastive_zoo.testing.worlds import Worlds

settings.register_profile("quick", max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    with Worlds(timeout=60.0) as pool:
        yield pool
