"""Tiny models for scripts/perturb_bridge.py: those of convention_cases.py, and of families with Flax classes.

Loaded by its path, from there and from tests/bridge/test_perturbed.py.
"""

from __future__ import annotations

from typing import Any

from convention_cases import _IMAGE, _LLAMA, _TEXT, _VISION, LANGUAGE, OTHERS

_T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 30}
_BART = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "vocab_size": 30,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
_WITH_FLAX_CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _LLAMA),
    "mistral": ("MistralForCausalLM", _LLAMA),
    "gemma": ("GemmaForCausalLM", _LLAMA),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 30, "n_positions": 16}),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 30, "attention_types": [[["global"], 2]]},
    ),
    "gptj": ("GPTJForCausalLM", {"n_embd": 16, "n_layer": 1, "n_head": 2, "rotary_dim": 4, "vocab_size": 30}),
    "opt": (
        "OPTForCausalLM",
        {**_TOWER, "ffn_dim": 24, "vocab_size": 30, "max_position_embeddings": 16, "word_embed_proj_dim": 16},
    ),
    "bloom": ("BloomForCausalLM", {"hidden_size": 16, "n_layer": 1, "n_head": 2, "vocab_size": 30}),
    "xglm": (
        "XGLMForCausalLM",
        {"d_model": 16, "ffn_dim": 24, "num_layers": 1, "attention_heads": 2, "vocab_size": 30},
    ),
    "t5": ("T5ForConditionalGeneration", _T5),
    "t5_gated": ("T5ForConditionalGeneration", {**_T5, "feed_forward_proj": "gated-gelu"}),
    "mt5": ("MT5ForConditionalGeneration", _T5),
    "umt5": ("UMT5ForConditionalGeneration", _T5),
    "longt5": ("LongT5ForConditionalGeneration", _T5),
    "switch": (
        "SwitchTransformersForConditionalGeneration",
        {**_T5, "num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    ),
    "bart": ("BartForConditionalGeneration", _BART),
    "mbart": ("MBartForConditionalGeneration", _BART),
    "pegasus": ("PegasusForConditionalGeneration", _BART),
    "marian": ("MarianMTModel", _BART),
    "blenderbot": ("BlenderbotForConditionalGeneration", _BART),
    "whisper": (
        "WhisperForConditionalGeneration",
        {**_BART, "num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 8},
    ),
    "bert": ("BertForMaskedLM", {**_TEXT, "max_position_embeddings": 16}),
    "bert_pretraining": ("BertForPreTraining", {**_TEXT, "max_position_embeddings": 16}),
    "roberta": ("RobertaForMaskedLM", {**_TEXT, "max_position_embeddings": 16}),
    "albert": ("AlbertForMaskedLM", {**_TEXT, "embedding_size": 8, "max_position_embeddings": 16}),
    "electra": ("ElectraForMaskedLM", {**_TEXT, "embedding_size": 8, "max_position_embeddings": 16}),
    "distilbert": (
        "DistilBertForMaskedLM",
        {"dim": 16, "hidden_dim": 24, "n_layers": 1, "n_heads": 2, "vocab_size": 30, "max_position_embeddings": 16},
    ),
    "roformer": ("RoFormerForMaskedLM", {**_TEXT, "max_position_embeddings": 16}),
    "big_bird": ("BigBirdForMaskedLM", {**_TEXT, "max_position_embeddings": 16, "attention_type": "original_full"}),
    "vit": ("ViTForImageClassification", {**_IMAGE, "num_labels": 3}),
    "clip": (
        "CLIPModel",
        {
            "text_config": {**_TOWER, "vocab_size": 30, "max_position_embeddings": 16, "projection_dim": 16},
            "vision_config": {**_IMAGE, "projection_dim": 16},
            "projection_dim": 16,
        },
    ),
    "resnet": (
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic", "num_labels": 3},
    ),
    "beit": ("BeitForImageClassification", {**_VISION, "image_size": 8, "patch_size": 4, "num_labels": 3}),
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = _WITH_FLAX_CLASSES | LANGUAGE | OTHERS
