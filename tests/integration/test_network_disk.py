"""Ray on machines whose caches of a network disk are separate: the local run's bytes, read back from the server.

Each machine is a mount namespace with a mount of its own (`tests/network_disk.py`); the kernel keeps the pages of each
mount apart, and writes back whole pages, as clients of NFS do.
"""

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import epimer
import network_disk
from commands import ENVIRONMENT

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning"),
    pytest.mark.skipif(not network_disk.available(), reason="FUSE cannot be mounted here"),
]
LAYERS = 12
QUICK = "from epimer.checkpoints import writer; writer.FLUSH_SECONDS = 0.0; from epimer.cli import main; main()"
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
"""of this cluster, which Ray lets nobody else join"""
RAY_FOLDER = Path(tempfile.gettempdir()) / f"ray-{os.getpid()}"  # paths of sockets must be short
"""of the cluster's files, so that other tests do not take it for theirs"""
CLUSTER = ENVIRONMENT | TOKEN | {"RAY_TMPDIR": str(RAY_FOLDER)}
WAIT = """
import sys, time, ray
ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
while sum(node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]) != int(sys.argv[2]):
    time.sleep(0.1)
"""


class Machine:
    """A process and its children, which see the disk through their own cache."""

    def __init__(self, root, *command, options=()):
        launcher = [sys.executable, network_disk.__file__, root / "served", root / "mounted", *options, "--"]
        self.process = subprocess.Popen(
            [*map(str, launcher), *map(str, command)],
            env=CLUSTER,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait(self):
        """Return the exit code and what was printed to stderr."""
        _, err = self.process.communicate(timeout=300)
        return self.process.returncode, err

    def kill(self):
        """End all of its processes at once, with what its cache has not written back."""
        with contextlib.suppress(OSError):
            mounts = os.readlink(f"/proc/{self.process.pid}/ns/mnt")
            for process in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    if os.readlink(process / "ns" / "mnt") == mounts:
                        os.kill(int(process.name), signal.SIGKILL)
        self.process.wait()
        self.process.stderr.close()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A disk with models, and where machines mount it."""
    root = tmp_path_factory.mktemp("disk")
    for name in ("served", "mounted"):
        (root / name).mkdir()
    generator = torch.Generator().manual_seed(0)
    for name in ("base", "m0", "m1"):
        state = {f"layers.{i}.weight": torch.randn(512, 384, generator=generator) for i in range(LAYERS)}
        norms = {f"layers.{i}.norm": torch.randn(384, generator=generator) for i in range(LAYERS)}
        save_file(state | norms, root / "served" / f"{name}.safetensors")
    models = [{"model": f"m{t}.safetensors"} for t in (0, 1)]
    recipe = {"merge_method": "epimer_free", "base_model": "base.safetensors", "models": models}
    (root / "served" / "recipe.yaml").write_text(json.dumps(recipe))
    return root


@pytest.fixture(scope="module")
def expected(root):
    """The local run's files."""
    with contextlib.chdir(root / "served"):
        epimer.merge("recipe.yaml", root / "served" / "local", device="cpu", progress=False, max_shard_size="4MB")
    return contents(root / "served" / "local")  # beside the other output, since records have relative paths


@pytest.fixture(scope="module")
def cluster(root):
    """Three machines with a worker each, and the address of their head, which has none."""
    RAY_FOLDER.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    ray += ["--object-store-memory", 80 << 20]
    machines = [Machine(root, *ray, "--head", "--port", port, "--num-cpus", 0, "--include-dashboard=false")]
    try:
        wait_for_workers(address, 0)
        for count in (1, 2, 3):  # one after the other, as they choose ports and names on one host
            machines.append(Machine(root, *ray, "--address", address, "--num-cpus", 1))
            wait_for_workers(address, count)
        yield address, machines
    finally:
        for machine in reversed(machines):
            machine.kill()
        shutil.rmtree(RAY_FOLDER, ignore_errors=True)


def wait_for_workers(address, count):
    wait = [sys.executable, "-c", WAIT, address, str(count)]
    subprocess.run(wait, env=CLUSTER, timeout=60, check=True, capture_output=True)


def merge(root, address, *options):
    """Start a driver on a machine of its own."""
    command = [sys.executable, "-c", QUICK, "merge", "recipe.yaml", "out", "--max-shard-size", "4MB", "-q"]
    return Machine(root, *command, "--engine", "ray", "--address", address, "--workers", "3", options=options)


def contents(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def written(root):
    """How many tensors the journal on the server has."""
    try:
        return (root / "served" / ".out.epimer" / "journal.jsonl").read_bytes().count(b'"crc"')
    except OSError:
        return 0


def until_written(root, count, driver):
    while written(root) < count:
        assert driver.process.poll() is None, driver.wait()
        time.sleep(0.01)


@pytest.fixture
def out(root):
    """The output as the server has it."""
    folder = root / "served" / "out"
    yield folder
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    assert sorted(path.name for path in (root / "served").iterdir() if path.name.startswith(".")) == []


def test_the_output_on_the_server_is_the_local_runs(root, cluster, expected, out):
    address, _ = cluster
    assert merge(root, address).wait() == (0, "")
    assert contents(out) == expected


def test_machines_of_the_driver_and_of_a_worker_die_on_the_way(root, cluster, expected, out):
    """Last, because the cluster is smaller afterwards."""
    address, machines = cluster
    driver = merge(root, address, "--no-allocation")
    until_written(root, 4, driver)
    driver.kill()
    before = written(root)
    assert 4 <= before < 2 * LAYERS
    assert not out.exists()
    driver = merge(root, address, "--no-allocation")
    until_written(root, before + 1, driver)
    machines[-1].kill()
    assert driver.wait()[0] == 0
    assert contents(out) == expected
