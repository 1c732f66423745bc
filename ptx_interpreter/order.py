"""Vector clocks over warps, which turn a missing barrier into an error in every run.

Every warp counts epochs. An access stamps its bytes with its warp and that warp's epoch. A barrier tells each of its
warps what the others have done so far, and starts their next epochs. Across blocks, knowledge travels through atomics:
a fence (or the release half of an atomic) saves what a warp knows, an atomic publishes that at its address, and a warp
that reads the address later and then fences (or has the acquire half) learns it. A warp that touches bytes with a stamp
it doesn't know races with the other, even if this run happened to take the right order.
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
        self.seen = np.zeros((blocks, warps, warps), np.int64)  # [block, w, v] last epoch of v that w knows
        self.abroad: dict[int, Knowledge] = {}  # warp -> what it knows of other blocks
        self.pending: dict[int, Knowledge] = {}  # warp -> what atomics told it, known after its next fence
        self.fenced: dict[int, Knowledge] = {}  # warp -> what it knew at its last fence
        self.published: dict[int, Knowledge] = {}  # address -> what atomics left there
        self.cross_block: dict[str, int] = {}  # buffer -> ordered reads of bytes that another block wrote

    def stamps(self, threads: np.ndarray) -> np.ndarray:
        """The stamp of an access by each thread; never 0."""
        warp = threads // 32
        return (warp + 1) << 32 | self.epoch[warp]

    def check(self, space, verb: str, at, stamps, threads, did: str = "wrote"):
        """Raise Race if a thread's warp doesn't know one of the stamps [accesses, n] on the bytes at `at`.

        A stamp of 0 is no stamp. did: what left the stamps.
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
        """Raise Race for the first access with a stamp that is `bad`."""
        row, column = np.argwhere(bad)[0]
        where, offset, buffer = space.describe(at[row, column])
        other, mine = int(stamps[row, column] >> 32) - 1, int(threads[row]) // 32
        same = other // self.warps == mine // self.warps
        who = f"warp {other % self.warps}" + ("" if same else f" of block number {other // self.warps}")
        missing = "no barrier" if same else "no atomic with release and acquire"
        message = f"{verb} of {where}, by warp {mine % self.warps}; {who} {did} it, and {missing} is in between"
        raise Race(message, buffer=buffer, offset=offset, indices=threads[bad.any(1)])

    def barrier(self, block: int, warps: np.ndarray):
        """`warps` of a block have met: each learns what any of them did or knew."""
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
        """The warp learns what atomics told it, and its next atomics publish what it knows now."""
        block, w = divmod(warp, self.warps)
        known = self.abroad.setdefault(warp, {})
        _merge(known, self.pending.pop(warp, {}))
        if block in known:
            self.seen[block, w] = np.maximum(self.seen[block, w], known.pop(block))
        self.seen[block, w, w] = self.epoch[warp]
        self.fenced[warp] = {**known, block: self.seen[block, w].copy()}
        self.epoch[warp] += 1

    def atomic(self, warp: int, address: int, reads: bool, writes: bool):
        """A read takes what others published at an address; a write publishes what the warp knew at its last fence."""
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
