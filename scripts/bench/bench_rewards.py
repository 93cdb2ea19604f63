"""Define the rewards that both sides of `end_to_end.py` train on; TRL's environment has the standard library alone.

In: a response's text, and the ground truth. Out: the reward, as `rl_example.py -rt FILE.py:FUNCTION` takes it.
"""

import re
import zlib

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def parity(response: str, ground_truth: str = "") -> float:
    """Return 1 for an odd number of characters, else 0; the ground truth is ignored."""
    return float(len(response) % 2)


def checksum(response: str, ground_truth: str = "") -> float:
    """Return a number in [0, 1) that differs between any two texts, so that every group has different rewards."""
    return zlib.crc32(response.encode()) / 2**32


def last_number(response: str, ground_truth: str) -> float:
    """Return 1 if the last number in the text is the ground truth, a number, else 0."""
    found = NUMBER.findall(response)
    return float(bool(found) and float(found[-1].replace(",", "")) == float(ground_truth.replace(",", "")))
