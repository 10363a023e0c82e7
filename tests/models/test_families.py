"""Published architectures against `transformers`: import by config.json alone, logits, export, adapters, chat tokens.

The library has an environment of its own, since it needs PyTorch: DTRAIN_TEST_HF_PYTHON names its Python.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dtrain.checkpoint.tensors import opened
from dtrain.core.errors import DataError, RecipeError
from dtrain.core.run_dir import Folder
from dtrain.data.chat import Chat
from dtrain.inference.generate import Sampling, generator_of
from dtrain.models.families.config import FAMILIES, published_model
from dtrain.models.multi_token import MultiToken
from dtrain.models.nn.single_device import SingleDeviceContext
from dtrain.train.import_run import import_adapters, import_published
from dtrain.weights.export import export
from dtrain.weights.load import LoadedRun, load_run
from dtrain.weights.read import find_tensors, leaves_by_path, read, without_padding
from tests.conftest import Dtrain
from tests.data.test_chat import TALK, tokenizer
from tests.models.hf_families import sized
from tests.models.random_decoders import parameters, written

PYTHON = os.environ.get("DTRAIN_TEST_HF_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="DTRAIN_TEST_HF_PYTHON names no Python with transformers and peft"),
]
SCRIPT = Path(__file__).with_name("hf_reference.py")
SOME = ("cohere2", "deepseek-v3", "gemma3n", "gemma4-moe", "glm4", "gpt-oss", "granite-hybrid", "ministral3")
"""Families that have between them what the others do not: in every change; the rest at night."""
RECURRENT = 1e-4, 5e-4
"""The tolerances of logits and gradients, in place of 1e-5, of layers whose small results are normalised: of models
with small parameters, transformers' logits in float32 are up to 1.4e-4 from its own in float64, as dtrain's are."""
LAYER_INPUTS = 1e-4, 1e-4
"""The same of models with inputs of each layer, which are normalised, too: those of transformers are up to 2e-5 and
1.1e-4 from its own."""
ONE_KEY = ("gpt-bigcode", "gemma4-e2b")
"""Models with one head of keys, which no axis splits."""
MESHES = ["data: 8", "data: 1, fsdp: 4, tensor: 2", "data: 1, tensor: 2, fsdp: 2, expert: 2"]


def reference(*words: str | Path, script: Path = SCRIPT) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("JAX", "XLA"))}
    environment["HF_HUB_OFFLINE"] = "1"
    done = subprocess.run([PYTHON, script, *words], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Path]:
    folder, here = tmp_path_factory.mktemp("published"), Path(__file__)
    nightly = any(item.path == here and item.get_closest_marker("nightly") for item in request.session.items)
    reference("make", folder, *(() if nightly else SOME))
    yield folder


def loaded(name: str) -> LoadedRun:
    return load_run(Folder(Path("runs") / name), [], lambda _: None)


def logits(run: LoadedRun, tokens: np.ndarray) -> np.ndarray:
    model: Any = run.recipe.model
    batch, weight = {"token": jnp.asarray(tokens, jnp.int32)}, jnp.ones(tokens.shape, jnp.float32)
    x, _ = model.activations(run.params, batch, weight, SingleDeviceContext())
    return np.asarray(model.head.logits(x, model.unembedding(run.params), "float32"))[..., : model.vocab]


def tolerances(model: Any, name: str) -> tuple[float, float]:
    """Of logits, as a share of the largest, and of gradients, as a share of their norm."""
    if model.delta or model.layer_inputs:
        return RECURRENT if model.delta else LAYER_INPUTS
    return 1e-5, 2e-5 if name.startswith("gemma4") else 1e-5  # its scores are not divided: more of them are far apart


@pytest.mark.nightly
def test_every_family_gives_the_published_logits_both_ways(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tokens, families = np.load(published / "tokens.npy"), list(json.loads((published / "families.json").read_text()))
    for number, name in enumerate(families):
        experts = any("experts" in field and "tok" not in field for field in sized()[name][1])
        place = number % len(MESHES) if experts else 0 if name in ONE_KEY else number % 2
        mesh = f"mesh={{{MESHES[place]}}}"
        import_published(published / name, name, [mesh], None, Path("runs"), lambda _: None)
        run = loaded(name)
        wanted = np.load(published / name / "logits.npy")
        most = tolerances(run.recipe.model, name)[0] * max(np.abs(wanted).max(), 1)
        np.testing.assert_allclose(logits(run, tokens), wanted, atol=most, rtol=0, err_msg=name)
        kind = sized()[name][0]
        lines, family = export(run, Path("out") / name, base=kind), FAMILIES[kind]
        assert "ForCausalLM" in lines[1] or "LMHeadModel" in lines[1]
        written = json.loads((Path("out") / name / "config.json").read_text())["model_type"]
        assert written == kind or not family.written or not family.opens(run.recipe.model), name
    reference("logits", tmp_path / "out", published / "tokens.npy")
    for name in families:
        found, wanted = (np.load(place / name / "logits.npy") for place in (Path("out"), published))
        assert np.array_equal(found, wanted), name
        kinds = [
            json.loads((place / name / "config.json").read_text())["model_type"] for place in (published, Path("out"))
        ]
        if kinds[0] != kinds[1] or name in ("phi3", "qwen3"):  # tensors that are split there, and files
            continue
        before, after = load_file(published / name / "model.safetensors"), load_file(f"out/{name}/model.safetensors")
        before, after = ({key.removeprefix("transformer."): x for key, x in d.items()} for d in (before, after))
        assert before.keys() == after.keys()
        skipped = {key: 2 if key.endswith("embed_positions.weight") else 0 for key in before}  # OPT's first rows
        assert all(np.array_equal(before[key][rows:], after[key][rows:]) for key, rows in skipped.items()), name


def test_every_family_is_compared() -> None:
    alike = {"gemma4_unified_text"}  # other defaults of the same fields: transformers has no such decoder alone
    assert {kind for kind, _ in sized().values()} == FAMILIES.keys() - alike


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SOME else pytest.mark.nightly) for name in sized()]
)
def test_logits_loss_and_gradients_are_the_published_ones(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of each family at two sizes: imported by config.json alone, the loss and the gradient of every tensor."""
    monkeypatch.chdir(tmp_path)
    folder, token_BT = published / name, np.load(published / "tokens.npy")
    import_published(folder, name, [], None, Path("runs"), lambda _: None)
    run = loaded(name)
    wanted = np.load(folder / "logits.npy")
    model: Any = run.recipe.model
    tolerance, of_gradients = tolerances(model, name)
    np.testing.assert_allclose(logits(run, token_BT), wanted, atol=tolerance * max(np.abs(wanted).max(), 1), rtol=0)
    target_BT = np.concatenate([token_BT[:, 1:], np.full((len(token_BT), 1), -1)], 1)
    batch = {"token": jnp.asarray(token_BT, jnp.int32), "target": jnp.asarray(target_BT, jnp.int32)}
    if model.experts:  # the losses of the router are dtrain's own
        model = replace(model, experts=replace(model.experts, balance=0.0))

    def loss(params: Any) -> Any:
        found = model.loss(params, batch, SingleDeviceContext())
        return found.sum / found.weight

    value, gradients = jax.jit(jax.value_and_grad(loss))(run.params)
    np.testing.assert_allclose(value, np.load(folder / "loss.npy"), rtol=2e-6)
    declared = without_padding(run.assembly.layout.declared)
    with opened(folder / "gradients") as tensors:
        where = find_tensors(tensors, model, declared, folder)
        shapes = leaves_by_path(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
                                             run.params))  # fmt: skip
        expected = read(tensors, where, declared, shapes)
    most = max(float(np.linalg.norm(x)) for x in expected.values())
    of = leaves_by_path(declared)
    for path, found in leaves_by_path(gradients).items():
        if not of[path].trained:
            continue
        # that of a bias of keys is zero but for rounding
        size = max(float(np.linalg.norm(expected[path])), 1e-2 * most)
        assert float(np.linalg.norm(found - expected[path])) < of_gradients * size, path


