"""The command line: `easytorch COMMAND`, one file per command."""
