"""The file system: folders that are written atomically, a journal, arrays in temporary files."""
