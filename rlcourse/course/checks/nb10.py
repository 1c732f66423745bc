"""Checks of the exercises of lesson 10: Amdahl's law, Dynamo's cache, slots of a mask, a fake, a diagnosis."""

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare, draw

q1 = Question(
    "q1", "rollout_gain", hint="Add up milliseconds over all steps, before and after; divide at the very end."
)


def check_gain(f, attention: Tensor, rest: float, faster: float, added: float) -> None:
    steps, times = len(attention), attention.double().tolist()
    before, after = sum(t + rest for t in times), sum(t / faster + rest + added for t in times)
    saved = sum(t - t / faster for t in times) / steps
    bound = before / (steps * rest)

    def answer(gain: float = before / after, limit: float = bound, room: float = saved) -> Tensor:
        return torch.tensor([gain, limit, room], dtype=torch.float64)

    each = [(t + rest) / (t / faster + rest + added) for t in times]
    last = (times[-1] + rest) / (times[-1] / faster + rest + added)
    once = before / (after - added * (steps - 1))
    mistakes = {
        "You averaged the gains of the steps: the slow steps count for more, add up their times.": answer(
            sum(each) / steps
        ),
        "That is the gain of the first step: attention grows with the context.": answer(each[0]),
        "That is the gain of the last step: earlier ones have a shorter context.": answer(last),
        "That is the gain of attention alone: the rest of the step stays what it was.": answer(faster),
        "What is added to a step is left out.": answer(before / (after - added * steps)),
        "What is added is added in every step, not once.": answer(once),
        "That is the time after through the time before: turn it round.": answer(after / before, 1 / bound),
        "Free attention with nothing added leaves `rest_ms` in each step: `added_ms` is no part of the bound.": answer(
            limit=before / (steps * (rest + added))
        ),
        "The bound is for free attention, not for attention that is `faster` times as fast.": answer(
            limit=before / (after - added * steps)
        ),
        "The third number is milliseconds a step, not of the whole rollout.": answer(room=saved * steps),
        "The third number is what the kernel saves in a step: attention before, less attention after.": answer(
            room=sum(times) / steps
        ),
    }
    compare(f(attention, rest, faster, added), answer(), mistakes, atol=1e-4)


@q1.case("attention grows with the context, and something is added")
def _(f):
    check_gain(f, torch.linspace(0.2, 2.0, 7), 1.5, 3.0, 0.25)
    check_gain(f, 0.1 + torch.rand(12), 0.8, 2.2, 0.4)


@q1.case("nothing added, and attention that stays as it is")
def _(f):
    attention = torch.linspace(0.5, 3.0, 5) + torch.rand(5)
    check_gain(f, attention, 2.0, 4.0, 0.0)
    check_gain(f, attention, 2.0, 1.0, 0.0)


@q1.case("a faster kernel and a slower rollout")
def _(f):
    check_gain(f, torch.linspace(0.1, 0.3, 6) + 0.1 * torch.rand(6), 2.0, 2.2, 5.0)


@q1.case("one step, and a kernel that is slower")
def _(f):
    check_gain(f, 1.0 + torch.rand(1), 0.5, 2.0, 0.1)
    check_gain(f, 1.0 + torch.rand(4), 1.0, 0.5, 0.2)


q2 = Question("q2", "pieces_a_step", hint="Keep for each function the values it was compiled for, at most `limit`.")


def kept(codes: list[int], guards: list[int], limit: int) -> set[tuple[int, int]]:
    """The pairs that Dynamo has compiled code for, once all were met."""
    pairs = list(dict.fromkeys(zip(codes, guards, strict=True)))
    return {pair for i, pair in enumerate(pairs) if sum(p[0] == pair[0] for p in pairs[:i]) < limit}


def counted(pairs: list[tuple[int, int]], there: set) -> Tensor:
    runs = sum(pair in there for pair in pairs)
    return torch.tensor([len(there), runs, len(pairs) - runs])


