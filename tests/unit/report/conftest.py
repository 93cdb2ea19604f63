"""Write the directories of runs that pages are made of."""

from functools import partial

import pytest

from tests.run_files import write_run_in


@pytest.fixture
def write_run(tmp_path):
    return partial(write_run_in, tmp_path)
