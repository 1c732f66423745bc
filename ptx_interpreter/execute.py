"""Runs a kernel, all threads of the grid at once or in another order, until every thread has left.

Each thread has its own program counter. Among threads that may run, those furthest back go first, up to the next of the
others, so the two sides of a branch reconverge. A thread waits at a barrier, and at a warp-level instruction until all
lanes of its mask are there.
"""

import numpy as np

from ptx_interpreter.errors import Divergent, Endless, PTXError, Unsupported
from ptx_interpreter.machine import Machine
from ptx_interpreter.memory import Memory
from ptx_interpreter.parse import Entry
from ptx_interpreter.report import Report
from ptx_interpreter.warp import whole_warps

READY, AT_BARRIER, AMONG_LANES, GONE = range(4)
ORDERS = ("lockstep", "warp", "serial", "random")


def run(
    entry: Entry,
    grid,
    threads,
    params: bytes,
    memory: Memory,
    shared_bytes: int = 0,
    order: str = "lockstep",
    seed: int = 0,
    limit: int = 2_000_000,
) -> Report:
    """Execute a kernel, which changes `memory`, and report what it did.

    grid, threads: an int or up to three. params: the parameters' bytes, laid out as in `entry.params`. shared_bytes:
    dynamic shared memory per block. order: which threads run next; a correct kernel gives the same result in each.
      lockstep  all threads of all blocks together
      serial    block after block, shuffled by `seed`
      warp      block after block, and in a block the last warp first, each until it waits
      random    a random warp runs a few instructions, then another
    limit: instructions, each for any number of threads, before it raises Endless. Raises a PTXError for the kernel's
    mistakes, ValueError for a launch that doesn't fit the kernel.
    """
    grid, block = _triple(grid), _triple(threads)
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, not {order!r}")
    if min(grid) < 1:
        raise ValueError(f"a grid needs a block, not {grid}")
    if np.prod(block) % 32 or not 32 <= np.prod(block) <= 1024:
        raise ValueError(f"a block needs 1 to 32 whole warps, not {block} threads")
    if entry.threads and entry.threads != block:
        raise ValueError(f"{entry.name} is compiled for {entry.threads} threads, not {block}")
    size = max((p.offset + p.size for p in entry.params), default=0)
    if len(params) < size:
        raise ValueError(f"{entry.name} takes {size} bytes of parameters, not {len(params)}")
    with np.errstate(all="ignore"):
        machine = Machine(entry, grid, block, params, memory, shared_bytes, seed)
        return _Run(machine, limit).all(order)


def _triple(size) -> tuple[int, int, int]:
    size = (size,) if isinstance(size, int) else tuple(size)
    return (*(int(n) for n in size), 1, 1)[:3]


