"""The contract of an engine, on threads: order, budget, errors, and an end that leaves nothing running."""

import threading
import time
from dataclasses import dataclass

import pytest
import torch

from epimer.engine.memory import memory_budget
from epimer.engine.threads import IN_FLIGHT, Threads
from epimer.errors import OutputError, ParameterError

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Job:
    name: str
    memory: int = 1
    delay: float = 0.0


class Squares:
    """Reads a number and squares it, and remembers how much memory was in use at once."""

    def __init__(self, jobs, fails=(), fails_reading=()):
        self.jobs, self.fails, self.fails_reading = jobs, fails, fails_reading
        self.lock, self.used, self.most, self.read_names = threading.Lock(), 0, 0, []

    def read(self, job):
        with self.lock:
            self.used += job.memory
            self.most = max(self.most, self.used)
            self.read_names.append(job.name)
        if job.name in self.fails_reading:
            raise ValueError(f"cannot read {job.name}")
        return int(job.name)

    def work(self, job, loaded, device):
        time.sleep(job.delay)
        assert not torch.is_grad_enabled()
        if job.name in self.fails:
            raise KeyError(job.name)
        return loaded**2

    def consumed(self, job):
        with self.lock:
            self.used -= job.memory


@pytest.fixture
def running():
    """The threads that run now and did not before the test."""
    before = set(threading.enumerate())
    return lambda: set(threading.enumerate()) - before


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_results_come_in_the_order_of_the_jobs_whoever_is_done_first(workers, running):
    jobs = [Job(str(i), delay=0.02 * (i % 3 == 0)) for i in range(12)]
    results = list(Threads([CPU] * workers).map(Squares(jobs)))
    assert results == [(job, int(job.name) ** 2) for job in jobs]
    assert not running()


@pytest.mark.parametrize(("budget", "expected"), [(10, 10), (25, 25), (3, 10), (None, 120)])
def test_what_is_in_use_stays_within_the_budget_but_one_job_always_goes_ahead(budget, expected):
    walk = Squares([Job(str(i), memory=10 if i % 2 else 5, delay=0.003) for i in range(16)])
    for job, _ in Threads([CPU] * 3, memory=budget).map(walk):
        walk.consumed(job)
        time.sleep(0.002)
    assert walk.most <= expected
    assert walk.used == 0


def test_a_slow_consumer_stops_the_reader(running):
    walk = Squares([Job(str(i), memory=10) for i in range(50)])
    results = Threads([CPU], memory=30).map(walk)
    next(results)
    time.sleep(0.1)
    assert len(walk.read_names) <= 3
    results.close()
    assert not running()


@pytest.mark.parametrize("workers", [1, 4])
def test_the_first_error_in_the_order_of_the_jobs_is_raised_in_its_place(workers, running):
    jobs = [Job(str(i), delay=0.03 * (i == 2)) for i in range(8)]
    results, seen = Threads([CPU] * workers).map(Squares(jobs, fails=("2", "3"))), []
    with pytest.raises(KeyError, match="2"):
        seen.extend(job.name for job, _ in results)
    results, seen = Threads([CPU] * workers).map(Squares(jobs, fails=("5",), fails_reading=("4",))), []
    with pytest.raises(ValueError, match="cannot read 4"):
        seen.extend(job.name for job, _ in results)
    assert seen == ["0", "1", "2", "3"]
    assert not running()


def test_a_device_without_memory_is_named_with_the_job():
    class Greedy(Squares):
        def work(self, job, loaded, device):
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(OutputError, match="this machine has too little memory for '7'; free some, or set --max-memory"):
        list(Threads([CPU]).map(Greedy([Job("7")])))


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), "torch's own"])
@pytest.mark.parametrize("where", ["read", "work"])
def test_a_job_without_memory_is_tried_again_while_no_other_job_runs(where, error):
    failed, together, busy, lock = set(), [], [0], threading.Lock()

    class Tight(Squares):
        def _use(self, job):
            with lock:
                busy[0] += 1
                together.append((job.name in failed, busy[0]))
            try:
                time.sleep(0.01)
                if job.name in ("2", "5") and job.name not in failed:
                    failed.add(job.name)
                    if isinstance(error, str):
                        torch.empty(1 << 60, dtype=torch.uint8)
                    raise error
            finally:
                with lock:
                    busy[0] -= 1

        def read(self, job):
            if where == "read":
                self._use(job)
            return super().read(job)

        def work(self, job, loaded, device):
            if where == "work":
                self._use(job)
            return super().work(job, loaded, device)

    jobs = [Job(str(i)) for i in range(12)]
    found = {job.name: result for job, result in Threads([CPU] * 3).map(Tight(jobs))}
    assert found == {job.name: result for job, result in Threads([CPU]).map(Squares(jobs))}
    assert failed == {"2", "5"}
    assert [count for again, count in together if again] == [1, 1]


def test_torch_s_threads_are_as_before_afterwards():
    before = torch.get_num_threads()
    list(Threads([CPU], threads=before + 1).map(Squares([Job("1")])))
    assert torch.get_num_threads() == before


def test_no_jobs_are_done_at_once():
    assert list(Threads([CPU] * 2).map(Squares([]))) == []


def test_a_limit_below_the_widest_job_is_refused_by_its_name():
    with pytest.raises(ParameterError, match=r"'wide' needs 9\.0 GB beside [0-9.]+ [MG]B for Python and torch; give"):
        memory_budget("1GB", [Job("narrow", 5), Job("wide", 9 * 10**9)])


def test_without_a_limit_a_job_over_four_fifths_of_what_is_free_goes_ahead_and_one_over_all_of_it_does_not(monkeypatch):
    monkeypatch.setattr("epimer.engine.memory.available_memory", lambda: 1000)
    assert memory_budget(None, [Job("narrow", 5)]) == 800
    assert memory_budget(None, [Job("narrow", 5), Job("wide", 1000)]) == 1000
    with pytest.raises(ParameterError, match=r"^'wide' needs 1\.0 kB of memory and 1\.0 kB are free; free some"):
        memory_budget(None, [Job("narrow", 5), Job("wide", 1001)])
    assert memory_budget(None, [Job("wide", 1001)], elsewhere=True) == 1001


@pytest.mark.parametrize("workers", [1, 3])
def test_a_slow_consumer_does_not_let_results_pile_up(workers):
    walk = Squares([Job(str(i)) for i in range(100)])
    results = Threads([CPU] * workers).map(walk)
    next(results)
    while len(walk.read_names) < IN_FLIGHT * workers:
        time.sleep(0.01)
    time.sleep(0.2)  # for a reader that would go on
    assert len(walk.read_names) <= IN_FLIGHT * workers + 1
    assert [result for _, result in results] == [i**2 for i in range(1, 100)]
    assert len(walk.read_names) == 100
