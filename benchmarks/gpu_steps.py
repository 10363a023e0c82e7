"""The training step on one NVIDIA GPU, beside its plan, and beside GPT-2 of Hugging Face transformers in PyTorch.

Every case is a decoder on rows of random tokens, trained with AdamW and clipping, computed in bfloat16, its parameters
in float32. Each part of a case is a process of its own with a time limit, which prints its line at once; one that fails
says why, and the others go on:

- `step`: the step that `dtrain run` compiles, alone, on one batch; the peak is what the device reports, with the
  creation of the initial values, beside what XLA reserves for the step;
- `loop`: a whole `dtrain run` of the same recipe, from its files of tokens to its checkpoint;
- `plan`: both tiers of `dtrain plan` for the chip, on the CPU while the other parts use the GPU; the compiled tier
  needs JAX's CUDA plug-in, no GPU;
- `torch`: GPT2LMHeadModel of the same sizes under torch.compile: fused AdamW, autocast to bfloat16, PyTorch's
  scaled_dot_product_attention, no dropout; without torch.compile if that fails.

Times are medians over rounds. With words, only parts whose name, such as `gpt2-124m-jit: step`, has one of them;
`--tiny` runs all parts with small sizes on the CPU; `--torch` names another Python for the part `torch`. `--out` is a
folder for results.json and for what the processes write to standard error.

    python3 benchmarks/gpu_steps.py [--tiny] [--seconds N] [--out FOLDER] [--torch PYTHON] [WORD ...]
"""

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtrain.recipe.recipe import Recipe

ROUNDS, MOST = 7, 200
"""Rounds that are timed, and the most steps of one."""
LEAST = 15
"""Seconds that must be left for a part to be started."""
Found = dict[str, Any]
"""What a part measured, as JSON values; `text` is its line."""
Say = Callable[[Found], None]
LORA = (
    "init={run: runs/none}",  # never read: the frozen parameters are random values as well
    'lora={rank: 16, targets: ["blocks.query.weight", "blocks.key.weight", "blocks.value.weight", '
    '"blocks.out.weight", "blocks.mlp.*"]}',
)
TINY = ("model.layers=2", "model.width=64", "model.heads=4", "model.hidden=128", "model.vocab=250")
TINY_LLAMA = ("model.kv_heads=2", "model.head_dim=16", "model.loss_chunks=1")


@dataclass(frozen=True)
class Case:
    """A decoder, its rows of a step, and the changes of its recipe."""

    preset: str
    length: int
    rows: int
    changes: tuple[str, ...] = ()
    fraction: str = ""
    """The part of the GPU's memory that JAX takes; empty: its default, 0.75, for which plans are made."""

    def recipe(self, tiny: bool, more: Sequence[str] = ()) -> "Recipe":
        """The recipe. It selects the CPU for a JAX that is imported later."""
        from shapes import decoder

        small = (*TINY, *(TINY_LLAMA if "llama" in self.preset else ())) if tiny else ()
        model = f"{{kind: decoder, preset: {self.preset}}}"
        length, rows = self.sizes(tiny)
        return decoder(self.preset, model, length, rows, [*self.changes, *small, *more])

    def sizes(self, tiny: bool) -> tuple[int, int]:
        """Tokens of a row, and rows."""
        return (32, 2) if tiny else (self.length, self.rows)


CASES = {
    "gpt2-124m-jit": Case("gpt2-124m", 1024, 16),
    "llama3.2-1b-jit": Case("llama3.2-1b", 2048, 4),
    "gpt2-124m-shard_map": Case("gpt2-124m", 1024, 16, ("engine=shard_map",)),
    # 62 GB: the frozen parameters are in float32 as well
    "llama3-8b-lora-jit": Case("llama3-8b", 2048, 2, LORA, fraction="0.92"),
}


@dataclass(frozen=True)
class Part:
    """A process that measures something of a case, and the seconds that it may take."""

    case: str
    what: str
    limit: float

    @property
    def name(self) -> str:
        return f"{self.case}: {self.what}"


