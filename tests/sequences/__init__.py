"""A differential fuzzer: random sequences of calls of the package against a NumPy reference."""
