"""Who comes before whom: vector clocks over warps, which turn a missing barrier into an error in every run.

Every warp counts epochs. An access leaves a stamp on its bytes: its warp and that warp's epoch. A barrier tells each of
its warps what the others have done so far, and starts their next epochs. Across blocks, knowledge travels through
atomics: a fence (or the release half of an atomic) takes down what a warp knows, an atomic leaves that at its address,
and whoever comes to the address later and then fences (or has the acquire half) knows it too. A warp that touches bytes
with a stamp it does not know races with the other, even if this run happened to take the right order.

Threads of one warp are taken to run in step. Of the readers of a byte of global memory, only the last one is kept.
"""

import numpy as np

from ptx_interpreter.errors import Race

LOW = (1 << 32) - 1
Knowledge = dict[int, np.ndarray]  # block -> epochs known of its warps


class Order:
    """The clocks of `blocks` blocks of `warps` warps."""

    def __init__(self, blocks: int, warps: int):
        self.warps = warps
        self.epoch = np.ones(blocks * warps, np.int64)
        self.seen = np.zeros((blocks, warps, warps), np.int64)  # [block, w, v] the epochs of v that w knows
        self.abroad: dict[int, Knowledge] = {}  # warp -> what it knows of other blocks
        self.pending: dict[int, Knowledge] = {}  # warp -> what atomics told it, to be known after the next fence
        self.fenced: dict[int, Knowledge] = {}  # warp -> what it knew at its last fence
        self.published: dict[int, Knowledge] = {}  # address -> what atomics left there
        self.cross_block: dict[str, int] = {}  # buffer -> bytes read that another block wrote, in order

    def stamps(self, threads: np.ndarray) -> np.ndarray:
        """What a write by each thread is stamped with; never 0."""
        warp = threads // 32
        return (warp + 1) << 32 | self.epoch[warp]

    def check(self, space, verb: str, at, stamps, threads, did: str = "wrote"):
        """Raises Race if one of the stamps [accesses, n], of the bytes at `at`, is unknown to its thread's warp.

        A stamp of 0 says nothing. `did`: what left the stamps.
        """
        warp = (threads // 32)[:, None]
        writer = (stamps >> 32) - 1
        foreign = (stamps != 0) & (writer != warp)
        if not foreign.any():
            return
        rows, columns = np.nonzero(foreign)
        mine, theirs, epoch = warp[rows, 0], writer[rows, columns], stamps[rows, columns] & LOW
        block = mine // self.warps
        known = self.seen[block, mine % self.warps, theirs % self.warps] >= epoch
        abroad = theirs // self.warps != block
        if abroad.any():
            cases = np.stack([mine[abroad], theirs[abroad], epoch[abroad]])
            cases, which = np.unique(cases, axis=1, return_inverse=True)
            known[abroad] = np.array([self._knows(*case) for case in cases.T.tolist()])[which.reshape(-1)]
            if verb == "read":
                for name, number in zip(*space.holders(at[rows, columns][abroad]), strict=True):
                    self.cross_block[name] = self.cross_block.get(name, 0) + int(number)
        if not known.all():
            bad = np.zeros(stamps.shape, bool)
            bad[rows[~known], columns[~known]] = True
            self.fail(space, verb, at, stamps, threads, bad, did)

    def fail(self, space, verb, at, stamps, threads, bad, did="wrote"):
        """Raises the Race of the first access of which something is `bad`."""
        row, column = np.argwhere(bad)[0]
        where, offset, buffer = space.describe(at[row, column])
        other, mine = int(stamps[row, column] >> 32) - 1, int(threads[row]) // 32
        same = other // self.warps == mine // self.warps
        who = f"warp {other % self.warps}" + ("" if same else f" of block number {other // self.warps}")
        missing = "no barrier" if same else "no atomic with release and acquire"
        message = f"{verb} of {where}, by warp {mine % self.warps}; {who} {did} it, and {missing} is in between"
        raise Race(message, buffer=buffer, offset=offset, indices=threads[bad.any(1)])

    def barrier(self, block: int, warps: np.ndarray):
        """`warps` of a block have met: each knows what all of them knew, and what they did."""
        own = block * self.warps + warps
        seen = self.seen[block]
        seen[warps, warps] = self.epoch[own]
        seen[warps] = seen[warps].max(0)
        self.epoch[own] += 1
        if any(int(w) in self.abroad for w in own):
            joined: Knowledge = {}
            for w in own:
                _merge(joined, self.abroad.get(int(w), {}))
            for w in own:
                self.abroad[int(w)] = dict(joined)

    def fence(self, warp: int):
        """What atomics told the warp is known from now on; what it knows now can be published."""
        block, w = divmod(warp, self.warps)
        known = self.abroad.setdefault(warp, {})
        _merge(known, self.pending.pop(warp, {}))
        if block in known:
            self.seen[block, w] = np.maximum(self.seen[block, w], known.pop(block))
        self.seen[block, w, w] = self.epoch[warp]
        self.fenced[warp] = {**known, block: self.seen[block, w].copy()}
        self.epoch[warp] += 1

    def atomic(self, warp: int, address: int, reads: bool, writes: bool):
        """The warp takes what others left at an address, if it reads; it leaves what it knew at its last fence."""
        left = self.published.setdefault(address, {})
        if reads:
            _merge(self.pending.setdefault(warp, {}), left)
        if writes:
            _merge(left, self.fenced.get(warp, {}))

    def _knows(self, mine: int, theirs: int, epoch: int) -> bool:
        block, v = divmod(theirs, self.warps)
        known = self.abroad.get(mine, {}).get(block)
        return known is not None and known[v] >= epoch


def _merge(into: Knowledge, other: Knowledge):
    for block, epochs in other.items():
        into[block] = np.maximum(into[block], epochs) if block in into else epochs
