"""What should not have happened to a product, and how often it did. Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Incident", "Incidents"]

# Incidents kept for display: the first ones tell what happened.
MOST_INCIDENTS = 200

# Seconds within which incidents of a kind are one.
MOMENT_SECONDS = 5.0


@dataclass
class Incident:
    """Something that should not have happened, and how often it did at that moment."""

    time: float
    what: str
    count: int = 1

    def __str__(self) -> str:
        return self.what if self.count == 1 else f"{self.count} x {self.what}"


class Incidents(list[Incident]):
    """The incidents of a product, in the order of time."""

    def add(self, time: float, what: str) -> None:
        """Note an incident; equal ones within a moment count as one, since a lost worker interrupts many steps."""
        for incident in self[-3:]:
            if incident.what == what and time - incident.time < MOMENT_SECONDS:
                incident.count += 1
                return
        if len(self) < MOST_INCIDENTS:
            self.append(Incident(time, what))
