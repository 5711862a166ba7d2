"""Arguments that have to be the same on all ranks."""

from __future__ import annotations

import json

from deep_ep.errors import refuse
from deep_ep.groups import Groups


def require_same(groups: Groups, call: str, arguments: dict[str, str]) -> None:
    """Collective: refuses on all ranks, with the same words, where a rank has another value than
    rank 0. arguments: by name."""
    mine = json.dumps(arguments).encode()
    said = [one.decode() for one in groups.all_gather(mine)]
    for rank, one in enumerate(said):
        if one == said[0]:
            continue
        first, other = json.loads(said[0]), json.loads(one)
        for name in arguments:
            got, expected = other.get(name), first.get(name)
            if got != expected:
                refuse(call, name, f"{got} on rank {rank}", f"{expected}, as on rank 0")
