"""Charts are valid SVG and put values where they belong."""

import xml.etree.ElementTree as ET
from pathlib import Path

from benchmarks import chart

SVG = "{http://www.w3.org/2000/svg}"


def points(root: ET.Element) -> list[list[tuple[float, float]]]:
    return [
        [(float(x), float(y)) for x, y in (p.split(",") for p in line.attrib["points"].split())]
        for line in root.iter(f"{SVG}polyline")
    ]


def test_lines_rise_with_their_values_and_doublings_are_equally_far(tmp_path: Path):
    path = tmp_path / "new" / "lines.svg"
    series = {"a <b>": [(1, 10.0), (2, 20.0), (4, 40.0)], "c": [(1, 40.0), (4, 10.0)]}
    chart.lines(path, "t & t", "streams", "tokens/s", series, doubling=True)
    root = ET.parse(path).getroot()
    (x1, y1), (x2, y2), (x4, y4) = points(root)[0]
    assert y1 > y2 > y4  # y grows downwards
    assert abs((x4 - x2) - (x2 - x1)) < 0.2
    assert abs((y2 - y4) - 2 * (y1 - y2)) < 0.2
    texts = {element.text for element in root.iter(f"{SVG}text")}
    assert {"a <b>", "c", "t & t", "streams", "tokens/s"} <= texts


def test_every_value_lies_inside_the_frame(tmp_path: Path):
    path = tmp_path / "lines.svg"
    chart.lines(path, "t", "x", "y", {"a": [(1, 0.0), (8, 73.1)]}, doubling=False)
    for x, y in points(ET.parse(path).getroot())[0]:
        assert chart.LEFT <= x <= chart.WIDTH - chart.RIGHT
        assert chart.TOP <= y <= chart.HEIGHT - chart.BOTTOM


def test_bars_are_as_high_as_their_values_and_say_them(tmp_path: Path):
    path = tmp_path / "bars.svg"
    chart.bars(path, "t", "ms", ["p50", "p99"], {"a": [10.0, 40.0], "b": [20.0, 5.0]})
    root = ET.parse(path).getroot()
    heights = [float(r.attrib["height"]) for r in root.iter(f"{SVG}rect")][1:]
    assert [round(h / heights[0], 1) for h in heights] == [1.0, 2.0, 4.0, 0.5]
    assert {"10.0", "40.0", "20.0", "5.00"} <= {t.text for t in root.iter(f"{SVG}text")}


def test_ten_lines_are_all_named_inside_the_picture_and_no_two_look_alike(tmp_path: Path):
    path = tmp_path / "lines.svg"
    series = {f"p-{n} rank 0": [(0, 1.0), (1, 1.0 + n)] for n in range(10)}
    chart.lines(path, "t", "x", "y", series, doubling=False)
    root = ET.parse(path).getroot()
    names = [t for t in root.iter(f"{SVG}text") if t.text in series]
    assert len(names) == 10
    for name in names:
        assert float(name.attrib["x"]) + 6.5 * len(name.text) < chart.WIDTH
        assert float(name.attrib["y"]) < chart.TOP
    looks = {
        (chart.COLOURS[n % len(chart.COLOURS)], chart.MARKS[n % len(chart.MARKS)])
        for n in range(len(series))
    }
    assert len(looks) == 10
