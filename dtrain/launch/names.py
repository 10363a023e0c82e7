"""Types of names in commands, scripts and manifests. Each accepts one kind of name and rejects everything else."""

from typing import Annotated

from pydantic import StringConstraints

from dtrain.core.errors import FieldError
from dtrain.core.types import Sentence


def _like(pattern: str) -> StringConstraints:
    return StringConstraints(pattern=f"^(?:{pattern})$")


LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"

Host = Annotated[
    str,
    _like(rf"(?:[a-z_][a-z0-9_-]{{0,31}}@)?{LABEL}(?:\.{LABEL}){{0,8}}"),
    Sentence("a host: a name or an IPv4 address, optionally with user@ before it, as ada@tpu-0; ports: ~/.ssh/config"),
]
"""A machine, as user@name or an IPv4 address. It never begins with '-', which ssh would read as an option."""
Variable = Annotated[
    str,
    _like(r"[A-Z][A-Z0-9_]{0,99}"),
    Sentence("the name of an environment variable: capital letters, digits and '_', as HF_TOKEN"),
]
"""Name of an environment variable; its value is never written to a file."""
RemotePath = Annotated[
    str,
    _like(r"(?:/|~/)?[A-Za-z0-9_.][A-Za-z0-9_./-]{0,254}|/"),
    Sentence("a path: letters, digits, '.', '_', '-' and '/', with ~/ or / before it if need be"),
]
"""A path on another machine."""
Resource = Annotated[
    str,
    _like(r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?"),
    Sentence("the name of a cloud resource: lower-case letters, digits and '-' inside, 63 characters at most"),
]
"""Name of a cloud resource, such as a network or a service (RFC 1035)."""
Bucket = Annotated[
    str,
    _like(r"[a-z0-9][a-z0-9_-]{1,61}[a-z0-9]"),
    Sentence("a bucket without gs://: 3 to 63 lower-case letters, digits, '-' and '_'"),
]
"""Name of a bucket, without gs://."""
Wheel = Annotated[
    str,
    _like(r"(?:[^\n]{0,4000}/)?[A-Za-z0-9][A-Za-z0-9_.+-]{0,200}\.whl"),
    Sentence("the path of a wheel, a file that ends in .whl"),
]
Word = Annotated[
    str,
    _like(r"[A-Za-z0-9][A-Za-z0-9_.:/@,=+-]{0,199}"),
    Sentence("one word: letters, digits and any of _.:/@,=+- inside, 200 characters at most"),
]
"""A value for a scheduler, without spaces: a partition, an account, a size, a time."""


def refuse(*rules: tuple[object, str, str, str]) -> None:
    """Raise FieldError for the first broken rule. Each rule: (whether it is broken, key, message, hint)."""
    for broken, key, message, hint in rules:
        if broken:
            raise FieldError(key, message, hint)
