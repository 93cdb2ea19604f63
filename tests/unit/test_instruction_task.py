"""Test the instruction-following task: what meets a constraint, the score, and the rows of a seed."""

import json
import random
import re
from collections import Counter

import instruction_task
import pytest
from hypothesis import given
from hypothesis import strategies as st
from instruction_task import KINDS, constraints_of, make_rows, rows_of, score, split_vocabulary

TRAINING, HELD_OUT = make_rows(0, num_train=400, num_eval=120)


def truth(*constraints: dict, subject: str = "dogs") -> str:
    return json.dumps({"subject": subject, "constraints": list(constraints)})


def is_met(kind: str, answer: str, **values: object) -> bool:
    return KINDS[kind].is_met(answer, values)
