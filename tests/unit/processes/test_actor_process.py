"""Test which cores an actor gets: two processes of two threads each on two cores are far slower than of one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coati_rl.processes.actor_process import assigned_cores, device_environment
from coati_rl.processes.ray_environment import actor_environment
from coati_rl.runtime.cluster import actor_options


@pytest.mark.parametrize(
    ("num_slots", "cores", "shares"),
    [
        (4, [0, 1], [[0], [1], [0], [1]]),  # 2 producers and 2 trainers on two cores: one each, in turn
        (2, [0, 1], [[0], [1]]),
        (1, [0, 1], [[0, 1]]),
        (2, [0, 1, 2, 3, 4], [[0, 1], [2, 3]]),
        (3, [4, 5, 6, 7, 8, 9], [[4, 5], [6, 7], [8, 9]]),
        (3, [7], [[7], [7], [7]]),
    ],
)
def test_cores_are_shared_out(num_slots, cores, shares):
    assert [assigned_cores(slot, num_slots, cores) for slot in range(num_slots)] == shares


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(1, 64))
def test_shares_are_disjoint_while_they_last_and_never_empty(num_slots, num_cores):
    cores = list(range(num_cores))
    shares = [assigned_cores(slot, num_slots, cores) for slot in range(num_slots)]
    assert {len(share) for share in shares} == {max(1, num_cores // num_slots)}
    if num_slots <= num_cores:
        assert len({core for share in shares for core in share}) == sum(len(share) for share in shares)
    else:
        counts = [sum(core in share for share in shares) for core in cores]
        assert max(counts) - min(counts) <= 1, "no core is loaded more than another"


def test_an_actor_gets_its_threads_and_variables_and_is_never_restarted():
    options = actor_options(name="a", num_threads=2, environment={"X": "1"})
    assert options["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == "2"
    assert options["runtime_env"]["env_vars"]["X"] == "1"
    assert options["runtime_env"]["env_vars"].items() >= actor_environment().items()
    assert options["max_restarts"] == 0


def test_a_run_on_the_cpu_finds_no_gpu_and_float32_on_one_is_float32():
    assert device_environment("cpu", "fp32") == {"CUDA_VISIBLE_DEVICES": ""}
    assert device_environment("cuda", "fp32") == {"TRITON_F32_DEFAULT": "ieee"}
    assert device_environment("cuda", "bf16") == {}
