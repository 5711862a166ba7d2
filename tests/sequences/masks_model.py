"""Steps of an exchange with masks: who is masked, who comes back, who leaves."""

from __future__ import annotations

from sequences.latency_state import REFUSED, Exchange, unsettled
from sequences.model import Call, Calls, Model, Step, require


def split(model: Model, step: Step) -> Calls:
    """Ranks mask those of other cells; ranks that are asleep mask nobody, and are masked."""
    on: Exchange = model.exchanges[step["on"]]
    require(on.masks and not model.simulated and not unsettled(model, on))
    require(len(on.cells) == 1 and not on.asleep)
    cells = [set(cell) & set(model.here) for cell in step["cells"]]
    cells = [cell for cell in cells if cell]
    asleep = set(step["asleep"]) & set(model.here)
    require(len(cells) > 1 and set.union(*cells) == set(model.here))
    require(all(asleep.isdisjoint(cell) or cell <= asleep for cell in cells))
    require(asleep != set(model.here))
    on.cells, on.asleep, on.gone = cells, asleep, set(model.gone)
    on.moved = True
    calls: Calls = [Call("meet") for _ in range(model.ranks)]
    for rank in model.here:
        others = [] if rank in asleep else [r for r in model.here if r not in on.cell(rank)]
        calls[rank] = Call("split", {"on": step["on"], "masked": others})
    return calls


def clear(model: Model, step: Step) -> Calls:
    """All take their masks back: of ranks that made as many dispatches. Who left meanwhile does not
    take back its own, and to whom it said so must rejoin."""
    on: Exchange = model.exchanges[step["on"]]
    require(on.masks and len(on.cells) > 1 and not unsettled(model, on))
    require(len({on.generation[r] for r in model.here}) == 1 and on.gone == model.gone)
    on.cells, on.asleep = [set(model.here)], set()
    return [
        Call("clear", {"on": step["on"]}) if rank in model.here else Call("meet")
        for rank in range(model.ranks)
    ]


def rejoin(model: Model, step: Step) -> Calls:
    on: Exchange = model.exchanges[step["on"]]
    ranks = model.here
    require(on.masks or not model.gone)
    require(not (on.moved and any(even or odd for even, odd in on.keeps)))
    calls = [
        Call("rejoin", {"on": step["on"]}, () if on.masks else REFUSED) for _ in range(model.ranks)
    ]
    if on.masks:
        on.base = max(on.generation[rank] for rank in ranks)
        on.generation = [on.base] * model.ranks
        on.cells, on.asleep, on.moved = [set(ranks)], set(), False
    return [call if rank in ranks else None for rank, call in enumerate(calls)]


def leave(model: Model, step: Step) -> Calls:
    """A rank destroys its group. Only exchanges with masks go on. Of one in another domain only the
    deadline tells, which no sequence waits for."""
    rank = step["rank"]
    require(rank in model.here and len(model.here) > 2 and len(set(model.domains)) == 1)
    require(not any(unsettled(model, on) for on in model.exchanges.values()))
    require(any(on.masks for on in model.exchanges.values()))
    model.gone.add(rank)
    for on in model.exchanges.values():
        on.cells = [cell - {rank} for cell in on.cells if cell - {rank}]
        on.asleep -= {rank}
    return [Call("leave", {"rank": rank}) for _ in range(model.ranks)]
