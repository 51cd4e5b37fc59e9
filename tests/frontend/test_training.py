"""Training through AOTAutograd's joint graph: losses, gradients and optimizer steps are those of eager torch."""

import copy

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import easytorch.frontend
from easytorch.frontend import program
from easytorch.frontend.device_tensor import DeviceTensor

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch.manual_seed(0)


def llama():
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    ids = torch.randint(0, 32, (2, 7))
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def bert():
    config = transformers.BertConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    ids = torch.randint(0, 32, (2, 7))
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 4:] = 0
    return transformers.BertForMaskedLM(config), {"input_ids": ids, "attention_mask": mask, "labels": ids}


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=32,
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=16,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    ids = torch.randint(0, 32, (2, 7))
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def resnet():
    config = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=3
    )
    return transformers.ResNetForImageClassification(config), {
        "pixel_values": torch.randn(3, 3, 16, 16),
        "labels": torch.tensor([0, 1, 2]),
    }


def t5():
    config = transformers.T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    ids, labels = torch.randint(1, 32, (2, 7)), torch.randint(1, 32, (2, 5))
    return transformers.T5ForConditionalGeneration(config), {"input_ids": ids, "labels": labels}


def vit():
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=16,
        patch_size=8,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.ViTForImageClassification(config), {
        "pixel_values": torch.randn(2, 3, 16, 16),
        "labels": torch.tensor([0, 2]),
    }


def whisper():
    config = transformers.WhisperConfig(
        vocab_size=64,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=16,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        decoder_start_token_id=1,
        eos_token_id=2,
    )
    return transformers.WhisperForConditionalGeneration(config), {
        "input_features": torch.randn(2, 8, 20),
        "labels": torch.randint(3, 60, (2, 5)),
    }


def mixtral():
    config = transformers.MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    ids = torch.randint(0, 32, (2, 7))
    return transformers.MixtralForCausalLM(config), {"input_ids": ids, "labels": ids}


def mamba():
    config = transformers.MambaConfig(vocab_size=32, hidden_size=16, state_size=4, num_hidden_layers=1)
    ids = torch.randint(0, 32, (2, 7))
    return transformers.MambaForCausalLM(config), {"input_ids": ids, "labels": ids}


def same_training(make, backend, steps=2):
    """Steps of AdamW beside eager ones: each loss, each gradient and each buffer to 1e-5 of the greatest in it."""
    module, inputs = make()
    module.train()
    eager = copy.deepcopy(module)
    run = torch.compile(module, backend="easytorch", options={"backend": backend})
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (module, eager)]
    for _ in range(steps):
        losses = [model(**inputs).loss for model in (run, eager)]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        for (name, ours), theirs in zip(module.named_parameters(), eager.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), name
            if theirs.grad is not None:
                scale = max(theirs.grad.abs().max().item(), 1e-3)
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-5 * scale, msg=name)
        for optimizer in optimizers:
            optimizer.step()
    for (name, ours), theirs in zip(module.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=name)


ALL = [bert, gpt2, resnet, t5, vit, whisper, mixtral, mamba]


@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_models_train_as_in_eager(make):
    same_training(make, "numpy")


@pytest.mark.jax_cpu
def test_llama_trains_as_in_eager_on_xla():
    same_training(llama, "xla:cpu")


def compiled(function, backend="numpy"):
    return torch.compile(function, backend="easytorch", options={"backend": backend})


def test_what_the_forward_saves_stays_on_the_device(monkeypatch):
    met = []
    on_device = program.on_device
    monkeypatch.setattr(
        program, "on_device", lambda backend, tensor: (met.append(type(tensor)), on_device(backend, tensor))[1]
    )
    x = torch.randn(3, 4, requires_grad=True)
    weight = torch.randn(4, 4)
    loss = compiled(lambda x: (x @ weight).tanh().sum())(x)
    met.clear()
    loss.backward()
    assert DeviceTensor in met
    wanted = x.detach().clone().requires_grad_()
    (wanted @ weight).tanh().sum().backward()
    torch.testing.assert_close(x.grad, wanted.grad)


def test_a_device_tensor_is_fetched_by_whoever_looks_at_it():
    backend = easytorch.frontend.routing.backend_of("numpy")
    values = torch.arange(6.0).reshape(2, 3)
    held = DeviceTensor(backend, backend.buffer_from_torch(values))
    assert held.shape == (2, 3) and held.dtype == torch.float32
    assert isinstance(held.detach(), DeviceTensor)
    assert torch.equal(held + 1, values + 1) and type(held + 1) is torch.Tensor
    assert "4." in repr(held)


