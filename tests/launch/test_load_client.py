"""How `gapless bench url=` reads event streams: as the WHATWG HTML standard defines them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gapless.launch.load_client import EventStream

LINE = st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), max_size=8)
OTHER_LINES = st.lists(st.one_of(LINE.map(lambda text: ":" + text), st.sampled_from(["event: a", "id:1", "datum: x"])))


@given(st.data())
def test_any_stream_in_any_reads_gives_its_events(data: st.DataObject) -> None:
    events = data.draw(st.lists(st.lists(LINE, min_size=1, max_size=3), max_size=4))
    text = data.draw(st.sampled_from(["", "\ufeff"]))
    ends = st.sampled_from(["\r\n", "\r", "\n"])
    for lines in events:
        written = data.draw(OTHER_LINES)
        for line in lines:
            is_bare = not line and data.draw(st.booleans())  # a line `data` is an empty field
            space = " " if line.startswith(" ") or data.draw(st.booleans()) else ""
            written += ["data" if is_bare else f"data:{space}{line}", *data.draw(OTHER_LINES)]
        for line in [*written, ""]:
            end = data.draw(ends)
            # The LF of an empty line after a lone CR would belong to that CR.
            text += line + ("\r\n" if not line and text.endswith("\r") and end == "\n" else end)
    text += data.draw(st.sampled_from(["", "data: unfinished", ": comment"]))
    body = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)))))
    stream = EventStream()
    parts = [body[start:end] for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    assert [event for part in parts for event in stream.feed(part)] == ["\n".join(lines) for lines in events]


def test_an_event_is_read_when_its_blank_line_is() -> None:
    """A CR ends a line at once: whether an LF follows is not waited for."""
    stream = EventStream()
    assert [stream.feed(part) for part in (b"data:a\r", b"\r", b"\n", b"data: b\r\n\r")] == [[], ["a"], [], ["b"]]