def check_pieces(f, codes: list[int], guards: list[int], limit: int) -> None:
    pairs = list(zip(codes, guards, strict=True))
    there = kept(codes, guards, limit)
    right = counted(pairs, there)
    unique = list(dict.fromkeys(pairs))
    over = {code for code, _ in pairs if sum(p[0] == code for p in unique) > limit}
    one_each = counted([(code, 0) for code in codes], kept(codes, [0] * len(codes), limit))
    mistakes = {
        "The limit is one too high: `limit` versions are kept, the first one included.": counted(
            pairs, kept(codes, guards, limit + 1)
        ),
        "The limit is one too low: `limit` versions are kept.": counted(pairs, kept(codes, guards, limit - 1)),
        "The limit holds for each function by itself, not for all together.": counted(pairs, set(unique[:limit])),
        "A function over the limit keeps the versions it has: only other values run eagerly.": counted(
            pairs, {pair for pair in unique if pair[0] not in over}
        ),
        "A version is good for its own value alone: another value compiles again.": one_each,
        "Two functions share nothing, even where their values are equal.": counted(
            [(0, g) for g in guards], kept([0] * len(guards), guards, limit)
        ),
        "There is no limit in your count.": counted(pairs, set(unique)),
        "The second number is of runs in a step, not of versions.": torch.stack([right[0], right[0], right[2]]),
        "The last two numbers are the wrong way round.": right[[0, 2, 1]],
    }
    found = f(torch.tensor(codes), torch.tensor(guards), limit)
    compare(torch.as_tensor(found).double() if found is not None else None, right.double(), mistakes)


def check_random(f, limit: int) -> None:
    check_pieces(f, torch.randint(0, 3, (40,)).tolist(), torch.randint(0, 6, (40,)).tolist(), limit)


@q2.case("twelve layers, one function that looks at its layer's number and one that does not")
def _(f):
    codes, guards = [0, 1] * 12, [n for layer in range(12) for n in (layer, 0)]
    check_pieces(f, codes, guards, 8)
    check_pieces(f, codes, guards, 3)
    check_random(f, 3)


@q2.case("below the limit, and exactly at it")
def _(f):
    check_pieces(f, [5] * 8, list(range(8)), 8)
    check_pieces(f, [5, 7] * 3, [0, 0, 1, 1, 2, 2], 8)
    check_random(f, 6)


@q2.case("values that come again in the same step")
def _(f):
    check_pieces(f, [1, 1, 1, 1, 1, 1, 1], [0, 1, 2, 3, 0, 1, 3], 2)
    check_random(f, 2)


@q2.case("random functions and values, a limit of one")
def _(f):
    check_random(f, 4)
    check_random(f, 1)


q3 = Question("q3", "first_and_last_slot", hint="`argmax` finds the first True; how many there are tells the last.")


def check_slots(f, starts: list[int], counts: list[int], slots: int, additive: bool = False) -> None:
    at = torch.arange(slots)
    first, many = torch.tensor(starts), torch.tensor(counts)
    seen = (at >= first[:, None]) & (at < (first + many)[:, None])
    mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf) if additive else seen
    last = first + many - 1

    def pair(a: Tensor, b: Tensor) -> Tensor:
        return torch.stack([a, b]).double()

    mistakes = {
        "The last slot is not the number of slots seen: rows are padded on the left.": pair(first, many - 1),
        "The last slot is the last one that is seen, not the one behind it.": pair(first, last + 1),
        "The last slot of the cache holds nothing yet: look at the mask.": pair(
            first, torch.full_like(last, slots - 1)
        ),
        "You counted all hidden slots: those behind the newest token are no padding.": pair(slots - many, last),
        "Padding of the first row was taken for all rows.": pair(first[:1].expand_as(first), last),
        "Padding is forgotten: the first slot is not always 0.": pair(first * 0, last),
        "The two rows are the wrong way round.": pair(last, first),
        "In a mask of numbers 0 is seen and -inf is hidden; in one of truths True is seen.": pair(
            (~seen).long().argmax(1), (~seen).long().argmax(1) + (~seen).sum(1) - 1
        ),
    }
    found = f(mask[:, None, None])
    if found is None:
        raise AssertionError("the result is None: is there a `return`?")
    found = torch.as_tensor(found)
    if found.dtype.is_floating_point or found.dtype == torch.bool:
        raise AssertionError("slots are whole numbers: give them as int64")
    compare(found.double(), pair(first, last), mistakes)


