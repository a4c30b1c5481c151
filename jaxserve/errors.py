"""Errors that a request can end with."""

from __future__ import annotations


class InvalidRequest(ValueError):
    """A request that cannot be served, naming the field at fault.

    Attributes:
      field: name of the field, as the caller wrote it.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


def shown(value: object) -> str:
    """A value as a message shows it: not at any length."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class QueueFull(Exception):
    """The queue holds as many requests or tokens as it may; try again later."""


class WrongState(RuntimeError):
    """A call that this engine does not take now, such as to stop a profile when none is running."""


class EngineStopped(RuntimeError):
    """The engine has been stopped, or has failed, and takes no more requests."""
