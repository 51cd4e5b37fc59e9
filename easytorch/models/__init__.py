"""Native models, one file a family, named after `model_type`; `easytorch.auto` finds them by that name."""
