"""Every Flax class of transformers 4.57.6 with a tiny config: which sizes, which inputs.

The sizes of a case differ from each other wherever the architecture lets them, so that a missing transpose, a wrong
head count or a swapped projection is a shape error or a wrong number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Recipe = dict[str, dict[str, Any]]

LABELS = {"id2label": {str(i): f"LABEL_{i}" for i in range(5)}, "label2id": {f"LABEL_{i}": i for i in range(5)}}
CLASSIFIERS = ("SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice")


@dataclass(frozen=True)
class Case:
    """One Flax class (its name without "Flax") with one config; `variant` tells cases of the same class apart."""

    architecture: str
    model_class: str
    settings: dict[str, Any]
    inputs: Recipe
    variant: str = ""
    members: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)


def ids(high: int, *shape: int, last: int | None = None) -> dict[str, Any]:
    entry = {"kind": "ids", "shape": list(shape or (2, 9)), "low": 5, "high": high}
    return entry if last is None else entry | {"last": last}


def mask(length: int = 9) -> dict[str, Any]:
    return {"kind": "mask", "shape": [2, length], "lengths": [length, length - 3]}


def floats(*shape: int) -> dict[str, Any]:
    return {"kind": "floats", "shape": list(shape)}


def text(high: int = 61, length: int = 9) -> Recipe:
    return {"input_ids": ids(high, 2, length), "attention_mask": mask(length)}


def typed(*shape: int) -> Recipe:
    """Token types, always given: FlaxElectra takes ones where torch takes zeros."""
    return {"token_type_ids": {"kind": "ids", "shape": list(shape), "low": 0, "high": 3}}


def choices(high: int = 61, length: int = 7) -> Recipe:
    return {"input_ids": ids(high, 2, 3, length)}


def seq2seq(high: int = 61, length: int = 9) -> Recipe:
    return text(high, length) | {"decoder_input_ids": ids(high, 2, 7)}


def image(channels: int = 3, height: int = 12) -> Recipe:
    return {"pixel_values": floats(2, channels, height, height)}


BERT = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 37,
    "type_vocab_size": 3,
}
SEQ2SEQ = {
    "vocab_size": 61,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 44,
    "max_position_embeddings": 37,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
T5 = {
    "vocab_size": 61,
    "d_model": 24,
    "d_kv": 7,
    "d_ff": 40,
    "num_layers": 2,
    "num_decoder_layers": 1,
    "num_heads": 3,
    "relative_attention_num_buckets": 10,
    "relative_attention_max_distance": 12,
    "decoder_start_token_id": 0,
}
LLAMA = {
    "vocab_size": 61,
    "hidden_size": 40,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "max_position_embeddings": 37,
}
VIT = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "image_size": 12,
    "patch_size": 4,
    "num_channels": 3,
}
WAV2VEC2 = {
    "vocab_size": 35,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "conv_dim": [10, 14, 18],
    "conv_kernel": [5, 3, 2],
    "conv_stride": [3, 2, 2],
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 6,
    "num_conv_pos_embedding_groups": 4,
    "num_codevector_groups": 2,
    "num_codevectors_per_group": 9,
    "codevector_dim": 16,
    "proj_codevector_dim": 12,
    "do_stable_layer_norm": True,
    "feat_extract_norm": "layer",
}


def bert_like(architecture: str, prefix: str, settings: dict[str, Any], heads: tuple[str, ...]) -> Iterator[Case]:
    """The base model and its heads; the causal one as a decoder."""
    has_types = "type_vocab_size" in settings
    plain = text() | (typed(2, 9) if has_types else {})
    each = choices() | (typed(2, 3, 7) if has_types else {})
    yield Case(architecture, f"{prefix}Model", settings, plain)
    for head in heads:
        extra = LABELS if head in ("SequenceClassification", "TokenClassification") else {}
        extra = {"is_decoder": True} if head == "CausalLM" else extra
        inputs = each if head == "MultipleChoice" else plain
        yield Case(architecture, f"{prefix}For{head}", settings | extra, inputs)
    if "MaskedLM" in heads:
        untied = settings | {"tie_word_embeddings": False}
        yield Case(architecture, f"{prefix}ForMaskedLM", untied, plain, variant="untied")


def bart_like(architecture: str, prefix: str, settings: dict[str, Any], heads: tuple[str, ...]) -> Iterator[Case]:
    yield Case(architecture, f"{prefix}Model", settings, seq2seq())
    closed = {"input_ids": ids(61, 2, 9, last=settings["eos_token_id"])}
    for head in heads:
        extra = LABELS if head == "SequenceClassification" else {}
        # The decoder of a classifier reads the input shifted by one, and pools at its last end-of-sequence token.
        yield Case(architecture, f"{prefix}For{head}", settings | extra, closed if extra else seq2seq())


def t5_like(
    architecture: str, prefix: str, settings: dict[str, Any], length: int = 9, **variants: Any
) -> Iterator[Case]:
    for variant, extra in {"": {}, **variants}.items():
        here = settings | extra
        yield Case(architecture, f"{prefix}Model", here, seq2seq(length=length), variant)
        yield Case(architecture, f"{prefix}ForConditionalGeneration", here, seq2seq(length=length), variant)
        if architecture != "longt5":
            yield Case(architecture, f"{prefix}EncoderModel", here, text(), variant)


def causal(architecture: str, names: tuple[str, str], settings: dict[str, Any], **variants: Any) -> Iterator[Case]:
    for variant, extra in {"": {}, **variants}.items():
        for name in names:
            yield Case(architecture, name, settings | extra, text(), variant)


def vision(architecture: str, prefix: str, settings: dict[str, Any], size: int = 12, **variants: Any) -> Iterator[Case]:
    for variant, extra in {"": {}, **variants}.items():
        yield Case(architecture, f"{prefix}Model", settings | extra, image(height=size), variant)
        labelled = settings | extra | LABELS
        yield Case(architecture, f"{prefix}ForImageClassification", labelled, image(height=size), variant)


def encoders() -> Iterator[Case]:
    every = ("MaskedLM", *CLASSIFIERS)
    albert = BERT | {"embedding_size": 14}
    groups = {"num_hidden_layers": 4, "num_hidden_groups": 2, "inner_group_num": 2}
    yield from bert_like("albert", "Albert", albert, ("PreTraining", *every))
    yield Case("albert", "AlbertForMaskedLM", albert | groups, text(), variant="groups")
    yield from bert_like("bert", "Bert", BERT, ("PreTraining", "NextSentencePrediction", "CausalLM", *every))
    big_bird = BERT | {"attention_type": "original_full", "max_position_embeddings": 43}
    sparse = {"attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1}
    yield from bert_like("big_bird", "BigBird", big_bird, ("PreTraining", "CausalLM", *every))
    yield Case("big_bird", "BigBirdModel", big_bird | sparse, text(length=20), variant="block_sparse")
    yield Case(
        "big_bird", "BigBirdForMaskedLM", big_bird | sparse | {"use_bias": False}, text(length=20), "block_sparse"
    )
    electra = BERT | {"embedding_size": 14}
    yield from bert_like("electra", "Electra", electra, ("PreTraining", "CausalLM", *every))
    yield Case("electra", "ElectraModel", BERT | {"embedding_size": 24}, text() | typed(2, 9), "same_size")
    distilbert = {"vocab_size": 61, "dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 40}
    distilbert |= {"max_position_embeddings": 37}
    yield from bert_like("distilbert", "DistilBert", distilbert, every)
    sinusoidal = distilbert | {"sinusoidal_pos_embds": True}
    yield Case("distilbert", "DistilBertModel", sinusoidal, text(), variant="sinusoidal")
    roberta = BERT | {"pad_token_id": 1}
    yield from bert_like("roberta", "Roberta", roberta, ("CausalLM", *every))
    yield from bert_like("roberta-prelayernorm", "RobertaPreLayerNorm", roberta, ("CausalLM", *every))
    yield from bert_like("xlm-roberta", "XLMRoberta", roberta, ("CausalLM", *every))
    roformer = BERT | {"embedding_size": 24}
    yield from bert_like("roformer", "RoFormer", roformer, every)
    yield Case("roformer", "RoFormerModel", roformer | {"rotary_value": True}, text(), variant="rotary_value")


def sequences() -> Iterator[Case]:
    untied = {"tie_word_embeddings": False}
    generation = ("ConditionalGeneration",)
    classifiers = ("SequenceClassification", "QuestionAnswering")
    yield from bart_like("bart", "Bart", SEQ2SEQ, generation + classifiers)
    yield Case("bart", "BartForCausalLM", SEQ2SEQ, text())
    yield Case("bart", "BartForConditionalGeneration", SEQ2SEQ | untied, seq2seq(), variant="untied")
    yield from bart_like("mbart", "MBart", SEQ2SEQ | {"scale_embedding": True}, generation + classifiers)
    yield from bart_like("blenderbot", "Blenderbot", SEQ2SEQ, generation)
    yield from bart_like("blenderbot-small", "BlenderbotSmall", SEQ2SEQ, generation)
    yield from bart_like("pegasus", "Pegasus", SEQ2SEQ | {"eos_token_id": 1, "pad_token_id": 0}, generation)
    marian = SEQ2SEQ | {"eos_token_id": 0, "pad_token_id": 60, "decoder_start_token_id": 60, "scale_embedding": True}
    marian |= {"activation_function": "swish", "decoder_vocab_size": 61, "share_encoder_decoder_embeddings": True}
    yield Case("marian", "MarianModel", marian, seq2seq(60))
    yield Case("marian", "MarianMTModel", marian, seq2seq(60))
    gated = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    yield from t5_like("t5", "T5", T5, gated=gated)
    # Untied, as every checkpoint is: transformers 5 lost the scale that a tied MT5 has before its head.
    yield from t5_like("mt5", "MT5", T5 | gated)
    # Blocks of a power of two: FlaxLongT5 numbers them by adding up 1 / size, which is not exact for others.
    long = T5 | {"local_radius": 4, "global_block_size": 4}
    yield from t5_like(
        "longt5",
        "LongT5",
        long | {"encoder_attention_type": "local"},
        length=20,
        global_gated=gated | {"encoder_attention_type": "transient-global"},
    )
    whisper = {k: v for k, v in SEQ2SEQ.items() if k != "max_position_embeddings"}
    whisper |= {"num_mel_bins": 10, "max_source_positions": 15, "max_target_positions": 19, "begin_suppress_tokens": []}
    whisper |= {"classifier_proj_size": 14, "suppress_tokens": [], "decoder_layers": 2, "bos_token_id": 2}
    heard: Recipe = {"input_features": floats(2, 10, 30)}
    yield Case("whisper", "WhisperModel", whisper, heard | {"decoder_input_ids": ids(61, 2, 7)})
    yield Case("whisper", "WhisperForConditionalGeneration", whisper, heard | {"decoder_input_ids": ids(61, 2, 7)})
    yield Case("whisper", "WhisperForAudioClassification", whisper | LABELS, heard)


def decoders() -> Iterator[Case]:
    untied = {"tie_word_embeddings": False}
    # FlaxBloom calls a function jax has never had (jnp.cat) unless the heads are a power of two.
    bloom = {"vocab_size": 61, "hidden_size": 20, "n_layer": 2, "n_head": 4}
    yield from causal("bloom", ("BloomModel", "BloomForCausalLM"), bloom)
    yield Case("bloom", "BloomForCausalLM", bloom | untied, text(), variant="untied")
    gpt2 = {"vocab_size": 61, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 37, "n_inner": 40}
    gpt2 |= {"bos_token_id": 3, "eos_token_id": 3}
    yield from causal("gpt2", ("GPT2Model", "GPT2LMHeadModel"), gpt2)
    yield Case("gpt2", "GPT2LMHeadModel", gpt2 | untied, text(), variant="untied")
    gpt_neo = {"vocab_size": 61, "hidden_size": 24, "num_layers": 2, "num_heads": 3, "intermediate_size": 40}
    gpt_neo |= {"attention_types": [[["global", "local"], 1]], "window_size": 4, "max_position_embeddings": 37}
    yield from causal("gpt_neo", ("GPTNeoModel", "GPTNeoForCausalLM"), gpt_neo | {"bos_token_id": 3, "eos_token_id": 3})
    gptj = {"vocab_size": 61, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 37, "n_inner": 40}
    gptj |= {"rotary_dim": 4, "bos_token_id": 3, "eos_token_id": 3}
    yield from causal("gptj", ("GPTJModel", "GPTJForCausalLM"), gptj)
    yield from causal("llama", ("LlamaModel", "LlamaForCausalLM"), LLAMA)
    yield Case("llama", "LlamaForCausalLM", LLAMA | {"num_key_value_heads": 5}, text(), variant="multi_head")
    gemma = LLAMA | {"num_attention_heads": 3, "head_dim": 10}
    yield from causal("gemma", ("GemmaModel", "GemmaForCausalLM"), gemma)
    # Inside the window: FlaxMistral's is one token wider than torch's.
    yield from causal("mistral", ("MistralModel", "MistralForCausalLM"), LLAMA | {"sliding_window": 21})
    opt = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "ffn_dim": 40}
    opt |= {"max_position_embeddings": 37, "word_embed_proj_dim": 24}
    projected = {"word_embed_proj_dim": 14}
    post = projected | {"do_layer_norm_before": False}
    yield from causal("opt", ("OPTModel", "OPTForCausalLM"), opt, projected=projected, post_norm=post)
    yield Case("opt", "OPTForCausalLM", opt | untied, text(), variant="untied")
    xglm = {"vocab_size": 61, "d_model": 24, "num_layers": 2, "attention_heads": 3, "ffn_dim": 40}
    yield from causal("xglm", ("XGLMModel", "XGLMForCausalLM"), xglm | {"max_position_embeddings": 37})


def images_and_sounds() -> Iterator[Case]:
    yield from vision("vit", "ViT", VIT)
    yield from vision("dinov2", "Dinov2", DINOV2, swiglu={"use_swiglu_ffn": True})
    beit = VIT | {"layer_scale_init_value": 0.1, "vocab_size": 61}
    shared = {"use_shared_relative_position_bias": True, "use_mask_token": True, "use_mean_pooling": False}
    each = {"use_relative_position_bias": True, "use_absolute_position_embeddings": True}
    yield from vision("beit", "Beit", beit, shared=shared, each=each)
    masked = beit | shared | {"use_absolute_position_embeddings": True}
    masked_image = image() | {"bool_masked_pos": {"kind": "bools", "shape": [2, 9]}}
    yield Case("beit", "BeitForMaskedImageModeling", masked, masked_image)
    resnet = {"embedding_size": 6, "hidden_sizes": [8, 12], "depths": [2, 1], "num_channels": 3, "layer_type": "basic"}
    wide = {"layer_type": "bottleneck", "downsample_in_first_stage": True, "hidden_sizes": [16, 24]}
    yield from vision("resnet", "ResNet", resnet, 20, bottleneck=wide)
    regnet = {"embedding_size": 6, "hidden_sizes": [8, 12], "depths": [2, 1], "num_channels": 3, "groups_width": 4}
    # FlaxRegNet's "x" layers call their own constructor wrongly, and can never have been saved.
    yield from vision("regnet", "RegNet", regnet | {"layer_type": "y"}, 20)
    # FlaxWav2Vec2 has neither the group norm of the feature extractor nor layers that normalise afterwards.
    sound: Recipe = {"input_values": floats(2, 300)}
    for variant, extra in {"": {}, "conv_bias": {"conv_bias": True}}.items():
        for name in ("Wav2Vec2Model", "Wav2Vec2ForCTC", "Wav2Vec2ForPreTraining"):
            yield Case("wav2vec2", name, WAV2VEC2 | extra, sound, variant)
    adapter = {"add_adapter": True, "num_adapter_layers": 2, "output_hidden_size": 24}
    yield Case("wav2vec2", "Wav2Vec2Model", WAV2VEC2 | adapter, sound, variant="adapter")
    for name in ("CLIPTextModel", "CLIPTextModelWithProjection"):
        yield Case(
            "clip", name, CLIP_TEXT, {"input_ids": ids(60, last=60), "attention_mask": mask(9) | {"lengths": [9, 9]}}
        )
    yield Case("clip", "CLIPVisionModel", CLIP_VISION, image())
    both = {"text_config": CLIP_TEXT, "vision_config": CLIP_VISION, "projection_dim": 18}
    yield Case("clip", "CLIPModel", both, {"input_ids": ids(60, last=60)} | image())


DINOV2 = {k: v for k, v in VIT.items() if k != "intermediate_size"} | {"mlp_ratio": 3}
CLIP_TEXT = BERT | {"projection_dim": 18, "bos_token_id": 59, "eos_token_id": 60}
CLIP_TEXT.pop("type_vocab_size")
CLIP_VISION = VIT | {"hidden_size": 30, "num_attention_heads": 5, "intermediate_size": 44, "projection_dim": 18}


def composites() -> Iterator[Case]:
    decoder = {"is_decoder": True, "add_cross_attention": True}
    bert_decoder = ("bert", BERT | decoder | {"hidden_size": 20, "num_attention_heads": 5})
    gpt2 = {"vocab_size": 61, "n_embd": 20, "n_layer": 2, "n_head": 5, "n_positions": 37}
    gpt2_decoder = ("gpt2", gpt2 | decoder)
    # Of the encoder's width: for another, the Flax class reads a setting that BART's config does not have.
    bart_decoder = ("bart", SEQ2SEQ | decoder)
    heard: Recipe = {"inputs": floats(2, 300), "decoder_input_ids": ids(61, 2, 7)}
    seen = image() | {"decoder_input_ids": ids(61, 2, 7)}
    for name, model_class, encoder, decoders_, inputs in (
        ("encoder-decoder", "EncoderDecoderModel", ("bert", BERT), (bert_decoder, gpt2_decoder), seq2seq()),
        (
            "speech-encoder-decoder",
            "SpeechEncoderDecoderModel",
            ("wav2vec2", WAV2VEC2),
            (bart_decoder, bert_decoder),
            heard,
        ),
        ("vision-encoder-decoder", "VisionEncoderDecoderModel", ("vit", VIT), (gpt2_decoder, bert_decoder), seen),
    ):
        for chosen in decoders_:
            members = {"encoder": encoder, "decoder": chosen}
            yield Case(name, model_class, {}, inputs, f"{encoder[0]}-{chosen[0]}", members)
    members = {"encoder": ("beit", VIT | {"use_relative_position_bias": True}), "decoder": bart_decoder}
    yield Case("vision-encoder-decoder", "VisionEncoderDecoderModel", {}, seen, "beit-bart", members)
    name, pair = "vision-text-dual-encoder", {"input_ids": ids(60)} | image()
    for vision_member, text_member in (
        (("vit", VIT | {"hidden_size": 30}), ("bert", BERT)),
        (("clip_vision_model", CLIP_VISION), ("bert", BERT | {"hidden_size": 27})),
        (("clip", {"text_config": CLIP_TEXT, "vision_config": CLIP_VISION}), ("albert", BERT | {"embedding_size": 14})),
    ):
        members = {"vision": vision_member, "text": text_member}
        variant = f"{vision_member[0]}-{text_member[0]}"
        yield Case(name, "VisionTextDualEncoderModel", {"projection_dim": 18}, pair, variant, members)


def cases() -> Iterator[Case]:
    """Every case, the architectures of one kind together."""
    yield from encoders()
    yield from sequences()
    yield from decoders()
    yield from images_and_sounds()
    yield from composites()