def check_random_slots(f, additive: bool = False) -> None:
    check_slots(f, torch.randint(0, 4, (8,)).tolist(), torch.randint(1, 6, (8,)).tolist(), 12, additive)


@q3.case("rows padded on the left, a cache that is not full")
def _(f):
    check_slots(f, [2, 0, 5], [4, 6, 1], 9)
    check_random_slots(f)


@q3.case("no padding, a full cache, one slot")
def _(f):
    check_slots(f, [0, 0], [3, 7], 7)
    check_slots(f, [0], [1], 1)
    check_random_slots(f)


@q3.case("a mask of numbers: 0 for seen, -inf for hidden")
def _(f):
    check_slots(f, [1, 3, 0], [5, 2, 8], 8, additive=True)
    check_random_slots(f, additive=True)


@q3.case("no mask: ValueError, and no guess")
def _(f):
    check_random_slots(f)
    try:
        f(None)
    except NotImplementedError:
        raise
    except ValueError:
        return
    except Exception as error:  # the grader tells of errors in another process by AssertionError
        if str(error).startswith("ValueError"):
            return
        raise AssertionError(f"without a mask, raise ValueError: there came {type(error).__name__}") from None
    raise AssertionError("without a mask you returned something: nobody knows which slots hold tokens")


q4 = Question(
    "q4", "fake_attend", hint="Two `new_empty`: think of shape, dtype and strides of what the kernel returns."
)


def check_fake(f, q: Tensor, values: Tensor) -> None:
    found = f(q, torch.empty(*values.shape[:3], q.shape[-1], dtype=values.dtype), values)
    if not isinstance(found, tuple | list) or len(found) != 3:
        raise AssertionError("return three things: the output, the log-sum, and the list of the output's strides")
    out, logsum, strides = found
    if not isinstance(out, Tensor) or not isinstance(logsum, Tensor):
        raise AssertionError("the output and the log-sum are tensors")
    rows, heads, size = *q.shape[:2], values.shape[-1]
    if list(out.shape) != [rows, heads, size]:
        hints = {
            tuple(q.shape): "The output has the head size of the values, not of the queries.",
            (rows, values.shape[1], size): "The output has as many heads as the queries, not as the cache.",
            (
                rows,
                values.shape[1],
                values.shape[2],
                size,
            ): "That is the cache's shape: the output has one token a row.",
        }
        usual = f"the output has shape {list(out.shape)}, expected {[rows, heads, size]}"
        raise AssertionError(hints.get(tuple(out.shape), usual))
    if out.dtype != q.dtype:
        raise AssertionError(f"the output has dtype {out.dtype}: the kernel gives that of the queries, {q.dtype}")
    if logsum.dtype != torch.float32:
        raise AssertionError(f"the log-sum has dtype {logsum.dtype}: the kernel keeps it in float32, whatever q is")
    if list(logsum.shape) != [rows, heads]:
        raise AssertionError(f"the log-sum has shape {list(logsum.shape)}, expected {[rows, heads]}")
    expected = [heads * size, size, 1]
    if [int(s) for s in strides] != expected:
        sentence = f"the strides are {list(strides)}, the kernel writes {expected}: without gaps, rows outermost"
        same = [int(s) for s in strides] == list(torch.empty_like(q).stride())
        raise AssertionError(sentence + (". `empty_like` takes over the order of q's strides" if same else ""))


@q4.case("queries without gaps, heads of one size")
def _(f):
    check_fake(f, torch.randn(3, 6, 8), torch.randn(3, 2, 5, 8))


@q4.case("half precision: the output follows, the log-sum does not")
def _(f):
    check_fake(f, torch.randn(2, 4, 8).bfloat16(), torch.randn(2, 2, 5, 8).bfloat16())
    check_fake(f, torch.randn(2, 4, 8).half(), torch.randn(2, 1, 5, 8).half())


@q4.case("queries turned round in memory: heads outermost")
def _(f):
    check_fake(f, torch.randn(6, 3, 8).transpose(0, 1), torch.randn(3, 2, 5, 8))


