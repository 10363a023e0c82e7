"""The config.json of published classifiers of images, of transformers and of timm, both ways."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtrain.core.errors import DataError, FieldError
from dtrain.core.files import read_object
from dtrain.core.types import JsonObject
from dtrain.data.batch import Preparation
from dtrain.models.families.fields import IGNORED, Fields, Published
from dtrain.models.families.parts import GELUS
from dtrain.models.resnet import WIDER, ResNet
from dtrain.models.settings import settings
from dtrain.models.vit import ViT

TOP = 255.0
"""The largest value of a pixel."""
CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"
DEFAULTS: dict[str, JsonObject] = {
    "vit": {
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
        "hidden_act": "gelu", "layer_norm_eps": 1e-12, "image_size": 224, "patch_size": 16, "num_channels": 3,
        "qkv_bias": True,
    },
    "resnet": {
        "num_channels": 3, "embedding_size": 64, "hidden_sizes": [256, 512, 1024, 2048], "depths": [3, 4, 6, 3],
        "layer_type": "bottleneck", "hidden_act": "relu", "downsample_in_first_stage": False,
        "downsample_in_bottleneck": False,
    },
}  # fmt: skip
"""The defaults of transformers."""
OF_PICTURES = {
    "mean", "std", "input_size", "interpolation", "crop_pct", "crop_mode", "fixed_input_size", "pool_size",
    "first_conv", "classifier", "url", "hf_hub_id", "tag", "license", "custom_load",
}  # fmt: skip
"""Fields of timm's `pretrained_cfg`, which older files have at the top."""
HARMLESS = IGNORED | OF_PICTURES | {
    "encoder_stride", "pooler_act", "pooler_output_size", "attention_probs_dropout_prob", "hidden_dropout_prob",
    "out_features", "out_indices", "stage_names", "num_labels", "label_names", "label_descriptions", "num_features",
    "pretrained_cfg",
}  # fmt: skip
"""Fields about training, other parts and names of classes; of pictures, those that matter are read by `prepared_as`."""
IN_TRAINING = {
    "drop_path_rate", "drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate",
    "drop_block_rate", "weight_init", "zero_init_last", "dynamic_img_size", "pretrained",
}  # fmt: skip
"""Arguments of timm that concern training, initial values or pictures of other sizes alone."""
VITS = {
    "tiny": (192, 12, 3),
    "small": (384, 12, 6),
    "base": (768, 12, 12),
    "large": (1024, 24, 16),
    "huge": (1280, 32, 16),
}
"""Width, layers and heads of the sizes of timm."""
TIMM_VIT = re.compile(rf"(vit|deit)_({'|'.join(VITS)})_patch(\d+)_(\d+)")
TIMM_RESNET = re.compile(r"(tv_)?resnet(18|34|50|101|152)")
BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
BOTTLENECK = 50
"""From how many layers on blocks are bottlenecks."""
TIMM_ARGS = {"img_size": "image", "patch_size": "patch", "embed_dim": "width", "depth": "layers", "num_heads": "heads"}
"""Arguments of timm's vision transformers, and ours."""
REGISTERED = "vit_tiny_patch16_224"
"""The name in timm that is written of any vision transformer, with the arguments that make it this one."""
MOST = 1_000_000
"""Largest size that a config.json may give."""


class NoConfig(Exception):
    """Why a library has no model that computes the same."""


def is_of_images(config: JsonObject) -> bool:
    """Whether it describes a classifier of images: one of transformers, or of timm, whose files have no model_type."""
    return config.get("model_type") in DEFAULTS or ("architecture" in config and "model_type" not in config)


def image_model(config: JsonObject, path: Path) -> Published:
    """The classifier of a config.json. DataError if it is not supported, or has an impossible value."""
    timm = "model_type" not in config
    fields = Fields(config, {} if timm else DEFAULTS[config["model_type"]], path)
    try:
        model = _of_timm(fields) if timm else _vit(fields) if config["model_type"] == "vit" else _resnet(fields)
    except FieldError as error:
        field = fields.sources.get(error.field.split(".")[0], error.field)
        raise DataError(
            f"{path}: {field}: {error.message}", "use the config.json that belongs to the parameters"
        ) from error
    unchecked = tuple(sorted(config.keys() - fields.known - HARMLESS))
    name = f"architecture: {config['architecture']}" if timm else f"model_type: {config['model_type']}"
    sources = dict.fromkeys(settings(model), name) | fields.sources
    return Published(model, sources, tuple(fields.unserved), unchecked, None)


