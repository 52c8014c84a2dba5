"""Charts are valid SVG, put values where they belong, and keep to the sheet."""

import xml.etree.ElementTree as ET
from collections.abc import Iterator

import pytest

from ekiden.plots import canvas
from ekiden.plots.axis import by_decades
from ekiden.plots.bars import bars, stacked
from ekiden.plots.lines import curves, densities, lines, timeline

SVG = "{http://www.w3.org/2000/svg}"
SERIES = {"a <b>": [(1.0, 10.0), (2.0, 20.0), (4.0, 40.0)], "c": [(1.0, 40.0), (4.0, 10.0)]}
TEN = {f"p-{n} rank 0": [(0.0, 1.0), (1.0, 1.0 + n)] for n in range(10)}
PICTURES = {
    "lines": lines("t & t", "x", "y", SERIES),
    "many lines": lines("t", "x", "y", TEN),
    "curves": curves("t", "x", "y", SERIES, goal=55.0),
    "no curves": curves("t", "x", "y", {}),
    "densities": densities("t", "ms", "%", SERIES),
    "timeline": timeline("t", "ms", [(0.0, 1.0), (3.3, 7.0)], [2.0], "n", [(0.0, 1), (3.0, 0)]),
    "bars": bars("t", "ms", ["p50", "p99"], {"a": [10.0, 40.0], "b": [20.0, 5.0]}),
    "stacked": stacked("t", "GiB", {"TP1": {"weights": 3.0, "KV": 5.0}, "TP2 x PP2": {"KV": 2.0}}),
}


def points(root: ET.Element) -> list[list[tuple[float, float]]]:
    return [
        [(float(x), float(y)) for x, y in (p.split(",") for p in line.attrib["points"].split())]
        for line in root.iter(f"{SVG}polyline")
    ]


def texts(root: ET.Element) -> set[str | None]:
    return {element.text for element in root.iter(f"{SVG}text")}


def blocks(root: ET.Element) -> list[ET.Element]:
    """But the sheet itself."""
    return list(root.iter(f"{SVG}rect"))[1:]


def reach(root: ET.Element) -> Iterator[tuple[float, float]]:
    """Corners of all that is drawn; of text, a guess at where it ends."""
    yield from (point for line in points(root) for point in line)
    for one in root.iter(f"{SVG}circle"):
        yield float(one.attrib["cx"]), float(one.attrib["cy"])
    for one in blocks(root):
        x, y, wide, high = (float(one.attrib[name]) for name in ("x", "y", "width", "height"))
        yield from ((x, y), (x + wide, y + high))
    for one in root.iter(f"{SVG}text"):
        x, wide = float(one.attrib["x"]), 5.5 * len(one.text or "")
        before = {"start": 0.0, "middle": 0.5, "end": 1.0}[one.attrib["text-anchor"]]
        yield x - before * wide, float(one.attrib["y"])
        yield x + (1 - before) * wide, float(one.attrib["y"])


@pytest.mark.parametrize("name", PICTURES)
def test_everything_lies_on_the_sheet(name: str):
    root = ET.fromstring(PICTURES[name])
    wide, high = (float(root.attrib[side]) for side in ("width", "height"))
    found = list(reach(root))
    assert found
    assert all(0 <= x <= wide and 0 <= y <= high for x, y in found)


def test_lines_rise_with_their_values_and_equal_ratios_are_equally_far():
    root = ET.fromstring(lines("t & t", "streams", "tokens/s", SERIES, log=True))
    (x1, y1), (x2, y2), (x4, y4) = points(root)[0]
    assert y1 > y2 > y4  # y grows downwards
    assert abs((x4 - x2) - (x2 - x1)) < 0.2
    assert abs((y2 - y4) - 2 * (y1 - y2)) < 0.2
    assert {"a <b>", "c", "t & t", "streams", "tokens/s", "1", "2", "4"} <= texts(root)
    assert root.get("aria-label") == "t & t"


def test_a_linear_axis_can_be_asked_for_whatever_the_values():
    root = ET.fromstring(lines("t", "x", "y", {"a": [(1, 1.0), (50, 1.0), (99, 1.0)]}, log=False))
    (x1, _), (x2, _), (x3, _) = points(root)[0]
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (4.0, 25.0, [5, 10, 20]),
        (36.0, 43.1, [36, 37.5, 39, 40.5, 42]),
        (8.01, 8.19, [8.04, 8.08, 8.12, 8.16]),
        (7.0, 7.0, [7]),
    ],
)
def test_a_narrow_axis_of_ratios_has_a_scale_too(low: float, high: float, ticks: list[float]):
    assert by_decades(low, high, 0, 100).ticks == pytest.approx(ticks)


def test_bars_are_as_high_as_their_values_and_say_them():
    text = bars(
        "t", "ms", ["p50", "p99"], {"a": [10.0, 40.0], "b": [20.0, 5.0]}, show="{:.2f}".format
    )
    root = ET.fromstring(text)
    heights = [float(one.attrib["height"]) for one in blocks(root)]
    assert [round(high / heights[0], 1) for high in heights] == [1.0, 2.0, 4.0, 0.5]
    assert {"10.00", "40.00", "20.00", "5.00", "p50", "p99", "a", "b"} <= texts(root)


def test_parts_of_a_bar_follow_one_another_and_are_as_long_as_their_values():
    first, second, other = blocks(ET.fromstring(PICTURES["stacked"]))
    start, wide = float(first.attrib["x"]), float(first.attrib["width"])
    assert float(second.attrib["x"]) == pytest.approx(start + wide, abs=0.2)
    assert float(second.attrib["width"]) == pytest.approx(wide * 5 / 3, abs=0.2)
    assert float(other.attrib["width"]) == pytest.approx(wide * 2 / 3, abs=0.2)
    assert other.attrib["fill"] == second.attrib["fill"] != first.attrib["fill"]
    assert first[0].text == "weights: 3.00 GiB"


def test_an_objective_above_every_value_is_drawn_and_named():
    root = ET.fromstring(PICTURES["curves"])
    ((_, goal), _) = points(root)[0]
    assert goal < min(y for line in points(root)[1:] for _, y in line)
    assert "objective" in texts(root)


def test_ten_lines_are_all_named_above_the_drawing_and_no_two_look_alike():
    root = ET.fromstring(PICTURES["many lines"])
    highest = min(y for line in points(root) for _, y in line)
    names = [t for t in root.iter(f"{SVG}text") if t.text in TEN]
    assert len(names) == 10
    assert all(float(name.attrib["y"]) < highest for name in names)
    looks = {(canvas.colour(n), canvas.MARKS[n % len(canvas.MARKS)]) for n in range(28)}
    assert len(looks) == 28


def test_names_are_text_whatever_they_hold():
    root = ET.fromstring(lines('a <b> & "c"', "<x>", "y", {"p<50>": [(1.0, 2.0), (3.0, 4.0)]}))
    assert root.get("aria-label") == 'a <b> & "c"'
    assert {"<x>", "p<50>"} <= texts(root)
