"""dtrain import, dtrain export"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dtrain.cli.arguments import RUNS, Best, Debug, Devices, Overrides, Run, RunsDir, Step, use_devices
from dtrain.cli.exits import exits, interruptible
from dtrain.core.errors import DtrainError, RecipeError

if TYPE_CHECKING:
    from dtrain.weights.load import LoadedRun


def add_to(app: typer.Typer) -> None:
    """Register the verbs."""
    example = "Example: dtrain import Llama-3.2-1B/ --out llama"
    app.command("import", epilog=example)(import_)
    app.command("export", epilog="Example: dtrain export runs/my-llama my-llama/")(export)


def import_(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[RECIPE] SOURCE [KEY=VALUE]...",
            help="With --out, only SOURCE: a folder of published weights with a config.json. Else a recipe, and a "
            ".safetensors file, a folder of such files, or a run folder.",
        ),
    ],
    out: Annotated[
        str | None, typer.Option(help="Make the recipe from SOURCE's config.json; the name of the new run.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="For a folder of PEFT adapters: the run that has the parameters they adapt.")
    ] = None,
    recipe_only: Annotated[
        bool,
        typer.Option("--recipe-only", help="With --out: write NAME-tune.yaml alone, which reads SOURCE when it runs."),
    ] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="With --out: the folder of the tokenizer, if SOURCE has none.")
    ] = None,
    allow_changes: Annotated[
        bool,
        typer.Option("--allow-changes", help="Import even if the source's settings contradict the recipe's model."),
    ] = False,
    devices: Devices = None,
    runs_dir: RunsDir = RUNS,
    debug: Debug = False,
) -> None:
    """Start a run from the parameters of a published model or of another run.

    With a recipe, a config.json next to published weights is compared with the recipe's model.
    """
    with exits(debug), interruptible():
        names, overrides = _split(words)
        if len(names) != (1 if out else 2):
            found = " ".join(names)
            usage = "dtrain import SOURCE --out NAME, or dtrain import RECIPE SOURCE"
            raise RecipeError(f"import needs {'SOURCE alone' if out else 'RECIPE and SOURCE'}; found: {found}", usage)
        source = Path(names[-1])
        if not source.exists():
            raise RecipeError(f"{source} does not exist")
        if recipe_only and (not out or (source / "adapter_config.json").is_file()):
            raise RecipeError("--recipe-only needs --out, and a folder of published weights")
        if tokenizer and (not out or (source / "adapter_config.json").is_file()):
            raise RecipeError("--tokenizer needs --out, and a folder of published weights")
        use_devices(devices)
        if out:
            if (source / "adapter_config.json").is_file():
                _import_adapters(source, out, base, overrides, devices, runs_dir)
            else:
                _import_published(source, out, overrides, devices, runs_dir, recipe_only, tokenizer)
            return
        from dtrain.core.shipped import find
        from dtrain.recipe.load import load
        from dtrain.train.import_run import import_params

        loaded = load(find(names[0]), overrides, devices)
        run_dir = import_params(loaded, runs_dir, source, _note, allow_changes=allow_changes)
        typer.secho(f"{run_dir.path} starts with the parameters of {source}", fg="green", err=True)
        typer.secho("to train it: the same command line with run in place of import, and without SOURCE", err=True)


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """The names and the overrides; a name may contain `=` if such a file exists."""
    names = [word for number, word in enumerate(words) if number == 0 or "=" not in word or Path(word).exists()]
    return names, [word for word in words if word not in names]


def _import_adapters(
    source: Path, name: str, base: str | None, overrides: list[str], devices: int | None, runs: Path
) -> None:
    from dtrain.core.run_list import find_run
    from dtrain.train.import_run import import_adapters

    if base is None:
        hint = "import the model first, dtrain import MODEL --out NAME, then add --base NAME"
        raise RecipeError(f"{source} has adapters: --base must name the run with the parameters that they adapt", hint)
    run_dir = import_adapters(source, name, find_run(base).path, overrides, devices, runs, _note)
    typer.secho(f"{run_dir.path} has the adapters of {source}, on the parameters of {base}", fg="green", err=True)


def _import_published(
    source: Path,
    name: str,
    overrides: list[str],
    devices: int | None,
    runs: Path,
    recipe_only: bool,
    tokenizer: Path | None,
) -> None:
    from dtrain.cli.next_commands import program
    from dtrain.train.import_run import CHAT, import_published, tokenizer_in

    recipe = import_published(
        source, name, overrides, devices, runs, _note, recipe_only=recipe_only, tokenizer_folder=tokenizer
    )
    written = "tunes it" if Path(CHAT).exists() else f"tunes it, once {CHAT} has your conversations"
    if not tokenizer_in(tokenizer or source):
        typer.secho(f"{recipe} tunes the parameters of {source}", fg="green", err=True)
        typer.echo(f"next: name a tokenizer's folder in {recipe}, as data.tokenizer; then", err=True)
        typer.echo(f"      {program()} run {recipe}   # {written}", err=True)
        return
    if recipe_only:
        typer.secho(f"{recipe} tunes the parameters of {source}, which it reads when it starts", fg="green", err=True)
        typer.echo(f"next: {program()} run {recipe}   # {written}", err=True)
        return
    run = name if runs == Path("runs") else str(runs / name)
    typer.secho(f"{runs / name} has the parameters of {source}", fg="green", err=True)
    typer.echo(f"next: {program()} generate {run} --prompt '...'", err=True)
    typer.echo(f"      {program()} run {recipe}   # {written}", err=True)


def export(
    run: Run,
    target: Annotated[
        Path,
        typer.Argument(
            metavar="TARGET",
            help="A folder, for other libraries; a .safetensors file; a .stablehlo program.",
        ),
    ],
    overrides: Overrides = None,
    names: Annotated[
        Literal["own", "published", "timm"] | None,
        typer.Option(
            help="Parameter names; default: for a folder those of Hugging Face (published), for a file dtrain's own. "
            "timm: of a classifier of images."
        ),
    ] = None,
    adapters: Annotated[
        bool,
        typer.Option("--adapters", help="Of a run with lora, write the adapters alone, for PEFT; default: merged."),
    ] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="The dtype in which parameters are written.")
    ] = "float32",
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Open the folder of a language model in transformers, and compare logits and continuations.",
        ),
    ] = False,
    python: Annotated[
        Path | None,
        typer.Option(help="With --verify: a Python that has transformers and torch; default: this, or one on PATH."),
    ] = None,
    step: Step = None,
    best: Best = False,
    devices: Devices = None,
    runs_dir: RunsDir = RUNS,
    debug: Debug = False,
) -> None:
    """Write the parameters of one of a run's checkpoints for other libraries.

    A folder gets weights, config.json and, of a language model, generation_config.json and the tokenizer, so that
    transformers opens it. NAME.stablehlo is a program with its parameters that classifies pictures with JAX alone.
    """
    with exits(debug), interruptible():
        use_devices(devices)
        from dtrain.core.run_list import find_run
        from dtrain.inference.verified_export import refuse_unverifiable
        from dtrain.weights.card import base_kind, write_card
        from dtrain.weights.export import SUFFIX, export, refuse_other_formats
        from dtrain.weights.load import load_run
        from dtrain.weights.program import PROGRAM, export_program

        refuse_other_formats(target)
        is_program, single = target.suffix == PROGRAM and not target.is_dir(), target.suffix == SUFFIX
        if is_program and (names or adapters or dtype != "float32"):
            raise RecipeError(f"{target}: a program has no --names, --adapters or --dtype", "leave them out")
        if verify and (is_program or (single and not target.is_dir()) or adapters or names == "own"):
            raise RecipeError("--verify opens a folder with published names", "give a folder; leave the others out")
        if python and not verify:
            raise RecipeError("--python is the one that --verify starts", "add --verify")
        found = find_run(run, runs_dir)
        loaded = load_run(found, overrides or [], _note, step=step, best=best)
        if verify:
            refuse_unverifiable(loaded)
        if is_program:
            written = export_program(loaded, target)
        else:
            written = export(loaded, target, names=names, adapters=adapters, dtype=dtype, base=base_kind(found))
        typer.secho(f"{run} at {loaded.chosen}, as {dtype}:", fg="green", err=True)
        if loaded.recipe.model.generates and not adapters and (target / "config.json").is_file():
            written.append(write_card(target, found, loaded.step, dtype))
        for line in written:
            _note(f"  {line}")
        if verify:
            _verify(loaded, target, dtype, python)


def _verify(loaded: "LoadedRun", folder: Path, dtype: str, python: Path | None) -> None:
    from dtrain.inference.verified_export import python_with_transformers, verify
    from dtrain.weights.export import VERIFICATION

    result = verify(loaded, folder, dtype, python_with_transformers(python), _note)
    for line in result.lines():
        typer.secho(line, fg="green" if result.agrees else "red", err=True)
    _note(f"{folder / VERIFICATION} has the result")
    if not result.agrees:
        raise typer.Exit(DtrainError.exit_code)


def _note(text: str) -> None:
    typer.echo(text, err=True)
