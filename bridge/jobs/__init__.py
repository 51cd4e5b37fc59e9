"""The steps of a conversion: find the source, write, verify, report."""
