"""Models, meshes, batches and short trainings for the contract tests over engines."""

import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

import jax
import numpy as np
from jax.sharding import PartitionSpec

from dtrain.assembly import state, step
from dtrain.data.arrays import image_example
from dtrain.data.batch import Batch, Example, Feature
from dtrain.models.altup import AltUp
from dtrain.models.custom import Custom
from dtrain.models.decoder import Decoder
from dtrain.models.decoder_layer import QueryGrowth
from dtrain.models.delta import Delta
from dtrain.models.latent import Latent
from dtrain.models.layer_pattern import LayerKind
from dtrain.models.mamba import Mamba
from dtrain.models.moe import Experts
from dtrain.models.multi_token import MultiToken
from dtrain.models.nn.model import Loss
from dtrain.models.nn.param import initial, trained
from dtrain.models.nn.precision import Precision
from dtrain.models.nn.single_device import SingleDeviceContext
from dtrain.models.rope import Learned, NoPosition, Rope
from dtrain.models.short_convolution import ShortConvolution
from dtrain.optim.optimizer import AdamW
from dtrain.optim.update import learning_rate, transformation
from dtrain.parallel.engine import Engine, Put
from dtrain.parallel.mesh import Mesh
from dtrain.parallel.rules import Layout
from dtrain.recipe import recipe

EXAMPLES, LENGTH = 16, 32


def initial_values(declared: Any) -> Any:
    """Initial parameters, made by one program: one by one they would take many."""
    return jax.jit(lambda: initial(declared, jax.random.key(0), "float32"))()


SMALL: dict[str, Any] = {
    "image": (8, 8, 1), "classes": 10, "sizes": (64, 32, 16, 10), "stages": (16, 32), "vocab": 48, "context": LENGTH,
    "layers": 2, "width": 32, "heads": 4, "hidden": 64,
}  # fmt: skip
"""Small values of the fields by which models are described; a model's other fields keep their defaults."""


def small(member: type) -> Any:
    """A small model of that class."""
    fields = {field.name for field in dataclasses.fields(member)}
    fields -= {"hidden"} if "sizes" in fields else set()  # part of the sizes
    return member(**{name: value for name, value in SMALL.items() if name in fields})


