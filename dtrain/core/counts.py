"""Numbers of things as text."""


def counted(count: int, one: str, several: str = "") -> str:
    """ "1 row", "1,234 rows"; `several` where it is not `one` and an s: "1 value is missing"."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def ms(seconds: float) -> str:
    """0.8861 → 886 ms."""
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"
