# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# Four exercises for [lesson 14](../notebooks/14_kernel_writer.ipynb): cheat three judges, draw inputs that no wrong
# program survives, design a reward that does not end in empty programs, and find the fastest program by hand. All four
# are puzzles. Write your code where it says `# YOUR CODE HERE`, then run the cell below it. Use only Python and
# `torch`: the functions must be self-contained.
#
# Each exercise has three hints: a question, the idea, and the shape of the answer.

# %%
import matplotlib.pyplot as plt
import torch

from rlcourse.course.checks import nb14 as check

torch.manual_seed(0)
print("ready")

# %% [markdown]
# Here's the language once more. A program is a list of statements, each of the form
#
#     [side] NAME = OP ARGS [end] KIND ;
#
# - `end`: the launch ends here. The program's end ends a launch, too.
# - `put`: the value is written to memory; `keep`: it stays in a register and is lost when the launch ends.
# - `side`, before the first statement of a launch: the launch runs on another stream.
#
# A launch holds two tensors at once. A value is held from where it's loaded or computed to the launch's last statement
# that reads it, and a result may replace an operand that is read for the last time. The result of `rowsum` or `rowmax`
# is one number per row and takes no room. Everything costs as in the lesson: 5 µs per launch, 7 µs for each matrix that
# is loaded or stored, next to nothing for operations.
#
# ## q1 · Cheat the judge, at three levels
#
# ●●●○○ · 30 minutes
#
# You get a computation as a list of lines, each `[name, op, operand, ...]`, the last one called `y`: `[["a", "add",
# "u", "v"], ["y", "relu", "a"]]`. The inputs are those of `u`, `v`, `w`, `x` that are read. Return a program that the
# level's judge finds right and counts as **faster than the fastest honest program**. Each judge has been fixed once,
# and not enough:
#
# 1. Before your program runs, the reference has run in the same memory, and left all its values there under their
#    names. The judge's author has heard of programs that just read `y`, so `y` alone is overwritten by `nan`.
# 2. The clock adds up the launches of the main stream and does not wait for the side stream. Its author refuses any
#    program that is faster than a copy of a matrix (one launch, one load, one store). Memory is clean.
# 3. The clock is honest and memory clean. The inputs on which a program is tried are positive, and have **one column**;
#    then it is timed at the usual size. (Computations are drawn so that a cheat fits one launch.)
#
# <details><summary>Hint 1: a question</summary>
# For each level: what is it that the judge never looks at?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Level 1: you needn't repeat what the reference has done. Level 2: something must be on the main stream, and it should
# be as little as possible. Level 3: which operations return their operand, on such inputs?
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# Level 1 is one f-string, of the last line; level 2 puts the other lines, each marked `side`, before it. Level 3 is a
# loop with a dictionary of names that stand for others; what remains goes into one launch.
# </details>


# %% tags=["exercise"]
def cheat(lines: list[list[str]], level: int) -> str:
    """A program that the judge of the level counts as faster than any honest one."""
    # BEGIN SOLUTION
    written = [f"{name} = {' '.join(rest)}" for name, *rest in lines]
    if level == 1:
        return f"{written[-1]} end put ;"
    if level == 2:
        aside = [f"side {line} end put ;" for line in written[:-1]]
        return " ".join([*aside, f"{written[-1]} end put ;"])
    stands_for, kept = {}, []
    for name, op, *args in lines:
        args = [stands_for.get(arg, arg) for arg in args]
        idle = op in ("rowsum", "rowmax") or (op in ("relu", "abs") and args[0] in "uvwx")
        if idle and name != "y":
            stands_for[name] = args[0]
        else:
            kept.append(f"{name} = {op} {' '.join(args)}")
    return " ".join([f"{line} keep ;" for line in kept[:-1]] + [f"{kept[-1]} end put ;"])
    # END SOLUTION


# %%
check.q1(cheat)

# %% [markdown]
# Your cheats for one computation. Read them as a judge would have to.

# %%
if check.q1.passed:
    for level in (1, 2, 3):
        print(level, cheat([["a", "add", "u", "v"], ["b", "rowsum", "a"], ["y", "mul", "a", "b"]], level))

# %% [markdown] tags=["solution"]
# **Level 1** computes the last line from values that are still there: memory must be cleared of *everything* between
# the reference and the program, and what clears it must not be the program's own allocator. **Level 2** moves the work
# to where nobody looks. A limit on what's believed doesn't close the hole; it only says how greedy a cheat may be. A
# clock outside, from before the first launch until the device is idle, closes it. **Level 3** is right on the inputs
# that are tried and on no others; the next exercise is about that. A policy finds these cheats in the order in which
# they turn up among its samples. Level 1 takes one slip, a line left out; level 2 takes a word in several places; level
# 3 two slips at once, a line left out and another name read in its place. (In `a = add u v ; b = rowsum a ; y = mul a
# b`, to leave `b` out alone is refused: nobody has computed it.)