PARTS = (
    Part("gpt2-124m-jit", "step", 75),
    Part("gpt2-124m-jit", "torch", 110),
    Part("gpt2-124m-jit", "loop", 60),
    Part("llama3.2-1b-jit", "step", 70),
    Part("gpt2-124m-shard_map", "step", 60),
    Part("machine", "doctor", 30),
    Part("llama3-8b-lora-jit", "step", 90),
)
"""In the order in which they use the GPU."""
PLANS = tuple(Part(case, "plan", 100) for case in CASES)


def timed(work: Callable[[int], None], seconds: float = 1.0) -> list[float]:
    """Seconds of a step in each round of about so many seconds; `work` does so many steps and waits for them."""
    work(3)
    start = time.perf_counter()
    work(2)
    each = (time.perf_counter() - start) / 2
    count, found = max(2, min(MOST, math.ceil(seconds / each))), []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work(count)
        found.append((time.perf_counter() - start) / count)
    return found


def spread(times: Sequence[float], tokens: int) -> tuple[str, Found]:
    """Median, least and most of these seconds, and the tokens per second of the median."""
    middle = statistics.median(times)
    text = f"{1e3 * middle:.2f} ms ({1e3 * min(times):.2f} to {1e3 * max(times):.2f}), {tokens / middle:,.0f} tokens/s"
    values = {"ms": 1e3 * middle, "ms_of_rounds": [1e3 * one for one in times], "tokens_per_second": tokens / middle}
    return text, values


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def first_device(tiny: bool) -> Any:
    """The first device of JAX as `dtrain run` sets it up. Called before `Case.recipe`, which would select the CPU."""
    import timing  # noqa: F401 - sets dtrain's flags

    import jax  # isort: skip

    from dtrain.parallel import compile_cache

    if note := compile_cache.use():
        print(note, file=sys.stderr)
    device = jax.devices()[0]
    if device.platform != "gpu" and not tiny:
        sys.exit(f"JAX found no GPU, only {device.device_kind}; --tiny needs none")
    return device


def step(name: str, tiny: bool, say: Say) -> None:
    """The compiled step of `dtrain run`, on one batch."""
    device, case = first_device(tiny), CASES[name]
    recipe, (length, rows) = case.recipe(tiny), case.sizes(tiny)
    import jax
    import numpy as np

    from dtrain.assembly.assemble import assemble
    from dtrain.assembly.state import create_state
    from dtrain.data.windows import row_example
    from dtrain.parallel.engine import Put
    from dtrain.track.meters import peak_of

    def peak() -> int:
        return (device.memory_stats() or {}).get("peak_bytes_in_use", 0)

    made = assemble(recipe, [device], row_example(length, packed=False), 2000)
    start = time.perf_counter()
    compiled = made.compile(made.train())
    compiling, sizes = time.perf_counter() - start, compiled.memory_analysis()
    state = [jax.block_until_ready(create_state(made.make, made.shapes))]
    before = peak()
    drawn = np.random.default_rng(0).integers(0, recipe.model.vocab, (rows, length + 1)).astype(np.int32)
    batch = Put(made.engine, made.layout, recipe.batch)({"token": drawn[:, :-1], "target": drawn[:, 1:]})
    losses = []

    def steps(count: int) -> None:
        for _ in range(count):
            state[0], metrics = compiled(state[0], batch)
        losses.append(float(metrics["loss"]))  # waits for the last step
        jax.block_until_ready(state[0])

    times = timed(steps)
    reserved = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes + sizes.output_size_in_bytes
    reserved -= sizes.alias_size_in_bytes
    text, values = spread(times, length * rows)
    published = peak_of([device])
    mfu = made.flops.step / (values["ms"] / 1e3 * published) if published else None
    shown = f", MFU {mfu:.1%}" if mfu else ""
    values |= {"peak": peak(), "peak_of_initial_values": before, "reserved": reserved, "mfu": mfu}
    values |= {"compile_s": compiling, "losses": losses, "device": device.device_kind}
    when = " before the first step" * (values["peak"] == before)
    memory = f"peak {gigabytes(values['peak'])}{when}, XLA reserves {gigabytes(reserved)}"
    more = f"compiled in {compiling:.0f} s, loss {losses[0]:.3f} to {losses[-1]:.3f}, {device.device_kind}"
    say({"text": f"{text}{shown}; {memory}; {more}"} | values)


