"""Values of an attribute that come from users' code, such as names of tools: a bounded number of them on metrics."""

OTHER = "_OTHER"
"""OpenTelemetry's word for the rest."""

MAX_CHARACTERS = 100


class Bounded:
    """The first `limit` different values are told apart, the others are `OTHER`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def __call__(self, value: object) -> str:
        text = str(value)[:MAX_CHARACTERS]
        if text not in self._known:
            if len(self._known) >= self._limit:
                return OTHER
            self._known.add(text)
        return text
