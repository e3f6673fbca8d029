"""What goes wrong while a product runs. Times are since the epoch."""

from __future__ import annotations

from dataclasses import dataclass

# Incidents kept for display. The first ones show the cause, so later ones are dropped.
MOST_INCIDENTS = 200

# Equal incidents within so many seconds count as one.
MOMENT_SECONDS = 5.0


@dataclass
class Incident:
    """A fault at a time (seconds since the epoch), and how often it occurred then."""

    time: float
    what: str
    count: int = 1

    def __str__(self) -> str:
        return self.what if self.count == 1 else f"{self.count} x {self.what}"


class Incidents(list[Incident]):
    """The incidents of a product, in order of time."""

    def add(self, time: float, what: str) -> Incident:
        """Add an incident. Equal ones close in time are counted together: a lost worker interrupts many steps."""
        for incident in self[-3:]:
            if incident.what == what and time - incident.time < MOMENT_SECONDS:
                incident.count += 1
                return incident
        incident = Incident(time, what)
        if len(self) < MOST_INCIDENTS:
            self.append(incident)
        return incident
