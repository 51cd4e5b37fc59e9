"""What the recorded references of the tests were made with."""
