"""Run a plan on this machine: a reader ahead, workers, and a writer behind, so that disk and cores overlap."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from queue import Empty, Full, Queue
from threading import Condition, Event, Thread
from typing import Any, TypeVar

import torch
from torch import Tensor

from epimer.checkpoints.checkpoint import fresh, header
from epimer.checkpoints.lora import Adapted
from epimer.errors import EpimerError, OutputError, TensorError
from epimer.geometry.linalg import LowRank, chunks, dense, nonfinite
from epimer.methods.curvatures import check_layer
from epimer.methods.inputs import check_finite, matrix_shape, precision
from epimer.methods.merge import Setting, check_delta, merge_tensor
from epimer.methods.registry import Prepared, Prepass
from epimer.plan.jobs import Job, Plan
from epimer.plan.participants import Role
from epimer.progress import Stage
from epimer.records import TensorRecord

T = TypeVar("T")
SMALL = 1 << 20  # jobs below this many bytes are handed over together
TOGETHER = 1 << 23

Made = tuple[Job, Tensor, TensorRecord]
Loaded = tuple[Tensor | None, list[Tensor | LowRank | None]]
"""the base's tensor, and per model its tensor, what an adapter adds to the base's, or None where it adds nothing"""


class Budget:
    """Bytes that may be in use at once; whoever asks for more waits, but one always goes ahead."""

    def __init__(self, most: int | None) -> None:
        self.most, self.used = most, 0
        self._changed = Condition()

    def take(self, amount: int, stop: Event) -> None:
        """Wait until there is room."""
        with self._changed:
            while not stop.is_set() and self.used and self.most is not None and self.used + amount > self.most:
                self._changed.wait(0.1)
            self.used += amount

    def give(self, amount: int) -> None:
        """Make room."""
        with self._changed:
            self.used -= amount
            self._changed.notify_all()


class Runner:
    """One merge in progress."""

    def __init__(
        self, plan: Plan, devices: Sequence[torch.device], *, threads: int, memory: int | None, ahead: int = 2
    ) -> None:
        self.plan, self.devices, self.threads = plan, devices, threads
        self.budget = Budget(memory)
        self.stop = Event()
        self.todo: Queue[tuple[list[Job], list[Any]] | None] = Queue(maxsize=ahead * len(devices))
        self.made: Queue[Any] = Queue()
        self.prepared: Prepared | None = None
        base = plan.base
        self.adapted = {
            role.label
            for role in plan.models
            if isinstance(role.checkpoint, Adapted)
            and base is not None
            and role.checkpoint.base.fingerprint == base.checkpoint.fingerprint
        }

    def prepare(self, stage: Stage) -> Prepared | None:
        """Let the method look at the whole model first, if it must."""
        method, jobs = self.plan.method, self.plan.merged
        if method.prepare is None or not jobs:
            return None
        setting = jobs[0].setting
        assert setting is not None
        entries = sum(job.template.numel() for job in jobs)

        def tensors() -> Iterator[tuple[str, Tensor | None, list[Tensor]]]:
            for job, read in ahead((job, [self._read(role, job) for role in self.plan.roles]) for job in jobs):
                tensors = [W.to(self.devices[0]) for W in read]
                yield job.name, None if self.plan.base is None else tensors.pop(0), tensors
                stage.advance(job.reads, job.key)

        def average(weights: list[float]) -> dict[str, Tensor]:
            raise AssertionError("a method that scores averages cannot come from a recipe")

        dtypes = [header for role in self.plan.roles for header in role.headers.values()]
        with threaded(self.threads):
            workers = 1 if self.devices[0].type == "cuda" else len(self.devices)
            found = Prepass(tensors, setting.weights, average, entries, precision(dtypes), workers)
            return method.prepare(found, setting.p)

    def results(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Tensor, TensorRecord]]:
        """Run jobs and yield what they made, in no particular order."""
        for device in set(self.devices):
            if device.type == "cuda":
                # Loads a library, which two threads must not do at once.
                torch.linalg.eigh(torch.eye(2, device=device))
        workers = [Thread(target=self._work, args=(device,), daemon=True) for device in self.devices]
        reader = Thread(target=self._load_all, args=(jobs,), daemon=True)
        for thread in (reader, *workers):
            thread.start()
        running = len(workers)
        try:
            while running:
                made = self.made.get()
                if made is None:
                    running -= 1
                elif isinstance(made, BaseException):
                    raise made
                else:
                    job, result, record = made
                    yield job, result, record
                    self.budget.give(job.memory)
                    del made, job, result
        finally:
            self.stop.set()
            while any(thread.is_alive() for thread in (reader, *workers)):
                _drain(self.todo)
                _drain(self.made)
                for thread in (reader, *workers):
                    thread.join(0.01)

    def _load_all(self, jobs: Sequence[Job]) -> None:
        torch.set_num_threads(self.threads)
        try:
            for batch in batches(jobs):
                self.budget.take(sum(job.memory for job in batch), self.stop)
                if self.stop.is_set():
                    break
                offer(self.todo, (batch, [self._load(job) for job in batch]), self.stop)
        except BaseException as error:
            self.made.put(error)
        for _ in self.devices:
            offer(self.todo, None, self.stop)

    def _next(self) -> tuple[list[Job], list[Any]] | None:
        while not self.stop.is_set():
            with suppress(Empty):
                return self.todo.get(timeout=0.1)
        return None

    def _load(self, job: Job) -> Loaded:
        base = self.plan.base
        if job.setting is None:
            source = base if base is not None else self.plan.models[0]
            return source.read(job.name), []
        W0 = None if base is None else base.read(job.name, job.rows)
        return W0, [self._load_one(role, job) for role in self.plan.models]

    def _load_one(self, role: Role, job: Job) -> Tensor | LowRank | None:
        model, name = role.checkpoint, role.stored.get(job.name, job.name)
        if role.label in self.adapted and isinstance(model, Adapted) and not model.replaces(name):
            delta = model.delta(name, job.rows)
            if delta is not None:
                for factor in (delta.A, delta.B):
                    check_finite(role.label, job.name, factor)
            return delta
        return role.read(job.name, job.rows)

    def _check(self, role: Role, job: Job, D: Tensor) -> None:
        """Refuse a task vector that is not finite, and say whose fault it is."""
        if nonfinite(D):
            for one in (*self.plan.roles[: -len(self.plan.models)], role):
                self._read(one, job)
            check_delta(role.label, job.name, D)

    def _read(self, role: Role, job: Job) -> Tensor:
        W = role.read(job.name, job.rows)
        check_finite(role.label, job.name, W)
        return W

    def _work(self, device: torch.device) -> None:
        torch.set_num_threads(self.threads)
        try:
            with torch.no_grad():
                while (item := self._next()) is not None:
                    batch, loaded = item
                    del item
                    job = batch[0]
                    for made in self._together(batch, loaded, device):
                        self.made.put(made)
                    del batch, loaded
            self.made.put(None)
        except torch.OutOfMemoryError as error:
            message = f"{device} has too little memory for {job.name!r}; use --device cpu, or a larger device."
            self.made.put(_chained(OutputError(message), error))
        except BaseException as error:
            self.made.put(error)

    def _together(self, batch: list[Job], loaded: list[Loaded], device: torch.device) -> Iterator[Made]:
        """Merge small tensors whose entries stand alone as one vector; anything else, and what fails, one by one."""
        if len(batch) > 1 and len({_kind(job, tensors) for job, tensors in zip(batch, loaded, strict=True)}) == 1:
            with suppress(TensorError):  # which does not say whose fault it was
                sizes = [job.template.numel() for job in batch]
                columns = zip(*([tensors[0], *tensors[1]] for tensors in loaded), strict=True)
                joined: list[Any] = [
                    None if parts[0] is None else torch.cat([dense(W).reshape(-1) for W in parts if W is not None])
                    for parts in columns
                ]
                whole = replace(batch[0], template=header((sum(sizes),), batch[0].template.dtype))
                result, record = self._make(whole, (joined[0], joined[1:]), device)
                for job, part in zip(batch, torch.split(result, sizes), strict=True):
                    shape, share = tuple(job.template.shape), (record.seconds or 0) * part.numel() / sum(sizes)
                    yield job, part.reshape(shape), replace(record, shape=shape, seconds=share)
                return
        for job in batch:
            yield job, *self._make(job, loaded.pop(0), device)

    def _make(self, job: Job, loaded: Loaded, device: torch.device) -> tuple[Tensor, TensorRecord]:
        started = time.perf_counter()
        W0, models = loaded
        del loaded
        if job.setting is None:
            assert W0 is not None
            record = TensorRecord(job.rule, tuple(W0.shape))
            result = W0.to(job.template.dtype)
            if W0.is_floating_point() and nonfinite(result) and not nonfinite(W0):
                raise TensorError(
                    f"{job.name!r} does not fit in {result.dtype}, to which it is copied; widen the dtype."
                )
            return result, replace(record, seconds=time.perf_counter() - started)
        setting = job.setting if self.prepared is None else job.setting.prepared(self.prepared)
        tensors = [W for W in models if isinstance(W, Tensor)]
        dtype = job.precision
        if W0 is not None and not tensors:
            check_finite("base", job.name, W0)
        like = [header(job.template.shape, dtype)] * len(models)
        checked = check_layer(job.name, job.rule, W0, like, setting.method, setting.p, self.plan.curvatures)
        setting = replace(setting, curvature=checked)
        if setting.entrywise and device.type == "cpu":
            result, record = self._in_chunks(setting, job, W0, models, dtype)
        else:
            start = None if W0 is None else W0.to(device, dtype)
            del W0
            deltas = self._deltas(job, start, models, device, dtype, factored=setting.factored)
            result, record = merge_tensor(setting, start, deltas, job.template)
        return result, replace(record, shape=tuple(job.template.shape), seconds=time.perf_counter() - started)

    def _in_chunks(
        self, setting: Setting, job: Job, W0: Tensor | None, models: list[Tensor | LowRank | None], dtype: torch.dtype
    ) -> tuple[Tensor, TensorRecord]:
        """Merge entries that stand alone a megabyte at a time, which never leaves the processor's cache."""
        result = fresh(job.template.shape, job.template.dtype)
        given = [dense(W).to(dtype) if isinstance(W, LowRank) else W for W in models]
        columns = [None if W is None else chunks(W.reshape(-1)) for W in (W0, *given)]
        record: TensorRecord | None = None
        for i, target in enumerate(chunks(result.reshape(-1))):
            base, *parts = [None if column is None else column[i] for column in columns]
            start = None if base is None else base.to(dtype)
            deltas = []
            for role, W, part in zip(self.plan.models, models, parts, strict=True):
                if part is None:
                    D = torch.zeros(len(target), dtype=dtype)
                elif start is None or isinstance(W, LowRank):
                    D = part.to(dtype)
                else:
                    D = part.to(dtype) - start
                self._check(role, job, D)
                deltas.append(D)
            piece, record = merge_tensor(setting, start, deltas, header(target.shape, target.dtype))
            target.copy_(piece)
        assert record is not None
        return result, record

    def _deltas(
        self,
        job: Job,
        start: Tensor | None,
        models: list[Tensor | LowRank | None],
        device: torch.device,
        dtype: torch.dtype,
        *,
        factored: bool,
    ) -> list[Tensor | LowRank]:
        """Take the task vectors one by one, letting go of each model's tensor on the way."""
        shape = matrix_shape(job.template) if job.rule == "matrix" else job.template.shape
        deltas: list[Tensor | LowRank] = []
        for t, role in enumerate(self.plan.models):
            W, models[t] = models[t], None
            if W is None:
                deltas.append(torch.zeros(shape, dtype=dtype, device=device))
            elif isinstance(W, LowRank):
                delta = W.to(device, dtype)
                deltas.append(delta if factored else delta.dense().reshape(shape))
            else:
                D = W.to(device, dtype)
                if start is not None:
                    D -= start  # what was read is nobody else's
                self._check(role, job, D)
                deltas.append(D.reshape(shape))
        return deltas