@q4.case("values with another head size than the keys, one row, one slot")
def _(f):
    check_fake(f, torch.randn(4, 6, 8), torch.randn(4, 3, 5, 12))
    check_fake(f, torch.randn(1, 2, 4), torch.randn(1, 1, 1, 6))


q5 = Question("q5", "diagnose", hint="Five rules from top to bottom, the first that holds: busy time is `busy * ms`.")


def verdict(ms: float, floor: float, busy: float, kernels: float, launches: float, us: float, **wrong) -> int:
    if ms <= 2 * floor and not wrong.get("no_floor"):
        return 0
    if (busy > 0.5) if wrong.get("busy_is_idle") else (busy < 0.5):
        many = launches > (wrong.get("many") or kernels / 2)
        return 1 if many else (4 if wrong.get("no_wait") else 2)
    whole = ms if wrong.get("of_step") else busy * ms
    return 3 if kernels * us * (1 if wrong.get("unit") else 1e-3) > whole / 2 else 4


def check_table(f, rows: list[tuple[float, ...]], us: float = 1.25) -> None:
    def all_of(**wrong) -> Tensor:
        return torch.tensor([verdict(*row, us, **wrong) for row in rows]).double()

    mistakes = {
        "Microseconds and milliseconds are mixed: `kernel_us` is microseconds.": all_of(unit=True),
        "Compare the kernels' least time with half of the busy time, not of the step.": all_of(of_step=True),
        "`busy` is the share in which the GPU works, not the one in which it waits.": all_of(busy_is_idle=True),
        "Look at the floor first: a step at the floor has nothing to repair.": all_of(no_floor=True),
        "Many launches are many beside the kernels of the same step, not beside a fixed number.": all_of(many=100),
        "A GPU that waits though few things are launched waits for the host: that is 2.": all_of(no_wait=True),
    }
    found = f(torch.tensor(rows, dtype=torch.float64), us)
    compare(torch.as_tensor(found).double() if found is not None else None, all_of(), mistakes)


def shuffled(rows: list[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """The rows in another order, milliseconds up to a tenth more or less."""
    speed = 0.9 + 0.2 * torch.rand(()).item()
    return [(speed * rows[i][0], speed * rows[i][1], *rows[i][2:]) for i in torch.randperm(len(rows)).tolist()]


ONE_OF_EACH = [
    (0.40, 0.25, 0.30, 400.0, 400.0),  # at the floor, whatever else
    (24.0, 0.25, 0.08, 760.0, 700.0),  # in pieces
    (3.00, 0.25, 0.40, 400.0, 3.0),  # waits for the host
    (2.00, 0.25, 0.90, 1200.0, 4.0),  # many small kernels
    (4.00, 0.25, 0.80, 120.0, 2.0),  # slow kernels
]


@q5.case("one of each")
def _(f):
    check_table(f, shuffled(ONE_OF_EACH))


@q5.case("one row, and other costs of a kernel")
def _(f):
    for row in ONE_OF_EACH:
        check_table(f, [row], us=2.0)
    check_table(f, random_table(), us=2.0)
    check_table(f, [(3.0, 0.3, 0.75, 700.0, 5.0), (3.0, 0.3, 0.75, 1000.0, 5.0)], us=1.5)


@q5.case("few kernels, each launched by itself; many kernels, of which some hundred are")
def _(f):
    few, many = (5.0, 0.5, 0.2, 60.0, 55.0), (5.0, 0.5, 0.2, 900.0, 300.0)
    check_table(f, shuffled([few] * draw(1, 4) + [many] * draw(1, 4)))


def random_table() -> list:
    kernels = torch.randint(20, 1500, (60,)).double()
    columns = [0.3 + 6 * torch.rand(60), 0.2 + torch.rand(60) * 0.6, torch.rand(60), kernels, kernels * torch.rand(60)]
    return torch.stack([c.double() for c in columns], dim=1).tolist()


@q5.case("random tables")
def _(f):
    check_table(f, random_table())


QUESTIONS = {"q1": q1, "q2": q2, "q3": q3, "q4": q4, "q5": q5}
