"""Arrays that are zarr folders under an index of their own: EasyDeL's and T5X's."""
