from chorister import errors
from chorister.analyst.algorithms.crosstab import crosstab
from chorister.analyst.algorithms.distribution import distribution
from chorister.analyst.algorithms.heatmap import heatmap
from chorister.analyst.algorithms.ngrams import discover_ngrams
from chorister.analyst.algorithms.words import discover_words
from chorister.analyst.live_fleet import connect
from chorister.analyst.question import Question
from chorister.analyst.rehearsal import rehearse
from chorister.analyst.request import categories, grid, intervals, prefix_tree
from chorister.analyst.result import Result
from chorister.analyst.series import Track
from chorister.analyst.study import Study
from chorister.analyst.trend import Trend
from chorister.policy import Policy

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

__version__: str
