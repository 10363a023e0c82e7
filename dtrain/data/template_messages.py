"""Conversations as text by a chat template, with an account of what the template does not write."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtrain.core.account import Account
from dtrain.core.errors import DataError
from dtrain.data.conversations import MATTERS, REASONING, SYSTEM, USUAL, WEIGHTS, Message, unknown_role
from dtrain.data.packed_rows import MESSAGE, ROLE
from dtrain.data.templates import Rendered, Template


@dataclass(frozen=True)
class MessageWriter:
    """Writes messages with a template. Each method raises DataError, with `where`, for a role that is not known, for
    what matters and is not written, and if the template fails."""

    template: Template
    ignore: Collection[str] = ()
    """Fields to leave out although they usually matter."""
    account: Account = field(default_factory=Account)
    """Counts of roles, and of what the template does not use."""

    def rendered(
        self, messages: Iterable[Message], where: str, context: Mapping[str, Any], learned: Sequence[int]
    ) -> Rendered:
        """A conversation as text with the spans of the messages `learned`."""
        return self.template.rendered(self._known(messages, where, context), where, context, learned)

    def prompt(self, messages: Iterable[Message], where: str, context: Mapping[str, Any] = {}) -> str:
        """The text after which the assistant answers. `context`: `tools` and `documents`."""
        return self.template.prompt(self._known(messages, where, context), where, context)

    def _known(self, messages: Iterable[Message], where: str, context: Mapping[str, Any]) -> list[Message]:
        for name in context:
            if not self.template.writes(name):
                message = f"{where}: has {name}, which the chat template does not write"
                raise DataError(message, f"use a template that does, or train without: data.ignore: [{name}]")
        return [self._message(message, where) for message in messages]

    def _message(self, message: Message, where: str) -> Message:
        """A message without the fields to ignore. What the template does not use is counted, or refused if it
        matters."""
        role: str = message["role"]
        if role == SYSTEM and not self.template.writes_system:
            self.account.add(MESSAGE, ["content of system messages"])
        if role not in USUAL and not self.template.writes(role):
            raise unknown_role(where, role)
        rest = {key: value for key, value in message.items() if key not in self.ignore or key in ("role", "content")}
        if thought := next((rest[name] for name in REASONING if rest.get(name) is not None), None):
            rest |= {name: thought for name in REASONING[:2] if self.template.writes(name) and rest.get(name) is None}
        if rest["content"] is None and not self.template.takes_null:
            rest["content"] = ""
        elif isinstance(rest["content"], list) and not self.template.takes_parts:
            rest["content"] = "".join(str(part["text"]) for part in rest["content"])
        others = [str(key) for key in rest if key not in ("role", "content", *WEIGHTS)]
        written = [key for key in others if self.template.writes(key)]
        unused = [key for key in others if key not in written and not (key in REASONING and {*written} & {*REASONING})]
        for key in unused:
            if key in MATTERS and message[key]:
                hint = f"use a template that does, or train without: data.ignore: [{key}]"
                raise DataError(f"{where}: a message has {key}, which the chat template does not write", hint)
        self.account.add(MESSAGE, unused)
        self.account.add(ROLE, [role])
        return rest
