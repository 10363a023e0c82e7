"""Pack documents into rows of a fixed length, so that few slots stay empty."""

from collections.abc import Sequence


def packed(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """The documents in each row: best fit decreasing (Johnson 1973), which depends on the sizes alone.

    The largest documents come first; each goes into the fullest row that has room for it. No size exceeds `capacity`.
    """
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    """The rows with exactly this many free slots."""
    occupied = 0  # bit i is set if a row has i free slots
    for document in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        size = sizes[document]
        fitting = occupied >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1  # the lowest set bit: the least room that suffices
            row = with_room[room].pop()
            if not with_room[room]:
                occupied ^= 1 << room
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(document)
        with_room[room - size].append(row)
        occupied |= 1 << (room - size)
    return rows
