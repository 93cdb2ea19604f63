"""Test that numbers drawn ahead equal those drawn one at a time, with any other rows in the batch."""

import gc

import torch

from producer.engines.vllm_sampler import SeedStreams


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn_singly(seed: int, number: int) -> list[int]:
    single = generator(seed)
    return [int(torch.randint(0, 2**31, (1,), generator=single)) for _ in range(number)]


def test_a_row_gets_its_generators_numbers_in_order_wherever_it_lies():
    streams, ones, others = SeedStreams(), generator(1), generator(2)
    found_ones, found_others = [], []
    for step in range(150):
        rows = {0: ones, 3: others} if step % 2 else {2: ones}
        seeds = streams.next_seeds(rows, 4)
        assert (seeds.dtype, seeds.shape) == (torch.int64, (4,))
        found_ones.append(int(seeds[0 if step % 2 else 2]))
        if step % 2:
            found_others.append(int(seeds[3]))
    assert found_ones == drawn_singly(1, 150)
    assert found_others == drawn_singly(2, 75)


def test_rows_without_a_generator_get_different_numbers_of_torchs_own():
    torch.manual_seed(7)
    streams = SeedStreams()
    first, second = streams.next_seeds({1: generator(1)}, 3).tolist(), streams.next_seeds({}, 3).tolist()
    assert len({*first, *second}) == 6
    torch.manual_seed(7)
    assert streams.next_seeds({1: generator(1)}, 3).tolist() == first


def test_a_request_that_has_ended_is_forgotten():
    streams = SeedStreams()
    streams.next_seeds({0: generator(1)}, 1)
    gc.collect()
    assert len(streams._streams) == 0
