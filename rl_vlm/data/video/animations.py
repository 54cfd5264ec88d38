"""How long a GIF or WEBP shows each frame, read from its blocks. No frame is decoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TABLE, TABLE_BITS = 0x80, 0x07
"""Bits of a GIF that say whether a table of colours follows, and how long it is."""
EXTENSION, CONTROL, IMAGE, END = b"!", b"\xf9", b",", b";"
"""First bytes of a GIF's blocks, and the second byte of the extension that tells the time of the next image."""
TICK = 100
"""Milliseconds of a frame without a time, as browsers show it."""


def frame_lengths(file: Any) -> list[int]:
    """Return the milliseconds of each frame of a GIF or of an animated WEBP."""
    file.seek(0)
    read: Callable[[Any], list[int]] = gif_lengths if file.read(4).startswith(b"GIF") else webp_lengths
    return [length or TICK for length in read(file)]


def gif_lengths(file: Any) -> list[int]:
    """Return the milliseconds of each frame of a GIF, or 0 for a frame without a time."""
    lengths, length = [], 0
    file.seek(10)
    skip_table(file, file.read(3))
    while (kind := file.read(1)) not in (b"", END):
        if kind == EXTENSION:
            is_control = file.read(1) == CONTROL
            first = next_block(file)
            if is_control:
                length = 10 * int.from_bytes(first[1:3], "little")
            skip_blocks(file, first)
        elif kind == IMAGE:
            lengths.append(length)
            length = 0
            skip_table(file, file.read(9)[8:])
            file.read(1)  # the size of the codes
            skip_blocks(file, next_block(file))
    return lengths


def next_block(file: Any) -> bytes:
    """Return a block of a GIF, whose first byte is its length. The last block of several is empty."""
    return file.read(int.from_bytes(file.read(1)))


def skip_blocks(file: Any, block: bytes) -> None:
    """Go to the end of the blocks of a GIF that begin with `block`."""
    while block:
        block = next_block(file)


def skip_table(file: Any, flags: bytes) -> None:
    """Go to the end of a table of colours, if there is one."""
    if flags and flags[0] & TABLE:
        file.seek(3 << ((flags[0] & TABLE_BITS) + 1), 1)


def webp_lengths(file: Any) -> list[int]:
    """Return the milliseconds of each frame of a WEBP."""
    lengths, place = [], 12
    file.seek(place)
    while len(head := file.read(8)) == 8:
        if head[:4] == b"ANMF":
            lengths.append(int.from_bytes(file.read(15)[12:], "little"))
        size = int.from_bytes(head[4:], "little")
        place += 8 + size + size % 2
        file.seek(place)
    return lengths
