"""Find secrets written into a recipe, which would be copied to run.json, recipe.yaml and trackers."""

import re

from dtrain.recipe.yaml import Node, walk

NAMES = re.compile(
    r"(api|access|private|secret)[_-]?key$ | (^|[_-])(tokens?|secrets?|password|passwd|credentials?)$",
    re.IGNORECASE | re.VERBOSE,
)
LEAST = 8
"""Shortest value that counts as a secret because of its key's name alone; an `end_token` is shorter."""
SHAPES = re.compile(
    r"""hf_[A-Za-z0-9]{30,} | gh[pousr]_[A-Za-z0-9]{30,} | github_pat_\w{30,} | glpat-[\w-]{20,}
    | sk-[\w-]{20,} | wandb_v\d_\w{20,} | AKIA[A-Z0-9]{16} | AIza[\w-]{35} | ya29\.[\w-]{20,} | xox[abp]-[\w-]{10,}
    | hooks\.slack\.com/\w+/\w | discord(app)?\.com/api/webhooks/\d | webhook\.office\.com/\w
    | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY | ://[^/\s:@]+:[^/\s@]+@ | ://[^/\s:@]{16,}@""",
    re.VERBOSE,
)
"""Tokens with a known format, webhooks, private keys, and passwords in URLs."""
HINT = "set it in the environment, e.g. as WANDB_API_KEY or HF_TOKEN, and remove it here; it was not printed or stored"


def secrets(tree: Node) -> list[str]:
    """Dotted paths of the values that look like secrets."""
    return [path for path, node in walk(tree) if isinstance(node.value, str) and _secret(path, node.value)]


def _secret(path: str, text: str) -> bool:
    webhook = path.endswith("webhook") and "://" in text
    return webhook or bool((len(text) >= LEAST and _named(path)) or SHAPES.search(text))


def _named(path: str) -> bool:
    return bool(NAMES.search(path.rpartition(".")[2]))
