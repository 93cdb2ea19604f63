"""Errors that processes have trouble to tell each other."""


class OtherArgumentsError(Exception):
    """An error that pickle cannot make again."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} is not {two}")
