"""What goes wrong between a torch graph and a builder."""


class LoweringError(RuntimeError):
    """A graph that cannot be lowered; the message says which part and what to do."""


class DataDependentError(LoweringError):
    """What a program of fixed sizes cannot take from the data; the message says where such a module runs after all."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f'{reason}. torch.compile(module, backend="easytorch") breaks the graph there and runs the rest.'
        )


class UnsupportedOpError(LoweringError, NotImplementedError):
    """An operation without a lowering and without a decomposition into such as have one."""
