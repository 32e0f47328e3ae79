"""Where the calls of a recording come from: so many different places, so that no report grows with what a script makes up as it runs."""

from __future__ import annotations

from ...core.observe import Place, modules

MOST = 20_000  # a model of 60 layers with 100 experts each has that many
ELSEWHERE = Place("", "", 0)


class BoundedPlaces:
    """The place of the calling code, for the first `MOST` different ones; later ones are all ELSEWHERE."""

    def __init__(self) -> None:
        self._known: set[Place] = set()
        self._modules: set[str] = set()

    def here(self) -> Place:
        """The place of the code that calls now."""
        place = modules.place()
        if place in self._known:
            return place
        if len(self._known) >= MOST:
            return ELSEWHERE
        self._known.add(place)
        return place

    def bounded(self, module: str) -> str:
        """The module, for the first `MOST` different ones; later ones are all "", outside of all."""
        if module not in self._modules:
            if len(self._modules) >= MOST:
                return ELSEWHERE.module
            self._modules.add(module)
        return module
