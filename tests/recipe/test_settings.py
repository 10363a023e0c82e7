"""Every setting has an effect: each field of each section, set to another value, changes what is computed."""

import dataclasses
import typing
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtrain.core.errors import FieldError
from dtrain.data.batch import Feature
from dtrain.data.pixels import Pixels
from dtrain.models.altup import AltUp
from dtrain.models.decoder import Decoder
from dtrain.models.decoder_layer import QueryGrowth
from dtrain.models.delta import Delta
from dtrain.models.latent import Latent
from dtrain.models.layer_pattern import LayerKind
from dtrain.models.mamba import Mamba
from dtrain.models.mlp import MLP
from dtrain.models.moe import Experts
from dtrain.models.multi_token import MultiToken
from dtrain.models.nn.param import initial
from dtrain.models.nn.single_device import SingleDeviceContext
from dtrain.models.rope import Learned, LinearScaling, Llama3, NoPosition, Rope, Yarn
from dtrain.models.short_convolution import ShortConvolution
from dtrain.optim.groups import Group, grouped
from dtrain.optim.optimizer import SGD, Optimizer
from dtrain.optim.shared import Cosine, Schedule
from dtrain.optim.update import averaged, learning_rate, transformation
from dtrain.train.progress import Improvement
from tests.engines import MEMBERS, initial_values, random_batch

