"""Lines through measured points, and what clients notice by the load of a card."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from omni_cluster.planning.measured import Card, Layout


@dataclass(frozen=True, slots=True)
class Curve:
    """Straight lines between points; level before the first, and on along the last line behind the last."""

    points: tuple[tuple[float, float], ...]

    def at(self, x: float) -> float:
        first_x, first_y = self.points[0]
        if x <= first_x or len(self.points) == 1:
            return first_y
        place = min(bisect.bisect_left(self.points, (x,)), len(self.points) - 1)
        (x0, y0), (x1, y1) = self.points[place - 1], self.points[place]
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0)

    def stretched(self, factor: float) -> Curve:
        """The same values at x times `factor`."""
        return Curve(tuple((x * factor, y) for x, y in self.points))

    @property
    def end(self) -> float:
        """The last x that was measured."""
        return self.points[-1][0]

    def most(self, limit: float, rises: bool) -> float:
        """The largest measured x at which it is at most `limit`, or at least that where it falls; 0 for none."""
        sign = 1 if rises else -1
        if sign * self.points[0][1] > sign * limit:
            return 0.0
        for (x0, y0), (x1, y1) in zip(self.points, self.points[1:], strict=False):
            if sign * y1 > sign * limit:
                return x0 + (x1 - x0) * (limit - y0) / (y1 - y0)
        return self.end


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """What clients notice by the answers a second that one sound card makes, of requests as those measured."""

    without_gap: Curve
    first_audio_p50_s: Curve
    first_audio_p95_s: Curve

    @classmethod
    def measured(cls, card: Card, layout: Layout) -> OpenLoop:
        """A burst of one is one stream alone on a card; where none was measured, the lowest rate is."""
        cells = card.chosen(layout)
        points = [(0.0, cell) for cell in cells if cell.is_alone]
        points += [(cell.each_per_s, cell) for cell in cells if cell.arrivals == "open"]
        return cls(
            Curve(tuple((x, cell.without_gap) for x, cell in points)),
            Curve(tuple((x, cell.first_audio_p50_s) for x, cell in points)),
            Curve(tuple((x, cell.first_audio_p95_s) for x, cell in points)),
        )

    def stretched(self, factor: float) -> OpenLoop:
        """Of requests that take `1 / factor` as much work."""
        curves = (self.without_gap, self.first_audio_p50_s, self.first_audio_p95_s)
        return OpenLoop(*(curve.stretched(factor) for curve in curves))

    def carried_per_s(self, without_gap: float, first_audio_p95_s: float | None = None) -> float:
        """The most answers a second, among the rates that were measured, with which a card keeps both; 0 for none."""
        carried = self.without_gap.most(without_gap, rises=False)
        if first_audio_p95_s is None:
            return carried
        return min(carried, self.first_audio_p95_s.most(first_audio_p95_s, rises=True))
