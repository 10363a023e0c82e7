"""Text of others, before it is printed: control characters could move the cursor, set titles or hide what follows."""

import re

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""C0 but tab and line feed, DEL, C1, and the characters that reorder a line."""


def printable(text: str) -> str:
    """The text with each control character as its escape: \\x1b."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)