TINY = {"vocab": 12, "context": 16, "layers": 2, "width": 16, "heads": 2, "hidden": 24}
MAMBA = Mamba(heads=4, head_dim=4, state=4)
STATES = {"mamba": MAMBA, "pattern": (LayerKind(mixer="mamba"), LayerKind())}
DELTA = Delta(key_heads=2, value_heads=4, key_dim=4, value_dim=4)
LINEAR = {"delta": DELTA, "pattern": (LayerKind(mixer="delta"), LayerKind())}
CONVOLVED = {"convolution": ShortConvolution(), "pattern": (LayerKind(mixer="convolution"), LayerKind())}
MIXED = {"delta": LINEAR, "convolution": CONVOLVED, "mamba": STATES}
MOE = Experts(count=4, active=2, hidden=8, z_loss=1e-3)
OTHERS: dict[str, dict[str, Any]] = {
    "Decoder": {
        "vocab": 20, "context": 24, "layers": 4, "width": 32, "heads": 4, "kv_heads": 1, "head_dim": 4, "hidden": 16,
        "experts": MOE, "position": Learned(), "epsilon": 1e-3, "window": 4, "global_every": 2, "init": 0.1,
        "attention_softcap": 5.0, "logit_softcap": 5.0, "z_loss": 0.1, "unroll": 2, "loss_chunks": 4, "pad_vocab": 5,
        "query_pre_attn_scalar": 3.0, "window_theta": 50.0, "pattern": (LayerKind(window=4), LayerKind()),
        "qkv_clip": 0.5, "attention_multiplier": 0.7, "query_growth": QueryGrowth(rate=0.5, original=4),
        "latent": Latent(rank=4, rotated=4), "delta": dataclasses.replace(DELTA, taps=2),
        "convolution": ShortConvolution(taps=2), "layer_inputs": 4, "mamba": dataclasses.replace(MAMBA, taps=2),
        "layer_inputs_vocab": 5, "altup": AltUp(streams=2), "laurel_rank": 3, "multi_token": MultiToken(),
    },
    "Latent": {"query_rank": 6, "rotated": 2, "value_dim": 6, "epsilon": 0.1},
    "Experts": {
        "count": 8, "active": 3, "hidden": 4, "shared": 1, "scale": 2.0, "balance": 0.5, "z_loss": 0.5,
        "bias_rate": 0.1, "capacity": 0.5, "groups": 2, "active_groups": 2, "shared_hidden": 6,
    },
    "LayerKind": {"count": 2, "window": 8, "position": NoPosition(), "head_dim": 4, "kv_heads": 1,
                  "hidden": 24, "chunk": 8, "sparsity": 0.5},
    "AltUp": {"streams": 3, "active": 1, "clip": 1.0},
    "Mamba": {"groups": 2},
    "QueryGrowth": {"rate": 0.1, "original": 8, "first": 1},
    "Rope": {"theta": 100.0, "scaling": LinearScaling(factor=2.0), "partial": 0.5},
    "Linear": {"factor": 3.0},
    "Llama3": {"factor": 2.0, "low": 2.0, "high": 8.0, "original": 64},
    "Yarn": {"factor": 2.0, "original": 64, "fast": 1000.0, "slow": 100.0, "attention_factor": 2.0,
             "mscale_all_dim": 0.7},
    "Pixels": {
        "mean": 0.5, "std": 2.0, "crop": 2, "resized_crop": 0.3, "colour": 0.5, "mixup": 1.0, "cutmix": 1.0,
        "smoothing": 0.1,
    },
    "CustomOptimizer": {"target": "optax:sgd", "args": {"b1": 0.5}},
    "MLP": {"mean": 3.0, "std": 2.0},
    "Steps": {"at": (0.25, 0.5)},
    "Plateau": {"metric": "eval/nll", "min_delta": 0.3, "final": 0.9},
}  # fmt: skip
NAMED = {
    "lr": 0.5, "schedule": Cosine(), "decay": 0.5, "clip": 1e-3, "ema": 0.5, "epsilon": 0.1, "factor_from": 8,
    "warmup": 5, "final": 0.5, "cooldown": 0.9, "sizes": (64, 8, 10), "dropout": 0.5,
    "groups": (Group(match="*.bias", lr=0.5),),
}  # fmt: skip
"""Values that have an effect where half and double of the present value have none, by the name of the field."""
BASES: dict[str, Any] = {
    "Decoder": Decoder(**TINY),
    "Experts": MOE,
    "Rope": Rope(),
    "Linear": LinearScaling(factor=2.0),
    "Llama3": Llama3(),
    "Yarn": Yarn(factor=4.0, original=100_000),
    "Latent": Latent(rank=4, rotated=4),
    "LayerKind": LayerKind(window=4),
    "Delta": DELTA,
    "ShortConvolution": ShortConvolution(),
    "QueryGrowth": QueryGrowth(rate=0.5, original=4),
    "AltUp": AltUp(),
    "MultiToken": MultiToken(),
    "Mamba": MAMBA,
}
BASES |= {type(model).__name__: model for model in MEMBERS if not isinstance(model, Decoder)}
ALONE = {
    ("Decoder", "preset"): "filled in before the section is made",
    ("Decoder", "remat"): "tests/models/nn/test_remat.py counts what is recomputed",
    ("Decoder", "unroll"): "a different program, the same numbers",
    ("CustomOptimizer", "folder"): "where the module is",
    ("MLP", "hidden"): "between the sizes of the data: tests/models/test_sizes.py",
    ("MLP", "label"): "decides about the sizes of the data: tests/models/test_sizes.py",
}
NUMBER = {"label": "number", "sizes": (64, 8, 1), "mean": 0.0, "std": 1.0}
NEEDS: dict[str, dict[str, Any]] = {
    "MLP.mean": NUMBER, "MLP.std": NUMBER,
    "global_every": {"window": 4}, "norm_bias": {"norm": "layer"}, "decay_all": {"decay": 0.5},
    "window_theta": {"window": 4}, "pre_norm": {"post_norm": True}, "qk_norm_joint": {"qk_norm": True},
    "qk_norm_rotated": {"qk_norm": True}, "shared_gate": {"shared": 1}, "active_groups": {"groups": 2},
    "parallel_norms": {"parallel": True}, "shared_hidden": {"shared": 1}, "group_by": {"groups": 2},
    "delta": LINEAR, "convolution": CONVOLVED, "mamba": STATES, "mixer": {"window": None}, "chunk": {"window": None},
    "LayerKind.hidden": {"dense": True}, "sparsity": {"dense": True}, "layer_inputs_vocab": {"layer_inputs": 4},
    "proportional": {"partial": 0.5},
}  # fmt: skip
"""Other fields that a field needs to have an effect."""


