"""Define the reward that both sides of `end_to_end.py` train on: cheap, and different within a group.

In: a text, and a ground truth, which is ignored. Out: 1 for an odd number of characters, else 0.
"""


def parity(response: str, ground_truth: str = "") -> float:
    """Return the reward, in the form that `rl_example.py -rt FILE.py:FUNCTION` takes."""
    return float(len(response) % 2)
