"""Failures of calls. Their kind decides how a completion continues or ends."""

from rewards.contract import FaultKind

OF_THE_INSTANCE: frozenset[FaultKind] = frozenset({"timeout", "connection", "crash", "memory"})
"""Kinds of failures that are not about the method that was called."""


class ToolFailure(Exception):
    """A call that failed.

    `kind` names the fault: `timeout`, `connection`, `crash`, `memory`, `step`, `action` or `exception`.
    """

    def __init__(self, kind: FaultKind, message: str, text: str = "") -> None:
        """`text` is the exception's own text. Both texts are made `writable`."""
        self.kind: FaultKind = kind
        self.message = writable(message)
        self.text = writable(text)
        super().__init__(self.message)

    def fault_in(self, method: FaultKind) -> FaultKind:
        """Return the kind of the fault if the call was of a method that the model does not call."""
        return self.kind if self.kind in OF_THE_INSTANCE else method


class UnknownAction(ValueError):
    """A turn without a known action. The model reads the message, and the completion continues."""


def writable(text: str) -> str:
    """Return a text that UTF-8 can hold: lone surrogates, as in names of files that are no UTF-8, become "?"."""
    return text.encode(errors="replace").decode()
