"""The same bytes whatever runs how often, in how many workers, under which hash seed, and under which names.

Where threads or the order of models change last digits, merges are within `TOLERANCE` of each other, for every method.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import epimer
import tiny
from epimer.api import plan_merge
from epimer.curvature.format import Provenance
from epimer.engine.recompute import GPU_TOLERANCE, TOLERANCE, difference
from epimer.testing import usual_count

SHAPES = {
    "embed_tokens.weight": (96, 48),
    "layers.0.q.weight": (192, 128),
    "layers.1.q.weight": (128, 192),
    "layers.0.norm.weight": (70_000,),  # more entries than torch leaves to one thread
    "layers.1.norm.weight": (128,),
}
MATRICES = ("layers.0.q.weight", "layers.1.q.weight")
MODELS = ("one", "two", "three")
WEIGHTS = (0.5, 0.2, 0.3)
METHODS = [
    row.name
    for name in epimer.list_methods()
    for row in (epimer.describe_method(name), epimer.describe_method(name).mergekit)
    if row is not None and not row.needs_function
]
DRAWN = ("dare", "dare_ties", "della", "della_linear")
"""methods that drop entries at random: what is drawn depends on the seed, the tensor's name and the model's place"""


def metrics(kind, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    def metric(m, n):
        g, x = draw(80, 2, m) * draw(m).exp(), draw(80, 2, n) * draw(n).exp()
        if kind == "samples":
            return epimer.Samples(g=g, x=x)
        G, A = g.flatten(0, 1), x.flatten(0, 1)
        return epimer.Kronecker(G=G.T @ G / len(G), A=A.T @ A / len(A))

    if kind == "diagonal":
        return {name: epimer.Diagonal(draw(*shape).square() * draw(*shape).exp()) for name, shape in SHAPES.items()}
    return {name: metric(*SHAPES[name]) for name in MATRICES}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A base, three models of it, and curvature of every kind, all with a tokenizer of their own order."""
    root = tmp_path_factory.mktemp("models")
    generator = torch.Generator().manual_seed(0)
    base = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    for t, name in enumerate(("base", *MODELS)):
        state = dict(base)
        for key, W in base.items() if t else ():
            state[key] = W + 0.02 * torch.randn(W.shape, generator=generator)
            if W.dim() == 2:  # a falling spectrum over noise, as fine-tuning leaves it
                left, right = (torch.randn(n, 12, generator=generator) for n in W.shape)
                state[key] += 0.05 * (left * 0.7 ** torch.arange(12)) @ right.T
        (root / name).mkdir()
        save_file(state, root / name / "model.safetensors")
        (root / name / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 48}))
        for kind in ("diagonal", "kronecker", "samples") if t else ():
            epimer.Curvature(metrics(kind, t), Provenance(kind)).save(root / f"{kind}-{name}")
    return root


@pytest.fixture(scope="module")
def narrow(root):
    """The same in bfloat16, where the entries of task vectors have few values and often cancel."""
    narrow = root / "narrow"
    narrow.mkdir()
    for path in [path for path in root.iterdir() if path != narrow]:
        shutil.copytree(path, narrow / path.name)
    for file in narrow.glob("*/model.safetensors"):
        save_file({name: W.bfloat16() for name, W in load_file(file).items()}, file)
    return narrow


def recipe(method, root=None, names=MODELS, order=None, **more):
    """Return the recipe of a method with what it needs; its paths are relative where there is no `root`."""
    row = epimer.describe_method(method)
    place = "" if root is None else f"{root}/"
    models = []
    for name, weight in [*zip(names, WEIGHTS, strict=True)][: usual_count(row)]:
        parameters = (
            {"parameters": {"weight": weight}} if "weight" in epimer.recipe.model.known_parameters(method) else {}
        )
        kind = row.curvature if row.needs_curvature else None
        curvature = {} if kind is None else {"curvature": f"{place}{kind}-{name}"}
        models.append({"model": f"{place}{name}", **parameters, **curvature})
    models = models if order is None else [models[t] for t in order if t < len(models)]
    made = {"merge_method": method, "base_model": f"{place}base", "models": models, **more}
    return made


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def apart(root, method, one, other):
    """Return how far the tensors of two merges are apart, in units of what the merge changed; 0 where bits agree."""
    plan = plan_merge(recipe(method, root))
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    jobs = {job.name: job for job in plan.jobs}
    return max(difference(plan, jobs[n], {n: first[n]}, {n: W}) or 0.0 for n, W in second.items())