def loop(name: str, tiny: bool, say: Say) -> None:
    """`dtrain run` of the recipe, on a file of random tokens."""
    first_device(tiny)
    import io

    import numpy as np
    from rich.console import Console as Rich

    case, (length, rows) = CASES[name], CASES[name].sizes(tiny)
    steps = 30 if tiny else 150
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        vocab = case.recipe(tiny).model.vocab
        np.random.default_rng(0).integers(0, vocab, 120 * rows * length).astype(np.uint32).tofile(path)
        files = [f"data.files=[{path}]", f"data.cache={folder}", "data.test=0.05"]
        asked = [f"steps={steps}", f"track.every={5 if tiny else 10}", "checkpoint={every: 0, minutes: 0}"]
        recipe = case.recipe(tiny, [*files, *asked])

        from dtrain.runtime.bench import Marks
        from dtrain.train.run import run

        console = Marks(rich=Rich(file=io.StringIO()))
        start = time.perf_counter()
        run(recipe, Path(folder) / "runs", console)
        whole = time.perf_counter() - start
    ms = console.cost.ms
    text = f"{ms:.2f} ms a step, {1e3 * rows * length / ms:,.0f} tokens/s; {steps} steps and all else in {whole:.0f} s"
    warnings = "".join(f"; warning: {warning}" for warning in console.warnings)
    say({"text": text + warnings, "ms": ms, "seconds": whole, "warnings": console.warnings})


