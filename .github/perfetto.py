"""Opens traces in Perfetto's own processor, which downloads itself: only the workflow runs this.

    python perfetto.py TRACE..
"""

import sys

from perfetto.trace_processor import TraceProcessor


def check(path: str) -> None:
    processor = TraceProcessor(trace=path)

    def number(query: str) -> int:
        return next(iter(processor.query(f"select ({query}) as number"))).number

    errors = [row.name for row in processor.query("select name from stats where severity = 'error' and value > 0")]
    assert not errors, f"{path}: errors while it was read: {errors}"
    slices = number("select count(*) from slice")
    assert slices > 100, f"{path}: {slices} slices"
    for name in ["forward", "backward", "optimizer", "aten::addmm"]:
        assert number(f"select count(*) from slice where name = '{name}'"), f"{path}: no {name}"
    unended = number("select count(*) from slice where dur < 0")
    assert unended == 0, f"{path}: {unended} slices without an end"
    flows = number("select count(*) from flow")
    assert flows, f"{path}: no arrow from a forward operator to its backward step"
    threads = number("select count(distinct utid) from thread_track join slice on slice.track_id = thread_track.id")
    assert threads > 1, f"{path}: {threads} thread"
    print(f"{path}: {slices} slices, {flows} flows, {threads} threads")
    processor.close()


if __name__ == "__main__":
    assert len(sys.argv) > 1, __doc__
    for trace in sys.argv[1:]:
        check(trace)