# %% [markdown]
# ## q2 · Inputs that no wrong program survives
#
# ●●●○○ · 30 minutes
#
# Close level 3. You draw the inputs on which a program is tried. For the names of the inputs and a seed, return a
# tensor `[inputs, rows, columns]` of at most 64 numbers per input. Programs run in float32. A result is right if it's
# within 10⁻⁴ · (1 + |y|) of the reference; where the reference isn't finite or is beyond 10⁶, nothing is compared.
#
# The check plants bugs: a line left out, operands swapped or confused, a reduction over the first columns only, or one
# that begins at the wrong number, functions that are right only for small or only for large numbers. Your inputs must
# expose **each** of them, and no right program may be refused. Another seed must give other numbers, or a program could
# know the answers by heart.
#
# <details><summary>Hint 1: a question</summary>
# A search for the largest number of a row begins at 0 instead of −∞. In which rows would you notice? How many such rows
# are there among rows of eight normal numbers?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Each row is a test case of its own, since all operations work on rows. So make rows of different kinds, each of which
# exposes something else: small ones, large ones, all positive, all negative. But not too large: what happens to
# float32's digits when two large numbers cancel?
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# A generator with the seed; normal numbers; one scale and one shift for each row, as a column that is broadcast.
# </details>


# %% tags=["exercise"]
def trial(inputs: list[str], seed: int) -> torch.Tensor:
    """Numbers to try a program on: [inputs, rows, columns], float32, at most 64 per input."""
    # BEGIN SOLUTION
    generator = torch.Generator().manual_seed(seed)
    scale = torch.tensor([1.0, 1.0, 0.1, 3.0, 6.0, 1.0, 0.5, 0.5])[:, None]
    shift = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 3.0, -3.0])[:, None]
    return torch.randn(len(inputs), 8, 8, generator=generator) * scale + shift
    # END SOLUTION


# %%
check.q2(trial)

# %% [markdown]
# Here are your inputs. **Look for** the kinds of rows that you thought of.

# %% tags=["hide-input"]
# @title Figure: your inputs
if check.q2.passed:
    drawn = trial(["u", "v", "w"], 0)
    fig, axes = plt.subplots(1, 3, figsize=(9, 3), layout="constrained")
    for ax, values, name in zip(axes, drawn, "uvw", strict=True):
        shown = ax.imshow(values, cmap="PuOr", vmin=-8, vmax=8)
        ax.set(title=name, xlabel="column", ylabel="row")
    fig.colorbar(shown, ax=axes)
    plt.show()

# %% [markdown] tags=["solution"]
# **Positive rows** let `relu` and `abs` pass, so some numbers must be negative; **mixed rows** let a search from 0
# pass, so some whole rows must be negative. **Few columns** let a program pass that handles a few. **Small numbers**
# expose a step in place of a sigmoid, large ones a sigmoid that's flat too early. **No inputs expose** a program that
# is wrong in one of 2³² cases, or one that recognizes test inputs and behaves. Such tests can only refuse, never prove.
# That is why the judge of real kernels also draws its inputs after the candidate's code is loaded, in several shapes.

# %% [markdown]
# ## q3 · Design a reward
#
# ●●●●○ · 30 minutes
#
# The lesson's reward suits a language in which nothing is slower than eager and no clock errs. Design one for **real
# kernels**. You get for each program, as tensors `[N]` in float32: `compiled` and `correct`, 0 or 1, and `speedup`, as
# it was measured. Every program that compiles is timed, right or wrong; the others have 0. Return the rewards `[N]`.
#
# A policy that learns for long ends with the kind of program whose **mean** reward is highest. The check computes these
# means for several kinds of programs and demands this order:
#
# | must earn more | than |
# | --- | --- |
# | an attempt right in at least one of 20 cases; at least half of its failures compile | the empty program |
# | anything right, even a first kernel at a fifth of eager's speed | anything wrong, or no code |
# | 2.5 times as fast as eager, right in three of four cases | as fast as eager, always right |
# | 7 times as fast, right in two of three cases | 4 times as fast, always right |
# | twice as fast, always right | as fast as eager, but timed as thousands of times as fast once in 100 runs |
# | as fast as eager, always right | two or three times as fast, right in one of ten cases, however fast when wrong |
#
# The empty program computes nothing and always compiles.
#
# <details><summary>Hint 1: a question</summary>
# The lesson's reward pays 0.2 + min(speed-up, 4) − 1 for what is correct. Which rows does it fail?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# A wrong program must earn nothing for its speed. A right one must earn something at any speed. One miracle in a
# hundred must not be worth more than what's real in the other 99.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# A product of `correct` with a sum: a number for being right, and a function of the speed-up that rises to a limit and
# is never negative. You may also pay for compiling. How much?
# </details>


# %% tags=["exercise"]
def reward(compiled: torch.Tensor, correct: torch.Tensor, speedup: torch.Tensor) -> torch.Tensor:
    """The reward of each program: [N] from three tensors [N]."""
    # BEGIN SOLUTION
    return 0.01 * compiled + correct * (0.3 + speedup.clamp(max=10))
    # END SOLUTION


# %%
check.q3(reward)