def _whole(path: Path, name: str, value: Any) -> int:
    """The value, which must be a number of things. DataError if it is not."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MOST:
        message = f"{path}: {name}: expected a whole number from 1 to {MOST:,}; found {json.dumps(value)[:60]}"
        raise DataError(message, "use the config.json that belongs to the parameters")
    return value


def _wholes(path: Path, name: str, value: Any, count: int | None = None) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not value or (count and len(value) != count):
        message = f"{path}: {name}: expected a list of {count or 'whole'} numbers; found {json.dumps(value)[:60]}"
        raise DataError(message, "use the config.json that belongs to the parameters")
    return tuple(_whole(path, name, one) for one in value)


def _side(path: Path, name: str, value: Any) -> tuple[int, ...]:
    """Height and width, from both or from one number for both."""
    return _wholes(path, name, value, 2) if isinstance(value, list) else (_whole(path, name, value),) * 2


def _classes(path: Path, config: JsonObject) -> int:
    named = config.get("id2label")
    if "num_labels" in config or not isinstance(named, dict | list):
        return _whole(path, "num_labels", config.get("num_labels", 2))
    return max(len(named), 1)


def _vit(fields: Fields) -> ViT:
    act, path, values = fields("hidden_act", "activation"), fields.path, fields.values

    def size(name: str, ours: str) -> int:
        return _whole(path, name, fields(name, ours))

    height, width = _side(path, "image_size", values.get("image_size", fields.defaults["image_size"]))
    fields.known.add("image_size")
    fields.sources["image"] = f"image_size: {height} x {width}"
    if act not in GELUS:
        fields.refuse(f"hidden_act: {json.dumps(act)}")
    if fields("qkv_bias", "bias") is not True:
        fields.refuse(f"qkv_bias: {json.dumps(values['qkv_bias'])}")
    epsilon = fields("layer_norm_eps", "epsilon")
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 < epsilon < 1:
        raise DataError(f"{path}: layer_norm_eps: expected a number from 0 to 1; found {json.dumps(epsilon)}", "")
    return ViT(
        image=(height, width, size("num_channels", "")),
        classes=_classes(path, values),
        patch=size("patch_size", "patch"),
        layers=size("num_hidden_layers", "layers"),
        width=size("hidden_size", "width"),
        heads=size("num_attention_heads", "heads"),
        hidden=size("intermediate_size", "hidden"),
        pool="token",
        bias=True,
        activation="gelu_tanh" if GELUS.get(act) == "gelu_tanh" else "gelu",
        epsilon=float(epsilon),
    )


def _resnet(fields: Fields) -> ResNet:
    path = fields.path
    for name in ("downsample_in_first_stage", "downsample_in_bottleneck"):
        if fields(name):
            fields.refuse(f"{name}: True")
    if fields("hidden_act") != "relu":
        fields.refuse(f"hidden_act: {json.dumps(fields('hidden_act'))}")
    kind = fields("layer_type", "bottleneck")
    if kind not in ("basic", "bottleneck"):
        fields.refuse(f"layer_type: {json.dumps(kind)}")
    wider = WIDER if kind == "bottleneck" else 1
    sizes = _wholes(path, "hidden_sizes", fields("hidden_sizes", "stages"))
    if any(size % wider for size in sizes):
        raise DataError(f"{path}: hidden_sizes: {list(sizes)} are not divisible by {wider}, as bottlenecks need", "")
    usual = DEFAULTS["vit"]["image_size"]  # it takes any size, and config.json has none
    return ResNet(
        image=(usual, usual, _whole(path, "num_channels", fields("num_channels"))),
        classes=_classes(path, fields.values),
        stages=tuple(size // wider for size in sizes),
        blocks=_wholes(path, "depths", fields("depths", "blocks")),
        stem=_whole(path, "embedding_size", fields("embedding_size", "stem")),
        bottleneck=kind == "bottleneck",
    )


def _of_timm(fields: Fields) -> ViT | ResNet:
    fields.known |= {"architecture", "num_classes", "global_pool", "model_args"}
    values, path = fields.values, fields.path
    name, pretrained = str(values["architecture"]), _mapping(path, "pretrained_cfg", values) or values
    arguments = {key: value for key, value in _mapping(path, "model_args", values).items() if value is not None}
    plain, pool = name.partition(".")[0], arguments.pop("global_pool", values.get("global_pool"))
    given = arguments.pop("num_classes", None) or values.get("num_classes") or pretrained.get("num_classes", 1000)
    classes = _whole(path, "num_classes", given)
    channels, height, width = _wholes(path, "input_size", pretrained.get("input_size") or (3, 224, 224), 3)
    channels = _whole(path, "in_chans", arguments.pop("in_chans", channels))
    arguments = {key: value for key, value in arguments.items() if key not in IN_TRAINING}
    if match := TIMM_VIT.fullmatch(plain):
        size, layers, heads = VITS[match[2]]
        own = {"img_size": int(match[4]), "patch_size": int(match[3]), "embed_dim": size, "depth": layers}
        own |= {"num_heads": heads}
        own |= {key: arguments.pop(key) for key in list(arguments) if key in TIMM_ARGS}
        height, width = _side(path, "img_size", own.pop("img_size"))
        ratio = arguments.pop("mlp_ratio", 4.0)
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio < MOST:
            raise DataError(f"{path}: mlp_ratio: expected a number; found {json.dumps(ratio)}", "")
        sizes: Any = {TIMM_ARGS[key]: _whole(path, key, value) for key, value in own.items()}
        fields.sources["image"] = f"img_size: {height} x {width}"
        model = ViT(
            image=(height, width, channels), classes=classes, hidden=max(1, int(sizes["width"] * ratio)), pool="token",
            bias=True, activation="gelu", epsilon=1e-6, **sizes,
        )  # fmt: skip
    elif match := TIMM_RESNET.fullmatch(plain):
        depth = int(match[2])
        blocks = _wholes(path, "layers", arguments.pop("layers", BLOCKS[depth]), len(BLOCKS[depth]))
        image = (height, width, channels)
        model = ResNet(image=image, classes=classes, blocks=blocks, bottleneck=depth >= BOTTLENECK)
    else:
        message = f"{path}: dtrain does not support timm's architecture {name}"
        known = "vit_SIZE_patchP_PIXELS, deit_SIZE_patchP_PIXELS, resnet18, 34, 50, 101, 152"
        raise DataError(message, f"supported: {known}")
    usual = "token" if isinstance(model, ViT) else "avg"
    if pool not in (None, usual):
        fields.refuse(f"global_pool: {pool}")
    for key, value in arguments.items():
        fields.refuse(f"model_args.{key}: {json.dumps(value)[:60]}")
    return model


def _mapping(path: Path, name: str, values: JsonObject) -> JsonObject:
    found = values.get(name) or {}
    if not isinstance(found, dict):
        raise DataError(f"{path}: {name}: expected a mapping; found {json.dumps(found)[:60]}", "")
    return found


def prepared_as(source: Path, channels: int) -> Preparation | None:
    """How the pictures that published parameters were trained on were normalised: from preprocessor_config.json, or
    from timm's config.json; None if neither says so. DataError if one is damaged.

    Pixels that were not scaled to 0..1 are accounted for: (p f - mean) / std is (p / 255 - mean / k) / (std / k), with
    k = 255 f.
    """
    folder = source if source.is_dir() else source.parent
    about: JsonObject = {}
    mean = std = None
    factor = 1 / TOP
    if (folder / PREPROCESSOR).is_file():
        path, about = folder / PREPROCESSOR, read_object(folder / PREPROCESSOR)
        mean, std = about.get("image_mean"), about.get("image_std")
        if about.get("do_normalize") is False:
            mean, std = 0.0, 1.0
        factor = about.get("rescale_factor", factor) if about.get("do_rescale", True) else 1.0
    elif (path := folder / CONFIG).is_file():
        config = read_object(path)
        about = _mapping(path, "pretrained_cfg", config) or config
        mean, std = about.get("mean"), about.get("std")
    if mean is None or std is None:
        return None
    means, stds = _numbers(path, "mean", mean, channels), _numbers(path, "std", std, channels)
    (scale,) = _numbers(path, "rescale_factor", factor, 1)
    if min(stds) <= 0 or scale <= 0:
        raise DataError(f"{path}: the deviation of the pixels, and their factor, must be above 0", "")
    k = 1.0 if math.isclose(scale, 1 / TOP, rel_tol=1e-6) else scale * TOP
    return Preparation(tuple(one / k for one in means), tuple(one / k for one in stds))


def _numbers(path: Path, name: str, value: Any, count: int) -> tuple[float, ...]:
    """One number, or one for each channel. DataError if they are not."""
    found = tuple(value) if isinstance(value, list) else (value,)
    wrong = any(isinstance(one, bool) or not isinstance(one, int | float) or not math.isfinite(one) for one in found)
    if wrong or len(found) not in (1, count):
        wanted = "a number" + (f", or one for each of {count} channels" if count > 1 else "")
        raise DataError(f"{path}: {name} of the pixels: expected {wanted}; found {json.dumps(value)[:60]}", "")
    return tuple(map(float, found))


def unlike(given: Preparation, wanted: Preparation) -> bool:
    """Whether pixels are normalised in another way, by more than a rounding of three digits."""

    def differ(ours: Sequence[float], theirs: Sequence[float]) -> bool:
        count = max(len(ours), len(theirs))
        both = (tuple(one) * (count if len(one) == 1 else 1) for one in (ours, theirs))
        return not all(math.isclose(a, b, abs_tol=1e-3) for a, b in zip(*both, strict=True))

    return differ(given.mean, wanted.mean) or differ(given.std, wanted.std)


def side(source: Path) -> tuple[int, int] | None:
    """Height and width of the pictures in preprocessor_config.json; None if it does not say them."""
    path = source / PREPROCESSOR
    about = read_object(path) if path.is_file() else {}
    size = about.get("crop_size") if about.get("do_center_crop") else None
    size = about.get("size") if size is None else size
    if isinstance(size, dict):
        edge = size.get("shortest_edge")
        size = (size.get("height", edge), size.get("width", edge))
    found = (size, size) if isinstance(size, int) else size
    match found:
        case (int(height), int(width)) if min(height, width) > 0:
            return height, width
    return None


def image_files(
    model: ViT | ResNet, library: str, classes: Sequence[str], pictures: Preparation
) -> tuple[dict[str, JsonObject], str]:
    """The files beside the parameters with which that library computes the same, by name, and what is to say about
    pictures of other shapes. NoConfig, with the settings that differ, if there are none.

    What is written is read back, and must give this model.
    """
    assert model.image
    height, width, channels = model.image
    mean, std = (one * (channels if len(one) == 1 else 1) for one in pictures[:2])
    pictures = Preparation(mean, std, pictures.fit)
    if len(classes) != model.classes:
        classes = [f"class {number}" for number in range(model.classes)]
    of_timm = library == "timm"
    config = _config_of_timm(model, classes, pictures) if of_timm else _config_of_transformers(model, classes)
    try:
        read = image_model(json.loads(json.dumps(config)), Path(CONFIG))
    except DataError as error:
        raise NoConfig(error.message.partition(": ")[2]) from error
    ours, theirs = settings(model), settings(read.model)
    unlike = [
        f"{name} is {theirs.get(name)} there, {ours.get(name)} here" for name in ours if ours[name] != theirs.get(name)
    ]
    if read.unserved or unlike or read.model.classes != model.classes:
        raise NoConfig("; ".join([*read.unserved, *unlike]) or "of another number of classes")
    if of_timm:
        return {CONFIG: config}, _other_shapes(pictures, MODES)
    alike = pictures.fit == "stretch" or (pictures.fit == "crop" and height == width)
    return {CONFIG: config, PREPROCESSOR: _preprocessor(model, pictures)}, "" if alike else _other_shapes(pictures, {})


MODES = {"crop": "center", "pad": "border", "stretch": "squash"}
"""timm's names for what is done with pictures of another shape."""