@pytest.mark.parametrize(
    ("kind", "depth"), [("deepseek_v3", 2), pytest.param("glm4_moe", 1, marks=pytest.mark.nightly)]
)
def test_layers_that_predict_further_tokens_learn_what_those_of_transformers_do(
    tmp_path: Path, kind: str, depth: int
) -> None:
    """Exported, and read by its `MtpModel`: the loss, and the gradient of each of their tensors and of the tables."""
    fields = next(fields for own, fields in sized().values() if own == kind)
    config = {"model_type": kind, "rms_norm_eps": 1e-6} | fields | {"num_nextn_predict_layers": depth}
    model: Any = published_model(config, 64, Path("config.json")).model
    model = replace(model, multi_token=MultiToken(depth=depth, weight=0.4), experts=replace(model.experts, balance=0.0))
    params, token_BT = parameters(model, 0), np.random.default_rng(0).integers(3, 96, (2, 40))
    written(model, params, tmp_path / "out")
    np.save(tmp_path / "tokens.npy", token_BT)
    reference("further", tmp_path / "out", tmp_path / "tokens.npy", "0.4", tmp_path / "found.npz")
    target_BT = np.concatenate([token_BT[:, 1:], np.full((2, 1), -1)], 1)
    batch = {"token": jnp.asarray(token_BT, jnp.int32), "target": jnp.asarray(target_BT, jnp.int32)}

    def loss(params: Any) -> Any:
        found = model.loss(params, batch, SingleDeviceContext())
        return found.sum / found.weight

    value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    wanted = np.load(tmp_path / "found.npz")
    np.testing.assert_allclose(value, wanted["loss"], rtol=2e-6)
    pairs = {"model.embed_tokens.weight": gradients["embed"][: model.vocab], "lm_head.weight": gradients["head"].T}
    for number, own in gradients["multi_token"].items():
        layer, block = f"further.layers.{int(number) - 1}.", own["block"]
        pairs |= {f"{layer}eh_proj.weight": own["projection"].T, f"{layer}post_norm.weight": own["norm"]["scale"]}
        pairs |= {f"{layer}{name[0]}norm.weight": own[f"{name}_norm"]["scale"] for name in ("embed", "hidden")}
        pairs[f"{layer}mtp_block.mlp.gate.weight"] = block["moe"]["router"].T
        pairs[f"{layer}mtp_block.mlp.shared_experts.down_proj.weight"] = block["moe"]["shared"]["down"].T
        pairs[f"{layer}mtp_block.self_attn.o_proj.weight"] = block["out"]["weight"].reshape(-1, model.width).T
        experts = np.swapaxes(block["moe"]["experts"]["down"], 1, 2)
        pairs[f"{layer}mtp_block.mlp.experts.down_proj"] = experts
    for name, found in pairs.items():
        assert np.linalg.norm(found - wanted[name]) < 1e-5 * np.linalg.norm(wanted[name]), name


