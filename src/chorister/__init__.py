"""Private federated statistics, asked interactively: you hear the choir, never a chorister.

    import chorister as ch

Names are loaded when they are first used: a device needs none of them but `Policy`, and the others
need the extra `analyst`. (Their types are in `__init__.pyi`.)
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

__all__ = [
    "Policy",
    "Question",
    "Result",
    "Study",
    "Track",
    "Trend",
    "__version__",
    "categories",
    "connect",
    "crosstab",
    "discover_ngrams",
    "discover_words",
    "distribution",
    "errors",
    "grid",
    "heatmap",
    "intervals",
    "prefix_tree",
    "rehearse",
]

__version__ = "0.1.0"

_MODULES: Final = {
    "Policy": "policy",
    "Question": "analyst.question",
    "Result": "analyst.result",
    "Study": "analyst.study",
    "Track": "analyst.series",
    "Trend": "analyst.trend",
    "categories": "analyst.request",
    "connect": "analyst.live_fleet",
    "crosstab": "analyst.algorithms.crosstab",
    "discover_ngrams": "analyst.algorithms.ngrams",
    "discover_words": "analyst.algorithms.words",
    "distribution": "analyst.algorithms.distribution",
    "grid": "analyst.request",
    "heatmap": "analyst.algorithms.heatmap",
    "intervals": "analyst.request",
    "prefix_tree": "analyst.request",
    "rehearse": "analyst.rehearsal",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 (whatever the name stands for)
    if name == "errors":
        return import_module(f"{__name__}.errors")
    if name in _MODULES:
        try:
            return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        except ModuleNotFoundError as error:
            raise ImportError(
                f"chorister.{name} needs more packages ({error.name}): "
                "pip install 'chorister[analyst]'"
            ) from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
