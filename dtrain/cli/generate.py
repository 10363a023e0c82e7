"""dtrain generate"""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from dtrain.cli.arguments import Best, Debug, Devices, Overrides, Run, Step, use_devices
from dtrain.cli.exits import exits, interruptible

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from dtrain.data.codec import Codec


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(epilog="Example: dtrain generate runs/decoder-tiny --prompt 'Alice was ' --top-k 20")(generate)


def generate(
    run: Run,
    overrides: Overrides = None,
    prompt: Annotated[str, typer.Option(help="The text to continue; - reads standard input.")] = "\n",
    tokens: Annotated[int | None, typer.Option(min=1, help="Number of tokens to generate; default: 200.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Number of texts to sample at once.")] = 1,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 takes the most likely token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Sample only from this many most likely tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample only from the most likely tokens of this total probability.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the sampling.")] = 0,
    step: Step = None,
    best: Best = False,
    devices: Devices = None,
    debug: Debug = False,
) -> None:
    """Continue a prompt with a trained decoder."""
    with exits(debug), interruptible():
        use_devices(devices)
        from dtrain.core.run_list import find_run
        from dtrain.train.generate import Sampling, generator

        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)

        def note(text: str) -> None:
            typer.echo(text, err=True)

        model = generator(find_run(run), overrides or [], note, step=step, best=best)
        text = sys.stdin.read() if prompt == "-" else prompt
        codec = model.codec
        ids = [int(token) for token in codec.encode(text.encode())]
        count = tokens or 200
        typer.secho(f"{run} at {model.chosen}", dim=True, err=True)
        _print(text, model.tokens(ids, count, samples, sampling), codec, samples)


def _print(text: str, drawn: "Iterator[np.ndarray]", codec: "Codec", samples: int) -> None:
    """Print one text token by token, or several texts when all are complete."""
    import numpy

    if samples == 1:
        typer.echo(text, nl=False)
        shown, ids = "", []
        for token in drawn:
            ids.append(int(token[0]))
            text_so_far = codec.decode(ids)
            if not text_so_far.endswith("\N{REPLACEMENT CHARACTER}"):
                typer.echo(text_so_far[len(shown) :], nl=False)
                sys.stdout.flush()
                shown = text_so_far
        typer.echo("")
        return
    all_ids = numpy.stack(list(drawn), 1)
    for row in all_ids:
        typer.echo(text + codec.decode(row.tolist()) + "\n" + "-" * 20)
