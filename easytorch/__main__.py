"""`python -m easytorch` is the `easytorch` command."""

from easytorch.cli.main import main

if __name__ == "__main__":
    main()