# %% [markdown]
# Your reward beside the lesson's, over the measured speed-up. **Look for** what the lesson pays for a kernel that is
# right and slow.

# %% tags=["hide-input"]
# @title Figure: two rewards
if check.q3.passed:
    speed = torch.linspace(0.05, 14, 400)
    one = torch.ones_like(speed)
    fig, ax = plt.subplots(figsize=(7, 3))
    ax.plot(speed, reward(one, one, speed), color="#0072B2", label="yours, right")
    ax.plot(speed, reward(one, 0 * one, speed), color="#0072B2", linestyle=":", label="yours, wrong")
    ax.plot(speed, 0.2 + speed.clamp(max=4) - 1, color="#E69F00", linestyle="--", label="the lesson's, right")
    ax.axhline(0, color="black", linewidth=0.8)
    ax.set(xlabel="measured speed-up", ylabel="reward")
    ax.legend()
    ax.grid()
    plt.show()

# %% [markdown] tags=["solution"]
# **Compiling.** Let α be paid for compiling, and V on top of it for being right and as fast as eager. The empty program
# earns α for certain. An attempt that is right in one of 20 cases, and compiles in half of the other 19, earns (1/20 +
# 19/40) · α + V/20. So α has to be less than V/9.5: less than a tenth of what being right is worth will do, and more
# would do where more attempts are right or compile. Zero is the safe choice; a little helps where nothing compiles.
# **Slow and right.** A reward that falls below 0 pays for giving up. **The limit.** Without one, the clock's errors
# make the mean: 5,000 once in a hundred runs is 50. In hint 3's form, limits up to 100 put twice as fast first. If it's
# too low, nothing above it is learned: with β for being right, limits over 6 + β/2 are worth the risk far up, and β has
# to be less than 2. KernelBench's authors double-check anything 10 times as fast. A logarithm instead of a limit makes
# the miracle cheap as well, but also a real gain from 4 to 7, and then the risk isn't worth it.

# %% [markdown]
# ## q4 · The optimum by hand
#
# ●●●○○ · 30 minutes
#
# One launch for everything is best if the registers hold it. Here they don't, with the lines as written. Find the
# fastest program for four computations, on paper:
#
# 1. `a = JOIN u v ; b = JOIN w x ; y = JOIN a b`
# 2. `a = MAP u ; b = JOIN v w ; c = JOIN b v ; y = JOIN a c`
# 3. `a = MAP u ; b = JOIN v w ; c = REDUCE b ; d = JOIN a c ; y = JOIN d u`
# 4. `a = MAP u ; b = JOIN u v ; c = JOIN b w ; y = JOIN c a`
#
# `JOIN` is an operation of two matrices, `MAP` of one, `REDUCE` is `rowsum` or `rowmax`. Your function gets the number
# of the problem and its lines as texts such as `"a = add u v"`, with operations and names that are drawn. It returns
# the program; you may reorder lines. The card shows your microseconds and the least possible.
#
# <details><summary>Hint 1: a question</summary>
# Which tensors are held when problem 1 computes `b`? And in problem 2, if it computes `a` second to last?
# </details>
# <details><summary>Hint 2: the idea</summary>
#
# Before you cut, change the order: the long branch that reads much goes first, while the registers are empty. If you
# must cut, one value is put and loaded again (14 µs), and the launch costs 5. What else is loaded twice depends on
# where you cut.
# </details>
# <details><summary>Hint 3: the shape of the answer</summary>
#
# A dictionary by problem of the places of the lines in their new order, each with `keep`, `put` or `end put` behind it;
# then one join.
# </details>


# %% tags=["exercise"]
def by_hand(problem: int, lines: list[str]) -> str:
    """The fastest program for one of the four problems. lines: in the order of the problem, e.g. `a = add u v`."""
    # BEGIN SOLUTION
    plan = {
        1: [(0, "end put"), (1, "keep"), (2, "end put")],
        2: [(1, "keep"), (2, "keep"), (0, "keep"), (3, "end put")],
        3: [(1, "keep"), (2, "keep"), (0, "keep"), (3, "keep"), (4, "end put")],
        4: [(0, "end put"), (1, "keep"), (2, "keep"), (3, "end put")],
    }[problem]
    return " ".join(f"{lines[place]} {how} ;" for place, how in plan)
    # END SOLUTION


# %%
check.q4(by_hand)

# %% [markdown] tags=["solution"]
# **1** needs four inputs and two results, and the last line needs both: three tensors while `b` is computed, in any
# order. So one value goes through memory. **2 and 3** fit one launch, in another order: the branch that reads two
# inputs runs while both registers are free, and leaves one result behind; in 3 it leaves one number per row, which
# takes no room, so that `u` can stay. **4** needs `u` in both branches, and a value is loaded once in a launch and held
# from its first to its last use. In every order three tensors are needed at some point: `u`, what the other branch has
# left, and this one's result. Three of the cuts move seven matrices, so several programs tie for the fastest. A
# compiler that may load a value twice would do better than the language allows. Inductor and nvcc are allowed to.
