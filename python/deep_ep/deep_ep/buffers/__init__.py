"""The buffers of DeepEP's releases, each in the module that callers import it from."""
