"""Inputs of each layer: an embedding of the token of its own, and a projection of what enters the first layer.

Gemma 3n and Gemma 4 E2B and E4B have them, as "per-layer embeddings". The table of a layer takes memory, but no
products. Dims: B batch, T tokens, E embed, P values of an input.
"""

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from dtrain.data.batch import TOKEN
from dtrain.models.feed_forward import activation
from dtrain.models.nn.context import Context
from dtrain.models.nn.layers import normalised
from dtrain.models.nn.matmul import matmul
from dtrain.models.nn.param import Init, Param, Tree

if TYPE_CHECKING:
    from dtrain.models.decoder import Decoder

TABLE, INPUTS = "table", "inputs"
"""Of the parameters of a layer the table of embeddings, and the matrices."""
FIRST, NORM = "first", "inputs_norm"
"""What all layers share: the activations before the first one, and the scale of projections."""


def params(model: "Decoder", inner: Init, outer: Init) -> Tree:
    """Those of one layer."""
    width, size, words = model.width, model.layer_inputs, model.layer_inputs_vocab or model.vocab
    return {
        TABLE: Param((model.padded(words), size), "vocab embed", inner, unpadded=(words, size)),
        INPUTS: {
            "projection": Param((width, size), "embed _", inner, fan_in=("embed",)),
            "gate": Param((width, size), "embed _", inner, fan_in=("embed",)),
            "out": Param((size, width), "_ embed", outer, fan_in=("_",)),
        },
    }


def shared(model: "Decoder", params: Tree, x_BTE: jax.Array, token_BT: jax.Array, ctx: Context) -> Tree:
    """What all layers share, from the activations before the first one."""
    if words := model.layer_inputs_vocab:
        token_BT = jnp.where(token_BT < words, token_BT, 0)
    norm = jax.tree.map(lambda x: x[None, None], ctx.gather(params[NORM]))
    return {FIRST: ctx.collect(x_BTE), TOKEN: token_BT, NORM: norm}


def applied(model: "Decoder", block: Tree, x_BTE: jax.Array, shared: Tree, ctx: Context) -> jax.Array:
    """(B, T, E), to be normalised and added to the activations x: out(act(gate(x)) * input). The input is the mean of
    embedding and projection times sqrt(2), both of which have a variance of about one."""
    own, size = block[INPUTS], model.layer_inputs
    token_BTP = block[TABLE] * math.sqrt(size)  # the rows, which `Layers.looked_up` has put in place of the table
    first_BTP = matmul(ctx.share(shared[FIRST]), own["projection"]) * model.width**-0.5
    first_BTP = normalised(shared[NORM], first_BTP, model.norm, model.epsilon, model.norm_offset)
    gate_BTP = activation(model.feed_forward)(matmul(x_BTE, own["gate"]))
    return matmul(gate_BTP * ((first_BTP + token_BTP) * 2**-0.5), own["out"])
