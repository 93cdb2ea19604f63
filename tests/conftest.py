"""Tests marked gpu are skipped where there is none; nothing else is ever skipped."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Asks torch for a GPU only when a test needs one: importing it takes seconds."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
