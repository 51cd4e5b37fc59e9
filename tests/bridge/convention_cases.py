"""Small models of families that never had an HF Flax class: (model class, config arguments)."""

from __future__ import annotations

from typing import Any

_TEXT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 30,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA = {**_TEXT, "num_key_value_heads": 1, "head_dim": 8}
_MOE = {**_LLAMA, "moe_intermediate_size": 12, "num_experts": 3, "num_experts_per_tok": 2}
_DEEPSEEK = {
    **_TEXT,
    "moe_intermediate_size": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
_VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
_IMAGE = {**_VISION, "image_size": 8, "patch_size": 4}
_SPEECH = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "conv_dim": (8, 8),
    "conv_kernel": (3, 3),
    "conv_stride": (2, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 12,
}

TIED = {"tie_word_embeddings": True}
UNTIED = {"tie_word_embeddings": False}

# Language models, each tried tied and untied.
LANGUAGE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2ForCausalLM", _LLAMA),
    "qwen3": ("Qwen3ForCausalLM", _LLAMA),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**_MOE, "decoder_sparse_step": 1}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**_MOE, "shared_expert_intermediate_size": 12}),
    "mixtral": ("MixtralForCausalLM", {**_LLAMA, "num_local_experts": 3}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", _DEEPSEEK),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**_DEEPSEEK, "n_shared_experts": 1}),
    "phi": ("PhiForCausalLM", _TEXT),
    "phi3": ("Phi3ForCausalLM", _LLAMA),
    "gemma2": ("Gemma2ForCausalLM", _LLAMA),
    "gemma3_text": ("Gemma3ForCausalLM", _LLAMA),
    "falcon": ("FalconForCausalLM", {**_TEXT, "new_decoder_architecture": False}),
    "mpt": ("MptForCausalLM", {"d_model": 16, "n_heads": 2, "n_layers": 1, "vocab_size": 30}),
    "olmo2": ("Olmo2ForCausalLM", _LLAMA),
    "granite": ("GraniteForCausalLM", _LLAMA),
    "granitemoe": ("GraniteMoeForCausalLM", {**_LLAMA, "num_local_experts": 3, "num_experts_per_tok": 2}),
    "starcoder2": ("Starcoder2ForCausalLM", _LLAMA),
    "cohere": ("CohereForCausalLM", _LLAMA),
    "gpt_oss": ("GptOssForCausalLM", {**_LLAMA, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "gpt_neox": ("GPTNeoXForCausalLM", _TEXT),
    "mamba": ("MambaForCausalLM", {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 30, "state_size": 4}),
    "mamba2": (
        "Mamba2ForCausalLM",
        {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "vocab_size": 30,
            "state_size": 4,
            "num_heads": 4,
            "head_dim": 8,
            "n_groups": 1,
        },
    ),
}

# Everything else: encoders, vision, vision and language, speech.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "modernbert": ("ModernBertForMaskedLM", {**_TEXT, "cls_token_id": 1, "sep_token_id": 2}),
    "deberta-v2": (
        "DebertaV2ForMaskedLM",
        {**_TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4},
    ),
    "siglip": ("SiglipModel", {"text_config": {**_TEXT, "projection_size": 16}, "vision_config": _IMAGE}),
    "convnext": (
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_labels": 3},
    ),
    "swin": (
        "SwinForImageClassification",
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 2},
    ),
    "detr": (
        "DetrForObjectDetection",
        {
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone": None,
            "backbone_config": {
                "model_type": "resnet",
                "embedding_size": 8,
                "hidden_sizes": [8, 8],
                "depths": [1, 1],
                "layer_type": "basic",
                "out_features": ["stage2"],
            },
            "d_model": 16,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 16,
            "decoder_ffn_dim": 16,
            "num_queries": 3,
        },
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        {
            "vision_config": {**_IMAGE, "model_type": "clip_vision_model", "projection_dim": 16},
            "text_config": {**_LLAMA, "model_type": "llama"},
            "image_token_index": 29,
        },
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {
            "vision_config": {**_IMAGE, "model_type": "siglip_vision_model"},
            "text_config": {**_LLAMA, "model_type": "gemma3_text"},
            "mm_tokens_per_image": 4,
        },
    ),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        {
            "text_config": {**_LLAMA, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
            "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4},
        },
    ),
    "wavlm": ("WavLMForCTC", _SPEECH),
    "hubert": ("HubertForCTC", _SPEECH),
    "speecht5": (
        "SpeechT5ForTextToSpeech",
        {
            **_SPEECH,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 16,
            "decoder_ffn_dim": 16,
            "speech_decoder_prenet_units": 8,
            "speech_decoder_postnet_units": 8,
            "speech_decoder_postnet_layers": 2,
            "speaker_embedding_dim": 8,
            "num_mel_bins": 4,
        },
    ),
    "vits": (
        "VitsModel",
        {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "ffn_dim": 16,
            "flow_size": 16,
            "spectrogram_bins": 9,
            "vocab_size": 12,
            "upsample_initial_channel": 16,
            "upsample_rates": [2, 2],
            "upsample_kernel_sizes": [4, 4],
            "resblock_kernel_sizes": [3],
            "resblock_dilation_sizes": [[1, 3]],
            "prior_encoder_num_flows": 2,
            "posterior_encoder_num_wavenet_layers": 1,
            "prior_encoder_num_wavenet_layers": 1,
            "duration_predictor_num_flows": 2,
            "depth_separable_num_layers": 1,
        },
    ),
}
