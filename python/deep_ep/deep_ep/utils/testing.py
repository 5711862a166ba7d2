"""Not here: says so to scripts that import it."""

raise ModuleNotFoundError(
    "deep_ep.utils.testing: a tool of DeepEP's own tests, which is not here; "
    "docs/deep_ep_names.md lists what is",
    name=__name__,
)
