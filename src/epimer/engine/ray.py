"""Run walks on a Ray cluster whose machines share a disk: every job is a task, which is retried where its node dies.

Tensors go by the shared disk and not by Ray's object store: a job reads its models there, and a merge writes its result
there. The walk itself (headers, options, paths) is sent once to every worker, a task then names its job by number.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import epimer
from epimer.engine.in_memory import ReadWalk
from epimer.engine.memory import parse_size, return_freed_memory
from epimer.engine.parcels import Scratch, own_scratch, pack, pack_walk, read_tensor, unpack
from epimer.engine.protocol import JobT, LoadedT, ResultT, Walk
from epimer.engine.threads import Threads
from epimer.engine.written import WritingWalk
from epimer.errors import EpimerError, OutputError, ParameterError
from epimer.machine import out_of_memory
from epimer.plain_text import format_size

AHEAD = 2  # jobs that are submitted and not done, per worker, where workers take all of the cluster
KEPT = 16  # jobs that are submitted and whose results are not consumed, per worker
RETRIES = 5  # of a job whose worker or node died
PROCESS = 1 << 28  # bytes of a worker without a job: Python and torch
CONNECT_SECONDS = 10
PER_GPU = 2  # jobs at a time, so that one reads while the other computes

Versions = tuple[str, str]
"""of epimer and of torch, on which the bytes of results depend"""


class Ray:
    """An engine of Ray tasks; results do not depend on the number of workers."""

    remote = True

    def __init__(self, devices: Sequence[torch.device], *, threads: int = 1, memory: int | None = None) -> None:
        """Create an engine on the cluster that this process is connected to.

        Args:
            devices: one per worker.
            threads: torch's threads within each worker, and the CPUs that each job takes of the cluster.
            memory: bytes that jobs in flight may take together; one always goes ahead. None sets no limit.
        """
        self.devices, self.threads, self.memory = list(devices), threads, memory
        self.per_gpu = PER_GPU

    def map(self, walk: Walk[JobT, LoadedT, ResultT]) -> Iterator[tuple[JobT, ResultT]]:
        """Yield every job with its result, in the order of the jobs."""
        kind: type[Any] = type(walk)
        if issubclass(kind, ReadWalk):  # it only reads, and this process sees the same disk
            yield from Threads(self._devices_here(), threads=self.threads, memory=self.memory).map(walk)
            return
        scratch = own_scratch(Path.cwd())
        try:
            if not issubclass(kind, WritingWalk):
                scratch.make()
            yield from self._run(walk, scratch)
        finally:
            scratch.remove()

    def _devices_here(self) -> list[torch.device]:
        device = self.devices[0]
        return [device if device.type == "cuda" and torch.cuda.is_available() else torch.device("cpu")]

    def _run(self, walk: Walk[JobT, LoadedT, ResultT], scratch: Scratch) -> Iterator[tuple[JobT, ResultT]]:
        flight = _Flight(self, walk, scratch)
        try:
            for i, job in enumerate(walk.jobs):
                result = unpack(flight.result(i), [job, *getattr(job, "jobs", ())])
                if isinstance(result, BaseException):
                    raise result
                yield job, result
                del result
                for file in scratch.folder.glob(f"{i}-*"):
                    file.unlink()
        finally:
            flight.cancel()


class _Flight:
    """The tasks of one walk that are submitted, and the results that are not consumed yet."""

    def __init__(self, engine: Ray, walk: Any, scratch: Scratch) -> None:
        self.ray = ray_module()
        self.engine, self.jobs, self.scratch = engine, walk.jobs, scratch.folder
        parcel = self.ray.put(pack_walk(walk, scratch))
        self.arguments = ([parcel], parcel.hex(), scratch.folder, engine.devices[0].type, engine.threads, versions())
        self.task = self.ray.remote(max_retries=RETRIES)(run_job)
        self.pending: dict[Any, int] = {}
        self.done: dict[int, bytes] = {}
        self.submitted = 0
        self.most = len(engine.devices) * (AHEAD if len(engine.devices) >= self._places() else 1)

    def _places(self) -> int:
        """Return how many jobs the cluster runs at once; only as many workers may have others wait for them there."""
        resources, cuda = self.ray.cluster_resources(), self.engine.devices[0].type == "cuda"
        if cuda:
            return int(resources.get("GPU", 0) * self.engine.per_gpu)
        return int(resources.get("CPU", 0) // self.engine.threads)

    def result(self, i: int) -> bytes:
        """Wait for the result of a job, packed, while others go on."""
        while i not in self.done:
            while self._has_room(i):
                self._submit()
            ready, _ = self.ray.wait(list(self.pending))
            for task in ready:
                number = self.pending.pop(task)
                self.done[number] = self._get(task, number)
        return self.done.pop(i)

    def _has_room(self, i: int) -> bool:
        """Whether one more job may be submitted while the result of job `i` is waited for."""
        if self.submitted == len(self.jobs) or self.submitted >= i + KEPT * len(self.engine.devices):
            return False
        used = sum(self.jobs[number].memory for number in self.pending.values())
        fits = self.engine.memory is None or used + self.jobs[self.submitted].memory <= self.engine.memory
        return not self.pending or (fits and len(self.pending) < self.most)

    def _submit(self) -> None:
        memory = task_memory(self.jobs[self.submitted])
        gpus = 1 / self.engine.per_gpu if self.engine.devices[0].type == "cuda" else 0
        task = self.task.options(num_cpus=self.engine.threads, num_gpus=gpus, memory=memory)
        self.pending[task.remote(self.submitted, *self.arguments)] = self.submitted
        self.submitted += 1

    def _get(self, task: Any, number: int) -> bytes:
        try:
            return self.ray.get(task)
        except self.ray.exceptions.RayError as error:
            return pack(self._explained(error, number), self.scratch, "error", load=read_tensor)

    def _explained(self, error: Exception, number: int) -> EpimerError:
        text = str(error)
        if "No module named 'epimer'" in text:
            return ParameterError("the machines of the cluster have no epimer; install the same version on each.")
        name, reason = getattr(self.jobs[number], "name", f"job {number}"), (text.strip().splitlines() or [""])[0]
        kind = type(error).__name__
        remedy = "see Ray's logs; where memory ran out, set --max-memory lower or take larger machines"
        return OutputError(f"{name!r} was not computed in {RETRIES + 1} attempts ({kind}: {reason}); {remedy}.")

    def cancel(self) -> None:
        """Give up what is in flight."""
        for task in self.pending:
            self.ray.cancel(task)


_walk: tuple[str, Any] = ("", None)
"""the walk that this worker was last sent, under its id"""


def run_job(
    number: int, parcel: list[Any], key: str, scratch: Path, device: str, threads: int, expected: Versions
) -> bytes:
    """Read and work on one job of a walk in a worker of the cluster; return its result, or its error, packed."""
    global _walk
    known: list[Any] = []
    try:
        if versions() != expected:
            here, there = (f"epimer {ours} and torch {torch_version}" for ours, torch_version in (expected, versions()))
            node = os.uname().nodename
            raise ParameterError(f"{node} has {there}, the driver {here}; install the same versions on every machine.")
        if _walk[0] != key:
            _walk = ("", None)
            return_freed_memory()
            torch.set_num_threads(threads)
            (data,) = ray_module().get(parcel)
            _walk = (key, unpack(data))
        walk = _walk[1]
        job = walk.jobs[number]
        known = [job, *getattr(job, "jobs", ())]
        with torch.no_grad():
            result = walk.work(job, walk.read(job), torch.device(device))
    except EpimerError as error:
        result = error
    except Exception as error:
        node = os.uname().nodename
        result = RuntimeError(f"{type(error).__name__}: {error} (on {node})")
        if out_of_memory(error):
            what = getattr(known[0] if known else None, "name", "this work")
            who, remedy = (
                (node, "set --max-memory lower") if device == "cpu" else (f"a GPU of {node}", "use --device cpu")
            )
            result = OutputError(f"{who} has too little memory for {what!r}; {remedy}, or take larger ones.")
    try:
        return pack(result, scratch, str(number), known=known, load=read_tensor)
    except EpimerError as error:
        return pack(error, scratch, "error", load=read_tensor)


def versions() -> Versions:
    """Return the versions of epimer and of torch here."""
    return epimer.__version__, torch.__version__.partition("+")[0]


def task_memory(job: Any) -> int:
    """Return the bytes that a task asks the cluster for, rounded so that tasks of about one size ask for the same."""
    needed = int(job.memory) + PROCESS
    step = 1 << (needed.bit_length() - 4)
    return -(-needed // step) * step


# --- the cluster ---


def check_ray() -> None:
    """Refuse to go on where Ray is not installed."""
    if find_spec("ray") is None:
        raise ParameterError("the engine 'ray' needs Ray; install it with: pip install 'epimer[ray]'")


def ray_module() -> Any:
    """Return the package `ray`, which is imported when it is first used."""
    check_ray()
    return import_module("ray")


def connect(address: str | None) -> Any:
    """Connect this process to a cluster, if it is not connected; return the package `ray`.

    None takes RAY_ADDRESS or, where it is not set, starts Ray on this machine until the process ends.
    """
    ray = ray_module()
    if ray.is_initialized():
        return ray
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    where = address or os.environ.get("RAY_ADDRESS", "local")
    check_address(where)
    try:
        ray.init(where, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _no_cluster(where, error) from error
    return ray


def check_address(address: str) -> None:
    """Refuse a host and port where nothing listens; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise _no_cluster(address, error) from error


