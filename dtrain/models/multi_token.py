"""Multi-token prediction: layers after the model's own that learn to predict the tokens after the next one.

Each takes the activations of the one before it, or of the model, and the embedding of a further token, and the model's
own output head gives its prediction (DeepSeek-AI 2024, section 2.2). Generation does not use them.
Dims: B batch, T tokens, E embed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from dtrain.core.types import Positive, PositiveFloat
from dtrain.data.batch import DOCUMENT, POSITION, TARGET, TOKEN, Batch
from dtrain.models.decoder_layer import apply, layer, norm, normal, shared_arrays
from dtrain.models.layer_pattern import LayerKind
from dtrain.models.nn import param as declare
from dtrain.models.nn.context import Context
from dtrain.models.nn.matmul import matmul
from dtrain.models.nn.param import Param, Tree
from dtrain.models.nn.single_device import rematerialised

if TYPE_CHECKING:
    from dtrain.models.decoder import Decoder

MULTI_TOKEN = "multi_token"
"""The parameters of these layers: a tree for each, by its number from 1."""
BLOCK, PROJECTION, EMBED_NORM, HIDDEN_NORM = "block", "projection", "embed_norm", "hidden_norm"
FURTHER_LAYERS = "num_nextn_predict_layers"
"""The field of a config.json that says how many such layers there are."""
EMBEDDED = "embedded"
"""Of what the layers share, the embedding of the further token."""


class Further(NamedTuple):
    """What these layers add to the loss: sums over tokens."""

    nll: jax.Array
    """The mean of the cross-entropies of these layers, each a sum over its tokens."""
    sums: Tree
    """Those of the layers, such as router losses."""


@dataclass(frozen=True, kw_only=True)
class MultiToken:
    """Predict further tokens in training, each by a layer of its own, to learn more from each token."""

    depth: Positive = 1
    """How many tokens after the next one are predicted."""
    weight: PositiveFloat = 0.3
    """Weight of the mean of their cross-entropies in the loss."""

    def params(self, model: "Decoder") -> Tree:
        """Of each layer: those of the model's last one, and a matrix from two normalised inputs."""
        width, initial = model.width, declare.normal(model.init)

        def one() -> Tree:
            tree: Tree = {name: norm(model, width, "embed") for name in (EMBED_NORM, HIDDEN_NORM, "norm")}
            tree[PROJECTION] = Param((2 * width, width), "embed _", initial, fan_in=("embed",))
            return tree | {BLOCK: layer(model, model.kinds[-1])}

        return {str(number): one() for number in range(1, self.depth + 1)}

    def losses(
        self,
        model: "Decoder",
        params: Tree,
        batch: Batch,
        weight_BT: jax.Array,
        x_BTE: jax.Array,
        embed: Callable[[jax.Array], jax.Array],
        ctx: Context,
    ) -> Further:
        """The losses of all these layers, from the model's normalised output x, split by `tokens`.

        `embed`: tokens (B, T) → embeddings. A token counts if it, and all before it, are of the document of the token
        that it is predicted from; the last ones of a row have none.
        """
        token_BT, target_BT, document_BT = batch[TOKEN], batch[TARGET], batch.get(DOCUMENT)
        position_BT = batch[POSITION] if POSITION in batch else ctx.places(token_BT.shape[1])[None]
        block = rematerialised(partial(_applied, model, model.kinds[-1]), model.remat, ctx, inside=False)
        nll, sums = jnp.zeros((), jnp.float32), dict[str, jax.Array]()
        for number, own in sorted(params[MULTI_TOKEN].items(), key=lambda one: int(one[0])):
            token_BT, target_BT = _shifted(token_BT, 1, 0), _shifted(target_BT, 1, -1)
            weight_BT = _shifted(weight_BT, 1, 0)
            if document_BT is not None:
                weight_BT = jnp.where(_shifted(document_BT, int(number), -1) == document_BT, weight_BT, 0)
            shared = shared_arrays(model, params, batch, position_BT, weight_BT, x_BTE, ctx)
            x_BTE, found = block(own, x_BTE, shared | {EMBEDDED: embed(token_BT)})
            lost, z, _ = model.head.losses(model.scaled(x_BTE), model.unembedding(params), target_BT, weight_BT, ctx)
            nll, sums = nll + lost, {name: sums.get(name, 0) + value for name, value in found.items()}
            sums["z"] = sums.get("z", 0) + z * self.weight / self.depth
        return Further(nll / self.depth, sums)


def _shifted(x_BT: jax.Array, places: int, fill: int) -> jax.Array:
    """At each place of a row what is so many places later; `fill` at the last ones."""
    return jnp.pad(x_BT[:, places:], ((0, 0), (0, places)), constant_values=fill)


def _applied(
    model: "Decoder", kind: LayerKind, own: Tree, x_BTE: jax.Array, shared: Tree, ctx: Context
) -> tuple[jax.Array, Tree]:
    """The normalised output of one such layer, and its sums."""
    own = ctx.gather(own)
    both = normal(model, own[EMBED_NORM], shared[EMBEDDED]), normal(model, own[HIDDEN_NORM], x_BTE)
    y_BTE = matmul(jnp.concatenate(both, -1), own[PROJECTION])
    y_BTE, sums = apply(model, kind, False, own[BLOCK], y_BTE, shared, ctx)
    return normal(model, own["norm"], y_BTE), sums
