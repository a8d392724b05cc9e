"""Settings of the whole suite: one thread, and two Hypothesis profiles.

``pytest`` runs the profile ``ci``, which draws the same examples every time. ``pytest --hypothesis-profile=thorough``
or ``HYPOTHESIS_PROFILE=thorough pytest`` draws many more, and new ones on every run.
"""

import os

import torch
from hypothesis import HealthCheck, settings

slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("ci", max_examples=8, deadline=None, derandomize=True, suppress_health_check=slow)
settings.register_profile("thorough", max_examples=400, deadline=None, suppress_health_check=slow)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

torch.set_num_threads(1)
