"""A fake `sky`, `gcloud` and `aws`: records its arguments and replays answers; one folder holds all buckets.

In its folder are `answers.json`, {verb: [answer, ...]} of which the last is repeated, and `calls`, one JSON object per
line. An answer is a text for standard output, a list for JSON, or {"code", "stderr"} for a failure.
"""

import json
import os
import sys
from pathlib import Path

HERE = Path(sys.argv[0]).parent
USER = "ada"
STATES = ("SKYPILOT_API_SERVER_ENDPOINT", "SKYPILOT_DISABLE_USAGE_COLLECTION")


def main() -> None:
    program, words = Path(sys.argv[0]).name, sys.argv[1:]
    call = {"words": [program, *words], "environment": {name: os.environ.get(name) for name in STATES}}
    with (HERE / "calls").open("a") as file:
        print(json.dumps(call), file=file)
    if program != "sky":
        _bucket(words)
        return
    verb = next((word for word in words if word in ("queue", "launch", "logs", "cancel")), "version")
    if verb == "launch":  # like the real program, refuse a name without a value
        missing = [
            words[i + 1] for i, word in enumerate(words) if word == "--secret" and words[i + 1] not in os.environ
        ]
        if missing:
            _fail(2, f"{missing[0]} is not set in local environment.")
        (HERE / "submitted.yaml").write_text(Path(words[-1]).read_text())
    answers = json.loads((HERE / "answers.json").read_text())
    left = answers.get(verb, [""])
    answer = left.pop(0) if len(left) > 1 else left[0]
    (HERE / "answers.json").write_text(json.dumps(answers))
    if (
        verb == "queue" and "-u" not in words and isinstance(answer, list)
    ):  # only the own user's rows, without user names
        own = [row for row in answer if row["user_name"] == USER]
        answer = [{key: value for key, value in row.items() if key != "user_name"} for row in own]
    if isinstance(answer, dict):
        _fail(answer["code"], answer["stderr"])
    sys.stdout.write(json.dumps(answer, indent=2) if isinstance(answer, list) else answer)


def _bucket(words: list[str]) -> None:
    path = HERE / "buckets" / words[-1].partition("://")[2]
    if "cp" in words:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(sys.stdin.read())
    elif path.exists():
        path.unlink()
    elif words[0] == "storage":
        _fail(1, "ERROR: (gcloud.storage.rm) The following URLs matched no objects or files:\n" + words[-1])


def _fail(code: int, text: str) -> None:
    print(text, file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
