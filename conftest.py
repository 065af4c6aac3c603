"""For every suite of this checkout."""

import os
import sys

# Threads that wait for work spin, which takes the time of the tests beside them; programs inherit this too.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
from hypothesis import HealthCheck, settings

# Property tests have no stopwatch, since speed is not tested here.
settings.register_profile("checkout", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("checkout")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tensors are tiny: more threads only wait for each other. A plan that is composed sets a number anew."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
