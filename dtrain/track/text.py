"""Numbers and durations as short text."""

MINUTE, HOUR, DAY = 60, 3600, 86400
BARS = "▁▂▃▄▅▆▇█"


def short(number: float) -> str:
    """A number with an SI suffix: 82512 → 82.5k."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}{suffix}"
    return f"{number:.0f}"


def clock_time(seconds: float) -> str:
    """A duration as minutes:seconds or hours:minutes:seconds: 192 → 3:12."""
    minutes, second = divmod(round(seconds), MINUTE)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def duration(seconds: float) -> str:
    """A duration in words: 2.9 → "2.9 s", 750 → "12 min 30 s", 11520 → "3 h 12 min", 200000 → "2 d 7 h"."""
    if seconds < MINUTE:
        return f"{seconds:.1f} s"
    for unit, name, smaller, part in ((DAY, "d", HOUR, "h"), (HOUR, "h", MINUTE, "min"), (MINUTE, "min", 1, "s")):
        if seconds >= unit:
            whole, rest = divmod(round(seconds / smaller), unit // smaller)
            return f"{whole} {name} {rest} {part}" if rest else f"{whole} {name}"
    return ""


def epochs_text(epochs: float) -> str:
    """A number of epochs: 2.5, 60, 3,000."""
    return f"{epochs:,.0f}" if epochs >= 100 else f"{epochs:.3g}"


def size(count: float) -> str:
    """A number of bytes: 5.1 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def sparkline(values: list[float], width: int = 40) -> str:
    """A curve in one line of text: bars between the lowest and the highest value, each the mean of equally many."""
    if not values:
        return ""
    width = min(width, len(values))
    groups = [values[index * len(values) // width : (index + 1) * len(values) // width] for index in range(width)]
    means = [sum(group) / len(group) for group in groups]
    low, span = min(means), max(means) - min(means)
    return "".join(BARS[round((len(BARS) - 1) * (mean - low) / span) if span else 0] for mean in means)
