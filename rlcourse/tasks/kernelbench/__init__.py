"""KernelBench: a model writes GPU kernels, and a judge compiles, checks and times them where they can do no harm."""
