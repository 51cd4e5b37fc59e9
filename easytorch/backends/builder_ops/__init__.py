"""The operations of a `Builder`, by the family names that backends have."""
