"""Kernels that the lessons build, each like those of `rlcourse.kernels`: reference, kernel, operation, EXAMPLES."""