def _other_shapes(pictures: Preparation, known: Mapping[str, str]) -> str:
    if pictures.fit in known:
        return ""
    return f"pictures of another shape are not prepared alike there: data.fit is {pictures.fit}"


def _preprocessor(model: ViT | ResNet, pictures: Preparation) -> JsonObject:
    """preprocessor_config.json: a square is the middle of a picture whose shorter side is made as long, or a picture
    is stretched."""
    assert model.image
    height, width, _ = model.image
    size: JsonObject = {"height": height, "width": width}
    cropped: JsonObject = {"do_center_crop": True, "size": {"shortest_edge": height}, "crop_size": size}
    crops = pictures.fit == "crop" and height == width
    return {
        "image_processor_type": "BitImageProcessor" if crops else "ViTImageProcessor",
        "do_resize": True, "resample": 3, "do_rescale": True, "rescale_factor": 1 / TOP, "do_normalize": True,
        "image_mean": list(pictures.mean), "image_std": list(pictures.std), **(cropped if crops else {"size": size}),
    }  # fmt: skip


def _config_of_transformers(model: ViT | ResNet, classes: Sequence[str]) -> JsonObject:
    assert model.image
    height, width, channels = model.image
    names: JsonObject = {
        "id2label": {str(number): name for number, name in enumerate(classes)},
        "label2id": {name: number for number, name in enumerate(classes)},
        "num_channels": channels,
    }
    if isinstance(model, ViT):
        acts = {form: name for name, form in GELUS.items()}
        return names | {
            "architectures": ["ViTForImageClassification"], "model_type": "vit", "hidden_size": model.width,
            "num_hidden_layers": model.layers, "num_attention_heads": model.heads, "intermediate_size": model.hidden,
            "hidden_act": acts[model.activation], "layer_norm_eps": model.epsilon, "patch_size": model.patch,
            "image_size": height if height == width else [height, width], "qkv_bias": model.bias,
        }  # fmt: skip
    sizes = [size * (WIDER if model.bottleneck else 1) for size in model.stages]
    return names | {
        "architectures": ["ResNetForImageClassification"], "model_type": "resnet", "embedding_size": model.stem,
        "hidden_sizes": sizes, "depths": list(model.counts), "hidden_act": "relu",
        "layer_type": "bottleneck" if model.bottleneck else "basic",
    }  # fmt: skip


