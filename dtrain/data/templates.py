"""Chat templates: messages to text, and which parts of the text the assistant wrote.

A template is Jinja, as Hugging Face's tokenizers carry it. It is untrusted: it is rendered in a sandbox, which reads no
file, imports nothing and changes no object. It knows no date (`strftime_now`): the same messages give the same text.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dtrain.core.errors import DataError
from dtrain.data.conversations import ASSISTANT, Message
from dtrain.data.paths import reason

NAMED = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "llama3": "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    "alpaca": "{% for m in messages %}{% if m.role == 'user' %}{{ '### Instruction:\n' + m.content + '\n\n' }}"
    "{% elif m.role == 'assistant' %}{{ '### Response:\n' + m.content + eos_token + '\n\n' }}"
    "{% else %}{{ m.content + '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}",
    "plain": "{% for m in messages %}{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}",
}
"""Templates that a recipe can name. `plain` joins the messages, and ends each of the assistant's with the end token."""

BEGIN, END = "\ue0f0", "\ue0f1"
"""Private characters that stand in the rendered text where `{% generation %}` begins and ends."""
HINT = "set data.template to another template: chatml, llama3, alpaca, plain, or a file"


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and (start, stop) of each part that the assistant wrote, its end token included."""

    text: str
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Template:
    """A chat template with the special tokens that it may use: bos_token, eos_token."""

    source: str
    special: Mapping[str, str] = field(default_factory=dict)

    def rendered(self, messages: Sequence[Message], where: str) -> Rendered:
        """The conversation as text. DataError, with `where`, if the template fails on it or hides what to learn."""
        text = self._text(messages, prompt=False, where=where)
        if BEGIN in text:
            return _without_marks(text)
        turns = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        return Rendered(text, tuple(self._span(text, messages, number, where) for number in turns))

    def prompt(self, messages: Sequence[Message], where: str) -> str:
        """The text after which the assistant answers."""
        return self._text(messages, prompt=True, where=where).replace(BEGIN, "").replace(END, "")

    def ending(self) -> str:
        """What follows each answer of the assistant: the text of its end token. Empty if there is none."""
        answer = "answer"
        asked = [{"role": "user", "content": "question"}, {"role": ASSISTANT, "content": answer}]
        text = self._text(asked, prompt=False, where="an example").replace(BEGIN, "").replace(END, "")
        return text[text.rindex(answer) + len(answer) :].strip() if answer in text else ""

    def _span(self, text: str, messages: Sequence[Message], number: int, where: str) -> tuple[int, int]:
        """Where the assistant's turn is: after the prompt for it, up to what the template writes behind its content."""
        before = self._text(messages[:number], prompt=True, where=where)
        last = number + 1 == len(messages)
        through = text if last else self._text(messages[: number + 1], prompt=False, where=where)
        content = str(messages[number]["content"]).strip()
        if text.startswith(before) and text.startswith(through):
            return len(before), len(before) + len(through[len(before) :].rstrip())
        # some templates write earlier turns without their reasoning: the turn ends as it would if it were the last one
        found = text.find(content, len(before)) if text.startswith(before) else -1
        at = through.rfind(content)
        ending = through[at + len(content) :].rstrip()
        stop = found + len(content) + len(ending)
        if found < 0 or at < 0 or text[found + len(content) : stop] != ending:
            message = f"{where}: the chat template changes earlier turns, so that the assistant's cannot be located"
            raise DataError(message, "mark them in the template: {% generation %} ... {% endgeneration %}")
        return len(before), stop

    def _text(self, messages: Sequence[Message], *, prompt: bool, where: str) -> str:
        if any(mark in str(message.get("content")) for message in messages for mark in (BEGIN, END)):
            raise DataError(f"{where}: has the private characters U+E0F0 or U+E0F1, which mark turns", "remove them")
        values = {"messages": list(messages), "add_generation_prompt": prompt, **self.special}
        try:
            return self._template.render(values)
        except MemoryError as error:
            raise DataError(f"{where}: the chat template needs more memory than there is", HINT) from error
        except Exception as error:  # a template runs code of its own, which can fail in any way
            raise DataError(f"{where}: the chat template fails: {reason(error)}", HINT) from error

    @cached_property
    def _template(self) -> Any:
        try:
            return _environment().from_string(self.source)
        except Exception as error:  # jinja2 compiles to Python, whose compiler raises errors of its own
            raise DataError(f"the chat template is not valid: {reason(error)}", HINT) from error

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_template"}


def _without_marks(text: str) -> Rendered:
    spans, plain, begin = [], "", None
    for part in re.split(f"([{BEGIN}{END}])", text):
        if part == BEGIN:
            begin = len(plain)
        elif part == END and begin is not None:
            spans.append((begin, len(plain)))
            begin = None
        elif part != END:
            plain += part
    return Rendered(plain, tuple(spans))


def _environment() -> Any:
    import json

    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %} ... {% endgeneration %}` around what the assistant wrote, as in transformers."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_marked", [])
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _marked(self, caller: Callable[[], str]) -> str:
            return f"{BEGIN}{caller()}{END}"

    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)

    def shown(value: Any) -> Any:
        if not isinstance(value, str) and " at 0x" in str(value):
            raise jinja2.TemplateError("it prints the address of an object, which differs in every process")
        return value

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols], finalize=shown
    )
    del environment.filters["random"], environment.globals["lipsum"]  # the same messages give the same text
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = fail
    return environment
