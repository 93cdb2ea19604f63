"""Test that what a package compiles when it is imported is compiled when it is called."""

import torch

from consumer.parallel.deferred_compilation import deferred_compilation


def test_a_function_is_compiled_at_its_first_call_once_and_as_it_asked(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, **settings: compiled.append(settings) or function)
    with deferred_compilation():

        @torch.compile
        def plus_one(x):
            return x + 1

        @torch.compile(dynamic=False)
        def doubled(x, *, times=2):
            return x * times

    assert compiled == [] and plus_one.__name__ == "plus_one"
    assert [plus_one(1), plus_one(2), doubled(3), doubled(3, times=4)] == [2, 3, 6, 12]
    assert compiled == [{}, {"dynamic": False}]
    torch.compile(plus_one)
    assert len(compiled) == 3, "after the block it is torch's own again"
