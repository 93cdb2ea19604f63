"""Test what is left of a machine's memory, from files as the kernel writes them."""

import pytest

from coati_rl.memory.capacity import available_bytes, total_bytes

GIB = 2**30


@pytest.fixture
def machine(tmp_path):
    """(line of /proc/self/cgroup, files by path below the mounted groups) -> GiB available of 8."""

    def run(line, files):
        (tmp_path / "proc" / "self").mkdir(parents=True)
        (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: {2**24} kB\nMemAvailable: {2**23} kB\n")
        (tmp_path / "proc" / "self" / "cgroup").write_text(line)
        for path, text in files.items():
            (tmp_path / "groups" / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "groups" / path).write_text(text)
        return available_bytes(proc=tmp_path / "proc", groups=tmp_path / "groups") / GIB

    return run


def test_without_a_limit_the_kernels_number_counts(machine):
    assert machine("0::/job\n", {"job/memory.max": "max\n", "job/memory.current": "5\n"}) == 8


def test_a_limit_counts_less_what_is_used_and_cannot_be_reclaimed(machine):
    files = {
        "job/memory.max": f"{4 * GIB}\n",
        "job/memory.current": f"{3 * GIB}\n",
        "job/memory.stat": f"anon {2 * GIB}\ninactive_file {GIB // 2}\nactive_file {GIB // 2}\n",
    }
    assert machine("0::/job\n", files) == 2


def test_the_limit_of_a_group_above_counts_too(machine):
    files = {
        "job/memory.max": f"{6 * GIB}\n",
        "job/memory.current": "0\n",
        "job/step/memory.max": "max\n",
    }
    assert machine("0::/job/step\n", files) == 6


def test_groups_of_the_first_version_are_read(machine):
    files = {
        "memory/box/memory.limit_in_bytes": f"{3 * GIB}\n",
        "memory/box/memory.usage_in_bytes": f"{GIB}\n",
        "memory/box/memory.stat": f"cache 0\ntotal_inactive_file 0\ntotal_active_file {GIB // 4}\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/memory.usage_in_bytes": "1\n",
    }
    assert machine("4:memory:/box\n3:cpuset:/\n", files) == 2.25


def test_in_a_container_the_groups_root_is_the_processs_own(machine):
    files = {"memory.max": f"{5 * GIB}\n", "memory.current": f"{GIB}\n"}
    assert machine("0::/host/path/of/the/container\n", files) == 4


@pytest.mark.parametrize(
    ("line", "path"), [("0::/job/step\n", "job/memory.max"), ("4:memory:/box\n", "memory/box/memory.limit_in_bytes")]
)
def test_the_memory_of_a_container_is_its_limit(machine, tmp_path, line, path):
    where = {"proc": tmp_path / "proc", "groups": tmp_path / "groups"}
    machine(line, {path: f"{GIB}\n", "job/step/memory.max": "max\n"})
    assert total_bytes(**where) == GIB
    (tmp_path / "groups" / path).write_text("9223372036854771712\n")
    assert total_bytes(**where) == total_bytes(proc=tmp_path / "no groups") > GIB


def test_this_machine_has_memory():
    available = available_bytes()
    assert available is not None and 0 < available <= total_bytes()
