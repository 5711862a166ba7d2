"""Batches as large as each rank is fast."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ferry.arguments import describe, flag, integer, refuse


class BalancedSampler:
    """A batch sampler for ranks of unequal speed: a faster rank gets more samples of each batch, so
    that all are done at about the same time. What comes of a batch is weighted by its samples::

        model = ferry.torch.DistributedDataParallel(model)
        sampler = ferry.torch.BalancedSampler(len(data), 64, model)
        for x, y in DataLoader(data, batch_sampler=sampler):
            loss = loss_of(model(x), y)          # the mean over the samples of this rank
            (loss * sampler.weight(len(x))).backward()

    Then gradients are those of the mean over all samples of the batch, whoever had how many.

    Every `every` batches the ranks exchange how long a sample takes, by the model's `busy_seconds`,
    and divide the batches that follow alike; the first ones are equal. So iterating is collective,
    and each batch is followed by one backward that exchanges gradients. A rank has at least one
    sample. Samples after the last whole batch are left out.

    Args:
        samples: how many the data set has, `len(data)`.
        batch: samples of all ranks together.
        model: a `ferry.torch.DistributedDataParallel`.
        every: batches between two measurements.
        shuffle, seed: another order in each epoch (`set_epoch`), the same on all ranks.
    """

    def __init__(
        self,
        samples: int,
        batch: int,
        model: Any,
        *,
        every: int = 8,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        if hasattr(samples, "__len__") and not hasattr(samples, "__index__"):
            refuse("BalancedSampler: samples", describe(samples), f"their number, {len(samples)}")
        if not all(hasattr(model, name) for name in ("collectives", "steps", "busy_seconds")):
            got = type(model).__name__
            refuse("BalancedSampler: model", got, "a ferry.torch.DistributedDataParallel")
        self._ranks = model.collectives
        self._model = model
        size = self._ranks.size
        self.samples = integer("BalancedSampler: samples", samples, 1)
        self.batch = integer("BalancedSampler: batch", batch, size)
        self._every = integer("BalancedSampler: every", every, 1)
        self._shuffle = flag("BalancedSampler: shuffle", shuffle)
        self._seed = integer("BalancedSampler: seed", seed)
        if samples < batch:
            refuse("BalancedSampler: batch", str(batch), f"at most the {samples} samples")
        self._epoch = 0
        self._nanoseconds = 0  # of a sample on this rank; 0: not measured
        #: Samples of each rank in the batches to come.
        self.shares = divide(self.batch, [1.0] * size)

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self.samples // self.batch

    def set_epoch(self, epoch: int) -> None:
        """The number that the next order is drawn with; it counts up by itself."""
        self._epoch = integer("set_epoch: epoch", epoch)

    def weight(self, samples: int) -> float:
        """What the mean over so many samples of this rank counts in the mean over ranks."""
        return samples * float(self._ranks.size) / self.batch

    def __iter__(self) -> Iterator[list[int]]:
        """Indices of this rank's samples, batch by batch."""
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        self._epoch += 1
        order = torch.arange(self.samples)
        if self._shuffle:
            order = torch.randperm(self.samples, generator=generator)
        sizes: list[int] = []  # of the batches of this epoch; a loader asks ahead of the training
        start = seen = self._model.steps
        busy = self._model.busy_seconds
        for number in range(len(self)):
            if number > 0 and number % self._every == 0:
                done = sum(sizes[seen - start : self._model.steps - start])
                self._balance(self._model.busy_seconds - busy, done)
                seen, busy = self._model.steps, self._model.busy_seconds
            first = number * self.batch + sum(self.shares[: self._ranks.rank])
            sizes.append(self.shares[self._ranks.rank])
            yield order[first : first + sizes[-1]].tolist()

    def _balance(self, seconds: float, samples: int) -> None:
        """Collective."""
        if samples > 0:
            took = max(1, round(seconds * 1e9 / samples))
            self._nanoseconds = (self._nanoseconds + took) // 2 if self._nanoseconds else took
        everyone = torch.empty(self._ranks.size, dtype=torch.int64)
        self._ranks.all_gather(torch.tensor([self._nanoseconds]), everyone)
        if everyone.min() > 0:
            self.shares = divide(self.batch, [1 / one for one in everyone.tolist()])


def divide(total: int, speeds: Sequence[float]) -> list[int]:
    """Whole shares of `total`, as near to the speeds as can be, and at least 1."""
    exact = [total * speed / sum(speeds) for speed in speeds]
    shares = [max(1, int(one)) for one in exact]
    ranks = range(len(shares))
    while sum(shares) < total:
        shares[max(ranks, key=lambda r: exact[r] - shares[r])] += 1
    while sum(shares) > total:
        shares[max((r for r in ranks if shares[r] > 1), key=lambda r: shares[r] - exact[r])] -= 1
    return shares
