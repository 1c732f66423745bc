"""The embedding: a row of a table for each token, and the gradient of the table.

Backward, a row of the table gets the sum of all its tokens' gradients, and a token comes many times. Atomic additions
would add them in an order that changes from run to run, and with it the last bits. So the tokens are sorted first, a
stable sort that keeps equal tokens in their order, and the threads of the first of equals add up all of them: one
writer, one order, the same bits every time. The price is that a token that comes a thousand times is a chain of a
thousand additions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlcourse.kernels import KernelError
from rlcourse.kernels.arguments import Argument, need_dtype, type_name
from rlcourse.kernels.dsl import Float32, Int32, Int64, cute, cutlass
from rlcourse.kernels.toolchain import launch

VECTOR = 8  # 16-bit numbers in 16 bytes


def embedding_reference(table: Tensor, token: Tensor) -> Tensor:
    """Rows [tokens, hidden] of table [vocabulary, hidden] for token int64 [tokens]."""
    return table[token]


def embedding_backward_reference(token: Tensor, dy: Tensor, dtable: Tensor) -> None:
    """dtable [vocabulary, hidden] float32 += the sum over each row's tokens of dy [tokens, hidden], in float64."""
    dtable.copy_(dtable.double().index_add(0, token, dy.double()))


@dataclass(frozen=True)
class Embedding:
    """y [tokens, hidden]: each thread copies 16 bytes."""

    hidden: int
    dtype: str
    threads: int = 256

    def __post_init__(self):
        check_shape(self)

    @property
    def pieces(self) -> int:
        return self.hidden // VECTOR

    def arguments(self) -> tuple:
        token = Argument("token", "int64", ("tokens",), align=8)
        y = Argument("y", self.dtype, ("tokens", self.hidden), free=1, output=True)
        return Argument("table", self.dtype, ("vocabulary", self.hidden)), token, y

    def grid(self, table, token, y):
        return -(-token.shape[0] * self.pieces // self.threads), 1, 1

    @cute.jit
    def __call__(self, table: cute.Tensor, token: cute.Tensor, y: cute.Tensor, stream):
        launched = self.kernel(table, token, y)
        launched.launch(grid=self.grid(table, token, y), block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, table: cute.Tensor, token: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        index = block * self.threads + thread
        row, piece = index // self.pieces, index % self.pieces
        if row < token.shape[0]:
            held = cute.make_rmem_tensor(VECTOR, table.element_type)
            cute.autovec_copy(cute.tiled_divide(table[token[row], None], (VECTOR,))[None, piece], held)
            cute.autovec_copy(held, cute.tiled_divide(y[row, None], (VECTOR,))[None, piece])


@dataclass(frozen=True)
class EmbeddingBackward:
    """dtable [vocabulary, hidden] float32 += sums of dy [tokens, hidden]. token int64 [tokens]: sorted; source: which
    row of dy each came from; end: one past the last place of its equals."""

    hidden: int
    dtype: str
    threads: int = 128

    def __post_init__(self):
        check_shape(self)

    @property
    def pieces(self) -> int:
        return self.hidden // VECTOR

    def arguments(self) -> tuple:
        lists = (Argument(name, "int64", ("tokens",), align=8) for name in ("token", "source", "end"))
        dy = Argument("dy", self.dtype, ("tokens", self.hidden), free=1)
        return *lists, dy, Argument("dtable", "float32", ("vocabulary", self.hidden))

    def grid(self, token, *_):
        return -(-token.shape[0] * self.pieces // self.threads), 1, 1

    @cute.jit
    def __call__(self, token: cute.Tensor, source: cute.Tensor, end: cute.Tensor, dy: cute.Tensor, dtable: cute.Tensor,
                 stream):  # fmt: skip
        launched = self.kernel(token, source, end, dy, dtable)
        launched.launch(grid=self.grid(token), block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, token: cute.Tensor, source: cute.Tensor, end: cute.Tensor, dy: cute.Tensor, dtable: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        index = block * self.threads + thread
        place, piece = index // self.pieces, index % self.pieces
        first = Int32(0)
        if place < token.shape[0]:
            before = Int64(-1)
            if place > 0:
                before = token[place - 1]
            if before != token[place]:
                first = Int32(1)
        if first == 1:
            row = cute.tiled_divide(dtable[token[place], None], (VECTOR,))
            held, sums = cute.make_rmem_tensor(VECTOR, dy.element_type), cute.make_rmem_tensor(VECTOR, Float32)
            sums.fill(0.0)
            for at in cutlass.range(place, end[place].to(Int32), unroll=4):
                cute.autovec_copy(cute.tiled_divide(dy[source[at], None], (VECTOR,))[None, piece], held)
                sums.store(sums.load() + held.load().to(Float32))
            total = cute.make_rmem_tensor(VECTOR, Float32)
            cute.autovec_copy(row[None, piece], total)
            total.store(total.load() + sums.load())
            cute.autovec_copy(total, row[None, piece])


def check_shape(kernel) -> None:
    """Raises KernelError for a dtype or a width that these kernels cannot do."""
    need_dtype(kernel)
    if kernel.hidden % VECTOR:
        name = type(kernel).__name__
        raise KernelError(f"{name} cannot cut rows of {kernel.hidden}: it takes multiples of {VECTOR}.")


@torch.library.custom_op("rlcourse::embedding", mutates_args=())
def embedding(table: Tensor, token: Tensor) -> Tensor:
    """`embedding_reference` in one launch; table bfloat16 or float16. Tokens must be within the table. Raises
    KernelError."""
    y = table.new_empty(len(token), table.shape[1])
    if y.numel():
        launch(Embedding(table.shape[1], type_name(table)), table, token, y)
    return y


@embedding.register_fake
def _(table, token):
    return table.new_empty(len(token), table.shape[1])


@torch.library.custom_op("rlcourse::embedding_backward", mutates_args=("dtable",))
def embedding_backward(token: Tensor, dy: Tensor, dtable: Tensor) -> None:
    """`embedding_backward_reference`: a sort and one launch, the same bits every time. It adds, so a head that shares
    the table can have added its part before. dy bfloat16 or float16, the stride of rows free; dtable float32. Raises
    KernelError."""
    if dy.numel():
        ordered, source = torch.sort(token, stable=True)
        end = torch.searchsorted(ordered, ordered, right=True)
        launch(EmbeddingBackward(dy.shape[1], type_name(dy)), ordered, source, end, dy, dtable)


@embedding_backward.register_fake
def _(token, dy, dtable):
    return None


EXAMPLES = (Embedding(896, "bfloat16"), EmbeddingBackward(896, "bfloat16"))  # Qwen2.5-0.5B
