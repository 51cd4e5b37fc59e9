"""Nested dicts and flat ones: `{"a": {"b": x}}` <-> `{"a/b": x}`, in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from easytorch.bridge.errors import CheckpointError


def flat(tree: Mapping[str, Any], prefix: str = "", separator: str = "/") -> dict[str, Any]:
    """Every leaf by its path; lists and tuples count as dicts from "0", "1", ..., empty dicts disappear.

    `CheckpointError` where two leaves have one path, as in `{"a": {"b": x}, "a/b": y}`.
    """
    leaves: dict[str, Any] = {}
    for key, child in tree.items():
        path = f"{prefix}{key}"
        if isinstance(child, list | tuple):
            child = dict(enumerate(child))
        below = flat(child, f"{path}{separator}", separator) if isinstance(child, Mapping) else {path: child}
        if both := leaves.keys() & below.keys():
            raise CheckpointError("is the path of two tensors of the tree", tensor=min(both))
        leaves.update(below)
    return leaves


def nested(leaves: Mapping[str, Any], separator: str = "/") -> dict[str, Any]:
    """The tree of `leaves`; `CheckpointError` for a path that is both a leaf and a branch."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *branches, last = path.split(separator)
        node = tree
        for branch in branches:
            node = node.setdefault(branch, {})
            if not isinstance(node, dict):
                raise CheckpointError("another tensor has a part of this path as its name", tensor=path)
        if last in node:
            raise CheckpointError("is both a tensor and a folder of tensors", tensor=path)
        node[last] = leaf
    return tree
