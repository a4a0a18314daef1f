"""A chart of n-grams as a tree: words from left to right, the most frequent branch on top."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from chorister.analyst.tables import drawable, needed

if TYPE_CHECKING:
    import altair

    from chorister.analyst.algorithms.ngrams import Ngrams


_ROW: Final = 19  # pixels per leaf
_LEVEL: Final = 150  # pixels per word
_MIN_WIDTH: Final = 380  # pixels, so that the title fits in any font


@dataclass(eq=False)
class _Node:
    """A word in the tree."""

    phrase: str
    word: str
    depth: int
    share: float | None = None  # None: only leads to n-grams that were found
    note: str = ""
    children: dict[str, _Node] = field(default_factory=dict)
    y: float = 0.0

    @property
    def weight(self) -> float:
        """The share of the most frequent phrase below, by which nodes are ordered."""
        return max([self.share or 0.0, *(child.weight for child in self.children.values())])


def tree(found: Ngrams, *, top: int) -> altair.LayerChart:
    """Draw the `top` most frequent n-grams of the longest length found, with their prefixes."""
    alt = needed("altair")
    root = _grown(found, top)
    nodes: list[_Node] = []
    links: list[dict[str, Any]] = []
    leaves = _place(root, 0, nodes, links)
    longest = max((node.depth for node in nodes), default=1)
    rows = [
        {
            "x": node.depth, "y": node.y,
            "word": drawable(node.word), "phrase": drawable(node.phrase),
            "percent": None if node.share is None else 100.0 * min(node.share, 1.0),
            "note": node.note,
        }
        for node in nodes
    ]  # fmt: skip
    width = max(_LEVEL * (longest + 0.3), _MIN_WIDTH)
    x = alt.X("x:Q", axis=None, scale=alt.Scale(domain=[0.6, 0.6 + width / _LEVEL]))
    y = alt.Y("y:Q", axis=None, scale=alt.Scale(domain=[-0.7, max(leaves, 1) - 0.3], reverse=True))
    lines = (
        alt.Chart(alt.InlineData(values=links))
        .mark_line(color="#c8ccd4", strokeWidth=1.2, interpolate="monotone")
        .encode(x=x, y=y, detail="link:N", order="step:Q")
    )
    base = alt.Chart(alt.InlineData(values=rows)).encode(x=x, y=y)
    tips = [
        alt.Tooltip("phrase:N", title="n-gram"),
        alt.Tooltip("note:N", title="devices"),
    ]
    known = base.transform_filter("isValid(datum.percent)")
    dots = known.mark_circle(opacity=0.9, color="#3b6fb6").encode(
        size=alt.Size(
            "percent:Q",
            title="% of reports",
            scale=alt.Scale(range=[15, 260], zero=True),
            legend=alt.Legend(
                orient="bottom", symbolFillColor="#3b6fb6", symbolStrokeWidth=0, tickCount=4
            ),
        ),
        tooltip=tips,
    )
    open_ = base.transform_filter("!isValid(datum.percent)").mark_point(
        size=25, color="#9aa3b2", filled=False
    )
    # A halo keeps words readable where a line crosses them.
    text = {"align": "left", "dx": 10, "fontSize": 12, "baseline": "middle"}
    halo = base.mark_text(**text, stroke="white", strokeWidth=4, strokeJoin="round").encode(
        text="word:N"
    )
    words = base.mark_text(**text, color="#1c2430").encode(text="word:N", tooltip=tips)
    last = found.results[-1]
    chart: altair.LayerChart = (
        alt.layer(lines, open_, dots, halo, words)
        .properties(
            width=width,
            height=max(_ROW * leaves, 60),
            title=alt.TitleParams(
                text=_title(found, leaves),
                subtitle=[
                    f"{last.n_reports:,} reports in the last round, epsilon {last.epsilon:.3g}",
                    "dots: share of a round's reports",
                    "rings: not found on their own",
                ],
                anchor="start",
            ),
        )
        .configure_view(stroke=None)
    )
    return chart


def _title(found: Ngrams, shown: int) -> str:
    longest = _longest_found(found)
    total = len(found.found(longest)) if longest else 0
    if not total:
        return "Nothing was found above the noise"
    return f"{shown:,} of {total:,} {longest}-grams"


def _longest_found(found: Ngrams) -> int:
    return max((n for n in range(1, found.depth + 1) if found.found(n)), default=0)


def _grown(found: Ngrams, top: int) -> _Node:
    columns = found.columns()
    shares = {}
    for i, phrase in enumerate(columns["ngram"]):
        low, high = float(columns["ci_low"][i]), float(columns["ci_high"][i])
        note = f"{float(columns['estimate'][i]):,.0f} ({low:,.0f} to {high:,.0f})"
        shares[phrase] = (float(columns["share"][i]), note)
    root = _Node("", "", 0)
    longest = _longest_found(found)
    for phrase in found.found(longest)[:top] if longest else []:
        node = root
        words = phrase.split()
        for depth, word in enumerate(words, start=1):
            if word not in node.children:
                begin = " ".join(words[:depth])
                share, note = shares.get(begin, (None, "not found on its own"))
                node.children[word] = _Node(begin, word, depth, share, note)
            node = node.children[word]
    return root


def _place(node: _Node, leaves: int, nodes: list[_Node], links: list[dict[str, Any]]) -> int:
    """Place leaves below each other, and every other node between its first and last child."""
    children = sorted(node.children.values(), key=lambda child: (-child.weight, child.word))
    for child in children:
        leaves = _place(child, leaves, nodes, links)
    if not node.depth:
        return leaves
    if children:
        node.y = (children[0].y + children[-1].y) / 2.0
    else:
        node.y, leaves = float(leaves), leaves + 1
    nodes.append(node)
    for child in children:
        bend = node.depth + 0.72
        points = [(node.depth, node.y), (bend, node.y), (child.depth, child.y)]
        links.extend(
            {"link": drawable(child.phrase), "step": step, "x": x, "y": y}
            for step, (x, y) in enumerate(points)
        )
    return leaves
