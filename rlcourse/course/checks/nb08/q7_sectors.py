"""q7: the sectors that a load of a warp moves."""

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare, draw

q7 = Question(
    "q7", "sectors", hint="A lane's access lies in sector address // 32. Count the distinct ones of each warp."
)


def loop_sectors(addresses: Tensor, active: Tensor, joined: bool = False) -> Tensor:
    """Sectors of each warp by sets, [W]. joined: as if no two warps asked for the same sector."""
    seen, counts = set(), []
    for warp, lanes in zip(addresses.tolist(), active.tolist(), strict=True):
        mine = {address // 32 for address, on in zip(warp, lanes, strict=True) if on}
        counts.append(len(mine - seen) if joined else len(mine))
        seen |= mine
    return torch.tensor(counts)


def check_sectors(f, addresses: Tensor, size: int, active: Tensor | None = None) -> None:
    active = torch.ones_like(addresses, dtype=torch.bool) if active is None else active
    asked = active.sum(1) * size
    lowest = torch.where(active, addresses, 2**40).amin(1)
    span = torch.where(active, addresses, -1).amax(1) + size - lowest
    mistakes = {
        "Lanes that are not active ask for nothing.": loop_sectors(addresses, active | True),
        "You divided the bytes asked for by 32: that is right only where they lie side by side.": -(-asked // 32),
        "You took the distance from the first byte to the last: what lies between need not be moved.": -(-span // 32),
        "You counted the lanes: several may share a sector.": active.sum(1),
        "You counted a sector for one warp alone: each warp asks for itself.": loop_sectors(addresses, active, True),
        "You counted bytes: a sector has 32.": 32 * loop_sectors(addresses, active),
        "You counted lines of 128 bytes: a sector has 32.": loop_sectors(addresses // 4, active),
    }
    compare(f(addresses, size, active), loop_sectors(addresses, active), mistakes)


def base() -> int:
    """An address at which a line of 128 bytes begins."""
    return 128 * draw(1, 10**6)


@q7.case("neighbours: 4 bytes a lane, and 16")
def _(f):
    check_sectors(f, base() + 4 * torch.arange(64).view(2, 32), 4)
    check_sectors(f, base() + 16 * torch.arange(96).view(3, 32), 16)


@q7.case("with a stride, from an odd beginning, and in any order")
def _(f):
    for step in (8, 20, 64, 128, 1000):
        check_sectors(f, base() + step * torch.arange(64).view(2, 32), 4)
    check_sectors(f, base() + 16 + 4 * torch.arange(32)[None], 4)
    check_sectors(f, base() + 4 * torch.randperm(256)[:64].view(2, 32), 4)


@q7.case("all lanes at one address; two warps at the same addresses")
def _(f):
    check_sectors(f, torch.full((1, 32), base()), 4)
    check_sectors(f, (base() + 4 * torch.arange(32)).expand(3, 32).clone(), 4)


@q7.case("lanes that are not active, down to none")
def _(f):
    addresses = base() + 32 * torch.arange(96).view(3, 32)
    active = torch.rand(3, 32) < 0.5
    active[2] = False
    check_sectors(f, addresses, 16, active)
