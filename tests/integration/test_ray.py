"""Merges, diagnoses and sweeps on a Ray cluster of three nodes: the local run's bytes, whatever dies on the way."""

import contextlib
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

import epimer
import tiny
from commands import ENVIRONMENT, assert_refused, run
from epimer.engine import curvature_shards
from epimer.methods.averaging import METHODS

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")]
LAYERS = 24


@pytest.fixture(scope="module")
def cluster():
    import ray
    from ray.cluster_utils import Cluster

    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    sizes = {"num_cpus": 1, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**sizes, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(wait=False, **sizes)
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    generator = torch.Generator().manual_seed(0)
    for name in ("base", "m0", "m1"):
        state = {f"layers.{i}.weight": torch.randn(512, 384, generator=generator) for i in range(LAYERS)}
        norms = {f"layers.{i}.norm": torch.randn(384, generator=generator) for i in range(LAYERS)}
        save_file(state | norms, root / f"{name}.safetensors")
    for method in ("epimer_free", "ties"):
        (root / f"{method}.yaml").write_text(json.dumps({"merge_method": method, **MODELS}))
    (root / "judge.py").write_text(JUDGE)
    return root


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)  # the recipe's paths are relative: workers must find them too
    monkeypatch.syspath_prepend(folder)
    return folder


MODELS = {"base_model": "base.safetensors", "models": [{"model": "m0.safetensors"}, {"model": "m1.safetensors"}]}
JUDGE = """
def score(state, split):
    return {"task": [float(state["layers.0.weight"].double().abs().sum() + state["layers.3.norm"].double().sum())]}
"""


