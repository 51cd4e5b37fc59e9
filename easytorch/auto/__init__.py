"""The auto classes: drop-ins for transformers' own.

A family in `easytorch/models` loads as our native class, any other architecture as transformers' own class with our
attention wherever that class calls one. `model.easytorch_report` says which, and after the first forward how many of
its attention layers actually called it. Names are loaded lazily, transformers with the first of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Every auto class of the newest transformers that makes models; `classes.py` derives ours from it.
MODELS = (
    "AutoBackbone",
    "AutoModel",
    "AutoModelForAudioClassification",
    "AutoModelForAudioFrameClassification",
    "AutoModelForAudioTokenization",
    "AutoModelForAudioXVector",
    "AutoModelForCTC",
    "AutoModelForCausalLM",
    "AutoModelForDecision",
    "AutoModelForDepthEstimation",
    "AutoModelForDocumentQuestionAnswering",
    "AutoModelForImageClassification",
    "AutoModelForImageMatting",
    "AutoModelForImageSegmentation",
    "AutoModelForImageTextToText",
    "AutoModelForImageToImage",
    "AutoModelForInstanceSegmentation",
    "AutoModelForKeypointDetection",
    "AutoModelForKeypointMatching",
    "AutoModelForMaskGeneration",
    "AutoModelForMaskedImageModeling",
    "AutoModelForMaskedLM",
    "AutoModelForMultimodalLM",
    "AutoModelForMultipleChoice",
    "AutoModelForNextSentencePrediction",
    "AutoModelForNormalEstimation",
    "AutoModelForObjectDetection",
    "AutoModelForPointmapEstimation",
    "AutoModelForPoseEstimation",
    "AutoModelForPreTraining",
    "AutoModelForQuestionAnswering",
    "AutoModelForRNNT",
    "AutoModelForSemanticSegmentation",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSequenceClassification",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForTDT",
    "AutoModelForTableQuestionAnswering",
    "AutoModelForTableRecognition",
    "AutoModelForTextEncoding",
    "AutoModelForTextRecognition",
    "AutoModelForTextToSpectrogram",
    "AutoModelForTextToWaveform",
    "AutoModelForTimeSeriesPrediction",
    "AutoModelForTokenClassification",
    "AutoModelForUniversalSegmentation",
    "AutoModelForVideoClassification",
    "AutoModelForVisualQuestionAnswering",
    "AutoModelForZeroShotImageClassification",
    "AutoModelForZeroShotObjectDetection",
)
# The same object as in transformers, so that a script needs one import.
PASSED_ON = (
    "AutoConfig",
    "AutoFeatureExtractor",
    "AutoImageProcessor",
    "AutoProcessor",
    "AutoTokenizer",
    "AutoVideoProcessor",
)

_NAMES = (*MODELS, *PASSED_ON, "Report")

if TYPE_CHECKING:
    from easytorch.auto.declared import *  # noqa: F403
    from easytorch.auto.report import Report as Report


def offered(names: tuple[str, ...]) -> list[str]:
    """`names` without the auto classes that the installed transformers lacks."""
    transformers = importlib.import_module("transformers")
    theirs = set(dir(transformers))
    return [name for name in names if name not in MODELS or name in theirs]


def __getattr__(name: str) -> Any:
    if name == "__all__":  # not a list from the start: what the installed transformers has is asked for with *
        return offered(_NAMES)
    if name in PASSED_ON:
        home = "transformers"
    elif name == "Report":
        home = "easytorch.auto.report"
    elif name.startswith("Auto"):  # one that a newer transformers has is found too
        home = "easytorch.auto.classes"
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_NAMES)}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})
