"""The walk of a merge: read the models' tensors, and merge their differences from the base, one job at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from epimer.checkpoints.checkpoint import allocate, header
from epimer.engine.batches import SMALL, Batch, batches, directions, stacks
from epimer.engine.layer import merge_layer, merge_stack
from epimer.engine.task_vectors import Tensors, check_deltas, read_tensors, task_vectors
from epimer.engine.weighted_sums import add_weighted_sum, in_precision
from epimer.errors import NumericalError, TensorError
from epimer.geometry.linalg import CHUNK, LowRank, as_compute_dtype, chunks, dense, nonfinite
from epimer.geometry.solution import Solution
from epimer.geometry.subspace import Tagged, tagged_of_layers
from epimer.methods.averaging import convex_combination
from epimer.methods.registry import Layer, Prepared
from epimer.plan.inputs import check_finite
from epimer.plan.jobs import Job, Plan
from epimer.plan.layer_curvature import NO_CURVATURE, LayerCurvature, layer_curvature
from epimer.plan.memory import streamed_rows
from epimer.records import Status, TensorRecord

PROBE = 1 << 10  # entries that are compared with the base's before the others

Merged = tuple[Job, Tensor, TensorRecord]
Sink = Callable[[Job, Tensor], None]
"""takes the next rows of a job's result, in memory that is used again afterwards"""


