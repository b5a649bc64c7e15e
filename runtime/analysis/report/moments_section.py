"""The worst moments of a run: each described in sentences, with a link into the timeline."""

from __future__ import annotations

import html

from ...core.numbers import counted, number_text, seconds_text
from ...core.run_record import RunRecord
from ..drawing.formatting import cause_label
from ..drawing.page_parts import section
from ..explain.analysed_run import AnalysedRun
from ..ledger.causes import Cause
from ..ledger.moments import Moment
from .blame_section import request_name

_HINT = (
    "Tokens that took at least twice what is typical (first tokens three times), and stages that stood idle as long; "
    "what overlaps is one moment. They rank by how many typical times all requests lost. In Perfetto, trace.json.gz "
    "begins with the run: a moment is at the same second of the ruler."
)
_PARTS = {
    "queue": "They were queued behind other requests",
    "no_room": "They were queued: no prompt was admitted, as the KV cache or the batch was full, or the policy held "
    "prompts back",
    "turn": "They waited for a slot of the depth, or for their turn",
    "kv_transfer": "Their KV was under way from another pipeline",
    "recovery": "The pipeline had failed and had not recovered",
    "control": "The coordinator, or its message, was late",
    "result": "The result was late",
    "unknown": "The record has no micro-batch for them",
    "wait": "They waited for stages that computed other micro-batches",
    "transport": "Activations were under way",
    "compute": "Their micro-batches computed longer",
}


def moment_text(moment: Moment, record: RunRecord, origin: float) -> list[str]:
    """Describe a moment: when it was, how long, what happened and whom others waited for.

    Args:
        moment: The moment.
        record: The run.
        origin: The run's start, on the clock of the moment.
    """
    when = f"At {moment.start - origin:,.2f} s, {seconds_text(moment.seconds)}"
    times = f"{number_text(moment.seconds / moment.typical)} times the typical" if moment.typical > 0 else ""
    requests = counted(moment.requests, "request")
    if moment.kind == "stall":
        what = f"{when}: stage {moment.stage} was idle, {times} compute of a micro-batch"
        texts = [what + (f"; {requests} had slow tokens." if moment.requests else ".")]
        texts.append(f"The cause is {cause_label(Cause(moment.cause))}.")
    else:
        token = "next token" if moment.kind == "tbt" else "first token"
        name = "TBT" if moment.kind == "tbt" else "TTFT"
        texts = [f"{when}: the {token} of {requests}, up to {times} {name} ({seconds_text(moment.typical)})."]
        where = f", above all on stage {moment.stage}" if moment.stage is not None else ""
        texts.append(f"{_PARTS[moment.cause]}{where}: {seconds_text(moment.excess)} more than usual.")
    if moment.blamed:
        each = (f"{_sized(record, place)} {seconds_text(seconds)}" for place, seconds in moment.blamed)
        texts.append(f"Cost others most: {', '.join(each)}.")
    return texts


def _sized(record: RunRecord, place: int) -> str:
    request = record.requests[place]
    return f"{request_name(request)} ({request.prompt_tokens:,} + {request.output_tokens:,} tokens)"


def moments_section(run: AnalysedRun, drawn_seconds: float) -> str:
    """Render the section; empty if there are no bad moments.

    Args:
        run: The run.
        drawn_seconds: Seconds of the run that the page's timeline shows, from the start.
    """
    if not run.moments:
        return ""
    items, ledger = [], run.ledger
    for moment in run.moments:
        texts = moment_text(moment, run.record, ledger.t0)
        room = 0.4 * max(moment.seconds, 1e-6)
        stretch = max(ledger.t0, moment.start - room), min(ledger.t1, moment.end + room)
        low, high = (at - ledger.t0 for at in stretch)
        link = f' <a href="#t={low:.6f}-{high:.6f}">Show in the timeline</a>' if low < drawn_seconds else ""
        first, *rest = map(html.escape, texts)
        items.append(f"<li><p><b>{first}</b> {' '.join(rest)}{link}</p></li>")
    heading = "The ten worst moments" if len(run.moments) == 10 else "The worst moments"
    return section(heading, f'  <ol class="moments">\n{"".join(items)}\n  </ol>', _HINT, "moments")
