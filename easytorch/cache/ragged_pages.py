"""`RaggedPagesCache`: keys and values in pages of a pool (PagedAttention, arXiv:2309.06180)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

from easytorch.cache.arguments import positive
from easytorch.cache.memory import free_and_total
from easytorch.cache.metadata import sizes_of
from easytorch.cache.page_slots import Pages, fit
from easytorch.cache.page_table import PageTable
from easytorch.kernels.decoder_step.native import PageSlots
from easytorch.kernels.ragged_page.write import write_pages
from easytorch.operations import OperationRegistry

_ATTENTION = OperationRegistry.create("ragged_page_attention")
_LAYERS = ("full_attention", "sliding_attention")


@dataclass(frozen=True, kw_only=True)
class RaggedPagesMetadata:
    """The pages of a pool: `num_pages` of `page_size` tokens, each with the keys and values of all layers.

    layers: which of the model's layers these are. layer_sizes: (heads, key and value head_dim) of each, where they
    differ; num_kv_heads, k_headdim and v_headdim are then the largest. index_headdim: of an indexer's keys, or 0.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    k_headdim: int
    v_headdim: int
    dtype: torch.dtype
    page_size: int
    num_pages: int
    max_model_length: int
    hbm_utilization: float
    layer_sizes: tuple[tuple[int, int, int], ...] = ()
    index_headdim: int = 0

    def __post_init__(self) -> None:
        positive(page_size=self.page_size, num_pages=self.num_pages, max_model_length=self.max_model_length)

    @classmethod
    def of(
        cls,
        config: PreTrainedConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        hbm_utilization: float,
        page_size: int,
        max_model_length: int,
        layers: Sequence[int] | None = None,
        latents: bool = False,
    ) -> RaggedPagesMetadata:
        """The number of pages that fits the free memory:

            page  = layers * page_size * heads * (key head_dim + value head_dim) * bytes of dtype
            pages = floor((free - (1 - hbm_utilization) * total) / page)

        so that (1 - hbm_utilization) of the device stays free. Of a CPU, free is what the system can give without
        swapping, within the container's limit. `ValueError` where one row of `max_model_length` does not fit.
        layers: those that keep keys and values, where the other layers keep something else; their heads may differ. By
        default all layers of the model, whose heads may not. latents: of DeepSeek's attention, in place of keys and
        values, the latents and the rotated keys that all heads share, and an indexer's keys where there is one.
        """
        positive(page_size=page_size, max_model_length=max_model_length)
        if isinstance(hbm_utilization, bool) or not isinstance(hbm_utilization, int | float):
            raise TypeError(f"hbm_utilization={hbm_utilization!r} must be a number")
        if not 0 < hbm_utilization <= 1:
            raise ValueError(f"hbm_utilization={hbm_utilization!r} must be above 0 and at most 1")
        settings: Any = config.get_text_config(decoder=True)
        differ = settings.is_heterogeneous and len({sizes_of(one) for one in settings.per_layer_config}) > 1
        layer_sizes: tuple[tuple[int, int, int], ...] = ()
        if layers is not None and differ:
            layer_sizes = tuple(sizes_of(settings.per_layer_config[index]) for index in layers)
        if layers is None:
            types = get_layer_types_and_kwargs(settings)[0]
            if others := sorted(set(types) - set(_LAYERS)):
                raise ValueError(f"pages hold keys and values; {settings.model_type} has layers of {', '.join(others)}")
            layers = range(len(types))
        if differ and not layer_sizes:
            raise ValueError(f"pages are of one size; {settings.model_type} has layers whose heads differ")
        heads, key_dim, value_dim = sizes_of(settings)
        index = (getattr(settings, "index_head_dim", None) or 0) if latents else 0
        if getattr(settings, "kv_lora_rank", None) is not None and latents:
            heads, key_dim, value_dim = 1, settings.kv_lora_rank, settings.qk_rope_head_dim
        elif getattr(settings, "kv_lora_rank", None) is not None or not heads:
            raise ValueError(f"pages hold keys and values of attention; {settings.model_type} caches something else")
        sizes = layer_sizes or ((heads, key_dim, value_dim),) * len(layers)
        width = sum(count * (of_key + of_value) + index for count, of_key, of_value in sizes)
        page = page_size * width * dtype.itemsize
        free, total = free_and_total(device)
        pages = math.floor((free - (1 - hbm_utilization) * total) / page)
        needed = -(-max_model_length // page_size)
        if pages < needed:
            raise ValueError(
                f"a row of {max_model_length} tokens takes {needed} pages of {page} bytes; of {total} bytes of "
                f"{device} {free} are free, of which hbm_utilization={hbm_utilization} leaves {max(pages, 0)} pages"
            )
        return cls(
            layers=tuple(layers),
            num_kv_heads=heads,
            k_headdim=key_dim,
            v_headdim=value_dim,
            dtype=dtype,
            page_size=page_size,
            num_pages=pages,
            max_model_length=max_model_length,
            hbm_utilization=hbm_utilization,
            layer_sizes=layer_sizes,
            index_headdim=index,
        )

    @property
    def sizes(self) -> tuple[tuple[int, int, int], ...]:
        """(heads, key and value head_dim) of each layer."""
        return self.layer_sizes or ((self.num_kv_heads, self.k_headdim, self.v_headdim),) * len(self.layers)

    @property
    def page_bytes(self) -> int:
        width = sum(heads * (key_dim + value_dim) + self.index_headdim for heads, key_dim, value_dim in self.sizes)
        return self.page_size * width * self.dtype.itemsize

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)

    @property
    def max_num_pages_per_req(self) -> int:
        return -(-self.max_model_length // self.page_size)

    def check(self, cache: Any) -> None:
        """`ValueError` for a cache that was not made by this metadata."""
        if not isinstance(cache, RaggedPagesCache) or cache.metadata != self:
            raise ValueError(f"the cache is no RaggedPagesCache of this metadata, but {type(cache).__name__}")


class _Tokens(NamedTuple):
    """Tokens [start, end) of every row, in the pages of `tables`: their slots (rows * tokens,) in the pool, and the
    context_lens (rows,) and query_start_loc (rows + 1,) of `ragged_page_attention`."""

    tables: Tensor
    start: int
    end: int
    slots: Tensor
    lens: Tensor
    starts: Tensor


class RaggedPagesCache(Cache):
    """Keys and values of all layers in the pages of one pool; a transformers `Cache` of rows of one length.

    Rows allocate pages as they grow, and free them by `reset` and `crop`. Rows with a common prefix share pages: beams,
    and `batch_repeat_interleave` of a prompt, copy a page when one of them writes to it. Our models attend to the pages
    themselves where there is no mask (no padding, no more tokens than a sliding window); elsewhere they are gathered.
    """

    def __init__(self, metadata: RaggedPagesMetadata, device: torch.device | str = "cpu") -> None:
        self.metadata, self.device = metadata, torch.device(device)
        self.table = PageTable(metadata.num_pages, metadata.page_size)
        self._tables: Tensor | None = None
        self._newest: _Tokens | None = None
        self._places = {index: place for place, index in enumerate(metadata.layers)}
        layers: list[Any] = [_Layer(self, index) for index in metadata.layers]
        super().__init__(layers=layers)

    @property
    def block_tables(self) -> Tensor:
        """(rows, pages) int32: where the tokens of each row lie, as `ragged_page_attention` takes it."""
        if self._tables is None:
            self._tables = torch.tensor(self.table.rows, dtype=torch.int32, device=self.device)
        return self._tables

    def context_lens(self, layer_idx: int = 0) -> Tensor:
        """(rows,) int32: how many tokens each row has."""
        return torch.full((len(self.table.rows),), self._of(layer_idx).length, dtype=torch.int32, device=self.device)

    def pools(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """The pages of a layer's keys (pages, page_size, K, D) and values (pages, page_size, K, Dv)."""
        layer = self._of(layer_idx)
        return layer.key_pages, layer.value_pages

    def index_pages(self, layer_idx: int) -> Tensor:
        """The pages of an indexer's keys (pages, page_size, C)."""
        pages = self._of(layer_idx).index_pages
        assert pages is not None, "the metadata has an index_headdim"
        return pages

    @property
    def batch_size(self) -> int:
        return len(self.table.rows)

    @property
    def free_pages(self) -> int:
        return len(self.table.free)

    def attend_pages(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, layer_idx: int, **features: Any
    ) -> Tensor:
        """Appends key and value (B, K, T, D) and attends to the row's pages: query (B, H, T, D) -> (B, T, H, Dv).

        key and value: None to attend to what the layer has been given.
        """
        layer = self._of(layer_idx)
        if key is not None and value is not None:
            layer.write(key, value)
        batch, _, length, _ = query.shape
        tokens = self.tokens(batch, layer.length - length, layer.length)
        output = _ATTENTION(
            query.transpose(1, 2).flatten(0, 1), layer.key_pages, layer.value_pages, tokens.lens, tokens.tables,
            tokens.starts, **features,
        )  # fmt: skip
        attended: Tensor = output.attention_outputs.unflatten(0, (batch, length))
        return attended

    def page_slots(
        self, layer_idx: int, rows: int, length: int, dtype: torch.dtype, sizes: tuple[int, int]
    ) -> Pages | None:
        """Pages for `length` more tokens of each of `rows` rows, for one operator that writes their keys and values, of
        `sizes` (heads, head_dim), and attends. None: not in these pages."""
        layer = self._of(layer_idx)
        pools = layer.key_pages, layer.value_pages
        if not fit(pools, dtype, sizes):
            return None
        end = layer.length + length
        tokens = layer.allocate(rows, end)
        made = PageSlots(*pools, tokens.slots, tokens.lens, tokens.tables, tokens.starts)
        return Pages(made, lambda: setattr(layer, "length", end))

    def tokens(self, rows: int, start: int, end: int) -> _Tokens:
        """Tokens [start, end) of every row, which have pages; made once for all layers of a call."""
        newest, tables = self._newest, self.block_tables
        if newest is not None and newest.tables is tables and (newest.start, newest.end) == (start, end):
            return newest
        size = self.metadata.page_size
        places = torch.arange(start, end, device=self.device)
        slots = (tables[:, places // size].long() * size + places % size).flatten()
        lens = torch.full((rows,), end, dtype=torch.int32, device=self.device)
        starts = torch.arange(rows + 1, dtype=torch.int32, device=self.device) * (end - start)
        self._newest = _Tokens(tables, start, end, slots, lens, starts)
        return self._newest

    def reserve(self, rows: int, start: int, end: int) -> None:
        """Allocates pages for tokens [start, end) of every row; the first call sets the number of rows."""
        if end > self.metadata.max_model_length:
            raise ValueError(f"max_model_length={self.metadata.max_model_length}, and a row would have {end} tokens")
        if not any(self.table.rows):  # nor does a call that found too few pages say it
            self.table.rows = [[] for _ in range(rows)]
        if len(self.table.rows) != rows:
            raise ValueError(f"the cache has {len(self.table.rows)} rows, and {rows} are given; reset() begins anew")
        size = self.metadata.page_size
        if any(len(row) * size < end or self.table.holders[row[start // size]] > 1 for row in self.table.rows):
            for source, target in self.table.reserve(start, end):
                for index in self.metadata.layers:
                    layer = self._of(index)
                    layer.key_pages[target], layer.value_pages[target] = (
                        layer.key_pages[source],
                        layer.value_pages[source],
                    )
            self._tables = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        chosen = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self._select(chosen.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        positive(repeats=repeats)
        self._select([row for row in range(len(self.table.rows)) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens. A positive number, once the length to keep, is refused."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give how many tokens to remove as a negative number")
        self._cut(max(0, self._of(self.metadata.layers[0]).length + tokens_to_remove))

    def reset(self) -> None:
        self._cut(0)
        self.table.rows = []

    def _cut(self, length: int) -> None:
        self.table.truncate(length)
        self._tables = None
        for index in self.metadata.layers:
            self._of(index).length = length

    def _select(self, rows: list[int]) -> None:
        self.table.select(rows)
        self._tables = None

    def _of(self, layer_idx: int) -> _Layer:
        layer = self.layers[self._places[layer_idx]]
        assert isinstance(layer, _Layer)
        return layer


class _Layer(CacheLayerMixin):
    is_sliding = False  # pages keep every token; windows are the attention's and the mask's
    is_croppable = True

    def __init__(self, cache: RaggedPagesCache, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        made, pages = cache.metadata, (cache.metadata.num_pages, cache.metadata.page_size)
        # not filled: memory is committed as pages are written
        heads, *dims = made.sizes[made.layers.index(index)]
        self.key_pages, self.value_pages = (
            torch.empty(*pages, heads, dim, dtype=made.dtype, device=cache.device) for dim in dims
        )
        self.index_pages: Tensor | None = None
        if made.index_headdim:
            self.index_pages = torch.empty(*pages, made.index_headdim, dtype=made.dtype, device=cache.device)
        self.cache, self.index, self.length = cache, index, 0
        self.dtype, self.device, self.is_initialized = made.dtype, cache.device, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is left to do."""

    def write(self, key: Tensor, value: Tensor) -> None:
        """Appends key and value (B, K, T, D)."""
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise ValueError("pages are for inference, and this call needs a gradient: call under torch.no_grad()")
        expected = (self.key_pages.shape[2], *self.key_pages.shape[3:], *self.value_pages.shape[3:])
        if (key.shape[1], key.shape[-1], value.shape[-1]) != expected or key.dtype != self.dtype:
            raise ValueError(
                f"the pages are of (heads, key and value head_dim) {expected} in {self.dtype}, and layer {self.index} "
                f"gives {(key.shape[1], key.shape[-1], value.shape[-1])} in {key.dtype}"
            )
        end = self.length + key.shape[2]
        slots = self.allocate(key.shape[0], end).slots
        key_rows, value_rows = (one.transpose(1, 2).flatten(0, 1) for one in (key, value))
        write_pages(self.key_pages, self.value_pages, key_rows, value_rows, slots)
        self.length = end

    def allocate(self, rows: int, end: int) -> _Tokens:
        """Tokens [length, end) of every row, in pages of their own."""
        self.cache.reserve(rows, self.length, end)
        return self.cache.tokens(rows, self.length, end)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.write(key_states, value_states)
        table = self.cache.block_tables[:, : -(-self.length // self.cache.metadata.page_size)].long()
        pools = (self.key_pages, self.value_pages)
        keys, values = (pool[table].flatten(1, 2)[:, : self.length].transpose(1, 2) for pool in pools)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.cache.metadata.max_model_length
