"""Errors of lowering a torch graph onto a builder."""


class LoweringError(RuntimeError):
    """A graph that cannot be lowered; the message says which part and what to do."""


class DataDependentError(LoweringError):
    """A size or branch depends on data, which a program of static sizes cannot express; the message says what to do."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f'{reason}. torch.compile(module, backend="easytorch") breaks the graph there and runs the rest.'
        )


class UnsupportedOpError(LoweringError, NotImplementedError):
    """An operation without a lowering and without a decomposition into such as have one."""