class _Run:
    """Each thread's program counter (`place`) and what it waits for."""

    def __init__(self, machine: Machine, limit: int):
        self.machine, self.steps, self.left = machine, machine.steps, limit
        count = machine.blocks * machine.block_size
        self.place, self.state = np.zeros(count, np.int64), np.full(count, READY, np.int8)
        self.mask, self.barrier = np.zeros(count, np.uint32), np.zeros(count, np.uint32)
        self.executed = np.zeros(len(self.steps) + 1, np.int64)  # by warps

    def all(self, order: str) -> Report:
        machine, everyone = self.machine, np.arange(len(self.place))
        if order in ("serial", "warp"):
            groups = [everyone.reshape(machine.blocks, -1)[b] for b in machine.random.permutation(machine.blocks)]
        else:
            groups = [everyone]
        for group in groups:
            while True:
                ready = group[self.state[group] == READY]
                if len(ready):
                    self._advance(*self._choose(ready, order))
                elif (self.state[group] == GONE).all():
                    break
                else:
                    self._stuck(group)
        for step, times in zip(self.steps, self.executed, strict=False):
            machine.report.instructions[step.instruction.opcode] += int(times)
        machine.report.cross_block_reads = machine.order.cross_block
        return machine.report

    def _choose(self, ready, order):
        """Which threads run next, and for at most how many instructions."""
        if order in ("lockstep", "serial"):
            return ready, self.left
        if order == "warp":
            return ready[ready // 32 == ready[-1] // 32], self.left
        warp = self.machine.random.choice(ready) // 32
        return ready[ready // 32 == warp], int(self.machine.random.integers(1, 64))

    def _advance(self, chosen, most: int):
        """Run the chosen threads that are furthest back, up to a jump, a wait, or the next of the others."""
        here = self.place[chosen]
        first = self.now = int(here.min())
        behind = here == first
        who = chosen[behind]
        stop = min(len(self.steps) if behind.all() else int(here[~behind].min()), first + most)
        try:
            self._straight(who, stop)
            done = self.now
            if done < stop:
                done += 1
                self._wait_or_jump(self.steps[self.now], who)
            else:
                self.place[who] = done
                self.state[who[self.place[who] == len(self.steps)]] = GONE
            self.executed[first:done] += len(np.unique(who // 32))
            self.left -= done - first
            if self.left <= 0:
                raise Endless("too many steps: a loop that does not end?", indices=who)
        except PTXError as error:
            if error.line is None:
                self.machine.place(error, self.steps[self.now].instruction)
            raise

    def _straight(self, who, stop: int):
        """Execute instructions from `now` to `stop`, or to the first at which these threads may diverge or wait."""
        threads = slice(who[0], who[-1] + 1) if who[-1] - who[0] + 1 == len(who) else who
        whole = whole_warps(who)
        while self.now < stop:
            step = self.steps[self.now]
            if step.kind != "plain" and not (step.kind == "together" and whole and step.predicate is None):
                return
            if step.predicate is None:
                step.execute(threads)
            else:
                holds = step.predicate(threads)
                if holds.all():
                    step.execute(threads)
                elif holds.any():
                    step.execute(who[holds])
            self.now += 1

    def _wait_or_jump(self, step, who):
        """Execute an instruction after which some threads may not continue with the next."""
        self.place[who] = self.now + 1
        if step.predicate is not None:
            who = who[step.predicate(who)]
            if not len(who):
                return
        name = step.instruction.name
        if name == "bra":
            self.place[who] = target = self.machine.entry.labels[step.instruction.operands[0]]
            if target == len(self.steps):
                self.state[who] = GONE
        elif step.kind == "jump":
            if name == "trap":
                raise Unsupported("the kernel stopped itself with a trap", indices=who)
            self.state[who] = GONE
        elif step.kind == "together":
            self._meet(step, who)
        else:
            self._arrive(step, who)

    def _meet(self, step, who):
        """Lanes reach a warp-level instruction: those whose whole mask is there execute it."""
        self.state[who], self.place[who], self.mask[who] = AMONG_LANES, self.now, step.mask(who)
        lanes = np.unique(who // 32)[:, None] * 32 + np.arange(32)
        here = (self.state[lanes] == AMONG_LANES) & (self.place[lanes] == self.now)
        bits = (here << np.arange(32)).sum(1).astype(np.uint32)
        together = lanes[here & (self.mask[lanes] & ~bits[:, None] == 0)]
        if len(together):
            step.execute(together)
            self.state[together], self.place[together] = READY, self.now + 1

    def _arrive(self, step, who):
        """Threads reach a barrier, which opens once it has as many threads as it waits for."""
        size = self.machine.block_size
        barrier, expected = step.execute(who)
        self.state[who], self.place[who], self.barrier[who] = AT_BARRIER, self.now, barrier
        cases = np.stack(np.broadcast_arrays(who // size, barrier, expected))
        for block, number, count in np.unique(cases, axis=1).T:
            members = np.arange(block * size, (block + 1) * size)
            there = members[(self.state[members] == AT_BARRIER) & (self.barrier[members] == number)]
            if len(there) != count:
                continue
            place = self.place[there]
            if not whole_warps(there) or (place.reshape(-1, 32) != place[::32, None]).any():
                raise Divergent("only a part of a warp comes to this barrier", indices=there)
            self.machine.order.barrier(int(block), np.unique(there % size // 32))
            self.machine.report.barriers += 1
            self.state[there], self.place[there] = READY, place + 1

    def _stuck(self, group):
        """No thread can continue: raise Divergent, naming who waits for whom."""
        waiting = group[self.state[group] != GONE]
        first = waiting[self.place[waiting].argmin()]
        step = self.steps[self.place[first]]
        if self.state[first] == AMONG_LANES:
            lanes = np.arange(32)
            among = first // 32 * 32 + lanes[self.mask[first] >> lanes.astype(np.uint32) & 1 == 1]
        else:
            among = first - first % self.machine.block_size + np.arange(self.machine.block_size)
        there = among[(self.place[among] == self.place[first]) & (self.state[among] == self.state[first])]
        missing = np.setdiff1d(among, there)
        elsewhere = missing[self.state[missing] != GONE]
        gone = len(missing) - len(elsewhere)
        message = f"{len(there)} of {len(among)} threads wait here; {gone} have left the kernel"
        if len(elsewhere):
            other = self.steps[self.place[elsewhere[0]]].instruction
            message += f", {len(elsewhere)} wait at line {other.line}: {other.text}"
        error = Divergent(message, indices=there)
        self.machine.place(error, step.instruction)
        raise error
