"""KernelBench: a model writes GPU kernels, and a judge compiles, checks and times them where they can do no harm.

`problems` reads tasks and answers, `rules` reads a text for cheats, `worker` runs it in a process of its own, `judging`
turns what comes back into a `verdict`.
"""
