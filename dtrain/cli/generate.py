"""dtrain generate"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtrain.cli.arguments import Debug, Devices, Overrides
from dtrain.cli.exits import exits

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from dtrain.data.codec import Codec


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(epilog="Example: dtrain generate runs/decoder-tiny --prompt 'def ' --tokens 100 --top-k 20")(generate)


def generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    overrides: Overrides = None,
    prompt: Annotated[str, typer.Option(help="The text to go on from; - reads standard input.")] = "\n",
    tokens: Annotated[int | None, typer.Option(min=1, help="How many tokens to add; 200 where not said.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="How many texts to draw at once.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw only among so many of the likeliest.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw only among the likeliest of this probability.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the draws.")] = 0,
    devices: Devices = None,
    debug: Debug = False,
) -> None:
    """Let a trained decoder go on from a prompt."""
    from dtrain.parallel.devices import found, pretend

    with exits(debug):
        if devices:
            pretend(devices)
        import logging

        logging.getLogger("absl").setLevel(logging.ERROR)
        found()
        from dtrain.folder import Folder
        from dtrain.generate import Sampling, generator

        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        model = generator(Folder(run), overrides or [], lambda text: typer.echo(text, err=True))
        text = sys.stdin.read() if prompt == "-" else prompt
        codec = model.codec
        ids = [int(token) for token in codec.encode(text.encode())]
        count = tokens or 200
        typer.secho(f"{run} at step {model.step}", dim=True, err=True)
        _print(text, model.tokens(ids, count, samples, sampling), codec, samples)


def _print(text: str, drawn: "Iterator[np.ndarray]", codec: "Codec", samples: int) -> None:
    """One text as it comes, or several when all are there."""
    import numpy

    if samples == 1:
        typer.echo(text, nl=False)
        shown, ids = "", []
        for token in drawn:
            ids.append(int(token[0]))
            said = codec.decode(ids)
            if not said.endswith("\N{REPLACEMENT CHARACTER}"):
                typer.echo(said[len(shown) :], nl=False)
                sys.stdout.flush()
                shown = said
        typer.echo("")
        return
    all_ids = numpy.stack(list(drawn), 1)
    for row in all_ids:
        typer.echo(text + codec.decode(row.tolist()) + "\n" + "-" * 20)
