"""Where and within which limits a walk runs, and the table of engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from epimer.engine.memory import memory_budget
from epimer.engine.protocol import Engine
from epimer.engine.ray import Ray, check_ray, cluster_devices, cluster_memory
from epimer.engine.threads import Threads, torch_threads, worker_devices
from epimer.errors import ParameterError
from epimer.plan.jobs import Job
from epimer.plan.time import Speeds, measured_speeds

ENGINES: dict[str, Any] = {"local": Threads, "ray": Ray}
"""name -> what takes one device per worker, `threads` and `memory`, and returns an engine"""


@dataclass(frozen=True)
class RunOptions:
    """How to run a walk; none of it changes what is computed but for the device's rounding."""

    device: str | torch.device = "cpu"
    """cpu, cuda, cuda:N, or auto for every GPU there is, else the CPU"""
    workers: int | None = None
    """jobs at a time; by default one per core and `threads`, or two per GPU"""
    threads: int = 1
    """torch's threads for each of them"""
    max_memory: str | int | None = None
    """most memory of the process, as "3GB"; by default four fifths of what is free, more for a single job"""
    progress: bool = False
    engine: str = "local"
    """local, or ray for a cluster whose machines share a disk"""
    address: str | None = None
    """of the Ray cluster; by default RAY_ADDRESS, or Ray is started on this machine"""

    def __post_init__(self) -> None:
        """Refuse an engine that is not there, before any work is done for it."""
        if self.engine not in ENGINES:
            raise ParameterError(f"There is no engine {self.engine!r}; engines: {', '.join(ENGINES)}.")
        if self.engine == "ray":
            check_ray()
        elif self.address is not None:
            raise ParameterError(f"--address {self.address} is for --engine ray; leave it out, or take that engine.")

    @property
    def network_device(self) -> torch.device:
        """The device of this machine that networks run on while something is chosen; refused if it cannot be used."""
        on_cluster = self.engine == "ray" and str(self.device) != "cpu"  # whose GPUs are not this machine's
        return worker_devices("auto" if on_cluster else self.device, 1, self.threads)[0]

    @property
    def network_threads(self) -> int:
        """The threads that torch has while a network runs alone: those of all workers together, or its usual number."""
        worker_devices("cpu", self.workers, self.threads)  # refuses numbers that cannot be
        if self.workers is None and self.threads == 1:
            return torch.get_num_threads()
        return (self.workers or 1) * self.threads

    def start(self, jobs: Sequence[Any], reserved: int = 0) -> Engine:
        """Return an engine for jobs; `reserved` bytes of its memory will be used by others.

        A job that exceeds the memory limit, or what is free, is refused by the name of its tensor.
        """
        devices = self.devices
        jobs = [job.on(devices[0]) if isinstance(job, Job) else job for job in jobs]
        widest = max((job.memory for job in jobs), default=0)
        memory = max(self.budget(jobs) - reserved, widest)
        engine: Engine = ENGINES[self.engine](devices, threads=self.threads, memory=memory)
        return engine

    @property
    def devices(self) -> list[torch.device]:
        """The device of every worker."""
        if self.engine == "ray":
            return cluster_devices(self.device, self.workers, self.threads, self.address)
        return worker_devices(self.device, self.workers, self.threads)

    def speeds(self) -> Speeds:
        """Return how fast one worker is, measured here in a fraction of a second when it is first asked for."""
        device = torch.device("cpu") if self.engine == "ray" else self.devices[0]
        with torch_threads(self.threads):
            return measured_speeds(device, self.threads)

    def budget(self, jobs: Sequence[Any]) -> int:
        """Return the bytes that jobs may take together; refuse one that exceeds the limit, or what is free."""
        if self.engine == "ray":
            return cluster_memory(self.max_memory, jobs, self.address)
        return memory_budget(self.max_memory, jobs, elsewhere=self.devices[0].type != "cpu")


def in_memory(device: torch.device, jobs: int) -> RunOptions:
    """Return options that take as many threads as torch has, spread over jobs as far as there are some."""
    if device.type != "cpu":
        return RunOptions(device, workers=3)  # Python starts kernels: more workers would wait for each other
    total = torch.get_num_threads()
    workers = max(1, min(total, jobs))
    return RunOptions(device, workers, max(1, total // workers))
