"""Decode attention, the second step once more: the arithmetic of `decode_split`, with loads that are ahead of it. The
third step (`rlcourse/kernels/decode_attention.py`) differs from the second in several things; this kernel has more
bytes in flight and changes nothing else, so that a measurement can tell what they bring by themselves. They don't
overlap with arithmetic: on Hopper the assembler moves the loads of a round after nearly all of it."""

from rlcourse.course.kernels.decode_simple import begin, leave, take
from rlcourse.course.kernels.decode_split import SplitDecode
from rlcourse.kernels.decode_common import allocate_partials, chunks
from rlcourse.kernels.dsl import const_expr, cute, cutlass, range_constexpr

TILES = 2  # of a block that are in flight at a time


class AheadDecode(SplitDecode):
    """The kernel, with the fields of `SplitDecode`."""

    @cute.jit
    def attend(self, queries, keys, values, first, last):
        """`decode_simple.attend`, where the loads of a tile of tokens come TILES tiles before their use."""
        size = queries.shape[1]
        tokens = const_expr(self.threads * 8 // size)
        partial, column, query, m, l, acc = begin(queries)
        key, value = (cute.make_rmem_tensor((1, 8, TILES), keys.element_type) for _ in range(2))
        if first < last:
            for tile in range_constexpr(TILES):
                load(key, value, keys, values, tile, first + tile * tokens + partial, last, column)
        for base in cutlass.range(first, last, TILES * tokens):
            for tile in range_constexpr(TILES):
                token = base + tile * tokens + partial
                held = key[None, None, tile], value[None, None, tile]
                take(query, *held, token < last, m, l, acc, size // 8)
                load(key, value, keys, values, tile, token + TILES * tokens, last, column)

        all_ml, all_acc = allocate_partials(tokens, size)
        leave(all_ml, all_acc, m, l, acc, partial, column)
        return all_ml, all_acc


@cute.jit
def load(key, value, keys, values, tile, token, last, column):
    """A lane's 16 bytes of a token's key and value. Past the end it reads the last one again, which does not count."""
    slot = cutlass.min(token, last - 1)
    cute.autovec_copy(chunks(keys)[None, slot, column], key[None, None, tile])
    cute.autovec_copy(chunks(values)[None, slot, column], value[None, None, tile])
