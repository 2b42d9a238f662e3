"""Run walks on this machine: one thread reads ahead, several compute, the caller consumes; disk and cores overlap."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from functools import cache, partial
from queue import Empty, Full, Queue
from threading import Condition, Event, Thread, get_ident
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from epimer.checkpoints.page_locked import PINNED
from epimer.engine.memory import ROOM
from epimer.engine.protocol import JobT, LoadedT, ResultT, Walk
from epimer.errors import OutputError, ParameterError
from epimer.geometry.decompositions import eigh
from epimer.machine import out_of_memory
from epimer.plain_text import format_size

J = TypeVar("J")
L = TypeVar("L")
R = TypeVar("R")
AHEAD = 2  # jobs that are read ahead, per worker
PINNED_AT_MOST = 1 << 33  # bytes that are page-locked for a GPU where there is no limit
IN_FLIGHT = 8  # jobs that are read and not yet consumed, per worker: more would only take memory


class Threads:
    """An engine of threads.

    Results do not depend on the number of workers; they may, in their last digit, on `threads`.
    """

    def __init__(self, devices: Sequence[torch.device], *, threads: int = 1, memory: int | None = None) -> None:
        """Create an engine.

        Args:
            devices: one per worker.
            threads: torch's threads within each worker.
            memory: bytes that jobs may take together; one always goes ahead. None sets no limit.
        """
        self.devices, self.threads, self.memory = list(devices), threads, memory

    def map(self, walk: Walk[JobT, LoadedT, ResultT]) -> Iterator[tuple[JobT, ResultT]]:
        """Yield every job with its result, in the order of the jobs."""
        for device in set(self.devices):
            if device.type == "cuda":
                eigh(torch.eye(2, device=device))  # loads a library, which two threads must not do at once
        memory, pinned = self.memory, 0
        if self.devices[0].type == "cuda":  # what is page-locked and waits for the next tensors is in use too
            pinned = PINNED_AT_MOST if memory is None else memory // 4
            memory = None if memory is None else memory - pinned
        budget = Budget(memory, IN_FLIGHT * len(self.devices))
        run: _Run[Any, Any, Any] = _Run(walk, self.devices, self.threads, budget, pinned)
        with torch_threads(self.threads):
            yield from run.results()


class Budget:
    """Bytes and jobs that may be in use at once; whoever asks for more waits, but one always goes ahead."""

    def __init__(self, most: int | None, jobs: int | None = None) -> None:
        self.most, self.used = most, 0
        self.most_jobs, self.jobs = jobs, 0
        self._changed = Condition()

    def take(self, amount: int, stop: Event) -> None:
        """Wait until there is room."""
        with self._changed:
            while not stop.is_set() and self.jobs and not self._fits(amount):
                self._changed.wait(0.1)
            self.used += amount
            self.jobs += 1

    def _fits(self, amount: int) -> bool:
        room = self.most is None or self.used + amount <= self.most
        return room and (self.most_jobs is None or self.jobs < self.most_jobs)

    def give(self, amount: int) -> None:
        """Make room."""
        with self._changed:
            self.used -= amount
            self.jobs -= 1
            self._changed.notify_all()


class Turns:
    """Lets jobs be worked on at once, or one of them alone."""

    def __init__(self) -> None:
        self.working, self.taken = 0, 0  # how many work beside others, and the thread that is alone
        self._changed = Condition()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Work beside others, unless one is alone."""
        with self._changed:
            self._changed.wait_for(lambda: not self.taken)
            self.working += 1
        try:
            yield
        finally:
            with self._changed:
                self.working -= 1
                self._changed.notify_all()

    @contextmanager
    def alone_for_now(self) -> Iterator[None]:
        """Work alone for a while, and then as before."""
        if self.taken == get_ident():
            yield
            return
        with self._changed:
            self.working -= 1
            self._changed.notify_all()
        try:
            with self.alone():
                yield
        finally:
            with self._changed:
                self._changed.wait_for(lambda: not self.taken)
                self.working += 1

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait for the others, and work while they wait."""
        with self._changed:
            self._changed.wait_for(lambda: not self.taken)
            self.taken = get_ident()
            self._changed.wait_for(lambda: not self.working)
        try:
            yield
        finally:
            with self._changed:
                self.taken = 0
                self._changed.notify_all()


class _Failure:
    """An error in place of a result."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Run(Generic[J, L, R]):
    """One walk in progress."""

    def __init__(
        self, walk: Walk[Any, Any, Any], devices: Sequence[torch.device], threads: int, budget: Budget, pinned: int
    ) -> None:
        self.walk, self.devices, self.threads, self.budget, self.pinned = walk, devices, threads, budget, pinned
        self.stop, self.turns = Event(), Turns()
        self.todo: Queue[tuple[int, J, L] | None] = Queue(maxsize=AHEAD * len(devices))
        self.done: Queue[tuple[int, R | _Failure]] = Queue()

    def results(self) -> Iterator[tuple[J, R]]:
        numbered = enumerate(self.devices)
        workers = [Thread(target=self._work, args=(device, number), daemon=True) for number, device in numbered]
        threads = [Thread(target=self._read, daemon=True), *workers]
        for thread in threads:
            thread.start()
        early: dict[int, R | _Failure] = {}
        try:
            for i, job in enumerate(self.walk.jobs):
                while i not in early:
                    place, result = self.done.get()
                    early[place] = result
                    del result
                current = early.pop(i)
                if isinstance(current, _Failure):
                    raise current.error
                yield job, current
                del current
                self.budget.give(job.memory)
        finally:
            self.stop.set()
            while any(thread.is_alive() for thread in threads):
                _drain(self.todo)
                for thread in threads:
                    thread.join(0.01)

    def _read(self) -> None:
        torch.set_num_threads(self.threads)
        PINNED.set(self.pinned)
        for i, job in enumerate(self.walk.jobs):
            self.budget.take(job.memory, self.stop)
            if self.stop.is_set():
                return
            with torch.no_grad():
                loaded = self._attempt(partial(self.walk.read, job), job, torch.device("cpu"))
            if isinstance(loaded, _Failure):
                self.done.put((i, loaded))
                break
            self._offer((i, job, loaded))
            del loaded
        for _ in self.devices:
            self._offer(None)

    def _work(self, device: torch.device, number: int) -> None:
        torch.set_num_threads(self.threads)
        stream = _worker_stream(device, number) if device.type == "cuda" else None
        PINNED.set(self.pinned)
        if device.type == "cpu":
            ROOM.set(self._room)
        with torch.no_grad(), torch.cuda.stream(stream):
            while (item := self._next()) is not None:
                i, job, loaded = item
                del item
                inputs = [loaded]
                del loaded
                result: R | _Failure = self._attempt(partial(self._work_on, inputs, job, device, stream), job, device)
                self.done.put((i, result))
                del result

    @contextmanager
    def _room(self, name: str, needed: int) -> Iterator[None]:
        """Let a job take more memory than was planned, while no other is worked on; refuse more than all may take."""
        most = self.budget.most
        if most is not None and needed > most:
            raise ParameterError(
                f"{name!r} must be merged once more in float64, which needs {format_size(needed)} of memory, and "
                f"{format_size(most)} may be used; free some or raise max_memory, or give it the rule 'average'."
            )
        with self.turns.alone_for_now():
            yield

    def _work_on(self, inputs: list[Any], job: J, device: torch.device, stream: torch.cuda.Stream | None) -> R:
        """Return the result of a job; where its inputs were used up in vain, they are read again."""
        loaded = inputs.pop() if inputs else self.walk.read(job)
        if stream is None:
            return self.walk.work(job, loaded, device)
        stream.wait_stream(torch.cuda.default_stream(device))
        result: R = self.walk.work(job, loaded, device)
        stream.synchronize()
        _keep_for(torch.cuda.default_stream(device), result)
        return result

    def _attempt(self, run: Callable[[], Any], job: J, device: torch.device) -> Any:
        """Return what `run` returns, or its failure; where there is too little memory, it is run again alone."""
        with self.turns.shared():
            result = _outcome(run)
        if not isinstance(result, _Failure) or not out_of_memory(result.error):
            return result
        del result  # and with its traceback all that it holds
        with self.turns.alone():
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            result = _outcome(run)
        if isinstance(result, _Failure) and out_of_memory(result.error):
            what = f"too little memory for {getattr(job, 'name', 'this work')!r}"
            remedy = "free some, or set --max-memory and --workers lower"
            problem = f"{device} has {what}; use --device cpu, or a larger device."
            refusal = OutputError(f"this machine has {what}; {remedy}." if device.type == "cpu" else problem)
            refusal.__cause__ = result.error.with_traceback(None)
            return _Failure(refusal)
        return result

    def _offer(self, item: tuple[int, J, L] | None) -> None:
        while not self.stop.is_set():
            with suppress(Full):
                self.todo.put(item, timeout=0.1)
                return

    def _next(self) -> tuple[int, J, L] | None:
        while not self.stop.is_set():
            with suppress(Empty):
                return self.todo.get(timeout=0.1)
        return None