@pytest.mark.nightly
def test_narrow_weights_give_the_logits_of_transformers(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MXFP4 and FP8, each device its own part: as there, where they are made wide when they are read."""
    monkeypatch.chdir(tmp_path)
    reference(published, tmp_path / "narrow", script=SCRIPT.with_name("hf_narrow.py"))
    tokens = np.load(published / "tokens.npy")
    for name in ("gpt-oss", "deepseek-v3"):
        folder = tmp_path / "narrow" / name
        import_published(folder, name, ["mesh={data: 2, fsdp: 2, tensor: 2}"], None, Path("runs"), lambda _: None)
        found, wanted, wide = logits(loaded(name), tokens), np.load(folder / "logits.npy"), published / name
        np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max(), rtol=0)
        assert np.abs(wanted - np.load(wide / "logits.npy")).max() > 0.01 * np.abs(wanted).max()


CONTINUED, PROMPT = 24, 13
"""The prompt is not as long as the slots that generation makes for it: it begins with empty ones."""


@pytest.mark.nightly
@pytest.mark.parametrize("name", sized())
def test_greedy_continuations_are_those_of_the_whole_pass(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With the cache, token by token, and from the logits of the whole text: the same words."""
    monkeypatch.chdir(tmp_path)
    prompts = np.load(published / "tokens.npy")[:, :PROMPT]
    import_published(published / name, name, [], None, Path("runs"), lambda _: None)
    run = loaded(name)
    drawn_TB = np.stack(list(generator_of(run).continued(prompts.tolist(), CONTINUED, Sampling(temperature=0))))
    assert drawn_TB.shape == (CONTINUED, len(prompts))
    whole = logits(run, np.concatenate([prompts, drawn_TB.T], 1))[:, PROMPT - 1 : -1]
    best = np.take_along_axis(whole, drawn_TB.T[..., None], -1)[..., 0]
    assert np.array_equal(whole.argmax(-1), drawn_TB.T) or (whole.max(-1) - best).max() < 1e-5 * np.abs(whole).max()


@pytest.mark.nightly
def test_adapters_go_to_peft_and_come_back(published: Path, dtrain: Dtrain, tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"ADD {i} AND {i + 1}: ", "response": f"{2 * i + 1}"}) for i in range(40)]
    (tmp_path / "chat.jsonl").write_text("\n".join(lines))
    dtrain("import", published / "llama2", "--out", "base")
    tune = ["data.files=[chat.jsonl]", "data.tokenizer=bytes", "data.template=plain", "optimizer.lr=0.01"]
    tune += ["precision.compute=float32"]
    assert "no tokenizer.json" in dtrain("generate", "base", "--prompt", "A", code=4).stderr
    dtrain("run", "base-tune.yaml", *tune, "epochs=10", "data.cache=cache")
    said = "for PEFT, on the model that the base came from"
    assert dtrain("export", "base-tune", "adapter", "--adapters").stderr.splitlines()[-1].endswith(said)
    dtrain("run", "base-tune.yaml", *tune, "epochs=1", "data.cache=cache", "lora.dtype=bfloat16", "name=half")
    assert f"{said}, in bfloat16: this run has it so" in dtrain("export", "half", "half", "--adapters").stderr
    dtrain("export", "base-tune", "merged")
    reference("peft", published / "llama2", tmp_path / "adapter", published / "tokens.npy", tmp_path / "peft.npy")
    reference("logits", tmp_path, published / "tokens.npy")
    plain, merged = np.load(published / "llama2" / "logits.npy"), np.load(tmp_path / "merged" / "logits.npy")
    assert np.abs(merged - plain).max() > 0.1
    np.testing.assert_allclose(np.load(tmp_path / "peft.npy"), merged, atol=3e-5)
    assert "--base must name the run" in dtrain("import", "adapter", "--out", "next", code=2).stderr
    dtrain("import", "adapter", "--out", "next", "--base", "base")
    dtrain("export", "next", "again", "--adapters")
    first, second = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "again"))
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[key], second[key]) for key in first)
    dtrain("run", "runs/next/recipe.yaml", *tune, "epochs=1", "data.cache=cache", "--allow-changes")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    refused = dtrain("import", "adapter", "--out", "dora", "--base", "base", code=4).stderr
    assert "use_dora: True is not supported" in refused
    assert not (tmp_path / "runs" / "dora").exists()