def plan(name: str, tiny: bool, say: Say) -> None:
    """Both tiers, on the second half of the cores: the first is for what runs beside it."""
    if len(cores := sorted(os.sched_getaffinity(0))) > 3:
        os.sched_setaffinity(0, cores[len(cores) // 2 :])
    recipe = CASES[name].recipe(tiny)

    from dtrain.core.slices import target
    from dtrain.plan.plan import Plan, quick
    from dtrain.plan.workers import PlanJob, outcomes

    on = target(gpu_target())

    def told(tier: str, made: Plan) -> None:
        ms = 1e3 * made.timing.seconds if made.timing else None
        shown = f"{ms:.2f} ms" if ms else "no time"
        sizes = {"peak": made.memory.peak, "reserved": made.memory.arena, "room": made.memory.room}
        reserved = f", reserves {gigabytes(made.memory.arena)}" if made.memory.arena else ""
        size = f"peak {gigabytes(made.memory.peak)}{reserved} of {gigabytes(made.memory.room)}"
        text = f"{tier} for {on.name}: {shown}, {size}; {'fits' if made.fits else 'DOES NOT FIT'}; in {made.took:.0f} s"
        say({"text": text, "tier": tier, "ms": ms, "fits": made.fits, "took": made.took} | sizes)

    told("quick", quick(recipe, on))
    made = next(outcomes([PlanJob(recipe, on)], 1))[1]
    if isinstance(made, Plan):
        told("compiled", made)
    else:
        say({"text": f"not compiled: {made.message}"})


def gpu_target() -> str:
    """The GPU of this machine as a plan's target; h100-1 if it has none that the chip table knows."""
    from dtrain.core.chips import chip_of

    asked, name = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], ""
    if shutil.which(asked[0]):
        name = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip().partition("\n")[0]
    chip = chip_of(name)
    return f"{chip.name}-1" if chip else "h100-1"


def torch(name: str, tiny: bool, say: Say) -> None:
    """GPT-2 of transformers; the words are padded as dtrain pads them, to a multiple of 8."""
    import torch as t
    from transformers import GPT2Config, GPT2LMHeadModel

    length, rows = CASES[name].sizes(tiny)
    words, layers, heads, width = (256, 2, 4, 64) if tiny else (50264, 12, 12, 768)
    device = "cuda" if t.cuda.is_available() else "cpu"
    if device == "cpu" and not tiny:
        sys.exit("PyTorch found no GPU; --tiny needs none")
    t.set_float32_matmul_precision("high")
    t.manual_seed(0)
    config = GPT2Config(
        vocab_size=words, n_positions=length, n_embd=width, n_layer=layers, n_head=heads, n_inner=4 * width,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    token = t.randint(0, words, (rows, length), device=device)

    def work(compiled: bool) -> Callable[[int], None]:
        model = GPT2LMHeadModel(config).to(device).train()
        optimizer = t.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
        called: Any = t.compile(model) if compiled else model

        def steps(count: int) -> None:
            for _ in range(count):
                optimizer.zero_grad(set_to_none=True)
                with t.autocast(device, t.bfloat16):
                    loss = called(input_ids=token, labels=token).loss
                loss.backward()
                t.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            losses.append(loss.item())  # waits for the last forward pass
            if device == "cuda":
                t.cuda.synchronize()

        return steps

    for compiled in (True, False):
        losses: list[float] = []
        start = time.perf_counter()
        try:
            steps = work(compiled)
            steps(1)
        except Exception as error:
            if not compiled:
                raise
            say({"text": f"torch.compile failed: {str(error).strip().splitlines()[0][:200]}"})
            continue
        first = time.perf_counter() - start
        text, values = spread(timed(steps), rows * length)
        peak = t.cuda.max_memory_allocated() if device == "cuda" else 0
        values |= {"peak": peak, "compiled": compiled, "first_s": first, "losses": losses, "torch": t.__version__}
        how = "torch.compile" if compiled else "without torch.compile"
        more = f"peak {gigabytes(peak)}; first step {first:.0f} s, loss {losses[0]:.3f} to {losses[-1]:.3f}"
        say({"text": f"{text}; {how}, torch {t.__version__}; {more}"} | values)
        return


MEASURES: dict[str, Callable[[str, bool, Say], None]] = {"step": step, "loop": loop, "plan": plan, "torch": torch}


def measure(name: str, tiny: bool) -> None:
    """Be the process of a part: its findings are lines of JSON on standard output, all else is on standard error."""
    out, sys.stdout = sys.stdout, sys.stderr
    case, _, what = name.partition(": ")
    MEASURES[what](case, tiny, lambda found: print(json.dumps(found), file=out, flush=True))


class Runner:
    """Runs parts and keeps what they find."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.end = options, time.monotonic() + options.seconds
        self.found: dict[str, list[Found]] = {}
        self._start = time.monotonic()
        self._lock = threading.Lock()

    def run(self, part: Part) -> None:
        """Run the part; what it finds is printed and written as it comes."""
        limit, began = min(part.limit, self.end - time.monotonic()), time.monotonic()
        if limit < min(LEAST, part.limit):
            self._say(part, f"left out, {max(limit, 0):.0f} s are left")
            return
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                self._command(part), stdout=subprocess.PIPE, stderr=errors, text=True, env=self._environment(part),
                start_new_session=True,
            )  # fmt: skip
            timer = threading.Timer(limit, _kill, [process])
            timer.start()
            assert process.stdout
            try:
                for line in process.stdout:
                    self._take(part, line.rstrip())
                code = process.wait()
            finally:
                timer.cancel()
                _kill(process)  # and what it started
            errors.seek(0)
            wrote, took = errors.read(), time.monotonic() - began
        if code:
            why = f"stopped after its {limit:.0f} s" if code == -signal.SIGKILL else f"FAILED with exit code {code}"
            self._say(part, "\n    ".join([f"{why}:", *wrote.strip().splitlines()[-6:]]))
        else:
            self._say(part, f"done in {took:.0f} s")
        if self.options.out:
            with self._lock, (self.options.out / "stderr.txt").open("a") as log:
                log.write(f"== {part.name}, exit code {code}, {took:.1f} s\n{wrote}\n")

    def _command(self, part: Part) -> list[str]:
        if part.what == "doctor":
            return [sys.executable, "-m", "dtrain", "doctor"]
        python = self.options.torch if part.what == "torch" else sys.executable
        words = [python, __file__, *(["--tiny"] if self.options.tiny else []), "--part", part.name]
        return ["nice", "-n", "10", *words] if part.what == "plan" else words

    def _environment(self, part: Part) -> dict[str, str]:
        """Of this process; plans see no GPU, and the rival none of the packages that were brought for dtrain."""
        kept, case = dict(os.environ), CASES.get(part.case)
        if part.what == "torch":
            kept.pop("PYTHONPATH", None)
        if part.what == "plan":
            kept |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        elif case and case.fraction:
            kept["XLA_PYTHON_CLIENT_MEM_FRACTION"] = case.fraction
        return kept

    def _take(self, part: Part, line: str) -> None:
        try:
            found = json.loads(line)
            text = found["text"]
        except (ValueError, TypeError, KeyError):
            self._say(part, line)
            return
        with self._lock:
            self.found.setdefault(part.name, []).append(found)
            if self.options.out:
                (self.options.out / "results.json").write_text(json.dumps(self.found, indent=1))
        self._say(part, text)

    def _say(self, part: Part, text: str) -> None:
        print(f"[{time.monotonic() - self._start:5.0f} s] {part.name:<28} {text}", flush=True)


def _kill(process: "subprocess.Popen[str]") -> None:
    """End the process and those that it started: they are a group of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def table(found: dict[str, list[Found]]) -> list[str]:
    """Each measured step beside its plans, its loop and the rival."""
    lines = []
    for name, case in CASES.items():
        measured = found.get(f"{name}: step")
        if not measured:
            continue
        own = measured[0]
        lines.append(f"{name} {case.length} x {case.rows}: {own['text']}")
        for made in found.get(f"{name}: plan", []):
            if "tier" in made:
                step = f"measured / planned step {own['ms'] / made['ms']:.2f}, " if made["ms"] else ""
                reserved = f", reserved by XLA {own['reserved'] / made['reserved']:.2f}" if made["reserved"] else ""
                ratio = f"peak {own['peak'] / made['peak']:.2f}{reserved}"
                lines.append(f"    {step}{ratio} ({made['text']})")
        for run in found.get(f"{name}: loop", []):
            lines.append(f"    dtrain run takes {run['ms'] / own['ms']:.3f}x of its step: {run['ms']:.2f} ms")
        for other in found.get(f"{name.removesuffix('shard_map').removesuffix('jit')}jit: torch", []):
            if "ms" in other:
                ratio = own["tokens_per_second"] / other["tokens_per_second"]
                lines.append(f"    {ratio:.3f}x of the tokens/s of transformers, which has {other['text']}")
    return lines


def parsed() -> argparse.Namespace:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--tiny", action="store_true", help="small sizes, on the CPU")
    parser.add_argument("--seconds", type=float, default=280, help="for all parts together")
    parser.add_argument("--out", type=Path, help="folder for results.json and stderr.txt")
    parser.add_argument("--torch", default=sys.executable, help="the Python of the part `torch`")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parsed()
    if options.part:
        measure(options.part, options.tiny)
        return
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    runner = Runner(options)

    def chosen(parts: Sequence[Part]) -> list[Part]:
        return [part for part in parts if not options.words or any(word in part.name for word in options.words)]

    with ThreadPoolExecutor(1) as beside:
        planned = [beside.submit(runner.run, part) for part in chosen(PLANS)]
        for part in chosen(PARTS):
            runner.run(part)
    for done in planned:
        done.result()
    print("\n".join(["", *table(runner.found)]), flush=True)


if __name__ == "__main__":
    main()
