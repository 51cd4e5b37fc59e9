"""The backend `numpy`: the reference definition of every operation, which the other backends are tested against."""
