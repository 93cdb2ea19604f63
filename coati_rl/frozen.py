"""Create instances of frozen dataclasses without their checks, which take most of the time of making small ones."""

from typing import Any, TypeVar

T = TypeVar("T")


def unchecked(cls: type[T], **fields: Any) -> T:
    """Create a frozen dataclass without `__post_init__`; the caller has made sure of what that checks.

    Args:
        cls: the class.
        fields: all of them, those that `__post_init__` or a default would fill included.
    """
    instance = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(instance, name, value)
    return instance
