"""KernelBench: a model writes GPU kernels, and a judge compiles, checks and times them where they can do no harm.

`problems` reads problems and answers, `rules` looks for cheats in a text, `worker` runs it in a process of its own, and
`judging` gives the verdict.
"""
