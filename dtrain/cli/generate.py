"""dtrain generate"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtrain.cli.arguments import RUNS, Best, Debug, Devices, Overrides, Run, RunsDir, Step, use_devices
from dtrain.cli.exits import exits, interruptible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dtrain.data.conversations import Message
    from dtrain.data.prompts import Prompt
    from dtrain.inference.generate import Sampling
    from dtrain.inference.texts import TextGenerator

COUNT = 200


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(
        epilog="Examples: dtrain generate decoder-tiny --prompt 'Alice was ' --top-k 20; "
        "dtrain generate my-chat --chat --prompt 'Why is the sky blue?'"
    )(generate)


def generate(
    run: Run,
    overrides: Overrides = None,
    prompt: Annotated[
        str | None, typer.Option(help="The text to continue, or with --chat the question; - reads standard input.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="A file of prompts, one to a line, or of records: prompt, or messages and tools; prints JSON lines."
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Answer as in a conversation; without --prompt, line after line."),
    ] = False,
    system: Annotated[str | None, typer.Option(help="The system's message of a conversation.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens to generate; default: 200.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Number of texts to sample for a prompt.")] = 1,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 takes the most likely token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Sample only from this many most likely tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample only from the most likely tokens of this total probability.")
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help=r"End before this text; may be repeated; \n is a line break."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the sampling.")] = 0,
    step: Step = None,
    best: Best = False,
    devices: Devices = None,
    runs_dir: RunsDir = RUNS,
    debug: Debug = False,
) -> None:
    """Continue a text with a trained decoder, or answer questions.

    A text ends at the token that ends texts in the training data, before --stop, or after --tokens.
    """
    with exits(debug), interruptible():
        from dtrain.core.errors import RecipeError

        if prompt is not None and prompts is not None:
            raise RecipeError("--prompt and --prompts cannot be used together", "give one of them")
        if system is not None and not chat and prompts is None:
            raise RecipeError("--system is the system's message of a conversation", "add --chat")
        if "" in (stop or []):
            raise RecipeError("--stop is empty: every text would end before its first character", "give a text")
        use_devices(devices)
        from dtrain.core.run_list import find_run
        from dtrain.inference.generate import Sampling, generator
        from dtrain.inference.texts import TextGenerator

        sampling, count = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed), tokens or COUNT
        loaded = generator(find_run(run, runs_dir), overrides or [], _note, step=step, best=best)
        model = TextGenerator(loaded, tuple(text.replace("\\n", "\n") for text in stop or []))
        typer.secho(f"{run} at {model.model.chosen}", dim=True, err=True)
        first: list[Message] = [{"role": "system", "content": system}] if system else []
        if first and not model.template.writes_system:
            raise RecipeError("the chat template does not write the system's message", "leave --system out")
        if prompts is not None:
            _print_all(model, prompts, chat, system, count, samples, sampling)
        elif chat and prompt is None:
            _converse(model, first, count, sampling)
        else:
            asked = sys.stdin.read() if prompt == "-" else "\n" if prompt is None else prompt
            ids = model.chat([*first, {"role": "user", "content": asked}]) if chat else model.prompt(asked)
            _print(model, "" if chat else asked, ids, count, samples, sampling)


def _note(text: str) -> None:
    typer.echo(text, err=True)


def _print(model: "TextGenerator", text: str, ids: list[int], count: int, samples: int, sampling: "Sampling") -> None:
    """Print one text token by token, or several texts when all are complete."""
    if samples > 1:
        for one in model.completed([ids] * samples, count, sampling):
            typer.echo(text + one + "\n" + "-" * 20)
        return
    pieces = model.stream(ids, count, sampling)
    typer.echo(text, nl=False)
    _stream(pieces)


def _stream(pieces: "Iterator[str]") -> str:
    """Print a text piece by piece; all of it."""
    whole = ""
    for piece in pieces:
        typer.echo(piece, nl=False)
        sys.stdout.flush()
        whole += piece
    typer.echo("")
    return whole


def _print_all(
    model: "TextGenerator", path: Path, chat: bool, system: str | None, count: int, samples: int, sampling: "Sampling"
) -> None:
    """Print an object for each of so many texts of each prompt in a file: the prompt, and `text`."""
    from dtrain.data.packed_rows import unused_lines

    prompts = model.prompts(path)
    ids = [_asked(model, prompt, chat, system) for prompt in prompts]
    for line in unused_lines(model.account):
        _note(f"{path}: {line}")
    model.refuse_long(ids, [prompt.where for prompt in prompts])
    each = [number for number in range(len(prompts)) for _ in range(samples)]
    texts = model.completed([ids[number] for number in each], count, sampling)
    for prompt, text in zip((prompts[number] for number in each), texts, strict=True):
        typer.echo(json.dumps({**prompt.shown(), "text": text}, ensure_ascii=False))


def _asked(model: "TextGenerator", prompt: "Prompt", chat: bool, system: str | None) -> list[int]:
    """The tokens of a prompt: of a conversation, or of a text, which with `chat` is a question."""
    from dtrain.core.errors import RecipeError
    from dtrain.data.conversations import USER, with_system

    messages = list(prompt.messages) or ([{"role": USER, "content": prompt.text}] if chat else [])
    if messages:
        return model.chat(with_system(prompt.where, messages, system), prompt.where, prompt.context)
    if system is not None:
        raise RecipeError(f"{prompt.where} is a text to continue, without a system's message", "add --chat")
    return model.prompt(prompt.text)


def _converse(model: "TextGenerator", messages: "list[Message]", count: int, sampling: "Sampling") -> None:
    """Answer each line of standard input, until its end."""
    shown = "> " if sys.stdin.isatty() else ""
    while True:
        typer.echo(shown, nl=False, err=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            messages.append({"role": "user", "content": line.strip()})
            answer = _stream(model.stream(model.chat(messages), count, sampling))
            messages.append({"role": "assistant", "content": answer})
