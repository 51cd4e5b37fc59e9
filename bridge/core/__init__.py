"""What every room of the bridge uses: tensors and readers as data, arrays on their way from files, JSON and sizes."""