def _outcome(run: Callable[[], Any]) -> Any:
    """Return what a call returns, or its failure."""
    try:
        return run()
    except BaseException as error:
        return _Failure(error)


@cache
def _worker_stream(device: torch.device, number: int) -> torch.cuda.Stream:
    """Return a GPU worker's own stream, so that none waits for another; always the same, as it keeps memory."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _keep_for(stream: torch.cuda.Stream, result: Any) -> None:
    """Let a result's memory on a GPU be used again only after what `stream` is doing with it."""
    if isinstance(result, Tensor):
        if result.is_cuda:
            result.record_stream(stream)
    elif isinstance(result, list | tuple):
        for part in result:
            _keep_for(stream, part)
    elif isinstance(result, dict):
        _keep_for(stream, list(result.values()))
    elif is_dataclass(result):
        _keep_for(stream, [getattr(result, part.name) for part in fields(result)])


def _drain(queue: Queue[Any]) -> None:
    with suppress(Empty):
        while True:
            queue.get_nowait()


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set torch's number of threads for a while; MKL's number is the process's, so it is restored afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def worker_devices(device: str | torch.device, workers: int | None, threads: int) -> list[torch.device]:
    """Return the device of every worker: one worker per core and `threads`, or two per GPU."""
    for name, value in (("threads", threads), ("workers", workers)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ParameterError(f"The {name!r} parameter must be an integer at least 1. Got {value!r} instead.")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names: list[str | torch.device] = [device]
    if device == "auto" or (device == "cuda" and gpus > 1):
        names = [f"cuda:{i}" for i in range(gpus)] or ["cpu"]
    devices = [check_device(name) for name in names]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    each = max(1, cores // threads) if devices[0].type == "cpu" else 2
    return [devices[i % len(devices)] for i in range(workers or each * len(devices))]


def check_device(device: str | torch.device) -> torch.device:
    """Return a device that can be used here."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ParameterError(
            f"device {device!r} cannot be used here ({str(error).splitlines()[0]}); use 'cpu'."
        ) from error
    if found.type == "meta":
        raise ParameterError("device 'meta' cannot be used: it has no data; use 'cpu' or 'cuda'.")
    return found
