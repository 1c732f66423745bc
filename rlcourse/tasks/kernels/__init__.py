"""A task for laptops: kernels in a small language, compiled, run, and timed by counting."""
