"""q3: log-prob and entropy, and their gradients, without logits."""

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlcourse.course.checks import Question, compare, draw

q3 = Question("q3", "gradients", hint="First on paper: the slopes of log p and of the entropy, for one logit.")


def plain(hidden, head, targets, a, b, temperature, mistake: str = "") -> tuple[Tensor, Tensor]:
    """Gradients of sum a log p + b sum entropy by autograd in float64, all logits at once; or what a mistake gives."""
    hidden, head = (t.double().requires_grad_() for t in (hidden, head))
    logits = hidden @ head.T / (1.0 if mistake == "temperature" else temperature)
    logp = logits.log_softmax(-1)
    p = logp.exp()
    entropy = -(p * logp).sum(-1)
    if mistake == "no H":
        entropy = -((p * logp).detach() * logits).sum(-1)  # its slope is -p log p
    sign = {"sign": -1.0, "log p alone": 0.0}.get(mistake, 1.0)
    loss = (a.double() * logp.gather(1, targets[:, None])[:, 0]).sum() + sign * b * entropy.sum()
    if mistake == "mean":
        loss = loss / len(targets)
    d_hidden, d_head = torch.autograd.grad(loss, (hidden, head))
    if mistake == "inner":
        d_hidden, d_head = d_hidden * temperature, d_head * temperature
    if mistake == "minus":
        d_hidden, d_head = -d_hidden, -d_head
    return d_hidden, d_head


MISTAKES = {
    "temperature": "The temperature is missing: logits are divided by it.",
    "inner": "The temperature divides the gradient, too: it stands between hidden and logits.",
    "sign": "The entropy has the wrong sign: it is added.",
    "log p alone": "The entropy's part is missing.",
    "no H": "The entropy depends on p in two places: its slope is -p (log p + H).",
    "mean": "It is a sum over tokens, not a mean.",
    "minus": "All signs are turned: one-hot minus p.",
}


class Numbers(TorchDispatchMode):
    """The most numbers of one tensor that an operation makes, and of all that are there at once, autograd's too."""

    def __init__(self):
        super().__init__()
        self.largest, self.at_once, self.alive = 0, 0, {}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        made = function(*arguments, **(options or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.dtype != torch.uint8:  # those are what the result is packed into
                memory = tensor.untyped_storage()
                self.largest = max(self.largest, tensor.numel())
                self.alive[memory._cdata] = StorageWeakRef(memory), memory.nbytes() // tensor.element_size()
        if sum(count for _, count in self.alive.values()) > self.at_once:  # perhaps: some of it may be gone
            self.alive = {key: kept for key, kept in self.alive.items() if not kept[0].expired()}
            self.at_once = max(self.at_once, sum(count for _, count in self.alive.values()))
        return made


def check_gradients(f, n: int, chunk: int, vocabulary: int, a: Tensor, b: float, temperature: float) -> None:
    d = draw(5, 9)
    hidden, head, targets = torch.randn(n, d), torch.randn(vocabulary, d), torch.randint(vocabulary, (n,))
    with Numbers() as seen:  # nothing while grading, where the function runs in another process
        found = f(hidden, head, targets, a, b, temperature, chunk)
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise AssertionError("two tensors are asked for: the gradients of hidden and of head")
    expected = plain(hidden, head, targets, a, b, temperature)
    wrong = {said: plain(hidden, head, targets, a, b, temperature, mistake) for mistake, said in MISTAKES.items()}
    whole = n // chunk * chunk
    short = plain(hidden[:whole], head, targets[:whole], a[:whole], b, temperature)[1]
    for place, name in enumerate(("the gradient of hidden", "the gradient of head")):
        mistakes = {said: w[place].float() for said, w in wrong.items()}
        if place:
            mistakes["The last chunk, which is not full, is missing."] = short.float()
            last = plain(hidden[-chunk:], head, targets[-chunk:], a[-chunk:], b, temperature)[1]
            mistakes["That is one chunk's: the head's gradient is the sum over all."] = last.float()
        compare(found[place], expected[place].float(), mistakes, what=name, atol=1e-4)
    check_memory(seen, n, d, chunk, vocabulary)


def check_memory(seen: Numbers, n: int, d: int, chunk: int, vocabulary: int) -> None:
    if n < 20 * chunk:
        return  # a few tensors of a chunk's logits are as large as all logits
    if seen.largest > max(chunk * vocabulary, vocabulary * d, n * d):
        raise AssertionError(
            f"The largest tensor has {seen.largest:,} numbers: more than a chunk's logits, {chunk * vocabulary:,}."
        )
    if seen.at_once > n * vocabulary // 2:
        raise AssertionError(
            f"There are {seen.at_once:,} numbers at once, and all logits are {n * vocabulary:,}: what keeps them, "
            "a list or autograd?"
        )


@q3.case("log-probs alone, at temperature 1")
def _(f):
    check_gradients(f, 12, 4, draw(20, 40), torch.randn(12), 0.0, 1.0)


@q3.case("with a temperature")
def _(f):
    check_gradients(f, 12, 3, draw(20, 40), torch.randn(12), 0.0, 0.5 + 0.3 * torch.rand(()).item())


@q3.case("the entropy alone")
def _(f):
    check_gradients(f, 10, 5, draw(20, 40), torch.zeros(10), 0.7, 1.0 + torch.rand(()).item())


@q3.case("both, and a last chunk that is not full")
def _(f):
    check_gradients(f, 13, draw(4, 6), draw(30, 60), torch.randn(13), 0.3, 0.8)


@q3.case("many tokens, whose logits are never all there")
def _(f):
    n = draw(380, 420)
    check_gradients(f, n, draw(3, 5), draw(280, 320), torch.randn(n), 0.3, 0.8)
