"""Test the packages of the GPU lock: none replaces another's files, which of them wins being a matter of chance."""

from collections import defaultdict
from importlib.metadata import distributions

import pytest

pytestmark = pytest.mark.gpu


def test_no_two_packages_install_different_files_of_one_name():
    packages = defaultdict(dict)  # of a file in a folder -> its digest by package
    for package in distributions():
        for file in package.files or ():
            if len(file.parts) > 1 and file.suffix in (".py", ".so") and ".." not in file.parts and file.hash:
                packages[str(file)][package.name] = file.hash.value
    clashes = {tuple(sorted(found)) for found in packages.values() if len(set(found.values())) > 1}
    assert not clashes
    assert len(packages) > 10_000
