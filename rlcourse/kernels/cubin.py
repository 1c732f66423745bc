"""What a kernel's machine code needs, read from the cubin: an ELF file whose section .nv.info lists it, function by
function. `cuobjdump -res-usage` prints the same."""

import struct

REGISTERS, STACK = 0x2F, 0x12  # the attributes EIATTR_REGCOUNT and EIATTR_MIN_STACK_SIZE
WITH_VALUE = 4  # the form of an attribute that has a value of its own


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack: 0 means that nothing is spilled and no array lies in local memory.

    Of the only kernel in it. Raises ValueError where the file is not a cubin.
    """
    found = dict.fromkeys((REGISTERS, STACK), 0)
    for attribute, value in _attributes(_section(cubin, b".nv.info")):
        if attribute in found:
            _, number = struct.unpack("<II", value)  # which function, how many
            found[attribute] = max(found[attribute], number)
    return {"registers": found[REGISTERS], "stack_bytes": found[STACK]}


def _section(elf: bytes, wanted: bytes) -> bytes:
    """The bytes of a section. The header says where the table of sections is, and which one holds their names."""
    if elf[:4] != b"\x7fELF":
        raise ValueError("This is not a cubin: it does not begin as an ELF file does.")
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    sections = [struct.unpack_from("<I20xQQ", elf, table + i * size) for i in range(count)]  # name, offset, bytes
    for name, offset, length in sections:
        start = sections[names][1] + name
        if elf[start : elf.index(b"\0", start)] == wanted:
            return elf[offset : offset + length]
    raise ValueError(f"This is not a cubin: it has no section {wanted.decode()}.")


def _attributes(info: bytes):
    """(attribute, value) of a section .nv.info: a byte for the form, one for the attribute, two for a short value or,
    in the form that has a value of its own, for its length."""
    at = 0
    while at < len(info):
        form, attribute, length = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == WITH_VALUE:
            yield attribute, info[at : at + length]
            at += length
