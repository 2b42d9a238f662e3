"""How much memory is free: the machine's, or what the limits of a container leave."""

import pytest

from epimer import machine

GB = 10**9


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Write what Linux tells: kilobytes free, this process's group, and files of groups."""
    monkeypatch.setattr(machine, "ROOT", tmp_path)

    def write(free_kb, group=None, **groups):
        files = {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable:   {free_kb} kB\n"}
        if group is not None:
            files["proc/self/cgroup"] = f"12:cpu:/other\n0::{group}\n"
        for name, (most, used, cached) in groups.items():
            at = f"sys/fs/cgroup/{'' if name == 'root' else name.replace('_', '/') + '/'}"
            files |= {f"{at}memory.max": f"{most}\n", f"{at}memory.current": f"{used}\n"}
            files[f"{at}memory.stat"] = f"anon 5\ninactive_file {cached}\n"
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    return write


def test_without_limits_it_is_what_the_machine_has(system):
    system(1000)
    assert machine.available_memory() == 1_024_000
    system(1000, "/", root=("max", 7, 3))
    assert machine.available_memory() == 1_024_000


def test_a_container_has_what_its_limit_leaves_with_the_pages_of_files(system):
    system(100 * GB // 1024, "/", root=(8 * GB, 5 * GB, 2 * GB))
    assert machine.available_memory() == 5 * GB


def test_the_narrowest_limit_around_the_process_counts(system):
    system(100 * GB // 1024, "/pods/one", pods=(8 * GB, 7 * GB, 0), pods_one=("max", 2 * GB, 0))
    assert machine.available_memory() == 1 * GB
    system(1000, "/pods/one", pods=(8 * GB, 9 * GB, 0))
    assert machine.available_memory() == 0