def test_chat_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    marked = "{% for m in messages %}<|im_start|>{{ m.role }} {% if m.role == 'assistant' %}{% generation %}"
    marked += "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    folder = tokenizer(tmp_path / "t", marked)
    talks = [TALK, [{"role": "user", "content": "🙂 hello"}, {"role": "assistant", "content": "so 🙂🙂  soon\n"}]]
    (tmp_path / "chat.json").write_text(json.dumps(talks))
    reference("tokens", folder, tmp_path / "chat.json", tmp_path / "out.json")
    (tmp_path / "chat.jsonl").write_text("\n".join(json.dumps({"messages": talk}) for talk in talks))
    data = Chat(files=(str(tmp_path / "chat.jsonl"),), length=64, tokenizer=str(folder), pack=False, test=0.0,
                cache=str(tmp_path / "cache"))  # fmt: skip
    batch = data.open("train").rows(np.arange(2))
    for row, (ids, mask) in enumerate(json.loads((tmp_path / "out.json").read_text())):
        filled = batch["document"][row] == 0
        assert batch["token"][row][filled].tolist() == ids[:-1]
        assert (batch["target"][row][filled] >= 0).tolist() == [bool(one) for one in mask[1:]]
        assert any(mask)


@pytest.mark.nightly
def test_folders_that_do_not_fit_leave_nothing_behind(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def refused(change: dict[str, Any], message: str, name: str = "llama2") -> None:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        for file in filter(Path.is_file, (published / name).iterdir()):
            (folder / file.name).write_bytes(file.read_bytes())
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(DataError, match=message):
            import_published(folder, "new", [], None, Path("runs"), lambda _: None)
        assert not Path("runs/new").exists()
        assert not Path("new-tune.yaml").exists()

    refused({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "does not support model_type mamba .Mamba")
    refused({"hidden_act": "relu2"}, "does not support:\n  hidden_act: relu2")
    refused({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}, "rope_parameters": None}, "rope_type: longrope")
    refused({"num_hidden_layers": 6}, r"model.layers.4.self_attn.k_proj.weight is missing")
    refused({"intermediate_size": 80}, r"has shape \(96, 64\), in the model \(80, 64\)")
    refused(
        {"model_type": "gpt2", "n_embd": 64, "n_positions": 64, "n_layer": 4, "n_head": 4},
        "the file has the parameter names of Llama; the recipe.s model has those of gpt_bigcode",
    )
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"has no config\.json"):
        import_published(tmp_path / "empty", "new", [], None, Path("runs"), lambda _: None)
    import_published(published / "llama2", "new", [], None, Path("runs"), lambda _: None)
    with pytest.raises(RecipeError, match="already has saved steps"):
        import_published(published / "llama2", "new", [], None, Path("runs"), lambda _: None)
    with pytest.raises(RecipeError, match="is not a run folder"):
        import_adapters(published / "llama2", "x", Path("runs/none"), [], None, Path("runs"), lambda _: None)
