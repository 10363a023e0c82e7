"""Conversations from records in the usual forms, each as a list of messages."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from dtrain.core.account import KnownNames
from dtrain.core.errors import DataError
from dtrain.data.record import Record

Message = dict[str, Any]
"""`role` (system, user, assistant, tool) and `content`: a text, a list of parts, or None beside calls; other keys are
kept for the template."""

BESIDE = {"role", "content", "name", "weight", "train", "trainable", "loss_mask"}
"""Keys of a message that are no text of its own, beside the content."""
SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
CALL = "function_call"
"""ShareGPT's role of a turn in which the assistant calls a function: its text is {"name", "arguments"}."""
ROLES = {
    "human": USER, "gpt": ASSISTANT, "bot": ASSISTANT, "ai": ASSISTANT, "model": ASSISTANT, "chatgpt": ASSISTANT,
    CALL: ASSISTANT,
    "observation": TOOL, "function_response": TOOL, "tool_response": TOOL,
}  # fmt: skip
"""Names of roles in files of other tools."""
USUAL = (SYSTEM, USER, ASSISTANT, TOOL)
"""Roles that every template may get."""
MATTERS = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Fields of messages that a reader would expect in what is learned."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning; the first two stand for any of them in templates, as in transformers."""
FORMS = (
    ("messages",), ("conversations",), ("prompt", "response"), ("prompt", "completion"), ("instruction", "output"),
    ("instruction", "response"), ("question", "answer"), ("question", "response"), ("text",),
)  # fmt: skip
"""The fields that a record may have, in the order in which they are looked for."""
HINT = "fields of a record: messages; prompt and response; instruction, input and output; or text. data.fields renames"

_METADATA = "describes the record"
_OUT = "remove it, or name it in data.ignore: [{name}] to train without it"
MEDIA = "the model reads text alone: " + _OUT
MASKS = "mark single turns by weight: 0 or train: false in their messages, or leave such records out; " + _OUT
IGNORED = dict.fromkeys(
    (
        "id", "idx", "index", "uuid", "prompt_id", "conversation_id", "hash", "source", "dataset", "origin", "subset",
        "split", "category", "task", "topic", "tags", "language", "lang", "license", "url", "title", "author", "model",
        "created", "timestamp", "date", "metadata", "meta", "__index_level_0__", "token_count", "num_tokens", "turn",
        "turns", "score", "rating", "score_chosen", "score_rejected", "chosen_score", "rejected_score",
    ),
    _METADATA,
) | {"parallel_tool_calls": "steers a service that answers"}  # fmt: skip
"""Fields of records that change nothing of what is learned."""
REFUSED = {
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), MEDIA),
    **dict.fromkeys(("loss_mask", "labels", "weight", "train", "trainable"), MASKS),
    **dict.fromkeys(
        ("chosen", "rejected"), "pairs of answers are data of kind preference, with objective: dpo; " + _OUT
    ),
    "input": "put it into the prompt; " + _OUT,
    "context": "put it into the prompt, or beside an instruction set data.fields: {{input: context}}; " + _OUT,
    "system_prompt": "rename it by data.fields: {{system: system_prompt}}; " + _OUT,
    "chat_template_kwargs": "write what it sets into the template, as a file; " + _OUT,
    **dict.fromkeys(("functions", "function"), "rename it by data.fields: {{tools: {name}}}; " + _OUT),
}
"""Fields of records that change what is learned, and that are not read."""
CONTEXT = ("tools", "documents")
"""Fields that a template takes beside the messages."""
FIELDS = tuple(dict.fromkeys([*(name for form in FORMS for name in form), "input", "history", "system", *CONTEXT]))
"""The usual names of fields."""
AS_JSON = ("messages", "conversations", "tool_calls", *CONTEXT)
"""Fields with lists, which some files have as JSON text."""
WEIGHTS = {
    **dict.fromkeys(("weight", "loss_mask"), (0, 1)),
    **dict.fromkeys(("train", "trainable", "loss"), (False, True)),
}
"""Fields of a message that say whether it is learned, each with its values for no and yes."""


