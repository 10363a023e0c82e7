"""Metrics: each is declared once, with its unit and whether a higher value is better."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from dtrain.core.types import JsonObject, NonNegative, Positive

PERCENT = "%"
"""Unit of a share: the value is a fraction of one and is shown in per cent."""


LONG = 1e9
"""From which values are written with an exponent, such as the perplexity of a run that diverged."""


class Metric(NamedTuple):
    """A metric. A model declares those that its loss returns in `metrics`, so that the best checkpoint can be kept."""

    name: str
    higher_is_better: bool | None
    """None: neither is, or it depends."""
    unit: str = ""
    """"%" for a fraction of one, shown in per cent; else printed after the value; "" for a plain number."""
    meaning: str = ""
    """A sentence for `dtrain help NAME`."""

    def text(self, value: float) -> str:
        """The value with its unit."""
        number = f"{value:z.2%}" if self.unit == PERCENT else f"{value:z.4f}" if abs(value) < LONG else f"{value:.4g}"
        return f"{number} {self.unit}" if self.unit not in ("", PERCENT) else number


LOSS = Metric("loss", False, meaning="What is minimised: a mean over examples or tokens; loss/NAME of one source.")
ACCURACY = Metric(
    "accuracy", True, PERCENT, "The share of the examples, or tokens, whose most probable class is the label."
)
NLL = Metric("nll", False, meaning="Negative log-likelihood of a token, where the loss has other parts, too.")
PERPLEXITY = Metric("perplexity", False, meaning="exp(nll): among how many equally probable tokens the model chooses.")
BITS_PER_BYTE = Metric(
    "bits_per_byte",
    False,
    meaning="nll in bits for each byte of text: compares models with different tokenizers. Of conversations the bytes "
    "are those of what is learned; tokens that end it count in nll alone.",
)
MAE = Metric("mae", False, meaning="Mean absolute error of a number.")
DROPPED = Metric("dropped", False, PERCENT, "The share of the tokens that found no place at their experts.")
EXACT_MATCH = Metric("exact_match", True, PERCENT, "The share of the answers to questions that are the expected text.")
CHOICE = Metric("choice_accuracy", True, PERCENT, "The share of the questions whose right choice is the most probable.")
REWARD_ACCURACY = Metric(
    "reward_accuracy",
    True,
    PERCENT,
    "The share of the answers whose reward is on the right side: of pairs, the preferred one's "
    "is higher; of judged answers, a good one's is above the average of the batch, and a bad one's below.",
)
REWARD_MARGIN = Metric(
    "reward_margin",
    True,
    meaning="By how much it is, a mean: of pairs, the preferred answer's reward less the other's; of "
    "judged ones, the reward less the average of the batch, or for bad answers that less the reward.",
)
FURTHER_NLL = Metric(
    "further_nll",
    False,
    meaning="What the tokens after the next one add to the loss, before model.multi_token.weight: the mean over its "
    "layers of sums of negative log-likelihoods, over as many tokens as nll; short documents have fewer such tokens.",
)
SOURCES = "sources"
"""Sums for each source of a mixture (2, sources), beside the metrics: of the cross-entropy, and of the weights."""
SCORES = (EXACT_MATCH, CHOICE)
OF_TOKENS = (NLL, PERPLEXITY, BITS_PER_BYTE, FURTHER_NLL)
MODELS = (LOSS, ACCURACY, *OF_TOKENS, MAE, DROPPED, *SCORES, REWARD_ACCURACY, REWARD_MARGIN)
"""What dtrain's own models return, what is computed from it, and scores of questions."""


LOGGED = (
    Metric("grad_norm", None, meaning="Length of the gradient of all parameters, before it is clipped."),
    Metric("lr", None, meaning="The learning rate of the step."),
    Metric("time/step_ms", False, "ms", "Time of a step since the line before; the next three are parts of it."),
    Metric("time/data_ms", False, "ms", "Waiting for the batch."),
    Metric("time/dispatch_ms", False, "ms", "Handing the step to the devices."),
    Metric("time/device_ms", False, "ms", "Waiting for the devices."),
    Metric("time/evaluate_s", False, "s", "Time of an evaluation."),
    Metric("rate/examples_per_s", True, meaning="Examples of a batch over the time of a step."),
    Metric("rate/tokens_per_s", True, meaning="Tokens of a batch over the time of a step."),
    Metric(
        "rate/mfu",
        True,
        PERCENT,
        "Model FLOPs utilisation: the model's FLOPs a second over the devices' peak in bfloat16, if it is known. FLOPs "
        "are three forward passes: of a decoder 6N a token, or 4N of frozen parameters, and causal attention; of a "
        "model of your own, and with frozen layers, the products of the gradient.",
    ),
    Metric("memory/peak_bytes", False, "bytes", "Most memory of the first device of this host so far."),
    Metric("memory/peak_fraction", False, PERCENT, "The same as a share of the device's memory."),
    Metric("plan/step_ms", None, "ms", "Time of a step that a plan for these devices predicted, if there is one."),
    Metric("rows/NAME", None, meaning="Rows of this source of a mixture that the run has trained on."),
    Metric("norm/grad/PATH", None, meaning="With track.norms: length of a parameter's gradient; PATH/0 of layer 0."),
    Metric("norm/update/PATH", None, meaning="With track.norms: length of a parameter's update."),
    Metric("norm/param/PATH", None, meaning="With track.norms: length of a parameter."),
)
"""What a run logs besides the metrics of its model; names without a group are `train/NAME`."""


def known(name: str, declared: Iterable[Metric]) -> Metric | None:
    """The metric of that name, its prefix `eval/` or `train/` left out, among those declared and then in MODELS."""
    short = name.partition("/")[2] or name
    return next((metric for metric in (*declared, *MODELS) if metric.name == short), None)


def higher_is_better(name: str, declared: Iterable[Metric]) -> bool | None:
    """Whether a higher value of that metric is better; None if it is unknown."""
    metric = known(name, declared)
    return metric.higher_is_better if metric else None


def plain(metrics: Iterable[Metric]) -> dict[str, JsonObject]:
    """The keys of run.json that hold declared metrics."""
    metrics = list(metrics)
    rising = {metric.name: metric.higher_is_better for metric in metrics if metric.higher_is_better is not None}
    return {"higher_is_better": rising, "units": {metric.name: metric.unit for metric in metrics if metric.unit}}


def recorded(record: JsonObject) -> tuple[Metric, ...]:
    """The metrics that the run with this run.json declared."""
    rising, units = record.get("higher_is_better", {}), record.get("units", {})
    return tuple(Metric(name, rising.get(name), units.get(name, "")) for name in {**rising, **units})


@dataclass(frozen=True, kw_only=True)
class Watch:
    """A metric of the evaluation, and when it counts as no longer improving."""

    metric: str = "eval/loss"
    """It must be one whose better direction is known."""
    patience: Positive = 5
    """Evaluations in a row without an improvement."""
    min_delta: NonNegative = 0.0
    """An improvement is better than the best value before by more than this."""
