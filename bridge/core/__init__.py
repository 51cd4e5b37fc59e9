"""What every room of the bridge uses: tensor metadata, readers, arrays read from files, JSON and sizes."""