@dataclass(frozen=True)
class Conversation:
    """One record: messages, or a plain text, which has no roles."""

    where: str
    messages: tuple[Message, ...] = ()
    text: str = ""
    context: Mapping[str, Any] = field(default_factory=dict)
    """`tools` and `documents` for the template."""
    excluded: frozenset[int] = frozenset()
    """The numbers of messages that are marked as not to be learned."""
    ignored: tuple[str, ...] = ()
    """Fields of the record that change nothing."""
    unknown: tuple[str, ...] = ()
    """Fields of the record that are not used, and that nobody here knows."""

    @property
    def empty(self) -> bool:
        """Whether nothing is written in it."""
        return not self.text.strip() and not any(
            str(message.get("content") or "").strip() or message.get("tool_calls") for message in self.messages
        )

    @property
    def learned(self) -> list[int]:
        """The numbers of the assistant's messages, without those marked as not to be learned."""
        return [number for number, message in enumerate(self.messages) if _learns(message, number, self.excluded)]


def _learns(message: Message, number: int, excluded: Collection[int]) -> bool:
    return message["role"] == ASSISTANT and number not in excluded


def unknown_role(where: str, role: str) -> DataError:
    """The error of a message whose role is none of the usual ones, with the nearest of these."""
    near = SYSTEM if role.lower() == "developer" else (get_close_matches(role.lower(), USUAL, 1) or [USER])[0]
    hint = f"give it one of {', '.join(USUAL)}: data.roles: {{{role}: {near}}}"
    return DataError(f"{where}: has a message of the role {role!r}, which is not known", hint)


def conversation(
    record: Record,
    fields: Mapping[str, str],
    *,
    ignore: Collection[str] = (),
    roles: Mapping[str, str] = {},
    calls: bool = True,
    answered: bool = True,
) -> Conversation:
    """The conversation in a record. `fields`: the record's name of a field, by the usual name; `ignore`: fields that
    are left out although they matter; `roles`: the usual name of a role, by the record's; `calls`: whether the template
    writes calls of functions (`tool_calls`); `answered`: whether messages need a turn of the assistant.

    DataError if a field is missing, has a wrong type or is not supported, or if messages lack that turn.
    """
    where, found = record
    values = {name: value for name, value in found.items() if name not in ignore}
    values |= {usual: found[own] for usual, own in fields.items() if own in found}
    for usual, own in fields.items():
        if usual not in FIELDS:
            near = get_close_matches(usual, FIELDS, 1)
            hint = f"did you mean {near[0]}?" if near else f"it is one of {', '.join(FIELDS)}"
            raise DataError(f"data.fields: {usual!r} is no usual name of a field", hint)
        if own not in found:
            raise DataError(f"{where}: has no field {own!r} (data.fields); it has {', '.join(map(repr, found))}", HINT)
    form = next((form for form in FORMS if all(values.get(name) is not None for name in form)), None)
    if form is None:
        raise DataError(f"{where}: has none of the known fields; it has {', '.join(map(repr, found)) or 'none'}", HINT)
    known = {*form, *fields.values(), *([] if form == ("text",) else ["system", *CONTEXT])}
    known |= {"input", "history"} if form[0] == "instruction" else set()
    ignored, unknown = _sorted_fields(where, found, known, ignore)
    if form == ("text",):
        return Conversation(where, text=_string(where, "text", values["text"]), ignored=ignored, unknown=unknown)
    own, asked = _turns(where, form, values, roles, calls)
    messages = with_system(where, own, values.get("system"))
    asked += len(messages) - len(own) if asked else 0
    marked = {number for number, message in enumerate(messages) if _excluded(where, message, number)}
    prompt = {number for number in range(asked) if messages[number]["role"] == ASSISTANT}
    excluded = frozenset(marked | prompt)
    context = context_of(where, values)
    read = Conversation(where, tuple(messages), "", context, excluded, ignored, unknown)
    if answered and not read.empty and not any(message["role"] == ASSISTANT for message in messages):
        roles_here = ", ".join(dict.fromkeys(str(message["role"]) for message in messages))
        hint = f"its roles are {roles_here}; rename one, data.roles: {{ROLE: {ASSISTANT}}}, or remove this record"
        raise DataError(f"{where}: has no turn of the assistant, so there is nothing to learn", hint)
    return read


