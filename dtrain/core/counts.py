"""Numbers of things as text."""


def counted(count: int, one: str, several: str = "") -> str:
    """ "1 row", "1,234 rows"; `several` where it is not `one` and an s: "1 value is missing"."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def hours_text(hours: float) -> str:
    """ "1 hour", "1.5 hours"."""
    return f"{hours:g} hour{'' if hours == 1 else 's'}"


def figures(value: float) -> str:
    """Four digits, and all of larger numbers: 0.01234, 20,526."""
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.4g}"


def ms(seconds: float) -> str:
    """0.8861 → 886 ms."""
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"
