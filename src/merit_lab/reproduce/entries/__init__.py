"""The entries, by what they are made from."""
