"""How the ranks of a buffer meet that processes may come to later."""

from __future__ import annotations

from typing import Any

import ferry
from deep_ep.errors import require


class ElasticGroup:
    """Not in the original: what `Buffer`, `ElasticBuffer` and `EPBuffer` take for `group`, so that
    a process takes the place of a rank that died. The same on all ranks; a process that comes
    later makes the same buffers, with a bootstrap that joins.

    Args:
        bootstrap: by which the ranks meet: of `ferry.from_environment`, `ferry.tcp` or
            `ferry.from_store`. It may join, or begin alone.
        name: under which processes find the buffer; of each buffer of a job another.
        domain_size, network, arbiter: as of a `ferry.Group`, where ranks are of several hosts.
    """

    def __init__(
        self,
        bootstrap: ferry.Bootstrap,
        name: str,
        *,
        domain_size: int = 0,
        network: str = "automatic",
        arbiter: Any = "",
    ) -> None:
        good = isinstance(bootstrap, ferry.Bootstrap)
        got = f"an object of type {type(bootstrap).__name__}"
        expected = (
            "a ferry.Bootstrap, as of ferry.from_environment: other groups end with their ranks, "
            "and nobody can come"
        )
        require(good, "ElasticGroup", "bootstrap", got, expected)
        good = isinstance(name, str) and name != ""
        require(good, "ElasticGroup", "name", repr(name), "a text that is not empty")
        self.bootstrap = bootstrap
        self.name = name
        self.domains: dict[str, Any] = {}
        if domain_size:
            self.domains["domain_size"] = domain_size
        if network != "automatic":
            self.domains["network"] = network
        self.arbiter = {"arbiter": arbiter} if arbiter else {}

    def rank(self) -> int:
        """This rank, as of a process group."""
        return self.bootstrap.rank

    def size(self) -> int:
        """The most ranks that there can be, as of a process group."""
        return self.bootstrap.size
