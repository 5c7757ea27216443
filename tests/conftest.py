"""Shapes are checked in this run, and Hypothesis searches briefly. The pool of worlds is the plugin's."""

import os

from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

# shapes that the engines and the masks promise are checked at every call of the run
install_import_hook(["contrastive_zoo.engine", "contrastive_zoo.masks"], "beartype.beartype")

settings.register_profile("quick", max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
