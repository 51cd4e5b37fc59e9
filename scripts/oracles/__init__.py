"""The programs that made the recorded references of the tests."""
