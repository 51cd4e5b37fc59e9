"""The command line: `easytorch COMMAND`, one file a command."""
