"""The recipe: every section is the object that does the work."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from dtrain.checkpoint.policy import Checkpoint
from dtrain.core.errors import FieldError, RecipeError
from dtrain.core.metrics import Watch
from dtrain.core.types import Natural, Positive, PositiveFloat, Seconds, Seed
from dtrain.core.weights_source import WeightsSource
from dtrain.data.chat import Chat
from dtrain.data.custom import CustomData
from dtrain.data.digits import Digits
from dtrain.data.feedback import Feedback
from dtrain.data.idx import IDX
from dtrain.data.images import Images
from dtrain.data.mixture import Mixture
from dtrain.data.npz import Npz
from dtrain.data.preference import Preference
from dtrain.data.record_data import Records
from dtrain.data.synthetic import Synthetic
from dtrain.data.table import Table
from dtrain.data.text import Text
from dtrain.data.tokens import Tokens
from dtrain.launch.targets.gke import GKE
from dtrain.launch.targets.hosts import Local
from dtrain.launch.targets.sky import Sky
from dtrain.launch.targets.slurm import Slurm
from dtrain.launch.targets.ssh import Ssh
from dtrain.models.cnn import CNN
from dtrain.models.custom import Custom
from dtrain.models.decoder import Decoder
from dtrain.models.distillation import Distillation
from dtrain.models.dpo import DPO
from dtrain.models.kto import KTO
from dtrain.models.lora import Lora
from dtrain.models.measures import Classification, CustomMeasure, Regression
from dtrain.models.mlp import MLP
from dtrain.models.nn.precision import Precision
from dtrain.models.objective import Objective as AnyObjective
from dtrain.models.objective import minimised
from dtrain.models.parts import Part
from dtrain.models.reference_free import ORPO, SimPO
from dtrain.models.resnet import ResNet
from dtrain.models.vit import ViT
from dtrain.optim.optimizer import Optimizer
from dtrain.parallel.auto import Auto
from dtrain.parallel.jit import Jit
from dtrain.parallel.mesh import Mesh
from dtrain.parallel.pmap import Pmap
from dtrain.parallel.shard_map import ShardMap
from dtrain.track.custom import CustomTracker
from dtrain.track.notify import Notify
from dtrain.track.tensorboard import TensorBoard
from dtrain.track.wandb import WandB

Model = MLP | CNN | ResNet | ViT | Decoder | Custom
Data = (
    Digits
    | IDX
    | Images
    | Table
    | Npz
    | Records
    | Text
    | Tokens
    | Chat
    | Preference
    | Feedback
    | Mixture
    | Synthetic
    | CustomData
)
Engine = Jit | ShardMap | Pmap
Objective = DPO | KTO | ORPO | SimPO | Distillation
Measure = Classification | Regression | CustomMeasure
Tracker = TensorBoard | WandB | CustomTracker
MOST_EVALUATIONS = 10
SHARE_OF_TIME = 0.1
"""Most of the training's time that evaluations take by default."""
FORWARD = 3
"""Examples that are evaluated in the time in which one is trained on: gradients cost two forward passes."""
MOST_STEPS = 2**31
UNKNOWN_STEPS = 2**31 - 1
"""The length of a run in epochs whose data is not opened: the largest int32, as steps are counted."""
"""The step is counted in 32 bits."""
Launch = Local | Ssh | Slurm | GKE | Sky


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """When the test split is measured. It always is at the end."""

    every: Natural | None = None
    """Steps between evaluations; 0 measures only at the end. Default: every epoch, or every few of them, so that there
    are at most ten and their losses take about a tenth of the time (what `questions`, `samples` and `measures` take is
    not counted); of less than two epochs, up to ten parts of the run."""
    batch: Positive | None = None
    """Examples at a time; default: the training batch."""
    questions: tuple[str, ...] = ()
    """Files of questions for a decoder, JSON lines with `prompt` and `answer`, or `choices`: each evaluation answers
    them and reports exact_match or choice_accuracy; the answers are kept in answers.jsonl in the run folder."""
    tokens: Positive = 64
    """Most tokens of an answer."""
    samples: Natural = 0
    """Held-out examples for which the model draws samples at each evaluation, by its `sample(params, batch, ctx)` or
    else its `predict`: uint8 (examples, height, width, 1 or 3) are pictures. They are kept in samples/ of the run
    folder, shown by `report --html`, and sent to trackers."""
    measures: tuple[Measure, ...] = ()
    """What else is computed at evaluations from the model's outputs for all examples, beyond sums over them."""

    def interval(self, steps: int, batch: int, train: float, test: float, decides: bool) -> int:
        """Steps between evaluations of a run, with so many examples in an epoch and held out; 0: only at the end.

        `decides`: whether the run needs evaluations while it trains, whatever they cost.
        """
        if self.every is not None:
            return self.every
        rows = steps * batch
        points = MOST_EVALUATIONS if decides else min(MOST_EVALUATIONS, int(SHARE_OF_TIME * FORWARD * rows / test))
        if points < 2:
            return 0
        each = rows / points
        if rows >= 2 * train:
            each = train * math.ceil(each / train - 0.05)
        return math.ceil(each / batch)


