"""The C++ of collectives over mapped memory (`shared_memory.cpp`), and how `decoder.cpp` calls them."""

from __future__ import annotations

from ctypes import Structure, c_double, c_int64, c_void_p

from .cpp_library import CppFile

_COMMON = "piii" + "ppp"
SHARED_MEMORY = CppFile("shared_memory", all_reduce=_COMMON + "id:i", gather=_COMMON + "piii" + "dp" + ":i")


class Reduction(Structure):
    """`Ranks` in `decoder.cpp`: the arguments of an all-reduce called from C++."""

    _fields_ = (
        *((name, c_void_p) for name in ("all_reduce", "base")),
        *((name, c_int64) for name in ("rank", "size", "capacity")),
        *((name, c_void_p) for name in ("ended", "round")),
        ("timeout_s", c_double),
    )
