"""What a conversion does: finds its source, writes, verifies, reports."""
