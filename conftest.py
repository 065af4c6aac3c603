"""For every suite of this checkout: property tests have no stopwatch, since speed is not tested here."""

from hypothesis import HealthCheck, settings

settings.register_profile("checkout", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("checkout")
