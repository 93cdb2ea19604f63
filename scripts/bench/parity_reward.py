"""The reward that both sides of `end_to_end.py` train on: as good as free, and different within a group.

In: a text, and what it should be, which does not count. Out: 1 for an odd number of characters, else 0.
"""


def parity(response: str, ground_truth: str = "") -> float:
    """In the form that `rl_example.py -rt FILE.py:FUNCTION` takes."""
    return float(len(response) % 2)
