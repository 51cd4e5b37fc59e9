"""The file system: folders that are there whole or not at all, a journal, arrays put aside in temporary files."""
