"""What all tests have in common."""

from hypothesis import HealthCheck, settings

# A busy machine is no failure: neither an example nor the making of examples is judged by the clock.
settings.register_profile("without a clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("without a clock")
