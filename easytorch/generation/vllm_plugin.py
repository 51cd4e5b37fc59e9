"""Native models in vLLM: a plugin of its entry point `vllm.general_plugins`.

vLLM's backend "transformers" (`--model-impl transformers`) builds models by `transformers.AutoModel`, replaces their
layers by its parallel ones by the plan that they declare, and gives them its attention. With EASYTORCH_VLLM=1 that gets
our decoders. Run here: the registration, and the attention function as vLLM registers and calls it. Not run: vLLM.
"""

from __future__ import annotations

from easytorch.switches import switch

SWITCH = "EASYTORCH_VLLM"


def register() -> bool:
    """Puts the native decoders of text into this process's `transformers.AutoModel`; False where that is not asked for.

    vLLM calls it in each of its processes. Nothing is changed unless EASYTORCH_VLLM is on.
    """
    if not switch(SWITCH):
        return False
    from transformers import AutoModel

    from easytorch.auto.classes import NativeFirst
    from easytorch.layers.decoder import DecoderBackbone

    if not isinstance(AutoModel._model_mapping, NativeFirst):
        # looked up by config when a model is built: importing every family would take seconds
        AutoModel._model_mapping = NativeFirst(AutoModel._model_mapping, DecoderBackbone)  # type: ignore[assignment]
    return True
