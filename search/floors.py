"""Lower bounds on peak memory, and on time where memory holds a pipeline back."""

from __future__ import annotations

from math import inf

from piper_core.schedule.grid import Layout, rows_of_stage
from search.partial_bound import COMPUTE_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES
from search.replay import numbered, peaks_of
from search.row_parts import alive_chunks
from search.shape import Shape, Shapes
from search.space import Configuration


class Floors(Shapes):
    """Memory floors of all configurations of one model on one cluster."""

    def static_bytes(self, config: Configuration) -> list[float]:
        """Return parameters, gradients and optimiser state of one rank of each row, buffers left out."""
        return self._static(config, self.shape(config))

    def _static(self, config: Configuration, shape: Shape) -> list[float]:
        mine = self.held(config, shape)
        known = mine.static.get(config.zero)
        if known is None:
            copies = 2 if config.layout is Layout.BIDIRECTIONAL else 1
            dense, expert = config.dp * config.cp * copies, config.dp // config.ep * config.cp * copies
            each = {at: (n.over(1, 1), n.over(dense, expert)) for at, n in {id(n): n for n in mine.numel}.items()}
            sizes = [each[id(n)] for n in mine.numel]
            known = []
            for row in shape.mine:
                whole, part = sum([sizes[s][0] for s in row]), sum([sizes[s][1] for s in row])
                known.append(
                    COMPUTE_BYTES * (part if config.zero >= 3 else whole)
                    + GRADIENT_BYTES * (part if config.zero >= 2 else whole)
                    + OPTIMIZER_BYTES * (part if config.zero >= 1 else whole)
                )
            mine.static[config.zero] = known
        return known

    def memory_floor(self, config: Configuration, gap: float = 0.0) -> float:
        """Return bytes that the fullest row needs at least: static state, and activations of as many microbatches as
        its family keeps alive, each no larger than the smallest stage of the row, which are there until the next
        backward, with its workspace; the allocator loses ``gap`` of those."""
        shape = self.shape(config)
        alive = alive_chunks(config.schedule, config.pp, config.num_microbatches, config.virtual_stages)
        mine, last = self.held(config, shape), len(shape.counts) - 1
        work = mine.workspace
        worst = 0.0
        for static, n, least, held in zip(
            self._static(config, shape), alive, mine.least_saved, shape.mine, strict=True
        ):
            held_bytes = n * least + min([work[s] for s in held])
            if last in held:  # when the first backward begins
                held_bytes = max(held_bytes, mine.saved[last] + work[last])
            worst = max(worst, static + (1 + gap) * held_bytes)
        return worst + self.context_bytes

    def any_order_floor(self, config: Configuration, gap: float = 0.0) -> float:
        """Return bytes that the fullest row needs at least under any order: static state, and one microbatch at the
        smallest of its stages, with the least workspace, which are there when its backward begins."""
        shape = self.shape(config)
        rows = zip(self._static(config, shape), self.held(config, shape).least_held, strict=True)
        return max(static + (1 + gap) * least for static, least in rows) + self.context_bytes

    def holding_s(
        self, config: Configuration, overlapping: bool, split: bool, gap: float, capacity_bytes: float
    ) -> list[float]:
        """Return, for each row, seconds that it holds activations for at least, in any order that fits.

        A microbatch's activations of a stage are there from the start of its forward to the end of its backward, and in
        between it passes every later stage twice. Of an overlap group, a forward and a backward, they are there to its
        start alone, but the forward that comes in their place waits for the backward too. What is held at once leaves
        room for the workspace of the backward that frees some of it. So bytes times seconds, added up over microbatches
        and stages, take that room at least so long; and so many at once, of those that hold least. ``inf`` where not
        even one microbatch fits.
        """
        shape = self.shape(config)
        mine = self.held(config, shape)
        share = config.num_microbatches / (2 if config.layout is Layout.BIDIRECTIONAL else 1)
        least = []
        for (bytes_s, seconds), static, row, one in zip(
            self._lives(config, shape, overlapping, split), self._static(config, shape), shape.mine, mine.least_saved,
            strict=True,
        ):  # fmt: skip
            room = (capacity_bytes - self.context_bytes - static) / (1 + gap)
            room -= min([mine.workspace[s] for s in row])
            if room < one:
                least.append(inf)
            else:
                least.append(share * max(bytes_s / room, seconds / int(min(room / one, share * len(row)))))
        return least

    def _lives(self, config: Configuration, shape: Shape, overlapping: bool, split: bool) -> list[tuple[float, float]]:
        """Return, for each row, what its stages' microbatches hold at least: (bytes times seconds, seconds)."""
        known = shape.lives.get((overlapping, split))
        if known is None:
            exchange = not overlapping
            rows = rows_of_stage(config.layout, config.pp, config.virtual_stages)
            forward = [piece.forward(exchange=exchange) for piece in shape.stages]
            backward = [
                (piece.input_backward if split else piece.backward)(exchange=exchange) for piece in shape.stages
            ]
            beyond, later = [0.0] * len(rows), 0.0
            for s in range(len(rows) - 2, -1, -1):
                hop = rows[s] != rows[s + 1] or len(rows[s]) > 1
                later += forward[s + 1] + backward[s + 1] + (2 * shape.message_s if hop else 0.0)
                beyond[s] = later
            saved, known = self.held(config, shape).saved, []
            for row in shape.mine:
                least, lightest = min([backward[s] for s in row]), min([saved[s] for s in row])
                bytes_s = seconds = 0.0
                for s in row:
                    own = 0.0 if overlapping else backward[s]
                    waits = max(0.0, least - beyond[s]) if overlapping else 0.0
                    bytes_s += saved[s] * (forward[s] + beyond[s] + own) + lightest * waits
                    seconds += forward[s] + beyond[s] + own + waits
                known.append((bytes_s, seconds))
            shape.lives[overlapping, split] = known
        return known

    def memory_of_order(self, config: Configuration, gap: float = 0.0) -> float:
        """Return bytes that the fullest row needs at least under the order that its family emits (level 2)."""
        shape = self.shape(config)
        mine = self.held(config, shape)
        order = numbered(config.schedule, config.pp, config.num_microbatches, config.virtual_stages)
        rows = zip(self._static(config, shape), peaks_of(order, mine.saved, mine.workspace), strict=True)
        return max(static + (1 + gap) * peak for static, peak in rows) + self.context_bytes
