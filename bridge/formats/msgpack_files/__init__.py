"""msgpack: Flax's trees, and EasyDeL's old single file."""