def _sorted_fields(
    where: str, found: Mapping[str, Any], used: Collection[str], ignore: Collection[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The fields of a record that are ignored, and those that are unknown. DataError for one that is not supported."""
    refused = REFUSED
    if found.get("label") in (False, 0, "false", "False"):  # KTO's form: an answer that is not wanted
        learns = "data of kind feedback, with objective: kto, learns from them"
        refused = REFUSED | {"label": f"an answer labelled false would be learned: {learns}; {_OUT}"}
    ignored, unknown = KnownNames(used, IGNORED, refused).sort(where, found, ignore)
    return tuple(ignored), tuple(unknown)


def context_of(where: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """`tools` and `documents` of a record, which may be JSON text."""
    context = {}
    for name in CONTEXT:
        value = _listed(where, name, values.get(name))
        if value in (None, "", [], {}):
            continue
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise DataError(f"{where}: {name} is not a list of objects", "write a list of objects, or leave it out")
        context[name] = value
    return context


def with_system(where: str, messages: list[Message], system: Any) -> list[Message]:
    """The messages after the system prompt that stands beside them in a record."""
    if system in (None, ""):
        return messages
    text = _string(where, "system", system)
    if messages and messages[0]["role"] == SYSTEM:
        if messages[0]["content"] != text:
            raise DataError(
                f"{where}: has two system prompts, in `system` and in its messages", "leave one of them out"
            )
        return messages
    return [{"role": SYSTEM, "content": text}, *messages]


def _turns(
    where: str, form: tuple[str, ...], values: Mapping[str, Any], roles: Mapping[str, str], calls: bool
) -> tuple[list[Message], int]:
    """The messages of a record, and how many of them are a prompt given as messages, of which no turn is learned."""
    given = {name: _listed(where, name, values[name]) for name in form}
    if len(form) > 1 and not all(isinstance(part, list) for part in given.values()):
        return _pair(where, form, given | {name: values.get(name) for name in ("input", "history")}), 0
    *before, last = (_messages(where, name, part, roles, calls) for name, part in given.items())
    prompt = [message for part in before for message in part]
    return [*prompt, *last], len(prompt)


def _listed(where: str, name: str, value: Any) -> Any:
    """A value of which the files of some tools have the JSON text."""
    if name not in AS_JSON:
        return messages_as_json(value)
    if isinstance(value, bytes) or (isinstance(value, str) and value.strip()):
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: {name} is text, but no JSON: {error}", "write a list of objects") from error
    return value


def messages_as_json(value: Any) -> Any:
    """The messages of which a text is the JSON; any other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("[{"):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return found if all(isinstance(one, dict) and {"role", "from"} & one.keys() for one in found) else value


def _pair(where: str, form: tuple[str, ...], values: Mapping[str, Any]) -> list[Message]:
    """The messages of a prompt and its answer, after those of alpaca's `history`: a list of such pairs."""
    asked, answered = (_string(where, name, values[name]) for name in form)
    extra = _string(where, "input", values.get("input") or "") if form[0] == "instruction" else ""
    before = values.get("history") or [] if form[0] == "instruction" else []
    if not isinstance(before, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in before):
        raise DataError(f"{where}: history is not a list of pairs of texts", "write [[question, answer], ...]")
    pairs = [*before, [f"{asked}\n\n{extra}" if extra.strip() else asked, answered]]
    return [
        {"role": role, "content": _string(where, "history", text)}
        for pair in pairs
        for role, text in zip((USER, ASSISTANT), pair, strict=True)
    ]


def _messages(where: str, name: str, listed: Any, roles: Mapping[str, str], calls: bool) -> list[Message]:
    if not isinstance(listed, list):
        raise DataError(f"{where}: {name} is {type(listed).__name__}, not a list of messages", HINT)
    messages = []
    for number, message in enumerate(listed, 1):
        if not isinstance(message, dict):
            raise DataError(f"{where}: message {number} is {type(message).__name__}, not an object", HINT)
        for names in (("role", "from"), ("content", "value")):
            one, other = (usual_role(value) if isinstance(value, str) else value for value in map(message.get, names))
            if None not in (one, other) and one != other:
                hint = "leave one of them out"
                raise DataError(f"{where}: message {number} has {' and '.join(names)}, which differ", hint)
        message = _with_calls(f"{where}: message {number}", message) if calls else message
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if not isinstance(role, str):
            raise DataError(f"{where}: message {number} has no role", "give each message role and content")
        if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
            raise DataError(f"{where}: message {number} ({role}) has no content", "give each message role and content")
        _refuse_media(f"{where}: message {number}", content)
        rest = {key: value for key, value in message.items() if key not in ("from", "value") and value is not None}
        own = {"role": roles.get(role, usual_role(role)), "content": content}
        if role == CALL and calls:
            own |= {"content": "", "tool_calls": _calls(f"{where}: message {number}", content)}
        messages.append(rest | own)
    return messages


def usual_role(role: str) -> str:
    """The usual name of a role, whose case does not matter; a role that is not known as it is."""
    small = role.lower()
    return ROLES.get(small, small if small in (SYSTEM, USER, ASSISTANT, TOOL) else role)


def _with_calls(where: str, message: Message) -> Message:
    """The message with its calls of functions as the list `tool_calls`: older files have one, as `function_call`."""
    older = message.get("function_call")
    if message.get("tool_calls") is None and isinstance(older, dict) and isinstance(older.get("name"), str):
        rest = {name: value for name, value in message.items() if name != "function_call"}
        return rest | {"tool_calls": [{"type": "function", "function": older}]}
    if not isinstance(message.get("tool_calls"), str | bytes):
        return message
    found = _listed(where, "tool_calls", message["tool_calls"])
    return message | {"tool_calls": found or None}


def _calls(where: str, content: Any) -> list[dict[str, Any]]:
    """`tool_calls` from ShareGPT's text of one call, or of a list of calls."""
    try:
        found = json.loads(content)
        found = found if isinstance(found, list) else [found]
        return [{"type": "function", "function": {"name": one["name"], "arguments": one["arguments"]}} for one in found]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        hint = 'write {"name": ..., "arguments": {...}}, or a list of such objects'
        raise DataError(f"{where}: {CALL} is no call of a function", hint) from error


def _refuse_media(where: str, content: Any) -> None:
    """DataError for a part of a message that is no text."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind == "text" and not isinstance(part.get("text"), str):
            raise DataError(
                f"{where}: has a part of type 'text' without its text", 'write {"type": "text", "text": ...}'
            )
        if kind != "text":
            raise DataError(f"{where}: has a part of type {kind!r}", "the model reads text alone: remove this record")


def _excluded(where: str, message: Message, number: int) -> bool:
    """Whether a message is marked as not to be learned. DataError for a mark that is neither yes nor no."""
    given = {name: message[name] for name in WEIGHTS if name in message}
    for name, value in given.items():
        no, yes = WEIGHTS[name]
        if value not in (no, yes):
            hint = f"use {json.dumps(no)} for a turn that is not learned, {json.dumps(yes)} for one that is"
            raise DataError(f"{where}: message {number + 1}: {name} is {value!r}", hint)
        if value and message["role"] != ASSISTANT:
            hint = "leave the mark out; data.learn: all has all tokens in the loss"
            raise DataError(f"{where}: message {number + 1} ({message['role']}): {name} asks to learn it", hint)
    return not all(given.values())


def _string(where: str, name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {name} is {type(value).__name__}, not text", HINT)
    return value
