"""The config.json of a decoder, read and written by the tables of families, and what other families need."""

from pathlib import Path
from typing import Any

from dtrain.core.errors import DataError, FieldError
from dtrain.core.narrow import BLOCK
from dtrain.core.types import JsonObject
from dtrain.models.decoder import Decoder
from dtrain.models.families.dense import DENSE
from dtrain.models.families.family import Family
from dtrain.models.families.fields import Fields, Published
from dtrain.models.families.older import OLDER
from dtrain.models.families.older_names import LEARNED
from dtrain.models.families.parts import merged
from dtrain.models.families.sparse import SPARSE
from dtrain.models.rope import Learned
from dtrain.models.settings import differing, settings

FAMILIES: dict[str, Family] = DENSE | OLDER | SPARSE
"""By `model_type`."""

GEMMA3: JsonObject = {
    "model_type": "gemma3_text", "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216,
    "num_hidden_layers": 26, "num_attention_heads": 8,
}  # fmt: skip
"""What the `text_config` of Gemma 3 with images may leave out."""
GEMMA4: JsonObject = {
    "model_type": "gemma4_text", "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216,
    "num_hidden_layers": 30, "num_attention_heads": 8,
}  # fmt: skip
WITH_IMAGES: dict[str, JsonObject] = {
    "gemma3": GEMMA3,
    "gemma3n": {"model_type": "gemma3n_text", "vocab_size": 262_400, "hidden_size": 2048, "num_hidden_layers": 35,
                "num_attention_heads": 8},
    "gemma4": GEMMA4,
    "gemma4_unified": GEMMA4 | {"model_type": "gemma4_unified_text"},
    "llama4": {"model_type": "llama4_text", "vocab_size": 202_048, "hidden_size": 5120, "num_hidden_layers": 48,
               "num_attention_heads": 40},
    "qwen3_5": {
        "model_type": "qwen3_5_text", "vocab_size": 248_320, "hidden_size": 4096, "intermediate_size": 12_288,
        "num_hidden_layers": 32, "num_attention_heads": 16,
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe_text", "vocab_size": 248_320, "hidden_size": 2048, "num_hidden_layers": 40,
        "num_attention_heads": 16,
    },
}  # fmt: skip
"""Types of decoders with an image encoder, which is not read, and what their `text_config` may leave out."""
OF_BOTH = ("tie_word_embeddings", "quantization_config")
"""Fields beside `text_config` that are about the decoder, too."""
SAME = {"kimi_k2": "deepseek_v3"}
"""Types whose fields and tensors are those of another."""
_LATENT = "latent attention"
NEEDS: dict[str, str] = {
    "longcat_flash": f"{_LATENT} with experts beside it",
    "mistral4": f"{_LATENT} with queries that grow with their position",
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "glm_moe_dsa"), f"{_LATENT} with a sparse index"),
    **dict.fromkeys(("kimi_linear", "olmo_hybrid"), "layers of linear attention"),
    **dict.fromkeys(("mamba", "jamba"), "state-space layers of Mamba-1"),
    "mamba2": "layers without a feed-forward layer",
    "nemotron_h": "layers of one part each: states, attention, or a feed-forward layer",
    "falcon_h1": "attention and states side by side in a layer",
    "zamba2": "one attention layer that others share",
    "persimmon": "normalisations of queries and keys with biases",
    **dict.fromkeys(("bloom", "mpt", "falcon"), "attention with linear biases (ALiBi)"),
    "apertus": "the activation xIELU",
    "phimoe": "the router SparseMixer",
}  # fmt: skip
"""Of other decoders by `model_type` what they have that dtrain's has not."""


def published_model(config: JsonObject, context: int, path: Path) -> Published:
    """The decoder of a config.json, for rows of at most `context` tokens.

    Raises DataError if its architecture is not supported, or a field is missing or has an impossible value.
    """
    if config["model_type"] in WITH_IMAGES and isinstance(text := config.get("text_config"), dict):
        outer = {name: config[name] for name in OF_BOTH if name in config}
        config = WITH_IMAGES[config["model_type"]] | outer | text
    kind = SAME.get(str(config["model_type"]), str(config["model_type"]))
    if kind not in FAMILIES:
        classes = config.get("architectures")
        named = ", ".join(map(str, classes)) if isinstance(classes, list) and classes else "no architecture named"
        supported = ", ".join(sorted(FAMILIES)) + "; of images vit, resnet, and timm's vit, deit and resnet"
        needs = f": it needs {NEEDS[kind]}" if kind in NEEDS else ""
        raise DataError(
            f"{path}: dtrain does not support model_type {kind} ({named}){needs}", f"supported: {supported}"
        )
    family = FAMILIES[kind]
    fields = Fields(config, family.defaults, path, context)
    _read_format(fields)
    try:
        own: dict[str, Any] = {"context": context} | merged(family.parts, fields)
        model = Decoder(**own)
    except (FieldError, LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise DataError(f"{path} does not describe a decoder: {type(error).__name__} {error}") from error
    fields.refuse_unread()
    sources = dict.fromkeys(settings(model), f"model_type: {config['model_type']}") | fields.sources
    positions = config.get("n_positions", config.get("max_position_embeddings"))
    return Published(model, sources, tuple(fields.unserved), fields.unchecked, positions)


def _read_format(fields: Fields) -> None:
    """Weights in narrow formats that are read as wide ones: MXFP4, and FP8 in blocks (core/narrow.py)."""
    given = fields.values.get("quantization_config")
    if not isinstance(given, dict):
        return
    blocks = given.get("weight_block_size") == [BLOCK, BLOCK] and given.get("fmt", "e4m3") == "e4m3"
    if given.get("quant_method") == "mxfp4" or (given.get("quant_method") == "fp8" and blocks):
        fields.known.add("quantization_config")


def config_of(model: Decoder, kind: str = "") -> JsonObject | None:
    """The fields of config.json with which transformers computes the same; None if no family does.

    `kind`: the `model_type` that is tried first, that of the weights which the model began with. Each candidate is read
    back with `published_model` and accepted only if it gives this decoder.
    """
    learned = isinstance(model.position, Learned)
    first = WITH_IMAGES[kind]["model_type"] if kind in WITH_IMAGES else SAME.get(kind, kind)
    for name in sorted(FAMILIES, key=lambda name: name != first):
        family = FAMILIES[name]
        if not family.written or learned != (family.names in LEARNED) or not family.opens(model):
            continue
        config = {"architectures": [family.architecture], "model_type": name} | family.config(model)
        try:
            published = published_model(config, model.context, Path("config.json"))
        except DataError:
            continue
        if not published.unserved and not differing(settings(model), settings(published.model), model.context):
            return config
    return None
