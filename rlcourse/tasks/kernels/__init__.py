"""Writing kernels as a task that runs on a laptop: programs in a small language, compiled, run, and timed by counting.

language.py   what a program may say, and what the compiler refuses
interpret.py  what it computes
clock.py      what it costs
optimum.py    the least it can cost, by search
problems.py   random computations to write programs for
judge.py      all of it on one program: compiled, correct, speed-up, reward; and holes to be found
lowering.py   a program as Triton source
task.py       the task for training, with what it measures
"""