MEMBERS = [small(member) for member in get_args(recipe.Model) if member is not Custom]
MODELS = {model.kind: model for model in MEMBERS if not model.mismatch(image_example((8, 8, 1), 10))}
"""The models for images that a recipe can name."""
MESHES = {
    "data8": Mesh(data=8),
    "fsdp8": Mesh(data=1, fsdp=8),
    "data2-fsdp2-tensor2": Mesh(data=2, fsdp=2, tensor=2),
}
DECODER = Decoder(
    vocab=48, context=LENGTH, layers=4, width=32, heads=4, kv_heads=2, hidden=48, init=0.1, window=12, global_every=2
)
LANGUAGE_MODELS = {
    "llama": DECODER,
    "gpt2": Decoder(
        vocab=48, context=LENGTH, layers=4, width=32, heads=4, feed_forward="gelu_tanh", position=Learned(),
        norm="layer", norm_bias=True, bias=True, tied=True, init=0.1, loss_chunks=4, remat="full", z_loss=1e-3,
    ),
    "gemma": Decoder(
        vocab=48, context=LENGTH, width=32, heads=4, kv_heads=2, hidden=48, feed_forward="geglu", init=0.1, layers=2,
        norm_offset=True, post_norm=True, qk_norm=True, embed_scale=True, tied=True, attention_softcap=20.0,
        logit_softcap=10.0, remat="attention",
    ),
    "olmo2": dataclasses.replace(
        DECODER, pre_norm=False, post_norm=True, qk_norm=True, qk_norm_joint=True, window_theta=100.0
    ),
    "mixtral": dataclasses.replace(DECODER, experts=Experts(count=4, active=2, hidden=24, z_loss=1e-3), remat="dots"),
    "deepseek": dataclasses.replace(
        DECODER, experts=Experts(count=8, active=3, hidden=16, shared=1, score="sigmoid", scale=2.0, bias_rate=1e-3)
    ),
    "glm4_moe": dataclasses.replace(
        DECODER, window=None, global_every=0, pattern=(LayerKind(window=12, dense=True), LayerKind()),
        experts=Experts(count=8, active=3, hidden=16, shared=1, score="sigmoid", scale=2.0, bias=True, groups=4,
                        active_groups=2, shared_gate=True),
    ),
    "cohere2": Decoder(
        vocab=48, context=LENGTH, layers=4, width=32, heads=4, kv_heads=2, hidden=48, init=0.1, norm="layer",
        position=Rope(interleaved=True), parallel=True, qkv_bias=True, out_bias=True, logit_multiplier=0.5,
        pattern=(LayerKind(window=12), LayerKind(position=NoPosition())), qkv_clip=0.5,
    ),
    "granite": Decoder(
        vocab=48, context=LENGTH, layers=4, width=32, heads=4, kv_heads=2, head_dim=16, hidden=48, init=0.1,
        position=Rope(partial=0.5), qk_norm=True, qk_norm_rotated=True, mlp_bias=True, feed_forward="relu2",
        embed_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.2,
        query_growth=QueryGrowth(rate=0.5, original=6),
        pattern=(LayerKind(window=12, position=Rope(theta=50.0)), LayerKind()),
    ),
    "deepseek_v3": Decoder(
        vocab=48, context=LENGTH, layers=4, width=32, heads=4, head_dim=16, hidden=48, init=0.1,
        latent=Latent(rank=16, query_rank=24, rotated=4, value_dim=8), position=Rope(interleaved=True),
        pattern=(LayerKind(dense=True), LayerKind(count=3)), remat="attention",
        experts=Experts(count=8, active=3, hidden=16, shared=1, shared_hidden=24, score="sigmoid", bias=True, groups=4,
                        active_groups=2, group_by=1),
    ),
    "gpt_oss": dataclasses.replace(
        DECODER, sinks=True, feed_forward="swiglu_clamped", bias=True, remat="dots",
        experts=Experts(count=4, active=2, hidden=24, biases=True, router_bias=True),
    ),
    "qwen3_5": Decoder(
        vocab=48, context=LENGTH, layers=4, width=32, heads=4, kv_heads=2, hidden=48, init=0.1, qk_norm=True,
        norm_offset=True, attention_gate=True, position=Rope(partial=0.5), remat="dots",
        delta=Delta(key_heads=2, value_heads=4, key_dim=8, value_dim=12, taps=3),
        pattern=(LayerKind(mixer="delta"), LayerKind()),
    ),
    "lfm2_moe": Decoder(
        vocab=48, context=LENGTH, layers=4, width=32, heads=4, kv_heads=2, hidden=48, init=0.1, qk_norm=True, tied=True,
        convolution=ShortConvolution(taps=3), experts=Experts(count=4, active=2, hidden=24, score="sigmoid", bias=True),
        pattern=(LayerKind(mixer="convolution", dense=True), LayerKind(), LayerKind(mixer="convolution"), LayerKind()),
    ),
    "gemma4": Decoder(  # the published ones multiply scores by 1: their rounding differs 4 times as much
        vocab=48, context=LENGTH, layers=4, width=32, heads=4, kv_heads=4, head_dim=8, hidden=48, init=0.1, tied=True,
        feed_forward="geglu", qk_norm=True, value_norm=True, post_norm=True, layer_scale=True, attention_multiplier=0.5,
        position=Rope(partial=0.25, proportional=True), experts=Experts(count=4, active=2, hidden=24, beside=True),
        pattern=(LayerKind(window=12, position=Rope()), LayerKind(head_dim=16, kv_heads=2, shared_values=True)),
    ),
    "granite_hybrid": Decoder(
        vocab=48, context=LENGTH, layers=4, width=32, heads=4, kv_heads=2, hidden=48, init=0.1, position=NoPosition(),
        mamba=Mamba(heads=4, head_dim=16, state=8, taps=3), pattern=(LayerKind(mixer="mamba"), LayerKind()),
        residual_multiplier=0.5, epsilon=1e-3,
    ),
    "mamba_groups": Decoder(
        vocab=48, context=LENGTH, layers=4, width=32, heads=4, kv_heads=2, hidden=48, init=0.1, epsilon=1e-3,
        mamba=Mamba(heads=8, head_dim=8, state=6, groups=2), pattern=(LayerKind(count=2, mixer="mamba"),), remat="full",
    ),
    "multi_token": Decoder(
        vocab=45, context=LENGTH, layers=4, width=32, heads=4, kv_heads=2, hidden=48, init=0.1, qkv_bias=True,
        experts=Experts(count=4, active=2, hidden=24, shared=1), multi_token=MultiToken(depth=2, weight=0.5),
        pattern=(LayerKind(window=12), LayerKind()), logit_multiplier=0.5, embed_multiplier=2.0, z_loss=0.01,
    ),
    "gemma3n": Decoder(
        vocab=48, context=LENGTH, layers=6, width=32, heads=4, kv_heads=2, head_dim=8, hidden=48, init=0.1, tied=True,
        feed_forward="geglu", qk_norm=True, value_norm=True, post_norm=True, layer_inputs=8, layer_inputs_vocab=40,
        embed_scale=True, epsilon=1e-3, altup=AltUp(streams=3, active=1), laurel_rank=4,
        pattern=(LayerKind(window=12, sparsity=0.7), LayerKind(), LayerKind(window=12, shared_keys=True)),
    ),
    "gemma4_e2b": Decoder(
        vocab=48, context=LENGTH, layers=8, width=32, heads=4, kv_heads=2, head_dim=8, hidden=48, init=0.1, tied=True,
        feed_forward="geglu", qk_norm=True, value_norm=True, post_norm=True, layer_inputs=8, pad_vocab=32,
        embed_scale=True, epsilon=1e-3,  # small values that are normalised have more rounding
        position=Rope(partial=0.25, proportional=True), remat="dots",
        pattern=(LayerKind(window=12, position=Rope()), LayerKind(head_dim=16),
                 LayerKind(window=12, position=Rope(), shared_keys=True, hidden=64),
                 LayerKind(head_dim=16, shared_keys=True, hidden=64)),
    ),
    "llama4": Decoder(
        vocab=48, context=LENGTH, layers=4, width=32, heads=4, kv_heads=2, hidden=48, init=0.1, qk_norm_plain=True,
        position=Rope(interleaved=True), query_growth=QueryGrowth(rate=0.5, original=6, first=1, unrotated=True),
        experts=Experts(count=4, active=1, hidden=24, shared=1, score="sigmoid", renormalise=False, before=True),
        pattern=(LayerKind(chunk=10, dense=True), LayerKind(position=NoPosition())),
    ),
    "phi": Decoder(
        vocab=48, context=LENGTH, layers=2, width=32, heads=4, hidden=48, feed_forward="relu", init=0.1, norm="layer",
        norm_bias=True, bias=True, parallel=True, parallel_norms=True, head_bias=True, position=Rope(partial=0.5),
        loss_chunks=2,
    ),
}  # fmt: skip
AXIS_MESHES = {
    axis: Mesh(**{"data": 1, axis: 2}) for axis in ("pipeline", "data", "fsdp", "sequence", "expert", "tensor")
} | {
    "data-fsdp-tensor": Mesh(data=2, fsdp=2, tensor=2),
    "fsdp-sequence": Mesh(data=1, fsdp=2, sequence=2),
    "data-expert": Mesh(data=2, expert=2),
    "pipeline-fsdp": Mesh(data=1, pipeline=2, fsdp=2),
    "sequence-tensor": Mesh(data=1, sequence=4, tensor=2),
    "fsdp-expert-tensor": Mesh(data=1, fsdp=2, expert=2, tensor=2),
    "pipeline-sequence-tensor": Mesh(data=1, pipeline=2, sequence=2, tensor=2),
}
ENGINES: dict[str, Engine] = {engine().kind: engine() for engine in get_args(recipe.Engine)}
ADAM = AdamW(lr=1e-3, decay=0.1, clip=1.0)


