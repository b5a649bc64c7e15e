"""Why a file or a server cannot be used, in words without numbers of errors."""

from __future__ import annotations

import socket

import pytest

from gapless.conf.errors import reason


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError(13, "Permission denied", "/keys"), "permission denied"),
        (IsADirectoryError(21, "Is a directory"), "is a directory"),
        (ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 9)"), "connection refused"),
        (
            OSError("Multiple exceptions: [Errno 111] Connect call, [Errno 113] No route"),
            "Multiple exceptions: Connect call, No route",
        ),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (TimeoutError(), "TimeoutError"),
        (ValueError("Expecting value: line 1"), "Expecting value: line 1"),
    ],
)
def test_reasons_are_words(error: Exception, words: str) -> None:
    assert reason(error) == words
