"""How long starting, hang detection and recovery wait, in seconds; a longer wait is a change of this file.

Users set four limits in `conf/schema.py`: `parallel.start_timeout_s` (no rank makes progress while it starts),
`parallel.step_timeout_s` (no stage makes progress), `parallel.max_recoveries` and `parallel.recovery_window_s`.
"""

from __future__ import annotations

# How often the coordinator looks.
POLL_S = 0.2  # for messages of ranks
LAUNCHER_POLL_S = 0.5  # for ranks that the launcher knows to be dead
PLACES_POLL_S = 1.0  # for a place of each rank, while nodes are missing
JOIN_POLL_S = 0.02

# When a stage counts as hung: no progress for HANG_FACTOR times the longest micro-batch so far, within these limits and
# `parallel.step_timeout_s`. Ranks that miss the roll call are considered hung.
HANG_FACTOR = 20.0
LEAST_HANG_S = 10.0
ROLL_CALL_S = 2.0

# Finding the cause of a failure: a dead rank's neighbours often report first. If the fault is repairable, the wait is
# short: after a repair for the wrong cause, the right one is the next fault.
CAUSE_S = 2.0
REPAIRABLE_CAUSE_S = 0.3

# Repair.
REJOIN_S = 10.0  # for a surviving rank to leave the failed pipeline
REPORT_S = 1.0  # for a rank's reporter to stop, once the communicators have been aborted

# The end of a run.
END_S = 5.0  # for a rank to exit after the coordinator's Stop, before it is killed
