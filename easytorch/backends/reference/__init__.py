"""The backend `numpy`: every operation by its definition, which the other backends are held to."""