def others(name: str, section: Any) -> Iterator[tuple[str, Any]]:
    """Yield (field, another value) for each field."""
    hints = typing.get_type_hints(type(section))
    for field in dataclasses.fields(section):
        hint, now = hints[field.name], getattr(section, field.name)
        if field.name == "kind" or (name, field.name) in ALONE:
            continue
        choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
        if hint is bool:
            yield field.name, not now
        elif choices:
            yield from ((field.name, value) for value in choices if value != now)
        elif field.name in (known := NAMED | OTHERS.get(name, {})):
            yield field.name, known[field.name]
        else:
            yield field.name, another(section, field.name, now)


def another(section: Any, field: str, now: Any) -> Any:
    """Another value that the section accepts: twice the present one, or half of it; of a tuple, of its first part."""
    first, rest = (now[0], now[1:]) if isinstance(now, tuple) else (now, ())
    for value in (2 * first, first // 2 if isinstance(first, int) else first / 2):
        changed = (value, *rest) if isinstance(now, tuple) else value
        with suppress(FieldError):
            dataclasses.replace(section, **{field: changed})
            return changed
    raise AssertionError(f"give OTHERS another value of {field}")


def cached_by_text(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function, computed once for each text of its argument: a section may hold a dict, which has no hash."""
    found: dict[str, Any] = {}

    def call(section: Any) -> Any:
        if (text := repr(section)) not in found:
            found[text] = function(section)
        return found[text]

    return call


def changed(section: Any, field: str, value: Any) -> tuple[Any, Any]:
    """The section with the other fields that the field needs, and the same with the field changed."""
    needed = NEEDS.get(f"{type(section).__name__}.{field}", NEEDS.get(field, {}))
    base = dataclasses.replace(section, **needed)
    return base, dataclasses.replace(base, **{field: value})


CONTAINERS: dict[type, Callable[[Any], dict[str, Any]]] = {
    Experts: lambda part: {"experts": part},
    Delta: lambda part: LINEAR | {"delta": part},
    ShortConvolution: lambda part: CONVOLVED | {"convolution": part},
    Mamba: lambda part: STATES | {"mamba": part},
    # layers between one that has keys for them and one that has nothing
    LayerKind: lambda part: (
        {"experts": MOE, "layers": 4}
        | MIXED.get(part.mixer, {})
        | {"pattern": (dataclasses.replace(part, count=1, shared_keys=False), part, LayerKind())}
    ),
    Latent: lambda part: {"latent": part},
    QueryGrowth: lambda part: {"query_growth": part},
    AltUp: lambda part: {"altup": part},
    MultiToken: lambda part: {"multi_token": part},
    Rope: lambda part: {"position": part},
} | dict.fromkeys((LinearScaling, Llama3, Yarn), lambda part: {"position": Rope(scaling=part)})
"""By the class of a part, the settings of a decoder that contains it."""


def whole(name: str, part: Any) -> Any:
    """A model that contains the part."""
    found = CONTAINERS.get(type(part))
    return Decoder(**(TINY | found(part))) if found else part


@cached_by_text
def program(model: Any) -> str:
    """Text of the jaxprs of initialisation and gradient."""
    start = jax.make_jaxpr(lambda: initial(model.params(), jax.random.key(0), "float32"))()
    batch = random_batch(examples=2)
    if isinstance(model, Decoder):
        token = np.zeros((2, 16), np.int32)
        batch = {"token": token, "target": token}
    elif hasattr(model, "image"):
        batch["image"] = np.zeros((2, *model.image), np.float32)
    batch |= {"row": np.arange(2, dtype=np.uint32)} if model.needs_keys else {}
    shapes = jax.eval_shape(lambda: initial(model.params(), jax.random.key(0), "float32"))
    context = SingleDeviceContext(train=True)
    slope = jax.make_jaxpr(jax.grad(lambda params: model.loss(params, batch, context).sum))(shapes)
    return f"{start}{slope}{[np.asarray(const).tolist() for const in slope.consts]}"


CASES = [(name, field, value) for name, base in BASES.items() for field, value in others(name, base)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "field", "value"), CASES, ids=lambda part: str(part)[:24])
def test_every_field_of_a_model_changes_its_program(name: str, field: str, value: Any) -> None:
    one, other = (whole(name, part) for part in changed(BASES[name], field, value))
    if (name, field) == ("Decoder", "context"):  # a bound on rows, and the size of the table of positions
        token = {"token": Feature((20,), "int32")}
        assert (one.mismatch(token) == "") != (other.mismatch(token) == "")
        return
    assert program(one) != program(other)


@cached_by_text
def walk(optimizer: Any) -> Any:
    """Parameters after a few steps, averaged if the optimizer averages them."""
    declared = grouped(MLP(sizes=(24, 16, 12, 10)).params(), optimizer.groups)
    params = initial_values(declared)
    update = transformation(optimizer, declared, 12)
    state = update.init(params)
    for step in range(12):
        gradients = jax.tree.map(lambda p, step=step: jnp.sin(p * 31 + step), params)
        updates, state = update.update(gradients, state, params, step=step)
        params = jax.tree.map(jnp.add, params, updates)
    return averaged(state, params)


def differ(one: Any, other: Any) -> bool:
    return any(not np.allclose(a, b, rtol=1e-5) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other)))


OPTIMIZERS = {member.__name__: member(lr=0.05) for member in typing.get_args(Optimizer)}
CASES = [(name, field, value) for name, base in OPTIMIZERS.items() for field, value in others(name, base)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "field", "value"), CASES, ids=lambda part: str(part)[:24])
def test_every_field_of_an_optimizer_changes_where_it_goes(name: str, field: str, value: Any) -> None:
    one, other = changed(OPTIMIZERS[name], field, value)
    assert differ(walk(one), walk(other))


@pytest.mark.parametrize("member", typing.get_args(Schedule))
def test_every_field_of_a_schedule_changes_the_rate(member: type) -> None:
    section = member()
    for field, value in others(member.__name__, section):
        one, other = changed(section, field, value)
        assert rates(one) != rates(other), field


def rates(schedule: Any) -> list[float]:
    """The learning rate of 21 steps with an evaluation after each: eval/nll is the first that no longer improves."""
    rate, scale = learning_rate(SGD(lr=1.0, schedule=schedule), 20), 1.0
    improvement, found = Improvement(schedule.watch, rising=False) if schedule.watch else None, []
    for step in range(21):
        found.append(scale * float(rate(step)))
        if improvement:
            improvement.note(step, max(1 - 0.2 * step, 0.0 if schedule.metric == "eval/loss" else 0.5))
            if improvement.stalled:
                scale, improvement.since = schedule.lowered(scale), 0
    return found


@pytest.mark.slow
def test_every_field_of_pixels_changes_the_image() -> None:
    image = (np.arange(512) % 256).astype(np.uint8).reshape(8, 8, 8, 1)
    label, row = np.zeros(8, np.int32), np.arange(8, dtype=np.uint32)
    batch = {"image": image, "row": row, "label": label, "other_image": image[::-1], "other_label": label}

    def apply(pixels: Pixels) -> Any:
        found = pixels.apply(batch, 255.0, jax.random.key(0), True)
        return [found["image"], found.get("share", np.ones(8)), found.get("smoothing", np.zeros(8))]

    for field, value in others("Pixels", Pixels()):
        one, other = changed(Pixels(), field, value)
        assert differ(apply(one), apply(other)), field
