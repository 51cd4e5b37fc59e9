"""`AutoModel*` and `AutoConfig`: drop-ins for transformers' own.

A family in `easytorch/models` loads as our native class, any other architecture as transformers' own class with our
attention plugged in wherever that class calls one. `model.easytorch_report` says which, and after the first forward
how many of its attention layers really called it.
"""

from transformers import AutoConfig

from easytorch.auto.classes import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from easytorch.auto.report import Report

__all__ = [
    "AutoConfig",
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForMaskedLM",
    "AutoModelForQuestionAnswering",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "Report",
]