def _no_cluster(address: str, error: Exception) -> ParameterError:
    reason = (str(error).strip().splitlines() or [""])[0][:160].rstrip(".")
    return ParameterError(
        f"there is no Ray cluster at {address!r} ({reason}); start one with `ray start --head`, or give --address."
    )


def cluster_devices(device: str | torch.device, workers: int | None, threads: int, address: str | None) -> list[Any]:
    """Return a device for every job at a time: one per `threads` CPUs of the cluster, or two per GPU."""
    for name, value in (("threads", threads), ("workers", workers)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ParameterError(f"The {name!r} parameter must be an integer at least 1. Got {value!r} instead.")
    nodes = _nodes(address)
    cpus, gpus = ([int(node.get(resource, 0)) for node in nodes] for resource in ("CPU", "GPU"))
    wanted = str(device)
    if wanted not in ("auto", "cpu", "cuda"):
        raise ParameterError(f"device {wanted!r} cannot be chosen on a cluster, which assigns GPUs; use 'cuda'.")
    if wanted == "cuda" and not any(gpus):
        raise ParameterError("device 'cuda' cannot be used: no machine of the cluster has a GPU; use 'cpu'.")
    if max(cpus, default=0) < threads:
        raise ParameterError(f"no machine of the cluster has {threads} CPUs for --threads {threads}; give fewer.")
    if wanted == "cuda" or (wanted == "auto" and any(gpus)):
        return [torch.device("cuda")] * (workers or PER_GPU * sum(gpus))
    return [torch.device("cpu")] * (workers or sum(count // threads for count in cpus))


def cluster_memory(max_memory: str | int | None, jobs: Sequence[Any], address: str | None) -> int:
    """Return the bytes that jobs may take together on a cluster; refuse one that no machine has memory for."""
    memory = [int(node.get("memory", 0)) for node in _nodes(address)]
    widest = max(jobs, key=lambda job: job.memory, default=None)
    if widest is not None and task_memory(widest) > max(memory, default=0):
        raise ParameterError(
            f"{widest.name!r} needs {format_size(task_memory(widest))} on one machine, and the largest of the cluster "
            f"offers {format_size(max(memory, default=0))}; take a method that needs less, or a larger machine."
        )
    total = sum(memory) if max_memory is None else parse_size(max_memory, "max_memory")
    return total


def one_per_machine(device: str, count: int | None, address: str | None) -> Ray:
    """Return an engine for a few long jobs: one at a time on every GPU, or on every machine with all of its CPUs.

    `count` is the number of jobs, if it is known. Every job has as many threads as the smallest machine has CPUs.
    """
    threads = min((cpus for node in _nodes(address) if (cpus := int(node.get("CPU", 0)))), default=1)
    devices = cluster_devices(device, None, 1, address)
    cuda = devices[0].type == "cuda"
    places = len(devices) // PER_GPU if cuda else sum("CPU" in node for node in _nodes(address))
    engine = Ray(devices[: count or places] or devices[:1], threads=1 if cuda else threads)
    engine.per_gpu = 1
    return engine


def _nodes(address: str | None) -> list[dict[str, float]]:
    return [node["Resources"] for node in connect(address).nodes() if node["Alive"]]
