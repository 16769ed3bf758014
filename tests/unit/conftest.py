"""Settings of the unit tests."""

from __future__ import annotations

import os

# Triton decides when it is first imported, by whichever test, whether its interpreter runs its kernels.
os.environ["TRITON_INTERPRET"] = "1"

import torch
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis
from no_links import pytest_runtest_call  # noqa: F401

# The models here are tiny: a second thread costs more than it brings.
torch.set_num_threads(1)

# How fast examples are made says more about the machine's load than about the test.
hypothesis.register_profile("moss", deadline=None, suppress_health_check=[HealthCheck.too_slow])
hypothesis.load_profile("moss")
