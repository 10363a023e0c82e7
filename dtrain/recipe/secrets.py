"""Secrets that stand in a recipe, where run.json, recipe.yaml and a tracker would keep them."""

import re

from dtrain.recipe.yaml import Node, walk

NAMES = re.compile(
    r"(api|access|private|secret)[_-]?key$ | (^|[_-])(tokens?|secrets?|password|passwd|credentials?)$",
    re.IGNORECASE | re.VERBOSE,
)
LEAST = 8
"""Characters of what may be a secret by its key's name alone: an end_token is none."""
SHAPES = re.compile(
    r"""hf_[A-Za-z0-9]{30,} | gh[pousr]_[A-Za-z0-9]{30,} | github_pat_\w{30,} | glpat-[\w-]{20,}
    | sk-[\w-]{20,} | wandb_v\d_\w{20,} | AKIA[A-Z0-9]{16} | AIza[\w-]{35} | ya29\.[\w-]{20,} | xox[abp]-[\w-]{10,}
    | hooks\.slack\.com/\w+/\w | discord(app)?\.com/api/webhooks/\d | webhook\.office\.com/\w
    | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY | ://[^/\s:@]+:[^/\s@]+@ | ://[^/\s:@]{16,}@""",
    re.VERBOSE,
)
"""Of tokens whose makers gave them a shape, webhooks, private keys, and passwords in addresses."""
HINT = "keep it in the environment, as WANDB_API_KEY or HF_TOKEN, and remove it here; it was not shown or written"


def secrets(tree: Node) -> list[str]:
    """The dotted paths at which something secret is written out."""
    return [path for path, node in walk(tree) if isinstance(node.value, str) and _secret(path, node.value)]


def _secret(path: str, text: str) -> bool:
    webhook = path.endswith("webhook") and "://" in text
    return webhook or bool((len(text) >= LEAST and _named(path)) or SHAPES.search(text))


def _named(path: str) -> bool:
    return bool(NAMES.search(path.rpartition(".")[2]))
