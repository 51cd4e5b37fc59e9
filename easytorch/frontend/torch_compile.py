"""The name "easytorch" for `torch.compile`."""

from __future__ import annotations

from importlib.metadata import entry_points

from easytorch.frontend.compile_options import NAME

_GROUP = "torch_dynamo_backends"


def register() -> None:
    """Makes the name known. Where the package is installed its entry point does so, and dynamo, which takes seconds to
    import, is left alone until it is used; a checkout on the path has no entry points."""
    if entry_points(group=_GROUP, name=NAME):
        return
    from torch._dynamo import list_backends, register_backend

    from easytorch.frontend.dynamo import easytorch

    if NAME not in list_backends(exclude_tags=()):
        register_backend(easytorch, name=NAME)
