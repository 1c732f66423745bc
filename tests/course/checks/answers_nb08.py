"""Answers to the exercises of lesson 08."""

import torch
from answers import solved

WRONG = {
    "q7": {
        "span": lambda a, size, on: -(-(a.amax(1) + size - a.amin(1)) // 32),
        "all warps as one": lambda a, size, on: torch.tensor([len(torch.unique(a[on] // 32))]),
    },
    "q8": {
        "row-major": (lambda row, column: 32 * row + column, "of column number 0 lie in 1 banks"),
        "column-major": (lambda row, column: row + 32 * column, "of row number 0 lie in 1 banks"),
        "padded": (lambda row, column: 33 * row + column, "no room to pad"),
        "the bank": (lambda row, column: column ^ (row % 4 * 8 + row // 4), "both go to word"),
        "floats": (solved("nb08", "q8", lambda word: word.float()), "whole number"),
    },
}

FOUR_EACH = """\
                for i in range_constexpr(4):
                    value = x[row, i * self.threads + thread]
                    total += value * value
"""
LAST = "                cute.arch.sync_threads()  # the next row writes shares again\n"
RELU = "                wide = wide if wide > 0.0 else Float32(0.0)\n"
REST = "                    one = one if one > 0.0 else Float32(0.0)\n"
UP = "cute.autovec_copy(cute.tiled_divide(up, (8,))[None, first // 8], u)"
UP_ONE_BY_ONE = "for k in range_constexpr(8):\n                u[k] = up[first + k]"
ADD = "out[thread] = a[thread] + 10.0"
GUARD = "if i < a.shape[0]:"
IN_TILE = "r = 8 * down + thread // 8\n        c = 8 * across + thread % 8"
SUM, SYNC = "total += shared[thread - 1]", "        cute.arch.sync_threads()\n"
SHUFFLE = "other = cute.arch.shuffle_sync_bfly(value, offset=1 << step)"
LARGER = "value = other if other > value else value"
STEPS = f"        for step in range_constexpr(5):\n            {SHUFFLE}\n            {LARGER}\n"
INSIDE = "".join(f"    {line}\n" for line in STEPS.splitlines())
EDITS = {
    "q1": {
        "copied": (ADD, "out[thread] = a[thread]", "copied"),
        "times ten": (ADD, "out[thread] = a[thread] * 10.0", "multiplied"),
        "the number of the thread": (ADD, "out[thread] = Float32(thread) + 10.0", "own number"),
        "one thread for all": (ADD, "if thread == 0:\n            " + ADD, "63 of 64 elements"),
    },
    "q2": {
        "no guard": (GUARD, "if i >= 0:", "beyond a tensor"),
        "no block": ("i = block * self.threads + thread", "i = thread", "nothing says who is first"),
        "leaves the last out": (GUARD, "if i + 1 < a.shape[0]:", "never written"),
    },
    "q3": {
        "not transposed": ("out[c, r] = a[r, c]", "out[r, c] = a[r, c]", "a itself"),
        "lanes down a column": (
            IN_TILE,
            IN_TILE.replace("//", "#").replace("%", "//").replace("#", "%"),
            "sectors that a warp reads it uses 50%",
        ),
    },
    "q4": {
        "its own first": ("total = shared[thread]", "total = a[thread] - a[thread] + shared[thread]", "were read from"),
        "no barrier": (SYNC, "", "no barrier stands"),
        "from memory": (SUM, "total += a[thread - 1]", "let each thread bring one number"),
        "wraps around": (
            "        if thread >= 1:\n            total += shared[thread - 1]\n        if thread >= 2:\n"
            "            total += shared[thread - 2]\n",
            "        total += shared[(thread + 63) % 64] + shared[(thread + 62) % 64]\n",
            "wrapped around",
        ),
        "one thread brings all": (
            "        shared[thread] = a[thread]\n",
            "        if thread == 0:\n            for i in range(64):\n                shared[i] = a[i]\n",
            "Two warps loaded a with 64 loads",
        ),
        "two alone": ("total += shared[thread - 2]", "total += 0.0", "Only two"),
    },
    "q5": {
        "far ones first": ("1 << step", "16 >> step", None),
        "begins at zero": ("-Float32.inf", "Float32(0.0)", "hold 0"),
        "one lane for all": (
            "            value = a[row, lane]\n" + STEPS,
            "            if lane == 0:\n                for k in range(a.shape[1]):\n"
            "                    x = a[row, k]\n                    value = x if x > value else value\n",
            "let each lane load one",
        ),
        "four steps": ("range_constexpr(5)", "range_constexpr(4)", "Only 16 lanes"),
        "no steps": ("range_constexpr(5)", "range_constexpr(0)", "never compared"),
        "inside": (STEPS, INSIDE, "never come"),
    },
    "q6": {
        "over the rows of b": ("range(a.shape[1])", "range(b.shape[0])", None),
        "overwritten": ("total += a", "total = a", "Only the last product"),
        "a row of b": ("b[k, c]", "b[c, k]", "walked along a row"),
    },
    "q9": {
        "another order": ("(wide * wide * u[i].to(Float32))", "(u[i].to(Float32) * wide * wide)", None),
        "the last piece one by one": ("if first + 8 <= gate", "if first + 8 < gate", "copy whole pieces"),
        "no relu in the rest": (REST, "", "have no relu"),
        "rounds on the way": (
            "(wide * wide * u[i].to(Float32))",
            "((wide * wide).to(out.element_type).to(Float32) * u[i].to(Float32))",
            "rounds to bfloat16 on the way",
        ),
        "up one by one": (UP, UP_ONE_BY_ONE, "copy whole pieces"),
        "no relu": (RELU, "", "relu is missing"),
    },
    "q10": {
        "no second barrier": (LAST, "", "no barrier stands"),
        "no root": ("cute.math.sqrt(everything)", "everything", "forgot the root"),
        "first warp alone": (
            "for warp in range_constexpr(4):\n                        e",
            "for warp in range_constexpr(1):\n                        e",
            "first warp's share",
        ),
        "no shuffle": ("total = cute.arch.warp_reduction_sum(total)", "total = total", "lane 0's own"),
        "one thread for all": (
            FOUR_EACH,
            "                if thread == 0:\n                    for i in range(512):\n"
            "                        total += x[row, i] * x[row, i]\n",
            "each thread loads 4",
        ),
    },
    "q11": {
        "waits for all": ("wait_group(1)", "wait_group(0)", "the latest group may be under way"),
        "waits for none": ("wait_group(1)", "wait_group(2)", "still writing"),
        "the same slot": ("(turn + 1) % 2", "turn % 2", "still writing"),
        "no sum over the warp": ("total = cute.arch.warp_reduction_sum(total)", "total = total", "lane 0's own"),
        "beyond the last row": ("turn < 3 and row + 1 < rows", "turn < 3", "beyond a tensor"),
        "no copy": (
            "total = mine.partition_D(slots[None, turn % 2]).load()",
            "total = mine.partition_S(x[row, None]).load()",
            "by cp.async",
        ),
    },
}