def test_dropout_has_the_mask_of_its_forward_in_the_backward():
    x = torch.ones(1000, requires_grad=True)
    run = compiled(lambda x: nn.functional.dropout(x, 0.25))
    torch.manual_seed(1)
    first = run(x)
    first.sum().backward()
    assert torch.equal(x.grad, first.detach())
    torch.manual_seed(1)
    assert torch.equal(run(x), first)
    assert not torch.equal(run(x), first)
    assert (first == 0).float().mean().item() == pytest.approx(0.25, abs=0.06)


def test_parts_without_gradients_and_several_backwards():
    layer = nn.Linear(3, 3)
    layer.bias.requires_grad_(False)
    run = compiled(lambda x: (layer(x).relu().sum(), x.detach() * 2))
    x = torch.randn(2, 3, requires_grad=True)
    loss, plain = run(x)
    assert not plain.requires_grad
    loss.backward(retain_graph=True)
    once = x.grad.clone()
    loss.backward()
    torch.testing.assert_close(x.grad, 2 * once)
    assert layer.bias.grad is None and layer.weight.grad is not None


def test_sizes_that_change_while_training():
    layer = nn.Linear(3, 3)
    run = torch.compile(layer, backend="easytorch", options={"backend": "numpy"}, dynamic=True)
    for size in (2, 3, 5, 4):
        x = torch.randn(size, 3)
        run(x).square().sum().backward()
        got = layer.weight.grad.clone()
        layer.zero_grad()
        layer(x).square().sum().backward()
        torch.testing.assert_close(got, layer.weight.grad)
        layer.zero_grad()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [None, "bool", "float"])
def test_attention_and_its_gradients(masked, causal):
    if masked and causal:
        pytest.skip("torch takes one of them")
    shapes = ((2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8))
    mask = {None: None, "bool": torch.rand(2, 1, 5, 6) > 0.3, "float": torch.randn(2, 1, 5, 6)}[masked]
    if masked == "bool":
        mask[0, 0, 2] = False

    def function(*inputs):
        return nn.functional.scaled_dot_product_attention(*inputs, mask, is_causal=causal, enable_gqa=True).sin()

    ours = [torch.randn(shape, requires_grad=True) for shape in shapes]
    theirs = [x.detach().clone().requires_grad_() for x in ours]
    for run, inputs in ((compiled(function), ours), (function, theirs)):
        run(*inputs).sum().backward()
    torch.testing.assert_close([x.grad for x in ours], [x.grad for x in theirs], rtol=1e-5, atol=1e-5)


def test_static_cache_decoding_step_by_step():
    """A cache held in place, which torch.export's own decompositions break on (torch 2.13)."""
    module, _ = llama()
    module.eval()
    ids = torch.randint(0, 32, (1, 4))
    run = compiled(module.forward)
    answers = []
    for forward in (run, module.forward):
        cache = transformers.StaticCache(config=module.config, max_cache_len=8)
        found = []
        with torch.no_grad():
            for place in range(4):
                position = torch.tensor([place])
                step = forward(
                    input_ids=ids[:, place : place + 1],
                    position_ids=position[None],
                    past_key_values=cache,
                    use_cache=True,
                )
                found.append(step.logits)
        answers.append(torch.cat(found, 1))
    torch.testing.assert_close(*answers, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(answers[0], module(input_ids=ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.jax_cpu
def test_narrow_training_runs_on_torch_by_default():
    layer = nn.Linear(4, 4, dtype=torch.bfloat16)
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    torch.compile(layer, backend="easytorch")(x).float().square().sum().backward()
    got = layer.weight.grad.clone()
    layer.zero_grad()
    layer(x).float().square().sum().backward()
    torch.testing.assert_close(got, layer.weight.grad, rtol=2e-2, atol=2e-2)


def test_checkpointed_dropout_is_drawn_again_from_its_state():
    weight = torch.randn(8, 8)

    def block(x):
        return nn.functional.dropout(torch.tanh(x @ weight), 0.5).sin()

    def function(x):
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)

    x = torch.randn(4, 8, requires_grad=True)
    result = compiled(function)(x)
    result.sum().backward()
    kept = (result != 0).float() * 2
    wanted = x.detach().clone().requires_grad_()
    (torch.tanh(wanted @ weight) * kept).sin().sum().backward()
    torch.testing.assert_close(x.grad, wanted.grad)
