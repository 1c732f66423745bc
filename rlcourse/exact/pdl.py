"""Programmatic dependent launch (Hopper and later), by the names of Triton's releases."""

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # older ones
    from triton.language.extra.cuda.gdc import gdc_launch_dependents, gdc_wait

__all__ = ["gdc_launch_dependents", "gdc_wait"]
