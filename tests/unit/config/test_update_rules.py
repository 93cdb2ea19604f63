"""Test what follows from the size of an update: its deadline, the memory in which engines stage it, and their share."""

import pytest

from coati_rl.config import Config
from coati_rl.config.update_rules import engine_share, stages_on_gpu, with_sync_timeout

GIB, GB = 2**30, 10**9


@pytest.mark.parametrize(("size", "seconds"), [(10**6, 60), (15.2 * GB, 90), (145.4 * GB, 350)])  # tiny, 7B, 72B
def test_a_transfer_has_a_second_more_for_each_half_gigabyte(size: float, seconds: float) -> None:
    config = with_sync_timeout(Config(), int(size))
    assert config.sync.sync_timeout_s == seconds


def test_a_deadline_that_was_given_stays() -> None:
    assert with_sync_timeout(Config(sync_timeout_s=60.0), 145 * GB).sync.sync_timeout_s == 60


@pytest.mark.parametrize(
    ("size", "gpu", "share", "is_on_gpu"),
    [(11, 80, 0.85, True), (12, 80, 0.85, False), (15, 80, 0.8, True), (131, 140, 0.5, False)],  # GiB; the context is 1
)
def test_an_update_that_fits_beside_the_engine_is_staged_on_its_gpu(size, gpu, share, is_on_gpu) -> None:
    assert stages_on_gpu(size * GIB, gpu_bytes=gpu * GIB, gpu_memory_utilization=share) is is_on_gpu


def test_on_unknown_gpus_it_is_staged_in_host_memory() -> None:
    assert not stages_on_gpu(1, gpu_bytes=None, gpu_memory_utilization=0.5)


@pytest.mark.parametrize(
    ("update", "wanted", "commit", "share"),  # GiB, on a GPU of 100 of which a context takes 1
    [
        (1, 50, 0, 0.9),  # all fits: at most 0.9
        (20, 50, 0, 0.77),  # staged on the GPU: 100 - 20 - 1 - 2
        (20, 77, 5, 0.77),
        (20, 78, 5, 0.9),  # vLLM can use more: staged in host memory
        (90, 95, 12, 0.85),
        (None, 50, 12, 0.85),  # by gloo or files, always there
        (200, 300, 200, 0.01),
    ],
)
def test_engines_take_of_a_gpu_what_updates_leave(update, wanted, commit, share) -> None:
    found = engine_share(
        gpu_bytes=100 * GIB,
        wanted_bytes=wanted * GIB,
        update_bytes=None if update is None else update * GIB,
        commit_bytes=commit * GIB,
    )
    assert found == share
    if update == 20:
        is_on_gpu = stages_on_gpu(20 * GIB, gpu_bytes=100 * GIB, gpu_memory_utilization=share)
        assert is_on_gpu == (wanted <= 77)
