"""What may stand in a command, a script or a manifest: each kind of name as a type that refuses all else."""

from typing import Annotated

from pydantic import StringConstraints


def _like(pattern: str) -> StringConstraints:
    return StringConstraints(pattern=f"^(?:{pattern})$")


LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"

Host = Annotated[str, _like(rf"(?:[a-z_][a-z0-9_-]{{0,31}}@)?{LABEL}(?:\.{LABEL}){{0,8}}")]
"""A machine, as user@name or an IPv4 address; never an option of ssh."""
Variable = Annotated[str, _like(r"[A-Z][A-Z0-9_]{0,99}")]
"""An environment variable, by name: its value is never written down."""
RemotePath = Annotated[str, _like(r"(?:/|~/)?[A-Za-z0-9_.][A-Za-z0-9_./-]{0,254}|/")]
"""A path on another machine."""
Resource = Annotated[str, _like(r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?")]
"""A resource, network or service of the cloud (RFC 1035)."""
Project = Annotated[str, _like(r"[a-z][-a-z0-9]{4,28}[a-z0-9]")]
Zone = Annotated[str, _like(r"[a-z]{2,20}-[a-z]{2,20}[0-9]{1,2}-[a-z]")]
Bucket = Annotated[str, _like(r"[a-z0-9][a-z0-9_-]{1,61}[a-z0-9]")]
"""A bucket, without gs://."""
Email = Annotated[str, _like(r"[a-z0-9][a-z0-9._-]{0,98}@[a-z0-9][a-z0-9.-]{0,98}")]
"""A service account."""
Wheel = Annotated[str, _like(r"(?:[^\n]{0,4000}/)?[A-Za-z0-9][A-Za-z0-9_.+-]{0,200}\.whl")]
Word = Annotated[str, _like(r"[A-Za-z0-9][A-Za-z0-9_.:/@,=+-]{0,199}")]
"""A word that a scheduler takes: a partition, an account, a size, a time."""
