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
MARK = "\ue0f2"
"""Another one, in the place of a message, to find it in the rendered text."""
CLOSING = (">", "]", "}")
"""Characters with which markers of templates end."""
HINT = "set data.template to another template: chatml, llama3, alpaca, plain, or a file"


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and (start, stop) of each part that the assistant wrote, its end token included."""

    text: str
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Template:
    """A chat template with the special tokens that it may use: bos_token, eos_token and others."""

    source: str
    special: Mapping[str, Any] = field(default_factory=dict)
    tools_source: str = ""
    """The template for conversations with tools, where a tokenizer has one of its own for them."""

    def writes(self, name: str) -> bool:
        """Whether the template speaks of such a variable, field or role."""
        return name in self._words

    @cached_property
    def _words(self) -> frozenset[str]:
        return frozenset(re.findall(r"\w+", f"{self.source}\n{self.tools_source}"))

    @cached_property
    def writes_answers(self) -> bool:
        """Whether it writes the content of an answer; also if it refuses such a short conversation."""
        return self._writes({"role": "user", "content": "question"}, {"role": ASSISTANT, "content": MARK})

    @cached_property
    def writes_system(self) -> bool:
        """Whether it writes a system prompt, or refuses it."""
        return self._writes({"role": "system", "content": MARK}, {"role": "user", "content": "question"})

    def _writes(self, *messages: Message) -> bool:
        """Whether the mark in one of these messages is written, or the template refuses them."""
        try:
            return MARK in self._text(messages, prompt=False, where="an example")
        except DataError:
            return True

    @cached_property
    def takes_null(self) -> bool:
        """Whether it asks if a message has a content, and does not write it as the text None."""
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {}}}
        asked: Message = {"role": "user", "content": "a"}
        called: Message = {"role": ASSISTANT, "content": None, "tool_calls": [call]}
        return self._adds_no("None", [asked, called], [asked, called | {"content": ""}]) or False

    @cached_property
    def takes_parts(self) -> bool:
        """Whether it writes the text of a content that is a list of parts, and not the list."""
        message: Message = {"role": "user", "content": [{"type": "text", "text": "a"}]}
        found = self._adds_no("type", [message], [message | {"content": "a"}])
        return self.writes("text") if found is None else found

    def _adds_no(self, word: str, one: Sequence[Message], other: Sequence[Message]) -> bool | None:
        """Whether the first conversation has the word no more often than the other; None if the template fails."""
        texts = [self._part(messages, prompt=False, where="an example", context={}) for messages in (one, other)]
        return None if texts[0] is None else texts[0].count(word) <= (texts[1] or "").count(word)

    def rendered(
        self,
        messages: Sequence[Message],
        where: str,
        context: Mapping[str, Any] = {},
        learned: Sequence[int] | None = None,
    ) -> Rendered:
        """The conversation as text, with the spans of the messages `learned`: by default, all of the assistant.

        `context`: `tools` and `documents`. DataError, with `where`, if the template fails or hides what to learn.
        """
        turns = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        learned = turns if learned is None else learned
        text = self._text(messages, prompt=False, where=where, context=context)
        if BEGIN in text:
            marked = _without_marks(text)
            if list(learned) == turns:
                return marked
            if len(marked.spans) != len(turns):
                message = (
                    f"{where}: the template marks {len(marked.spans)} parts for {len(turns)} turns of the assistant"
                )
                raise DataError(f"{message}, of which some are not learned", "use a template that marks each turn once")
            return Rendered(
                marked.text, tuple(s for turn, s in zip(turns, marked.spans, strict=True) if turn in learned)
            )
        return Rendered(text, tuple(self._span(text, messages, number, where, context) for number in learned))

    def prompt(self, messages: Sequence[Message], where: str, context: Mapping[str, Any] = {}) -> str:
        """The text after which the assistant answers."""
        return self._text(messages, prompt=True, where=where, context=context).replace(BEGIN, "").replace(END, "")

    def ending(self) -> str:
        """What is learned after each answer of the assistant: the text of its end token. Empty if there is none, or if
        it stands behind `{% endgeneration %}`."""
        return self._marked_after_answer.partition(END)[0].strip()

    @cached_property
    def _after_answer(self) -> str:
        """What the template writes behind the content of an answer that is the last message."""
        return self._marked_after_answer.replace(BEGIN, "").replace(END, "")

    @cached_property
    def _marked_after_answer(self) -> str:
        """The same with BEGIN and END where `{% generation %}` begins and ends."""
        answer = "answer"
        asked = [{"role": "user", "content": "question"}, {"role": ASSISTANT, "content": answer}]
        text = self._text(asked, prompt=False, where="an example")
        return text[text.rindex(answer) + len(answer) :] if answer in text else ""

    def _span(
        self, text: str, messages: Sequence[Message], number: int, where: str, context: Mapping[str, Any]
    ) -> tuple[int, int]:
        """Where the assistant's turn is: after what the text has in common with the prompt for the turn, up to what the
        template writes behind its content.

        A prompt may end with more than the turn begins with (`<think>`): the common part ends before that.
        """
        start = self._start(text, messages[:number], where, context)
        if start is None:
            start = self._start_by_mark(text, messages, number, where, context)
        last = number + 1 == len(messages)
        through = text if last else self._part(messages[: number + 1], prompt=False, where=where, context=context)
        if start is not None and through is not None and text.startswith(through):
            return start, max(start, len(through.rstrip()))
        # some templates write earlier turns without their reasoning, or something after the last one
        end = self._end_of_turn(text, messages, number, where, context)
        if start is None or end is None:
            message = f"{where}: the chat template changes earlier turns, so that the assistant's cannot be located"
            raise DataError(message, "mark them in the template: {% generation %} ... {% endgeneration %}")
        return start, max(start, end + self._ending_at(text, end))

    def _part(self, messages: Sequence[Message], *, prompt: bool, where: str, context: Mapping[str, Any]) -> str | None:
        """The first messages of a conversation as text; None if the template refuses them without the others."""
        try:
            return self._text(messages, prompt=prompt, where=where, context=context)
        except DataError:
            return None

    def _start_by_mark(
        self, text: str, messages: Sequence[Message], number: int, where: str, context: Mapping[str, Any]
    ) -> int | None:
        """Where a turn begins in a text that writes earlier messages otherwise than the prompt for the turn does.

        That is as far before its content as an answer begins before its own; None if the content is not written.
        """
        changed = [*messages[:number], messages[number] | {"content": MARK}, *messages[number + 1 :]]
        before, mark, _ = (self._part(changed, prompt=False, where=where, context=context) or "").partition(MARK)
        asked = str(messages[number - 1].get("content") or "").strip()  # an answer stands behind what it answers
        found = mark and text.startswith(before) and before.endswith(self._before_answer) and asked in before
        return len(before) - len(self._before_answer) if found else None

    @cached_property
    def _before_answer(self) -> str:
        """What the template writes between the prompt for an answer and its content."""
        asked = [{"role": "user", "content": "question"}]
        prompt = self._text(asked, prompt=True, where="an example")
        text = self._text([*asked, {"role": ASSISTANT, "content": MARK}], prompt=False, where="an example")
        return text.partition(MARK)[0].removeprefix(prompt) if text.startswith(prompt) else ""

    def _end_of_turn(
        self, text: str, messages: Sequence[Message], number: int, where: str, context: Mapping[str, Any]
    ) -> int | None:
        """Where a message ends in the text: before what follows a mark that stands in its place; None if the text does
        not end with that."""
        mark = {"role": messages[number]["role"], "content": MARK}
        for other in (mark, {**messages[number], **mark}):
            changed = [*messages[:number], other, *messages[number + 1 :]]
            marked = self._part(changed, prompt=False, where=where, context=context) or ""
            before, _, rest = marked.partition(MARK)
            if MARK not in rest and before and text.endswith(rest):
                return len(text) - len(rest)
        return None

    def _ending_at(self, text: str, place: int) -> int:
        """How many characters from there on the template writes behind the content of every answer."""
        after = self._after_answer
        size = _common(text[place:], after)
        if size == len(after):
            return len(after.rstrip())
        # what only the last answer has begins somewhere: the common part ends with the last whole marker
        return len(after[: max(after.rfind(end, 0, size) + 1 for end in CLOSING)].rstrip())

    def _start(self, text: str, before: Sequence[Message], where: str, context: Mapping[str, Any]) -> int | None:
        """Where a turn after these messages begins in the text; None if the text does not begin with them."""
        if not before:  # many templates fail without a message
            header = self._header
            return text.index(header) + len(header) if header in text else 0
        prompt = self._part(before, prompt=True, where=where, context=context)
        if prompt is not None and text.startswith(prompt):
            return len(prompt)
        without = self._part(before, prompt=False, where=where, context=context)
        if prompt is None or without is None:
            return None
        common, without = _common(text, prompt), without.rstrip()
        return common if common >= len(without) and text.startswith(without) else None

    @cached_property
    def _header(self) -> str:
        """What the template writes before an answer, as far as a turn that is written has it, too."""
        asked = [{"role": "user", "content": "question"}]
        without = self._text(asked, prompt=False, where="an example")
        whole = self._text([*asked, {"role": ASSISTANT, "content": "answer"}], prompt=False, where="an example")
        common = _common(whole, self._text(asked, prompt=True, where="an example"))
        return whole[len(without) : common] if whole.startswith(without) else ""

    def _text(self, messages: Sequence[Message], *, prompt: bool, where: str, context: Mapping[str, Any] = {}) -> str:
        if any(mark in str(message.get("content")) for message in messages for mark in (BEGIN, END)):
            raise DataError(f"{where}: has the private characters U+E0F0 or U+E0F1, which mark turns", "remove them")
        absent = dict.fromkeys(("tools", "documents"))  # None, as transformers gives them
        values = {**self.special, **absent, **context, "messages": list(messages), "add_generation_prompt": prompt}
        try:
            return (self._for_tools if "tools" in context and self.tools_source else self._template).render(values)
        except MemoryError as error:
            raise DataError(f"{where}: the chat template needs more memory than there is", HINT) from error
        except Exception as error:  # a template runs code of its own, which can fail in any way
            dated = (
                "it writes today's date, and training data would change every day: copy it into a file with a date in "
            )
            hint = f"{dated}its place, and name that in data.template" if "strftime_now" in reason(error) else HINT
            raise DataError(f"{where}: the chat template fails: {reason(error)}", hint) from error

    @cached_property
    def _for_tools(self) -> Any:
        return _compiled(self.tools_source)

    @cached_property
    def _template(self) -> Any:
        return _compiled(self.source)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_template", "_for_tools")}


def _common(one: str, other: str) -> int:
    """How many characters two texts have in common at their begin."""
    differing = (number for number, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))


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


def _compiled(source: str) -> Any:
    """The template, ready to render. DataError if it is not valid."""
    try:
        return _environment().from_string(source)
    except Exception as error:  # jinja2 compiles to Python, whose compiler raises errors of its own
        raise DataError(f"the chat template is not valid: {reason(error)}", HINT) from error


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

    class Absent(jinja2.Undefined):
        """A variable that is not given; to print a special token that the tokenizer does not name is an error."""

        def __str__(self) -> str:
            if str(self._undefined_name).endswith("_token"):
                raise jinja2.TemplateError(f"it writes {self._undefined_name}, which the tokenizer does not name")
            return super().__str__()

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:  # the arguments that transformers takes, in its order
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def shown(value: Any) -> Any:
        if not isinstance(value, str) and " at 0x" in str(value):
            raise jinja2.TemplateError("it prints the address of an object, which differs in every process")
        return value

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, jinja2.ext.loopcontrols],
        finalize=shown,
        undefined=Absent,
    )
    del environment.filters["random"], environment.globals["lipsum"]  # the same messages give the same text
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = fail
    return environment
