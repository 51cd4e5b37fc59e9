"""A checkpoint loaded as another class of its family: what the two call differently is found, and never random."""

import pytest
import torch
import transformers

import easytorch
from easytorch.bridge.convert import convert

_SIZES = {
    "vocab_size": 31,
    "d_model": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "max_position_embeddings": 16,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 8,
    "decoder_ffn_dim": 8,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}


@pytest.fixture(scope="module", params=["Bart", "MBart", "Marian", "Pegasus", "Blenderbot", "BlenderbotSmall"])
def family(request) -> str:
    return request.param


def _config(family: str) -> transformers.PreTrainedConfig:
    return getattr(transformers, f"{family}Config")(**_SIZES)


@pytest.mark.parametrize("kind", ["torch", "flax"])
def test_the_decoder_alone_has_the_embeddings_both_halves_share(family, tmp_path, kind) -> None:
    model = getattr(transformers, f"{family}Model")(_config(family))
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_()
    model.save_pretrained(tmp_path / "torch")
    if kind == "flax":
        convert(tmp_path / "torch", tmp_path / "flax", to="flax")
    decoder, info = easytorch.AutoModelForCausalLM.from_pretrained(tmp_path / kind, output_loading_info=True)
    assert torch.equal(decoder.get_input_embeddings().weight, model.get_input_embeddings().weight)
    assert decoder.get_output_embeddings().weight is decoder.get_input_embeddings().weight
    assert not info["missing_keys"]
    expected = model.get_decoder().eval()(input_ids=torch.arange(5)[None]).last_hidden_state
    torch.testing.assert_close(decoder.base_model.decoder(input_ids=torch.arange(5)[None])[0], expected)


def test_a_new_head_that_nothing_ties_stays_new(tmp_path) -> None:
    config = _config("Bart")
    config.tie_word_embeddings = False
    transformers.BartModel(config).save_pretrained(tmp_path)
    _, info = easytorch.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == {"lm_head.weight"}


def test_of_t5_the_encoder_alone(tmp_path) -> None:
    config = transformers.T5Config(vocab_size=31, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    model = transformers.T5ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "torch")
    convert(tmp_path / "torch", tmp_path / "flax", to="flax")
    encoder, info = easytorch.AutoModelForTextEncoding.from_pretrained(tmp_path / "flax", output_loading_info=True)
    assert not info["missing_keys"]
    inputs = torch.arange(5)[None]
    torch.testing.assert_close(encoder(input_ids=inputs)[0], model.encoder(input_ids=inputs)[0])
