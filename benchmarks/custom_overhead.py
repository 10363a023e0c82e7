"""The step of a model of one's own, compared with the same model in a bare loop written with its own library.

The examples in examples/, each with its recipe's batch on one device: the compiled step of `dtrain run` (a random key
for each example, statistics, gradient norm, checks of finite numbers) and a jitted step as that library's guide writes
it: one key for the batch, `optax.adamw`, the loss as metric. Both run on one batch that stays on the device, in
alternating segments; the medians of the paired ratios are printed.

    python benchmarks/custom_overhead.py        target: at most 1.05x
"""

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from timing import alternate, median_ratio, run_step

from dtrain.assembly.assemble import assemble
from dtrain.recipe.load import load

EXAMPLES = Path(__file__).parents[1] / "examples"
ROUNDS, SEGMENT = 15, {"nnx_transformer": 10}
sys.path.insert(0, str(EXAMPLES))

Step = Callable[[Any, Any, jax.Array], tuple[Any, Any, jax.Array]]


def cross_entropy(logits: jax.Array, label: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()


def plain_jax(batch: dict[str, jax.Array], optimizer: Any) -> Callable[[], Any]:
    from plain_jax import Net

    net = Net()
    params = net.init(jax.random.key(0), {"image": batch["image"][:1]})

    def loss(params: Any, key: jax.Array) -> jax.Array:
        (w1, b1), (w2, b2) = params
        x = jax.nn.relu(batch["image"].reshape(len(batch["image"]), -1) @ w1 + b1)
        x = x * jax.random.bernoulli(key, 1 - net.drop, x.shape) / (1 - net.drop)
        return cross_entropy(x @ w2 + b2, batch["label"])

    return stepper(loss, params, optimizer)


def linen_cnn(batch: dict[str, jax.Array], optimizer: Any) -> Callable[[], Any]:
    from linen_cnn import Net

    net = Net(16)
    variables = net.init(jax.random.key(0), batch["image"][:1], train=False)
    state = optimizer.init(variables["params"])

    @jax.jit
    def step(params: Any, statistics: Any, state: Any, key: jax.Array) -> Any:
        def loss(params: Any) -> tuple[jax.Array, Any]:
            logits, kept = net.apply(
                {"params": params, "batch_stats": statistics}, batch["image"], train=True, mutable=["batch_stats"],
                rngs={"dropout": key},
            )  # fmt: skip
            return cross_entropy(logits, batch["label"]), kept["batch_stats"]

        (value, kept), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        updates, new = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), kept, new, value

    held = [variables["params"], variables["batch_stats"], state]

    def once(key: jax.Array) -> jax.Array:
        *held[:], value = step(*held, key)
        return value

    return once


def equinox(module: Any, batch: dict[str, jax.Array], optimizer: Any, dropout: bool) -> Callable[[], Any]:
    import equinox as eqx

    params, static = eqx.partition(module, eqx.is_inexact_array)

    def loss(params: Any, key: jax.Array) -> jax.Array:
        net = eqx.combine(params, static)
        keys = jax.random.split(key, len(batch["image"]))
        logits = (
            jax.vmap(lambda x, k: net(x, key=k))(batch["image"], keys) if dropout else jax.vmap(net)(batch["image"])
        )
        return cross_entropy(logits, batch["label"])

    return stepper(loss, params, optimizer)


def equinox_mlp(batch: dict[str, jax.Array], optimizer: Any) -> Callable[[], Any]:
    from equinox_mlp import Net

    return equinox(Net(128, jax.random.key(0)), batch, optimizer, dropout=True)


def equinox_rnn(batch: dict[str, jax.Array], optimizer: Any) -> Callable[[], Any]:
    from equinox_rnn import Net

    return equinox(Net(64, jax.random.key(0)), batch, optimizer, dropout=False)


def nnx_transformer(batch: dict[str, jax.Array], optimizer: Any) -> Callable[[], Any]:
    from flax import nnx
    from nnx_transformer import Transformer

    net = Transformer(64, 2, nnx.Rngs(0))
    net.train()
    tuned = nnx.Optimizer(net, optimizer, wrt=nnx.Param)

    @nnx.jit
    def step(net: Any, tuned: Any) -> jax.Array:
        def loss(net: Any) -> jax.Array:
            return cross_entropy(net(batch["token"]), batch["target"])

        value, gradients = nnx.value_and_grad(loss)(net)
        tuned.update(net, gradients)
        return value

    cached = nnx.cached_partial(step, net, tuned)
    return lambda _: cached()


def stepper(loss: Callable[..., jax.Array], params: Any, optimizer: Any) -> Callable[[], Any]:
    """A jitted step of plain JAX, its state held."""

    @jax.jit
    def step(params: Any, state: Any, key: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, key)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    held = [params, optimizer.init(params)]

    def once(key: jax.Array) -> jax.Array:
        *held[:], value = step(*held, key)
        return value

    return once


def main() -> None:
    worst = 0.0
    for bare in (plain_jax, linen_cnn, equinox_mlp, equinox_rnn, nnx_transformer):
        name = bare.__name__
        recipe = load(EXAMPLES / f"{name}.yaml")
        source = recipe.data.open("train")
        made = assemble(recipe, jax.devices()[:1], source.example, recipe.total_steps(len(source)))
        rows = source.rows(np.arange(recipe.batch))
        times = SEGMENT.get(name, 100)
        own = run_step(made, rows | {"row": np.arange(recipe.batch, dtype=np.uint32)}, times)
        batch = jax.device_put(
            recipe.data.prepare({k: jnp.asarray(v) for k, v in rows.items()}, jax.random.key(0), False)
        )
        once = bare(batch, optax.adamw(recipe.optimizer.lr, weight_decay=recipe.optimizer.decay))
        keys = list(jax.random.split(jax.random.key(1), times))

        def segment(once: Callable[..., Any] = once, keys: list[jax.Array] = keys) -> None:
            for key in keys:
                value = once(key)
            jax.block_until_ready(value)

        found = alternate({"run": own, "bare": segment}, ROUNDS)
        wall, cpu = (median_ratio(found, "run", "bare", clock) for clock in (0, 1))
        step = {key: statistics.median(wall for wall, _ in found[key]) / times * 1e6 for key in found}
        print(
            f"{name:<16} run {step['run']:8.0f} us  bare {step['bare']:8.0f} us  {wall:.3f}x wall  {cpu:.3f}x CPU",
            flush=True,
        )
        worst = max(worst, wall)
    print(f"worst {worst:.3f}x, target 1.05x")


if __name__ == "__main__":
    main()