class MergeWalk:
    """Merges the tensors of a plan."""

    def __init__(
        self,
        plan: Plan,
        jobs: Sequence[Job],
        prepared: Prepared | None = None,
        *,
        stacked: bool = False,
        written: bool = False,
    ) -> None:
        """Merge these parts of a plan.

        Args:
            plan: all of the merge.
            jobs: which of its parts.
            prepared: what the method's pre-pass found.
            stacked: merge matrices of one shape together, as a GPU likes it.
            written: results are written and then let go.
        """
        self.plan, self.prepared, self.written = plan, prepared, written
        self.jobs = list(stacks(jobs) if stacked else batches(jobs))

    def read(self, batch: Batch) -> list[Tensors]:
        """Read the tensors, the curvature and the basis of every job; what is streamed, let the system load."""
        if len(batch.jobs) == 1 and self._streams(batch.jobs[0]):
            for one in self.plan.participants.all:
                one.prefetch(batch.name, batch.jobs[0].rows)
            return [Tensors(None, [], streamed=True)]
        return [self._read_one(job) for job in batch.jobs]

    def _streams(self, job: Job) -> bool:
        """Whether a job's tensors are merged a few rows at a time as they are read, which needs little memory."""
        return job.streams and job.memory > SMALL and job.name not in self.plan.corrections

    def _read_one(self, job: Job) -> Tensors:
        participants = self.plan.participants
        if job.method is None:
            return Tensors(participants.template.read(job.name), [])
        tensors = read_tensors(participants, job, job.rows)
        tensors.curvature = layer_curvature(job, participants, self.plan.curvatures)
        return tensors

    def work(self, batch: Batch, loaded: list[Tensors], device: torch.device) -> list[Merged]:
        """Merge small tensors whose entries stand alone as one vector; anything else, and what fails, one by one."""
        if batch.stacked:
            return self._merge_stack(batch, loaded, device)
        alike = {self._common(job, tensors) for job, tensors in zip(batch.jobs, loaded, strict=True)}
        if len(batch.jobs) > 1 and len(alike) == 1:
            with suppress(TensorError):  # which does not say whose fault it was
                return list(self._as_one(batch, loaded, device))
        return [(job, *self._merge(job, loaded.pop(0), device)) for job in batch.jobs]

    def work_into(self, sink: Sink, batch: Batch, loaded: list[Tensors], device: torch.device) -> list[TensorRecord]:
        """Merge as `work` does and hand on what is merged; of a tensor that is streamed, some rows at a time."""
        job = self._weighted(batch.jobs[0])
        if loaded[0].streamed and self._in_chunks(job, device):
            started = time.perf_counter()
            return [_record(job, *self._merge_rows(job, loaded[0], None, sink), started)]
        records = []
        for job, result, record in self.work(batch, loaded, device):
            sink(job, result)
            records.append(record)
        return records

    def _common(self, job: Job, tensors: Tensors) -> object:
        """Return what jobs must have in common to be done as one; a job that cannot has itself."""
        corrected = job.name in self.plan.corrections
        if not job.entrywise or corrected or not all(isinstance(W, Tensor) for W in tensors.models):
            return job.key
        dtypes = [job.template.dtype, *(W.dtype for W in (tensors.base, *tensors.models) if isinstance(W, Tensor))]
        return id(job.options), job.rule, tuple(job.weights), tuple(dtypes), job.device

    def _as_one(self, batch: Batch, loaded: list[Tensors], device: torch.device) -> Iterator[Merged]:
        sizes = [job.template.numel() for job in batch.jobs]
        columns = zip(*([tensors.base, *tensors.models] for tensors in loaded), strict=True)
        base, *models = [
            None if parts[0] is None else torch.cat([dense(W).reshape(-1) for W in parts if W is not None])
            for parts in columns
        ]
        whole = replace(batch.jobs[0], template=header((sum(sizes),), batch.jobs[0].template.dtype))
        result, record = self._merge(whole, Tensors(base, list(models)), device)
        for job, part, tensors in zip(batch.jobs, torch.split(result, sizes), loaded, strict=True):
            shape, share = tuple(job.template.shape), (record.seconds or 0) * part.numel() / sum(sizes)
            unchanged = record.unchanged or equals_base(part, tensors.base)
            yield job, part.reshape(shape), replace(record, shape=shape, seconds=share, unchanged=unchanged)

    def _merge(self, job: Job, tensors: Tensors, device: torch.device) -> tuple[Tensor, TensorRecord]:
        started = time.perf_counter()
        solution, unchanged = Solution(job.template), False
        if job.method is None:
            result, solution = self._copy(job, tensors)
        else:
            job = self._weighted(job)
            if tensors.base is not None and not any(isinstance(W, Tensor) for W in tensors.models):
                assert self.plan.participants.base is not None
                check_finite(self.plan.participants.base, job.name, tensors.base)
            if self._in_chunks(job, device):
                result = self._room(job)
                solution, unchanged = self._merge_rows(job, tensors, result)
            else:
                if tensors.streamed:
                    tensors = read_tensors(self.plan.participants, job, job.rows)
                return self._merge_task_vectors(job, tensors, *self._task_vectors(job, tensors, device), started)
        return result.to(job.device), _record(job, solution, unchanged, started)

    def _room(self, job: Job) -> Tensor:
        """Allocate a result: where it goes to a file in pages that the next one uses again, else in the caller's."""
        kept, W = self.plan.participants.template.checkpoint.in_memory, job.template
        return torch.empty(W.shape, dtype=W.dtype) if kept else allocate(W.shape, W.dtype)

    def _merge_task_vectors(
        self,
        job: Job,
        tensors: Tensors,
        start: Tensor | None,
        deltas: list[Any],
        started: float,
    ) -> tuple[Tensor, TensorRecord]:
        """Merge task vectors where they are; what was read alongside has their curvature."""
        return self._merge_whole(job, start, deltas, tensors.curvature.converted(deltas[0]), started)

    def _merge_whole(
        self,
        job: Job,
        start: Tensor | None,
        deltas: list[Any],
        curvature: LayerCurvature,
        started: float,
        atoms: Tagged | None = None,
        found: Solution | None = None,
    ) -> tuple[Tensor, TensorRecord]:
        """Return the merged tensor, where it belongs, and its record."""
        result = torch.empty(job.template.shape, dtype=job.template.dtype, device=deltas[0].device)
        solution = self._merge_deltas(job, start, deltas, result, curvature, atoms, found)
        return self._moved(job, result), _record(job, solution, equals_base(result, start), started)

    def _task_vectors(self, job: Job, tensors: Tensors, device: torch.device) -> tuple[Tensor | None, list[Any]]:
        """Return the base's tensor and the task vectors, on the device and in working precision."""
        base, tensors.base = tensors.base, None
        on_device = None if base is None else base.to(device, non_blocking=True)
        start = None if on_device is None else on_device.to(job.precision)  # converted there, after the transfer
        del base
        return start, task_vectors(self.plan.participants, job, start, tensors, device)

    def _merge_stack(self, batch: Batch, loaded: list[Tensors], device: torch.device) -> list[Merged]:
        """Merge matrices of one shape whose singular vectors are found for all of them at once."""
        started = time.perf_counter()
        jobs = [self._weighted(job) for job in batch.jobs]
        read = [self._task_vectors(job, tensors, device) for job, tensors in zip(jobs, loaded, strict=True)]
        found: list[Tagged | None] = [None] * len(jobs)
        layers = [deltas for _, deltas in read]
        if all(isinstance(D, Tensor) for deltas in layers for D in deltas) and not any(
            tensors.curvature.basis for tensors in loaded
        ):
            with suppress(NumericalError, torch.OutOfMemoryError):  # which do not say whose fault it was
                found = tagged_of_layers(layers, directions(jobs[0]))
        curvatures = [tensors.curvature.converted(deltas[0]) for tensors, deltas in zip(loaded, layers, strict=True)]
        del layers
        return list(self._merge_found(jobs, read, found, curvatures, started))

    def _merge_found(
        self,
        jobs: Sequence[Job],
        read: list[tuple[Tensor | None, list[Any]]],
        found: Sequence[Tagged | None],
        curvatures: list[LayerCurvature],
        started: float,
    ) -> Iterator[Merged]:
        """Merge matrices of one shape, of which most have their singular vectors, at once as far as that can be."""
        whole = [i for i, atoms in enumerate(found) if atoms is not None]
        layers = [self._layer(jobs[i], *read[i], found[i]) for i in whole]
        solutions: dict[int, Solution | None] = {}
        if whole:
            made = merge_stack(jobs[0], layers, [curvatures[i] for i in whole])
            solutions = dict(zip(whole, made, strict=True))
        del layers
        began = time.perf_counter()
        share = (began - started) / len(jobs)
        for i, job in enumerate(jobs):
            (start, deltas), curvature = read.pop(0), curvatures.pop(0)
            merged = self._merge_whole(job, start, deltas, curvature, began - share, found[i], solutions.get(i))
            yield job, *merged
            del start, deltas, curvature, merged
            began = time.perf_counter()

    def _moved(self, job: Job, result: Tensor) -> Tensor:
        """Return a result where its tensor belongs; one that is written goes through memory that is used again."""
        if self.written and result.is_cuda:
            return allocate(result.shape, result.dtype).copy_(result)
        return result.to(job.device)

    def _weighted(self, job: Job) -> Job:
        """Return a job with the weights that the pre-pass found, if it did."""
        return replace(job, weights=self.prepared.weights) if self.prepared and self.prepared.weights else job

    def _copy(self, job: Job, tensors: Tensors) -> tuple[Tensor, Solution]:
        """Copy the base's tensor; Inf in it, as a mask has, is kept and told, NaN is refused."""
        W, template, solution = tensors.base, self.plan.participants.template, Solution(job.template)
        assert W is not None
        result = W.to(job.template.dtype, copy=template.checkpoint.in_memory)
        if not W.is_floating_point() or not (bad := nonfinite(result)):
            return result, solution
        if bad > nonfinite(W):
            raise TensorError(f"{job.name!r} does not fit in {result.dtype}, to which it is copied; widen the dtype.")
        text = template.non_finite(job.name)
        if bool(as_compute_dtype(W).isnan().any()):
            raise TensorError(f"{text}, and is copied as it is; repair it, or give it the rule 'skip'.")
        return result, replace(solution, status=Status.NON_FINITE, note=text)

    def _in_chunks(self, job: Job, device: torch.device) -> bool:
        """Whether a job is merged a part at a time because its entries do not depend on each other."""
        return job.entrywise and device.type == "cpu" and job.name not in self.plan.corrections

    def _merge_rows(
        self, job: Job, tensors: Tensors, result: Tensor | None, sink: Sink | None = None
    ) -> tuple[Solution, bool]:
        """Merge a tensor some rows at a time, and return whether it equals the base's.

        Args:
            job: whose entries do not depend on each other.
            tensors: what has been read, or that it is to be streamed.
            result: where to write; None for memory that the next rows use again.
            sink: gets the rows as they are merged.
        """
        solution, unchanged = Solution(job.template), True
        for target, part in self._pieces(job, tensors, result):
            solution = self._merge_in_chunks(job, part, target)
            unchanged = unchanged and equals_base(target, part.base)
            if sink is not None:
                sink(job, target)
            del part  # before the next is read
        return solution, unchanged

    def _pieces(self, job: Job, tensors: Tensors, result: Tensor | None) -> Iterator[tuple[Tensor, Tensors]]:
        """Yield blocks of rows of the result with what they are merged from; all of it if that has been read."""
        if not tensors.streamed:
            assert result is not None
            yield result, tensors
            return
        W, first = job.template, job.rows[0] if job.rows else 0
        step = streamed_rows(W)
        room = allocate((min(step, len(W)), *W.shape[1:]), W.dtype) if result is None else result
        for start in range(0, len(W), step):
            stop = min(start + step, len(W))
            target = room[: stop - start] if result is None else room[start:stop]
            yield target, read_tensors(self.plan.participants, job, (first + start, first + stop))

    def _merge_in_chunks(self, job: Job, tensors: Tensors, result: Tensor) -> Solution:
        """Merge entries that stand alone a part at a time, in memory that never leaves the processor's cache."""
        # A weighted sum of task vectors is not finite where one of them is not, so the result alone is checked; whose
        # fault it is shows below.
        models = [W for W in tensors.models if W is not None]
        if (
            job.is_weighted_sum
            and all(job.weights)
            and add_weighted_sum(result, tensors.base, models, job.weights, job.options.scale, job.precision)
        ):
            return Solution(result)
        given = [dense(W) if isinstance(W, LowRank) else W for W in tensors.models]
        columns = [[] if W is None else chunks(W.reshape(-1)) for W in (*given, tensors.base)]
        scratch = torch.empty(len(columns), min(CHUNK, result.numel()), dtype=job.precision)
        solution = Solution(result)
        for i, target in enumerate(chunks(result.reshape(-1))):
            *deltas, start = scratch[:, : len(target)].unbind()
            W0 = in_precision(columns[-1][i], start) if columns[-1] else None
            for W, D, column in zip(tensors.models, deltas, columns, strict=False):
                if W0 is None or isinstance(W, LowRank):
                    D.copy_(column[i])
                else:
                    torch.sub(in_precision(column[i], D), W0, out=D)
            check_deltas(self.plan.participants, job, deltas)
            solution = self._merge_deltas(job, W0, deltas, target, NO_CURVATURE)
        return solution

    def _layer(self, job: Job, W0: Tensor | None, deltas: list[Any], atoms: Tagged | None = None) -> Layer:
        """Return a tensor as its method sees it, but for its curvature."""
        context = None if self.prepared is None else self.prepared.context
        start = None if W0 is None else as_compute_dtype(W0)
        return Layer(job.matrix, deltas, job.weights, context=context, inputs=job.inputs, base=start, atoms=atoms)

    def _merge_deltas(
        self,
        job: Job,
        W0: Tensor | None,
        deltas: list[Any],
        result: Tensor,
        curvature: LayerCurvature,
        atoms: Tagged | None = None,
        found: Solution | None = None,
    ) -> Solution:
        """Merge task vectors onto the base, and write that to `result`, in its shape and dtype.

        `found` is their merge, where it was made together with other layers'.
        """
        layer = self._layer(job, W0, deltas, atoms)
        start = layer.base
        for wide in (False, True):
            if job.rule == "statistic":
                solution = convex_combination(layer, job.options.scale, based=W0 is not None)
                total = solution.value.reshape(result.shape)
            else:
                solution = found if found is not None and not wide else merge_layer(job, layer, curvature, wide=wide)
                total = job.options.scale * dense(solution.value).reshape(result.shape)
            if start is not None:
                total += start
            if (correction := self.plan.corrections.get(job.name)) is not None:
                total += (correction if job.rows is None else correction[slice(*job.rows)]).to(total)
            if not nonfinite(result.copy_(total)):
                return solution
            check_deltas(self.plan.participants, job, deltas)
            if job.precision == torch.float64 or job.rule == "statistic" or not nonfinite(total):
                break
        raise TensorError(f"the merged {job.name!r} does not fit in {result.dtype}; lower scale, or widen its dtype.")


def _record(job: Job, solution: Solution, unchanged: bool, started: float) -> TensorRecord:
    """Return the record of a tensor whose merge began at `started`."""
    found = solution.status, solution.rank, solution.residual, solution.eta, solution.note
    return TensorRecord(job.rule, tuple(job.template.shape), *found, time.perf_counter() - started, unchanged)


def equals_base(result: Tensor, base: Tensor | None) -> bool:
    """Whether a result is the base's tensor in its dtype, to the last bit; most differ in their first entries."""
    if base is None:
        return False
    W, W0 = result.reshape(-1), base.reshape(-1)
    return all(torch.equal(W[:end], W0[:end].to(W)) for end in (min(len(W), PROBE), len(W)))
