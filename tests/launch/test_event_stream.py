"""Event streams, however they are written and cut, are read as the HTML standard reads them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gapless.launch.event_stream import EventReader

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
EVENTS = st.lists(TEXTS.map(lambda text: text.replace("\r", "\n")), max_size=6)
NOISE = st.sampled_from(["", ": a comment", ":", "event: delta", "id: 7", "retry", "dat: x", "datas: x"])


@st.composite
def written(draw: st.DrawFn, events: list[str]) -> bytes:
    """Return events in any of the ways in which a stream may have them."""
    end = draw(st.sampled_from(["\n", "\r", "\r\n"]))
    found = draw(st.sampled_from(["", "\ufeff"]))
    for event in events:
        for line in event.split("\n"):
            noise = draw(NOISE)
            found += noise + end if noise else ""
            found += "data" if not line and draw(st.booleans()) else f"data:{draw(st.sampled_from(['', ' ']))}{line}"
            found += end
        found += end
    return found.encode()


@given(st.data(), EVENTS)
def test_events_are_read_however_they_are_written_and_cut(data: st.DataObject, events: list[str]) -> None:
    events = [event for event in events if not any(line.startswith(" ") for line in event.split("\n"))]
    stream = data.draw(written(events))
    reader, found, begin = EventReader(), list[str](), 0
    while begin < len(stream):
        size = data.draw(st.integers(1, len(stream) - begin))
        found += reader.push(stream[begin : begin + size])
        begin += size
    assert found == events


def test_an_event_comes_with_its_last_byte_and_a_cut_one_never() -> None:
    reader = EventReader()
    assert list(reader.push(b"data: a\r\r")) == ["a"]
    assert list(reader.push(b"\ndata:  b\n")) == []
    assert list(reader.push(b"\n")) == [" b"]
    assert list(reader.push(b"data: c\r\n")) == []