@pytest.mark.parametrize("method", METHODS)
def test_repetition_workers_and_memory_change_no_byte_and_threads_only_last_digits(root, tmp_path, method):
    runs = {
        "first": {"workers": 1},
        "again": {"workers": 1},
        "three": {"workers": 3, "max_memory": "2GB"},
        "threads": {"workers": 2, "threads": 3},
    }
    for name, options in runs.items():
        epimer.merge(recipe(method, root), tmp_path / name, device="cpu", progress=False, **options)
    assert contents(tmp_path / "first") == contents(tmp_path / "again") == contents(tmp_path / "three")
    assert apart(root, method, tmp_path / "first", tmp_path / "threads") <= TOLERANCE
    verified = epimer.verify(tmp_path / "first", recipe=recipe(method, root), sample=None)
    assert verified.verified, verified
    assert verified.checks[-1].identical == len(SHAPES)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", METHODS)
def test_a_gpu_changes_last_digits_only_and_gives_the_same_bytes_again(root, tmp_path, method):
    for name, device in (("cpu", "cpu"), ("gpu", "cuda"), ("again", "cuda")):
        epimer.merge(recipe(method, root), tmp_path / name, device=device, progress=False)
    assert contents(tmp_path / "gpu") == contents(tmp_path / "again")
    assert apart(root, method, tmp_path / "cpu", tmp_path / "gpu") <= GPU_TOLERANCE
    assert epimer.verify(tmp_path / "gpu", recipe=recipe(method, root), sample=None, device="cpu").verified


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", METHODS)
def test_the_order_of_the_models_changes_last_digits_only(root, narrow, tmp_path, method, precision):
    root = narrow if precision == "bfloat16" else root
    density = {"parameters": {"density": 1.0}} if method in DRAWN else {}
    for name, order in (("first", None), ("permuted", (2, 0, 1))):
        given = recipe(method, root, order=order, **density)
        if epimer.describe_method(method).models[1] == 1:
            given["models"] = given["models"][:1]
        epimer.merge(given, tmp_path / name, device="cpu", progress=False)
    assert apart(root, method, tmp_path / "first", tmp_path / "permuted") <= TOLERANCE


@pytest.mark.parametrize("method", DRAWN)
def test_what_is_drawn_belongs_to_the_place_of_a_model_and_to_the_seed(root, tmp_path, method):
    """Two models with the same task vector: their order changes nothing, another seed everything."""
    shutil.copytree(root / "one", tmp_path / "twin")
    (tmp_path / "twin").rename(root / "twin")
    given = {"merge_method": method, "base_model": str(root / "base")}
    merged = []
    try:
        for i, (pair, seed) in enumerate(((("one", "twin"), 0), (("twin", "one"), 0), (("one", "twin"), 1))):
            models = [{"model": str(root / name)} for name in pair]
            epimer.merge(
                {**given, "models": models, "parameters": {"seed": seed}},
                tmp_path / str(i),
                device="cpu",
                progress=False,
            )
            merged.append((tmp_path / str(i) / "model.safetensors").read_bytes())
    finally:
        shutil.rmtree(root / "twin")
    assert merged[0] == merged[1]
    assert merged[0] != merged[2]


@pytest.mark.parametrize("method", ["ties", "dare", "tsv", "epimer", "epimer_kron", "nan", "sce"])
def test_other_names_of_the_folders_change_names_alone(root, tmp_path, method):
    epimer.merge(recipe(method, root), tmp_path / "first", device="cpu", progress=False)
    moved = shutil.copytree(root, tmp_path / "moved")
    names = {"base": "zzz", "one": "nine", "two": "b", "three": "a c"}  # another alphabetical order
    for old, new in names.items():
        (moved / old).rename(moved / new)
        for kind in ("diagonal", "kronecker", "samples") if old != "base" else ():
            (moved / f"{kind}-{old}").rename(moved / f"{kind}-{new}")
    given = recipe(method, moved, tuple(names[name] for name in MODELS)) | {"base_model": str(moved / "zzz")}
    epimer.merge(given, tmp_path / "second", device="cpu", progress=False)
    first, second = (json.loads((tmp_path / name / "epimer.json").read_bytes()) for name in ("first", "second"))
    for key in ("tensor_checksums", "tensors", "weights", "parameters", "environment"):
        assert first[key] == second[key]
    for key in ("models", "measured"):
        assert [fingerprint for _, fingerprint in first[key]] == [fingerprint for _, fingerprint in second[key]]
    data = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second")]
    assert data[0] == data[1]