def offer(queue: Queue[Any], item: Any, stop: Event) -> None:
    """Put an item into a queue when there is room, unless the work stops first."""
    while not stop.is_set():
        with suppress(Full):
            queue.put(item, timeout=0.1)
            return


def ahead(items: Iterable[T]) -> Iterator[T]:
    """Yield items, made by a thread that is always one ahead."""
    queue: Queue[tuple[T | None, BaseException | None]] = Queue(maxsize=1)
    stop = Event()

    def make() -> None:
        try:
            for item in items:
                offer(queue, (item, None), stop)
                if stop.is_set():
                    return
            offer(queue, (None, StopIteration()), stop)
        except BaseException as error:
            offer(queue, (None, error), stop)

    Thread(target=make, daemon=True).start()
    try:
        while True:
            item, error = queue.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item  # type: ignore[misc]
    finally:
        stop.set()


@contextmanager
def threaded(count: int) -> Iterator[None]:
    """Set torch's threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def batches(jobs: Sequence[Job]) -> Iterator[list[Job]]:
    """Hand small tensors over together, so that a norm or a bias does not cost a turn of its own."""
    batch: list[Job] = []
    for job in jobs:
        if batch and (job.memory > SMALL or sum(other.memory for other in batch) > TOGETHER):
            yield batch
            batch = []
        batch.append(job)
        if job.memory > SMALL:
            yield batch
            batch = []
    if batch:
        yield batch


def _kind(job: Job, loaded: Loaded) -> object:
    """Return what jobs must have in common to be done as one; a job that cannot has itself."""
    setting, (base, models) = job.setting, loaded
    if setting is None or not setting.entrywise or not all(isinstance(W, Tensor) for W in models):
        return job.key
    dtypes = [job.template.dtype, *(W.dtype for W in (base, *models) if isinstance(W, Tensor))]
    return id(setting.p), setting.rule, tuple(setting.weights), tuple(dtypes)


def _drain(queue: Queue[Any]) -> None:
    with suppress(Empty):
        while True:
            queue.get_nowait()


def _chained(error: EpimerError, cause: BaseException) -> EpimerError:
    error.__cause__ = cause
    return error
