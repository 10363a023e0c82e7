"""What the shell completes after TAB: recipes, keys and their values, runs, targets of plans."""

import sys
from pathlib import Path

import typer

from dtrain.core.shipped import shipped

TARGETS = (
    *("v5e-1", "v5e-4", "v5e-8", "v5e-16", "v5e-32", "v5e-64", "v5e-128", "v5e-256"),
    *("v6e-1", "v6e-4", "v6e-8", "v6e-16", "v6e-32", "v6e-64", "v6e-128", "v6e-256"),
    *("v5p-8", "v5p-16", "v5p-32", "v5p-64", "v5p-128", "v5p-256", "h100-1", "h100-8", "h200-8", "cpu-8"),
)
FILES = {
    "bash": "~/.bashrc and ~/.bash_completions/dtrain.sh",
    "zsh": "~/.zshrc and ~/.zfunc/_dtrain",
    "fish": "~/.config/fish/completions/dtrain.fish",
    "powershell": "your PowerShell profile",
    "pwsh": "your PowerShell profile",
}
"""The files that Typer changes to install completion."""


def recipes(incomplete: str) -> list[str]:
    """Recipes that come with dtrain, and files."""
    folder = Path(incomplete).parent if "/" in incomplete else Path()
    files = [str(path) for path in folder.glob("*") if path.suffix in (".yaml", ".yml")] if folder.is_dir() else []
    return [name for name in (*shipped(), *sorted(files)) if name.startswith(incomplete)]


def overrides(args: list[str], incomplete: str) -> list[str]:
    """Keys of recipes with `=`, and after it their values. `args`: the words before."""
    from dtrain.recipe.keys import cached_keys

    if incomplete == "=" or args[-1:] == ["="]:  # bash takes `key=value` apart, and completes the value alone
        key, start = (args[-1], "") if incomplete == "=" else (args[-2] if len(args) > 1 else "", incomplete)
        return list(
            dict.fromkeys(v for one in cached_keys() if one.path == key for v in one.values if v.startswith(start))
        )
    key, separator, start = incomplete.partition("=")
    if not separator:
        paths = dict.fromkeys(one.path for one in cached_keys() if one.typed)
        depth = incomplete.count(".")
        return [f"{path}=" for path in paths if path.startswith(incomplete) and path.count(".") <= depth + 1]
    return [f"{key}={value}" for value in _values(key) if value.startswith(start)]


def _values(key: str) -> list[str]:
    from dtrain.recipe.keys import cached_keys

    return list(dict.fromkeys(value for one in cached_keys() if one.path == key for value in one.values))


def topics(context: typer.Context, incomplete: str) -> list[str]:
    """What `dtrain help` explains: verbs, keys, kinds, metrics and codes of errors."""
    from dtrain.cli.help_topics import metrics, pages
    from dtrain.recipe.keys import cached_keys

    keys = cached_keys()
    names = [
        *getattr(context.find_root().command, "commands", ()),
        *(key.path for key in keys),
        *(key.kind for key in keys if key.path.endswith("kind")),
        *metrics(),
        *pages(),
    ]
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]


def runs(context: typer.Context, incomplete: str) -> list[str]:
    """Names of the runs in --runs-dir, by default ./runs."""
    from dtrain.core.run_list import runs_in

    folder = Path(context.params.get("runs_dir") or "runs")
    return [run_dir.path.name for run_dir in runs_in(folder) if run_dir.path.name.startswith(incomplete)]


def runs_and_recipes(context: typer.Context, incomplete: str) -> list[str]:
    """Names of runs, and recipes."""
    return list(dict.fromkeys([*runs(context, incomplete), *recipes(incomplete)]))


def shipped_recipes(incomplete: str) -> list[str]:
    """Recipes that come with dtrain."""
    return [name for name in shipped() if name.startswith(incomplete)]


def targets(incomplete: str) -> list[str]:
    """Slices for plans: the smaller ones of each generation of TPU."""
    return [name for name in TARGETS if name.startswith(incomplete)]


def script(shell: str) -> str:
    """The script that completes `dtrain` in a shell. KeyError if there is none for it."""
    from typer._completion_shared import get_completion_script

    if shell not in FILES:
        raise KeyError(shell)
    return get_completion_script(prog_name="dtrain", complete_var="_DTRAIN_COMPLETE", shell=shell)


def ask_before_install(arguments: list[str]) -> str:
    """Why completion is not installed with these arguments; empty if the user agrees to the change of files."""
    import shellingham

    if arguments != ["--install-completion"]:
        return "--install-completion stands alone: it is for the shell from which it is called"
    try:
        shell, _ = shellingham.detect_shell()
    except shellingham.ShellDetectionFailure:
        return "the shell is not known; `dtrain --show-completion` prints the script for one"
    if shell not in FILES:
        return f"there is no completion for {shell}; there is for {', '.join(FILES)}"
    if not sys.stdin.isatty():
        return "stdin is not a terminal, so you cannot be asked; `dtrain --show-completion` prints the script"
    return "" if typer.confirm(f"This changes {FILES[shell]}. Continue?", err=True) else "nothing was changed"
