"""What a kernel's machine code needs, read from the cubin. `cuobjdump -res-usage` prints the same."""

import struct

REGISTERS, STACK = 0x2F, 0x12  # the attributes EIATTR_REGCOUNT and EIATTR_MIN_STACK_SIZE
WITH_VALUE = 4  # the form of an attribute whose value follows it


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack: 0 means that nothing is spilled and no array lies in local memory.

    A cubin is an ELF file. Its section .nv.info lists attributes: a byte for the form, one for the attribute, and two
    for a short value or for the length of one that follows, here a function's number and how many it needs.
    """
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<I20xQQ", cubin, table + i * size) for i in range(count)]  # name, start, length
    named = {cubin[sections[names][1] + name :].partition(b"\0")[0]: place for name, *place in sections}
    at, length = named[b".nv.info"]
    end, found = at + length, {REGISTERS: 0, STACK: 0}
    while at < end:
        form, attribute, length = struct.unpack_from("<BBH", cubin, at)
        at += 4
        if form == WITH_VALUE:
            if attribute in found:
                found[attribute] = max(found[attribute], struct.unpack_from("<II", cubin, at)[1])
            at += length
    return {"registers": found[REGISTERS], "stack_bytes": found[STACK]}