def example_of(model: Any) -> Example:
    """The example (names, shapes and types of arrays) that the model is trained on."""
    if not isinstance(model, Decoder):
        return image_example((8, 8, 1), 10)
    token = Feature((LENGTH,), "int32", model.vocab, ("length",))
    return dict.fromkeys(("token", "target", "position", "document"), token)


def random_batch(model: Any = None, examples: int = EXAMPLES) -> Batch:
    """Random images and labels, or rows of random tokens with several documents."""
    draw = np.random.default_rng(0)
    if isinstance(model, Decoder):
        token = draw.integers(0, model.vocab, (examples, LENGTH + 1)).astype(np.int32)
        document = np.cumsum(draw.random((examples, LENGTH)) < 0.15, axis=1).astype(np.int32)
        return {"token": token[:, :-1], "target": np.where(draw.random((examples, LENGTH)) < 0.1, -1, token[:, 1:])} | {
            "position": places_in(document),
            "document": document,
        }
    image = draw.normal(size=(examples, 8, 8, 1)).astype(np.float32)
    return {"image": image, "label": draw.integers(0, 10, examples).astype(np.int32)}


@dataclass
class Trained:
    """The result of a few steps."""

    losses: list[float]
    params: Any
    state: Any
    compiled: jax.stages.Compiled


