"""What other tools call the keys of a recipe, for the hints of unknown keys and options."""

from collections.abc import Collection
from difflib import get_close_matches

NAMES = {
    "batch_size": "batch", "bs": "batch", "train_batch_size": "batch", "global_batch_size": "batch",
    "per_device_train_batch_size": "batch", "max_steps": "steps", "num_steps": "steps", "train_steps": "steps",
    "iterations": "steps", "num_epochs": "epochs", "max_epochs": "epochs", "num_train_epochs": "epochs",
    "learning_rate": "optimizer.lr", "weight_decay": "optimizer.decay", "eps": "optimizer.epsilon",
    "beta1": "optimizer.b1", "beta2": "optimizer.b2", "betas": "optimizer.b1", "clip_norm": "optimizer.clip",
    "gradient_clip": "optimizer.clip", "max_grad_norm": "optimizer.clip", "gradient_clip_val": "optimizer.clip",
    "grad_clip": "optimizer.clip", "warmup_steps": "optimizer.schedule.warmup",
    "warmup_ratio": "optimizer.schedule.warmup", "lr_scheduler": "optimizer.schedule",
    "lr_schedule": "optimizer.schedule", "scheduler": "optimizer.schedule", "grad_accum": "accumulate",
    "gradient_accumulation": "accumulate", "gradient_accumulation_steps": "accumulate",
    "accumulate_grad_batches": "accumulate", "random_seed": "seed", "eval_steps": "evaluate.every",
    "eval_every": "evaluate.every", "save_steps": "checkpoint.every", "save_every": "checkpoint.every",
    "early_stopping": "stop", "dtype": "precision.compute", "mixed_precision": "precision.compute",
    "gradient_checkpointing": "model.remat", "activation_checkpointing": "model.remat", "model_name": "model.kind",
    "max_length": "data.length", "max_seq_length": "data.length", "seq_len": "data.length",
    "sequence_length": "data.length", "dataset": "data", "steps_per_execution": "engine.steps_per_call",
    "val_split": "data.test", "validation_split": "data.test", "num_workers": "data.load.workers",
    "budget": "launch.budget", "lora_r": "lora.rank", "lora_rank": "lora.rank", "lora_alpha": "lora.alpha",
    "load_in_4bit": "lora.dtype", "load_in_8bit": "lora.dtype", "bnb_4bit_quant_type": "lora.dtype",
}  # fmt: skip
"""Keys and options of transformers, Keras, Lightning, torchtune, axolotl and the like, and ours."""


def own_name(name: str, taken: Collection[str] = ()) -> str:
    """Our key for the name of another tool, also if it is misspelt a little; empty if there is none. Names that are
    `taken` are keys of ours where it stands."""
    word, others = name.lower().replace("-", "_"), NAMES.keys() - set(taken)
    near = [word] if word in others else get_close_matches(word[:40], sorted(others), 1, 0.87)
    return NAMES[near[0]] if near else ""