@dataclass(frozen=True, kw_only=True)
class Stop(Watch):
    """The run ends before its last step once a metric of the evaluation no longer improves."""


@dataclass(frozen=True, kw_only=True)
class Track:
    """Where numbers go besides the console and metrics.jsonl."""

    every: Positive = 50
    """Steps between log lines."""
    norms: bool = False
    """Log the norms of gradients, updates and values of each parameter, and of each layer of a stack. They are computed
    at logged steps only; the step then needs memory for one more copy of the parameters."""
    to: tuple[Tracker, ...] = ()
    """Where metrics are copied, besides metrics.jsonl in the run folder."""
    notify: Notify | None = None
    """Notification when the run ends, resumes, or has spent a share of its time limit."""


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Checks of the compiled step, and of the losses while it runs."""

    not_finite: Literal["stop", "skip", "rollback"] = "stop"
    """If the loss or the gradients are not finite: stop (exit code 7), skip the update, or roll back to the newest
    checkpoint and skip the batches since then."""
    nan: Literal["report", "locate"] = "report"
    """If the run stops because a loss is not finite: `locate` repeats the steps since the newest checkpoint and names
    the operation and its line. For one process; the operations are evaluated one by one on one device."""
    spike: Annotated[float, Gt(1)] | None = None
    """A loss above this many times the median of the last 50 is a spike; losses below zero are not checked."""
    on_spike: Literal["stop", "rollback"] = "rollback"
    """On a spike: stop (exit code 7), or roll back and skip the batches."""
    budget: Natural = 5
    """How many updates may be skipped, or how often the run may roll back, before it stops."""
    patience: Seconds = 300.0
    """Seconds that a step may take before its process counts as hung, and each step of a call of several; compiling,
    restoring, saving and evaluating may take ten times as long."""

    constants_mb: PositiveFloat = 1.0
    """Constants in the compiled program that are larger than this many MB are reported."""
    purity: bool = True
    """Trace the step twice and report any difference."""
    contract: bool = True
    """Before the first step of a custom model, check that its loss is a weighted sum over examples."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Steps to trace with JAX's profiler, into `profile/` in the run folder."""

    start: Positive = 10
    """The first step to trace; the first steps of a run are slower than the others."""
    steps: Annotated[int, Ge(1), Le(1000)] = 5
    """Number of steps to trace."""


