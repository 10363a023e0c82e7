"""Run by a Python with transformers: what apply_chat_template makes of conversations, as JSON.

Input: {"folders": [FOLDER], "records": [[MESSAGES, TOOLS or null]]}. Output, for each folder and record, null if the
template refuses the conversation, else the ids of the whole text, and for each turn of the assistant the characters
(start, stop) that it wrote, with the offsets of each token.
"""

import json
import sys
from typing import Any


def common(one: str, other: str) -> int:
    """How many characters two texts have in common at their begin."""
    differing = (number for number, (a, b) in enumerate(zip(one, other)) if a != b)
    return next(differing, min(len(one), len(other)))


def turns(tokenizer: Any, messages: list[dict[str, Any]], tools: Any) -> dict[str, Any] | None:
    def text(of: list[dict[str, Any]], prompt: bool) -> str:
        return tokenizer.apply_chat_template(of, tools=tools, tokenize=False, add_generation_prompt=prompt)

    try:
        whole = text(messages, False)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                start = common(whole, text(messages[:number], True)) if number else 0
                through = text(messages[: number + 1], False)
                spans.append([start, len(through.rstrip()) if whole.startswith(through) else -1])
    except Exception as error:
        return {"refused": str(error)}
    coded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    return {"ids": coded["input_ids"], "spans": spans, "offsets": coded["offset_mapping"], "text": whole}


def main() -> None:
    from transformers import AutoTokenizer

    job = json.load(sys.stdin)
    found = {}
    for folder in job["folders"]:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        found[folder] = [turns(tokenizer, messages, tools) for messages, tools in job["records"]]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
