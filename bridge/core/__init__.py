"""Shared code of the bridge's rooms: tensor metadata, readers, arrays read from files, JSON and sizes."""
