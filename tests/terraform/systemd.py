"""A fake `systemctl` and `systemd-run` for transient units: each loaded unit is a file with its state.

    python systemd.py FOLDER systemctl is-active -q dtrain-delete-node.timer

As the real ones: a unit between two starts is `activating`, which is not active; a name is free only when neither its
timer nor its service is loaded; a failed unit stays loaded until `reset-failed`.
"""

import fnmatch
import sys
from pathlib import Path


def run(folder: Path, words: list[str]) -> int:
    """`systemd-run --unit=NAME --on-active=...` starts a timer."""
    name = next(word.partition("=")[2] for word in words if word.startswith("--unit="))
    if any((folder / f"{name}.{kind}").exists() for kind in ("timer", "service")):
        print(f"Failed to start transient timer unit: Unit {name} was already loaded.", file=sys.stderr)
        return 1
    (folder / f"{name}.timer").write_text("active")
    return 0


def control(folder: Path, words: list[str]) -> int:
    """The verbs that say or change what is loaded; any other is refused."""
    verb, *names = [
        word for before, word in zip(["", *words], words) if not word.startswith("-") and before not in ("-p", "-P")
    ]
    names = [name if "." in name or "*" in name else f"{name}.service" for name in names]
    loaded = [path for path in sorted(folder.iterdir()) if any(fnmatch.fnmatch(path.name, name) for name in names)]
    states = [path.read_text() for path in loaded]
    missing = [name for name in names if "*" not in name and not (folder / name).exists()]
    if verb in ("stop", "reset-failed"):
        for path, state in zip(loaded, states):
            if (state == "failed") == (verb == "reset-failed"):
                path.unlink()
        return {"stop": 5, "reset-failed": 1}[verb] if missing else 0
    if verb in ("show", "is-active", "is-failed") and not {"-q", "--quiet"} & set(words):
        value = "" if "--value" in words or verb != "show" else "ActiveState="
        print(*[value + state for state in states or ["inactive"]], sep="\n")
    good = {
        "show": True,
        "cat": not missing,
        "status": {"active", "activating"} & set(states),
        "is-active": "active" in states,
        "is-failed": "failed" in states,
    }
    return 0 if good[verb] else 3


if __name__ == "__main__":
    place, command, *rest = sys.argv[1:]
    Path(place).mkdir(exist_ok=True)
    sys.exit({"systemctl": control, "systemd-run": run}[command](Path(place), rest))