@dataclass(frozen=True, kw_only=True)
class Init(WeightsSource):
    """Initial parameters, by path. Those that another run lacks are initialised at random; published weights must have
    all parameters but those of `new`."""

    map: dict[str, str] = field(default_factory=dict)
    """Names in the other run, by patterns of names here: {"encoder.*": "blocks.*"}; `*` stands for the same text."""
    new: tuple[str, ...] = ()
    """Patterns of parameters that are initialised at random even if the run or the files have them: ["head.*"]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights and self.map:
            raise FieldError("map", "published parameters have fixed names", "leave it out; new: [...] leaves some out")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A complete run."""

    name: str
    """Name of the run and of its folder; default: the recipe's file name."""
    model: Model
    """What is trained: a kind and its settings; a kind alone takes the sizes of the data (`model: mlp`)."""
    data: Data
    """What it is trained on, and what is held out."""
    optimizer: Optimizer
    """How parameters are updated, with the learning rate and its schedule."""
    batch: Positive
    """Examples in one optimizer step, over all devices."""
    steps: Positive | None = None
    """Optimizer steps; give either this or epochs."""
    epochs: Positive | None = None
    """Passes over the training data; give either this or steps."""
    accumulate: Positive = 1
    """Microbatches per batch."""
    seed: Seed = 0
    """Of all random numbers: initial values, order of the examples, augmentation, dropout."""
    engine: Auto | Engine = field(default_factory=Auto)
    """How a step is spread over devices: jit, placed by the compiler; shard_map, by hand; pmap, one copy a device; by
    default auto, which is jit or shard_map, by the chip."""
    mesh: Mesh = field(default_factory=Mesh)
    precision: Precision = field(default_factory=Precision)
    init: Init | None = None
    parts: dict[str, Part] = field(default_factory=dict)
    """Where parts of the model come from, by what the paths of their parameters begin with: {encoder: {run: ...}}."""
    lora: Lora | None = None
    """Train low-rank adapters, with the model's own parameters frozen."""
    objective: Objective | None = None
    """What is minimised in place of the model's own loss."""
    class_weights: Literal["balanced"] | dict[str, PositiveFloat] | None = None
    """How much the examples of each class count in training, in its loss and its metrics; evaluations count all alike.
    balanced: by 1 / the number of examples of the class, 1 on average; or a number by name, such as {cat: 2.5}, others
    1."""
    evaluate: Evaluate = field(default_factory=Evaluate)
    stop: Stop | None = None
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    track: Track = field(default_factory=Track)
    guard: Guard = field(default_factory=Guard)
    profile: Profile | None = None
    launch: Launch | None = None
    """Where `dtrain launch` runs it."""

    def __post_init__(self) -> None:
        problem = length_problem(self.steps, self.epochs)
        if problem:
            raise FieldError("steps", problem)

    @property
    def minimised(self) -> AnyObjective:
        """The objective, which is the model's own loss by default."""
        return minimised(self)

    @property
    def user_code(self) -> tuple[str, ...]:
        """What the recipe names as code that runs when model and optimizer are built or the data is opened."""
        return tuple(filter(None, (self.model.user_code, self.data.user_code, self.optimizer.user_code)))

    def total_steps(self, examples: int) -> int:
        """Number of steps of the run, given the examples in an epoch. Raises RecipeError if there are too many."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        steps = -(-self.epochs * examples // self.batch)
        if steps >= MOST_STEPS:
            product = f"{self.epochs:,} epochs of {examples:,} examples in batches of {self.batch:,}"
            raise RecipeError(f"epochs: {product} are {steps:,} steps; a run must have fewer than {MOST_STEPS:,}")
        return steps


def length_problem(steps: int | None, epochs: int | None) -> str:
    """Why the length of a run is not well defined; empty if it is."""
    if (steps is None) != (epochs is None):
        return ""
    found = "neither" if steps is None else f"steps = {steps} and epochs = {epochs}"
    return f"give either steps or epochs; found {found}"


def watched(recipe: Recipe) -> dict[str, Watch]:
    """The metrics of the evaluation that decide about the run, by the key of the section that names them."""
    found = {"stop": recipe.stop, "optimizer.schedule": recipe.optimizer.schedule.watch}
    return {key: watch for key, watch in found.items() if watch}