def _config_of_timm(model: ViT | ResNet, classes: Sequence[str], pictures: Preparation) -> JsonObject:
    assert model.image
    height, width, channels = model.image
    about: JsonObject = {
        "input_size": [channels, height, width], "mean": list(pictures.mean), "std": list(pictures.std),
        "num_classes": model.classes, "interpolation": "bicubic", "crop_pct": 1.0,
        "crop_mode": MODES[pictures.fit],
    }  # fmt: skip
    config: JsonObject = {"num_classes": model.classes, "label_names": list(classes)}
    if isinstance(model, ViT):
        arguments: JsonObject = {key: getattr(model, ours) for key, ours in TIMM_ARGS.items() if ours != "image"}
        arguments |= {"img_size": height if height == width else [height, width]}
        arguments |= {"mlp_ratio": model.hidden / model.width}
        name = REGISTERED
        about |= {"first_conv": "patch_embed.proj", "classifier": "head"}
        return config | {"architecture": name, "global_pool": "token", "model_args": arguments, "pretrained_cfg": about}
    fitting = [depth for depth in BLOCKS if (depth >= BOTTLENECK) == model.bottleneck]
    depth = next((depth for depth in fitting if BLOCKS[depth] == model.counts), fitting[0])
    about |= {"first_conv": "conv1", "classifier": "fc"}
    arguments = {"layers": list(model.counts)}
    return config | {"architecture": f"resnet{depth}", "global_pool": "avg", "model_args": arguments,
                     "pretrained_cfg": about}  # fmt: skip