def contents(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def written(draft):
    """How many tensors an unfinished output's journal has."""
    try:
        return sum(b'"crc"' in line for line in (draft / "journal.jsonl").read_bytes().splitlines())
    except OSError:
        return 0


@pytest.fixture
def expected(here, tmp_path):
    """The local run's files, by method."""

    def local(method):
        epimer.merge(f"{method}.yaml", tmp_path / "local", device="cpu", progress=False)
        return contents(tmp_path / "local")

    return local


@pytest.mark.parametrize("method", ["epimer_free", "ties"])
def test_the_output_is_the_local_runs(cluster, here, expected, tmp_path, method):
    ran = run("merge", f"{method}.yaml", tmp_path / "out", "--engine", "ray", "--address", cluster.address, "-q")
    assert ran.code == 0, ran.err
    assert contents(tmp_path / "out") == expected(method)
    assert not list(here.glob(".epimer-ray-*"))


def test_a_diagnosis_and_a_sweep_find_what_they_find_here(cluster, here):
    engines = {"local": {}, "ray": {"engine": "ray", "address": cluster.address}}
    diagnoses = [epimer.diagnose("ties.yaml", rank=4, progress=False, **options) for options in engines.values()]
    assert diagnoses[0].to_dict() == diagnoses[1].to_dict()
    settings = {"methods": ["average", "tsv", "epimer_free"], "scales": [0.5, 1.0], "ranks": [4], "progress": False}
    sweeps = [epimer.sweep("ties.yaml", "judge:score", **settings, **options) for options in engines.values()]
    assert sweeps[0].to_dict() == sweeps[1].to_dict()
    assert not list(here.glob(".epimer-ray-*"))


@pytest.fixture(scope="module")
def classifier(folder):
    torch.manual_seed(0)
    config = transformers.BertConfig(**tiny.SIZES, **tiny.TEXT, **tiny.CALM, num_labels=3)
    transformers.BertForSequenceClassification(config).save_pretrained(folder / "bert")
    tiny.save_tokenizer(folder / "bert")
    tiny.write_rows(folder, "animal")
    return ["bert", "--task", "text-classification", "--data", "animal-train.jsonl", "--samples", "24", "-q"]


def test_curvature_of_shards_is_that_of_processes(cluster, here, classifier, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "epimer"]
    command = [*torchrun, "curvature", *classifier, "-o", str(tmp_path / "processes")]
    subprocess.run(command, cwd=here, env=ENVIRONMENT, check=True, timeout=100)
    options = ["--engine", "ray", "--address", cluster.address, "--shards", "2"]
    ran = run("curvature", *classifier, "-o", tmp_path / "shards", *options)
    assert ran.code == 0, ran.err
    assert contents(tmp_path / "shards") == contents(tmp_path / "processes")
    assert not list(tmp_path.glob(".shards*"))
    ran = run("curvature", *classifier, "-o", tmp_path / "ekfac", "--kind", "ekfac", *options)
    assert_refused(ran, "--kind ekfac cannot be measured in several parts; give --shards 1")


def measurement_in_parts(cluster, classifier, out) -> list:
    """Return the command that measures curvature in two parts."""
    return ["curvature", *classifier, "-o", out, "--engine", "ray", "--address", cluster.address, "--shards", "2"]


def parts_of_a_killed_driver(command, folder, monkeypatch) -> Path:
    """Return the parts that a driver leaves which dies between them and their sum."""

    def die(parts):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(curvature_shards, "sum_of", die)
        assert run(*command).code == 130
    (parts,) = folder.glob(".out.epimer-parts-*")
    return parts


def test_shards_that_a_killed_driver_has_are_not_measured_again(cluster, here, classifier, tmp_path, monkeypatch):
    command = measurement_in_parts(cluster, classifier, tmp_path / "out")
    parts = parts_of_a_killed_driver(command, tmp_path, monkeypatch)
    times = {path: path.stat().st_mtime_ns for path in parts.glob("part-*/*")}
    assert len(times) >= 4
    measured = []
    work = curvature_shards.Curvature.load
    monkeypatch.setattr(curvature_shards.Curvature, "load", lambda f: (measured.append(mtimes(f)), work(f))[1])
    assert run(*command).code == 0
    assert measured == [mtimes_of(times, parts / f"part-{n}") for n in (0, 1)]


def test_a_damaged_shard_is_measured_again(cluster, here, classifier, tmp_path, monkeypatch):
    options = ["--engine", "ray", "--address", cluster.address, "--shards", "2"]
    assert run("curvature", *classifier, "-o", tmp_path / "whole", *options).code == 0
    command = ["curvature", *classifier, "-o", tmp_path / "out", *options]

    def die(parts):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(curvature_shards, "sum_of", die)
        assert run(*command).code == 130
    (first,) = tmp_path.glob(".out.epimer-parts-*/part-0/curvature.safetensors")
    data = bytearray(first.read_bytes())
    data[-3] ^= 64
    first.write_bytes(data)
    (second,) = tmp_path.glob(".out.epimer-parts-*/part-1/curvature.json")
    second.unlink()
    assert run(*command).code == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def mtimes(folder):
    return {path: path.stat().st_mtime_ns for path in folder.iterdir()}


def mtimes_of(times, folder):
    return {path: time for path, time in times.items() if path.parent == folder}


def test_what_is_wrong_on_a_worker_is_said_here(cluster, here, tmp_path):
    state = {f"layers.{i}.weight": torch.full((512, 384), float("nan")) for i in range(LAYERS)}
    save_file(state | {f"layers.{i}.norm": torch.zeros(384) for i in range(LAYERS)}, tmp_path / "m1.safetensors")
    recipe = {"merge_method": "tsv", "base_model": "base.safetensors", "models": [{"model": "m0.safetensors"}]}
    recipe["models"] += [{"model": str(tmp_path / "m1.safetensors")}]
    with pytest.raises(epimer.TensorError, match=r"models\[1\].*holds NaN or Inf in 196608 of 196608 entries"):
        epimer.merge(recipe, tmp_path / "out", engine="ray", address=cluster.address, progress=False)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.epimer").exists()


def test_what_cannot_be_sent_or_placed_is_refused(cluster, here, tmp_path):
    def refused(recipe, error, **options):
        with pytest.raises(epimer.ParameterError, match=error):
            epimer.merge(recipe, tmp_path / "out", engine="ray", address=cluster.address, progress=False, **options)

    from dataclasses import replace

    mine = replace(next(row for row in METHODS if row.name == "average"), name="mine")
    epimer.register_method(mine)
    try:
        refused({"merge_method": "mine", **MODELS}, "'mine' is code of this process.*install it on every machine")
    finally:
        epimer.unregister_method("mine")
    refused("ties.yaml", "no machine of the cluster has a GPU", device="cuda")
    refused("ties.yaml", "cluster, which assigns GPUs; use 'cuda'", device="cuda:1")
    refused("ties.yaml", "no machine of the cluster has 2 CPUs for --threads 2", threads=2)


def test_workers_run_a_plugin_from_its_file(cluster, here, tmp_path):
    """Its options are a class of the plugin, which a worker has to find too."""
    example = Path(__file__).parents[2] / "examples" / "own_method.py"
    recipe = {"merge_method": "stock_with_floor", **MODELS, "parameters": {"least": 0.3}}
    (here / "stock.yaml").write_text(json.dumps(recipe))
    for name, options in {"local": [], "ray": ["--engine", "ray", "--address", cluster.address]}.items():
        command = [sys.executable, "-m", "epimer", "merge", "stock.yaml", str(tmp_path / name), "-q", *options]
        subprocess.run([*command, "--plugin", str(example)], cwd=here, env=ENVIRONMENT, check=True)
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")


def test_a_killed_driver_is_resumed(cluster, here, expected, tmp_path):
    out, draft = tmp_path / "out", tmp_path / ".out.epimer"
    options = ["--engine", "ray", "--address", cluster.address, "-q"]
    quick = "from epimer.checkpoints import writer; writer.FLUSH_SECONDS = 0.0; from epimer.cli import main; main()"
    command = [sys.executable, "-c", quick, "merge", "epimer_free.yaml", str(out), *options]
    with subprocess.Popen(command, cwd=here, env=ENVIRONMENT) as process:
        while process.poll() is None and written(draft) < 4:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert 4 <= written(draft) < 2 * LAYERS
    assert not out.exists()
    assert run("merge", "epimer_free.yaml", out, *options).code == 0
    assert contents(out) == expected("epimer_free")


SWEEP = ["sweep", "ties.yaml", "--eval", "judge:score", "--methods", "average,tsv,epimer_free", "--scale", "1", "-q"]


def scratch_folders(here):
    """The folders that large tensors go by, and how many files are in each."""
    return {path: len(list(path.iterdir())) for path in here.glob(".epimer-ray-*")}


def test_what_a_killed_driver_left_is_removed_by_the_next_run(cluster, here, tmp_path):
    """Its folder goes; that of a process that lives stays, and so does that of another machine."""
    sweep = [*SWEEP, "--engine", "ray", "--address", cluster.address]
    living, elsewhere = here / f".epimer-ray-{os.uname().nodename}-1", here / ".epimer-ray-elsewhere-1"
    for folder in (living, elsewhere):
        folder.mkdir()
    handle = os.open(living, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        with subprocess.Popen([sys.executable, "-m", "epimer", *sweep], cwd=here, env=ENVIRONMENT) as process:
            while process.poll() is None and sum(scratch_folders(here).values()) < 2:
                time.sleep(0.005)
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        assert len(scratch_folders(here)) == 3
        assert run(*sweep, "--out", tmp_path / "ray.json").code == 0
        assert scratch_folders(here) == {living: 0, elsewhere: 0}
    finally:
        os.close(handle)
        living.rmdir()
        elsewhere.rmdir()
    assert run(*SWEEP, "--out", tmp_path / "local.json").code == 0
    assert (tmp_path / "ray.json").read_bytes() == (tmp_path / "local.json").read_bytes()


def workers(cluster):
    """The processes of a cluster that are at work on a job."""
    raylets = {node.all_processes["raylet"][0].process.pid for node in cluster.list_all_nodes()}
    busy = []
    for comm in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            parent = int((comm.parent / "stat").read_text().rpartition(")")[2].split()[1])
            busy += [int(comm.parent.name)] if parent in raylets and comm.read_text() == "ray::run_job\n" else []
    return busy


@contextlib.contextmanager
def killing(cluster, most):
    """Kill processes at work on a job, as a system without memory does, while the block runs; yield who was killed."""
    killed, over = [], threading.Event()

    def kill():
        while len(killed) < most and not over.wait(0.1):
            for worker in workers(cluster)[:most]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
                    killed.append(worker)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield killed
    finally:
        over.set()
        killer.join()


def test_jobs_of_killed_workers_are_run_again_and_nothing_is_left(cluster, here, tmp_path):
    with killing(cluster, 2) as killed:
        ran = run(*SWEEP, "--engine", "ray", "--address", cluster.address, "--out", tmp_path / "ray.json")
    assert ran.code == 0, ran.err
    assert killed
    assert not scratch_folders(here)
    assert run(*SWEEP, "--out", tmp_path / "local.json").code == 0
    assert (tmp_path / "ray.json").read_bytes() == (tmp_path / "local.json").read_bytes()


def test_a_job_whose_every_worker_is_killed_is_named_with_what_to_do(cluster, here, tmp_path, monkeypatch):
    """The job is a decomposition that takes seconds, so that it is found at work."""
    monkeypatch.setattr("epimer.engine.ray.RETRIES", 1)
    for name in ("base", "m0", "m1"):
        save_file({"wide": torch.randn(2048, 2048)}, tmp_path / f"{name}.safetensors")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(json.dumps({"merge_method": "iso_c", **MODELS}))
    before = sorted(tmp_path.iterdir())
    with killing(cluster, 1000):
        ran = run("merge", "recipe.yaml", "out", "--engine", "ray", "--address", cluster.address, "-q")
    ran = ran._replace(out="")  # Ray itself prints that workers died
    assert_refused(ran, "'wide' was not computed in 2 attempts", "where memory ran out, set --max-memory lower")
    assert sorted(tmp_path.iterdir()) == before


def test_parts_of_another_measurement_go_when_the_output_is_there(cluster, here, classifier, tmp_path, monkeypatch):
    command = measurement_in_parts(cluster, classifier, tmp_path / "out")
    parts = parts_of_a_killed_driver(command, tmp_path, monkeypatch)
    handle = os.open(parts, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert_refused(run(*command), "another run is writing", "out; wait for it")
    os.close(handle)
    assert run(*command, "--samples", "16").code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_node_is_killed_and_the_merge_completes(cluster, here, expected, tmp_path):
    """Last, because the cluster is smaller afterwards."""
    import ray
    from ray._private.state import available_resources_per_node

    ray.is_initialized() or ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
    drivers = ray.get_runtime_context().get_node_id()
    doomed = next(node for node in cluster.worker_nodes if node.node_id != drivers)
    killed = threading.Event()

    def kill():
        while not killed.is_set():
            free = available_resources_per_node()[doomed.node_id]
            if written(tmp_path / ".out.epimer") >= 4 and free.get("CPU", 0) == 0:  # it is at work on a job
                cluster.remove_node(doomed, allow_graceful=False)
                killed.set()
            time.sleep(0.01)

    alive = sum(node["Alive"] for node in ray.nodes())
    watcher = threading.Thread(target=kill, daemon=True)
    watcher.start()
    from epimer.checkpoints import writer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "FLUSH_SECONDS", 0.0)
        epimer.merge("epimer_free.yaml", tmp_path / "out", engine="ray", progress=False)
    assert killed.is_set()  # before the merge was done: its journal was there
    watcher.join()
    deadline = time.monotonic() + 30
    while sum(node["Alive"] for node in ray.nodes()) == alive and time.monotonic() < deadline:
        time.sleep(0.1)
    assert sum(node["Alive"] for node in ray.nodes()) == alive - 1 == 2
    assert contents(tmp_path / "out") == expected("epimer_free")


def test_without_ray_it_says_how_to_install_it(here, tmp_path, monkeypatch):
    monkeypatch.setattr("epimer.engine.ray.find_spec", lambda name: None)
    assert_refused(run("merge", "ties.yaml", tmp_path / "out", "--engine", "ray"), "pip install 'epimer[ray]'")