@pytest.mark.parametrize("method", [method for method in METHODS if method not in DRAWN])
def test_other_names_of_the_tensors_in_the_same_order_change_no_byte(root, method):
    """Names decide rules and what is drawn at random, and nothing else."""
    row = epimer.describe_method(method)
    count = usual_count(row)
    states = [load_file(root / name / "model.safetensors") for name in ("base", *MODELS[:count])]
    found = []
    for prefix in ("", "zeta.model."):
        base, *models = ({prefix + name: state[name] for name in SHAPES} for state in states)
        given = {}
        if row.needs_curvature:
            measured = [metrics(row.curvature, t) for t in range(1, count + 1)]
            given["curvature"] = [{prefix + name: one for name, one in each.items()} for each in measured]
        merged = epimer.merge_state_dicts(base if row.needs_base else None, models, method, **given)
        found.append({name.removeprefix(prefix): W for name, W in merged.items()})
    assert found[0].keys() == found[1].keys() == SHAPES.keys()
    assert all(torch.equal(W, found[1][name]) for name, W in found[0].items())


SCRIPT = """
import json, sys, warnings
warnings.simplefilter("ignore")
import epimer
recipes = json.load(open("recipes.json"))
for name, recipe in recipes.items():
    epimer.merge(recipe, f"{sys.argv[1]}/{name}", device="cpu", progress=False, workers=int(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def unions(root):
    """Two models whose tokenizers have words of their own, and adapters with modules of their own."""
    generator = torch.Generator().manual_seed(1)
    for t, name in enumerate(("u0", "u1", "u2")):
        folder = root / name
        folder.mkdir()
        tiny.save_tokenizer(folder)
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        words = tokenizer["model"]["vocab"]
        for word in ("red", "green", "blue", "black", "white")[: 2 * t]:
            words[f"{word}{t}"] = len(words)
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        sizes = {"model_type": "llama", "vocab_size": len(words), "hidden_size": 8, "tie_word_embeddings": False}
        (folder / "config.json").write_text(json.dumps(sizes))
        tables = {
            n: torch.randn(len(words), 8, generator=generator) for n in ("model.embed_tokens.weight", "lm_head.weight")
        }
        save_file({**tables, "model.norm.weight": torch.randn(8, generator=generator)}, folder / "model.safetensors")
    for t, name in enumerate(MODELS):
        epimer.extract_lora(str(root / name), str(root / "base"), root / f"lora-{name}", 2 + t, progress=False)
    return root


def test_neither_the_hash_seed_nor_the_process_changes_a_byte(unions, tmp_path):
    root = unions
    adapters = [{"model": f"base+lora-{name}"} for name in MODELS]
    recipes = {method: recipe(method) for method in METHODS}
    recipes["union"] = {
        "merge_method": "average",
        "base_model": "u0",
        "models": [{"model": "u1"}, {"model": "u2"}],
        "tokenizer_source": "union",
    }
    recipes["lora"] = {"merge_method": "average", "base_model": "base", "models": adapters, "output": "lora"}
    recipes["adapters"] = {"merge_method": "tsv", "base_model": "base", "models": adapters}
    recipes["slices"] = {
        "merge_method": "passthrough",
        "slices": [{"sources": [{"model": name, "layer_range": [t, t + 1]}]} for t, name in enumerate(("one", "two"))],
    }
    recipes["rules"] = recipe("epimer_free") | {"rules": {"*.norm.*": "copy", "layers.1.*": "average"}}
    (root / "recipes.json").write_text(json.dumps(recipes))
    found = []
    for seed, workers in (("0", 1), ("1", 2), ("4242", 2)):
        out = tmp_path / seed
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-c", SCRIPT, str(out), str(workers)]
        subprocess.run(command, cwd=root, env=environment, check=True, timeout=300)
        found.append(contents(out))
    assert len(found[0]) >= 4 * len(recipes)
    assert found[0] == found[1] == found[2]


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")
def test_every_method_on_ray_has_the_local_runs_bytes(root, tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.chdir(root)
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init("local", num_cpus=2, object_store_memory=80 << 20, include_dashboard=False, logging_level="ERROR")
    try:
        for method in METHODS:
            for engine in ("local", "ray"):
                epimer.merge(recipe(method), tmp_path / engine / method, device="cpu", engine=engine, progress=False)
            assert contents(tmp_path / "local" / method) == contents(tmp_path / "ray" / method), method
    finally:
        ray.shutdown()
