"""Caches of keys, values and states, and their metadata.

metadata.py     `TransformerMetadata`: the sizes of a cache
transformer.py  `TransformerCache`: dynamic, static and quantized, sliding windows and recurrent states by layer
quantized.py    quantized keys and values
ragged_pages.py `RaggedPagesCache`: pages of a pool, shared by sequences with a common prefix
ragged_step.py  `RaggedStep`: one call for tokens of many sequences, whose keys and values lie in such pages, and
                `DecodeStep`: one token of each, from static tensors
page_slots.py   where tokens go in such pages, for an operator that writes and attends in one call
static.py       a cache of fixed size, of all tokens in every layer
state_slots.py  `StateSlots`: states of recurrent layers, one slot a sequence
page_table.py   which pages hold which tokens
memory.py       how much memory is free

The caches are transformers' `Cache`, so that a model takes them as its cache.
"""

from easytorch.cache.metadata import TransformerMetadata
from easytorch.cache.ragged_pages import RaggedPagesCache, RaggedPagesMetadata
from easytorch.cache.ragged_step import Chunk, DecodeStep, RaggedStep
from easytorch.cache.state_slots import StateSlots
from easytorch.cache.transformer import TransformerCache

__all__ = [
    "Chunk",
    "DecodeStep",
    "RaggedPagesCache",
    "RaggedPagesMetadata",
    "RaggedStep",
    "StateSlots",
    "TransformerCache",
    "TransformerMetadata",
]
