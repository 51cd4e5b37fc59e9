"""What goes wrong between a torch graph and a builder."""


class LoweringError(RuntimeError):
    """A graph that cannot be lowered; the message says which part and what to do."""


class UnsupportedOpError(LoweringError, NotImplementedError):
    """An operation without a lowering and without a decomposition into such as have one."""