@dataclass
class Placed:
    """A model's initial state, a batch and the gradient function, on one engine and mesh."""

    engine: Engine
    layout: Layout
    update: Any
    shapes: Any
    now: Any
    rows: Batch
    grads: Any


@cache
def first_params(model: Any) -> Any:
    """The model's initial parameters, on the host: compiled once for all engines and meshes."""
    return jax.device_get(jax.jit(lambda: initial(model.params(), jax.random.key(0), "float32"))())


def place(
    model: Any, engine: Engine, mesh: Mesh, *, parts: int = 1, optimizer: Any = ADAM, sizes: Any = None
) -> Placed:
    """Assemble everything up to the first step."""
    sizes = sizes or mesh.sizes(mesh.least)
    devices = jax.devices()[: mesh.least]
    layout = Layout(sizes, mesh.table(), model.params(), mesh.build(sizes, devices), example_of(model))
    layout.check()
    update = transformation(optimizer, layout.declared, 100)
    make = state.state_initializer(layout.declared, update, "float32", 0)
    shapes = state.abstract(make, layout, optimizer.state_dims, optimizer.apart)
    params = jax.device_put(first_params(model), state.placement(shapes.params))
    make = jax.jit(
        lambda params: state.State(np.int32(0), params, update.init(trained(params, layout.declared))),
        out_shardings=state.placement(shapes),
    )
    grads = engine.grads(layout, step.loss_of(model, lambda rows: rows, Precision()), parts)
    rows = Put(engine, layout, EXAMPLES)(random_batch(model))
    return Placed(engine, layout, update, shapes, make(params), rows, grads)


def loss_alone(model: Any, params: Any, batch: Any, **how: bool) -> Loss:
    """The loss on one device, compiled as one program: operations one by one are hundreds of compilations."""
    return jax.jit(lambda params, batch: model.loss(params, batch, SingleDeviceContext(**how)))(params, batch)


def gradients(on: Placed) -> tuple[float, Any]:
    """The mean loss and its gradients at the initial state."""
    traced = on.engine.trace(on.layout, on.grads, on.now.params, on.rows, out=None, donate=False)
    loss, sums = jax.device_get(jax.block_until_ready(on.engine.compile(traced, "cpu")(on.now.params, on.rows)))
    return float(loss.sum / loss.weight), jax.tree.map(lambda g: g / loss.weight, sums)


def train(on: Placed, optimizer: Any = ADAM, steps: int = 2) -> Trained:
    """Train for a few steps."""
    one = step.train_step(on.grads, on.update, learning_rate(optimizer, 100), on.layout.declared)
    out = (state.placement(on.shapes), on.layout.sharding(PartitionSpec()))
    compiled = on.engine.compile(on.engine.trace(on.layout, one, on.now, on.rows, out=out, donate=True), "cpu")
    now, losses = on.now, []
    for _ in range(steps):
        now, metrics = compiled(now, on.rows)
        losses.append(float(jax.block_until_ready(metrics)["loss"]))
    return Trained(losses, jax.device_get(now.params), now, compiled)


def places_in(document: np.ndarray) -> np.ndarray:
    """Each token's position in its document."""
    position = np.arange(document.shape[1])
    start = np.where(np.diff(document, axis=1, prepend=-1) != 0, position, 0)
    return (position - np.maximum.accumulate(start, axis=1)).astype(np.int32)


def worst(found: Any, reference: Any) -> float:
    """The largest difference between two trees, relative to the largest value of each leaf.

    For a leaf whose values are all below a fiftieth of the tree's largest, the difference is relative to that fiftieth:
    with a bound of 1e-5 that is three roundings of the largest value in float32, which sums that cancel can contain.
    """
    floor = 2e-2 * max(np.abs(leaf).max() for leaf in jax.tree.leaves(reference))

    def one(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.abs(a - b).max() / max(np.abs(b).max(), floor))

    return max(jax.tree.leaves(jax.tree.map(one, found, reference)))
