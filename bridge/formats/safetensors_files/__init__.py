"""safetensors, with torch's names, Flax's or EasyDeL's."""
